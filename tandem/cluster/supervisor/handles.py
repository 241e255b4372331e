"""The processes that the supervisor drives, as it sees them; Ray stands behind them in `cluster.ray.launcher`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.cluster.supervisor.events import Build, Intent, NextLife, Placement
from tandem.cluster.supervisor.nodes import Aim, Node
from tandem.core.identity import Role
from tandem.core.machine import HostBoot


@dataclass(frozen=True)
class ProcessState:
    """What a process says of itself."""

    address: str  # of its control service; empty until it listens
    url: str  # where clients of a router go; empty until it listens
    placement: Placement
    draining: bool  # it was told to, by this supervisor or an earlier one


class ProcessHandle(Protocol):
    """One incarnation of a worker or a router. Every call but `kill` raises `WorkerLostError` once it has ended."""

    role: Role
    name: str  # of its slot
    incarnation: str
    seat: Role  # in which its process was started

    async def state(self) -> ProcessState:
        """Answers as soon as the process runs, also while the model loads."""

    async def start(self) -> ProcessState:
        """Load and listen; the same answer again when it has. Raises the `TandemError` that prevented it."""

    async def wait_closed(self) -> None:
        """Until it has stopped. Raises the `TandemError` on which it gave up."""

    async def next_life(self, then: NextLife) -> ProcessHandle | None:
        """The life that its process has begun in place of this one, which has stopped; `None`: it has begun none."""

    async def wait_ended(self) -> None:
        """Until its process has provably ended, seen on its own node; to be called once its state is known.

        Raises:
            WorkerLostError: nobody can tell any more: the node itself is gone.
        """

    async def kill(self) -> None:
        """End its process, also one that is stopped or does not react; without effect on one that has ended."""


@dataclass(frozen=True)
class Found:
    """What an earlier supervisor left running. `ended`: incarnations of workers that have provably ended."""

    processes: Sequence[ProcessHandle]
    ended: Sequence[str]


@dataclass(frozen=True)
class Memory:
    """What outlives the supervisor. `term` counts the supervisors; `intent` is `None` for the first."""

    term: int
    intent: Intent | None


class Launcher(Protocol):
    """Starts processes and finds those of an earlier supervisor. Every call blocks, but for those that are awaited."""

    def start(
        self, role: Role, name: str, incarnation: str, beside: Sequence[str], build: Build, aim: Aim
    ) -> ProcessHandle:
        """`beside`: the others of its pool that stay; routers are spread over nodes with regard to them."""

    def keep_build(self, build: Build, wheel: bytes, before: Build) -> None:
        """For `start`, also by later supervisors; of other builds only `before` may still be asked for."""

    def nodes(self) -> Sequence[Node]:
        """Those that are taken for alive; none where all runs on one host."""

    async def knock(self, node: Node) -> bool:
        """Whether the node gives a sign of life, within a bounded time."""

    async def meet(self, node: Node) -> HostBoot:
        """The boot under which the node runs.

        Raises:
            WorkerLostError: it cannot be asked.
        """

    def find(self) -> Found: ...

    def begin_term(self) -> Memory:
        """Count this supervisor and read what the last one remembered."""

    def remember(self, intent: Intent) -> None:
        """For the next supervisor."""
