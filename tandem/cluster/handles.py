"""The processes that the supervisor drives, as it sees them; Ray stands behind them in `tandem.cluster.launcher`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tandem.cluster.events import Placement, Role


@dataclass(frozen=True)
class WorkerState:
    """`address` is empty while it loads."""

    address: str
    placement: Placement
    draining: bool


class WorkerHandle(Protocol):
    """One incarnation of a worker. Every call raises `WorkerLostError` once its process has ended."""

    async def state(self) -> WorkerState:
        """Answers as soon as the process runs, also while the model loads."""

    async def start(self) -> WorkerState:
        """Load and listen; the same answer again when it has. Raises the `TandemError` that prevented it."""

    async def wait_closed(self) -> None:
        """Until it has stopped. Raises the `TandemError` on which it gave up."""

    async def drain(self) -> None:
        """Until it holds nothing any more."""

    async def stop(self) -> None: ...

    def kill(self, *, unresponsive: bool = False) -> None:
        """End its process; without effect on one that has ended. `unresponsive`: it may not even react to Ray."""


class RouterHandle(Protocol):
    """One incarnation of the router; errors as for `WorkerHandle`."""

    async def start(self) -> tuple[str, str]:
        """Listen; the URL for clients and the address of RouterControl."""

    async def wait_closed(self) -> None: ...

    async def stop(self) -> None: ...

    def kill(self) -> None: ...


@dataclass(frozen=True)
class FoundWorker:
    role: Role
    worker_id: str
    incarnation: str
    handle: WorkerHandle


@dataclass(frozen=True)
class Found:
    """What an earlier supervisor left running."""

    workers: list[FoundWorker]
    router: tuple[str, RouterHandle] | None


@dataclass(frozen=True)
class Memory:
    """What outlives the supervisor. `term` counts the supervisors; `wanted` is `None` for the first."""

    term: int
    wanted: dict[Role, int] | None


class Launcher(Protocol):
    """Starts processes and finds those of an earlier supervisor."""

    def start_worker(self, role: Role, worker_id: str, incarnation: str) -> WorkerHandle: ...

    def start_router(self, incarnation: str) -> RouterHandle: ...

    def find(self) -> Found: ...

    def begin_term(self) -> Memory:
        """Count this supervisor and read what the last one remembered."""

    def remember_wanted(self, wanted: dict[Role, int]) -> None: ...
