"""What happens to a cluster (events, past tense) and what shall be done about it (instructions, imperative).

Plain data between `pools`, which decides, and `supervisor`, which acts. A `name` is that of a slot (`prefill-0`,
`router-0`); a worker's name is its worker id.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.core.identity import Role


@dataclass(frozen=True)
class Ending:
    """Why a life ended: a wire code of `tandem.core.errors` and a sentence."""

    code: str
    message: str


@dataclass(frozen=True)
class Drain:
    """One worker shall leave.

    Attributes:
        incarnation: of the worker that leaves.
        timeout_s: seconds from the start of its drain until it is killed.
        refill: its place is filled when it has gone.
        successor: worker id of the slot that it waits for before it drains; empty: it waits for none.
    """

    incarnation: str
    timeout_s: float
    refill: bool
    successor: str


@dataclass(frozen=True)
class Intent:
    """What a later supervisor must know and the workers cannot tell it.

    Attributes:
        wanted: sizes of the pools.
        drains: of the workers that leave, by worker id.
        failures: of slots that failed of late, by name: a crash loop stays backed off.
        closing_s: a shutdown was asked for, which gives requests so many seconds; `None`: none was.
    """

    wanted: dict[Role, int]
    drains: dict[str, Drain] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    closing_s: float | None = None


@dataclass(frozen=True)
class Placement:
    """Where a process runs. `node` is the host's name or address."""

    node: str
    pid: int


@dataclass(frozen=True)
class Member:
    """One worker in the membership that routers get. `state`: starting, ready, draining or failed."""

    worker_id: str
    incarnation: str
    role: Role
    address: str
    state: str
    node: str
    pid: int


# --- events -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerAdopted:
    """A restarted supervisor found this worker alive. `address` is empty while it still loads."""

    role: Role
    worker_id: str
    incarnation: str
    address: str
    placement: Placement | None
    draining: bool


@dataclass(frozen=True)
class RouterAdopted:
    """A restarted supervisor found this router alive; `RouterStarted` follows."""

    name: str
    incarnation: str


@dataclass(frozen=True)
class ClusterOpened:
    """Everything alive has been adopted: from here on the pools are brought to what is intended."""

    intent: Intent


@dataclass(frozen=True)
class WantedChanged:
    role: Role
    workers: int


@dataclass(frozen=True)
class DrainOrdered:
    """Replace this worker; it must be ready and not be leaving already, or nothing happens.

    Attributes:
        replace_first: start its successor before it drains.
        timeout_s: seconds that it may take to drain.
    """

    worker_id: str
    replace_first: bool
    timeout_s: float


@dataclass(frozen=True)
class WorkerPlaced:
    """Its process runs; it loads the model now."""

    worker_id: str
    incarnation: str
    placement: Placement


@dataclass(frozen=True)
class LoadingHeard:
    """Its process answered while it loads the model."""

    worker_id: str
    incarnation: str


@dataclass(frozen=True)
class WorkerStarted:
    worker_id: str
    incarnation: str
    address: str
    placement: Placement


@dataclass(frozen=True)
class WorkerFailedToStart:
    worker_id: str
    incarnation: str
    error: Ending


@dataclass(frozen=True)
class Exited:
    """A process has ended, or it has given up by itself. `error` is `None` when it was asked to stop."""

    name: str
    incarnation: str
    error: Ending | None


@dataclass(frozen=True)
class Drained:
    """It holds nothing any more."""

    worker_id: str
    incarnation: str


@dataclass(frozen=True)
class LoadReported:
    """It answered a heartbeat. `num_requests`: that it holds, running and queued."""

    name: str
    incarnation: str
    num_requests: int


@dataclass(frozen=True)
class WriterSuspected:
    """A decode worker keeps pages in quarantine until this writer's end is certain; told again as long as it lives."""

    worker_id: str
    incarnation: str


@dataclass(frozen=True)
class ProcessEnded:
    """This worker's process has provably ended, seen on its own node. May come before or after `Exited`."""

    incarnation: str


@dataclass(frozen=True)
class EndingsTaken:
    """A worker has taken the news of `NoteEnded`."""

    worker_id: str
    incarnation: str
    ended: tuple[str, ...]


@dataclass(frozen=True)
class RouterStarted:
    """It listens. It knows no membership yet."""

    name: str
    incarnation: str
    url: str
    control_address: str


@dataclass(frozen=True)
class ClosingBegun:
    """A shutdown was asked for; requests under way may still end within `grace_s`, new ones are refused."""

    grace_s: float


@dataclass(frozen=True)
class ShutdownRequested:
    """End everything; nothing that ends from here on is replaced."""


@dataclass(frozen=True)
class ClockJumped:
    """The supervisor, or its whole host, stood still for this long, and heard nobody meanwhile."""

    seconds: float


@dataclass(frozen=True)
class Tick:
    """Time has passed; sent at `PoolState.wake_at()`."""


Event = (
    WorkerAdopted
    | RouterAdopted
    | ClusterOpened
    | WantedChanged
    | DrainOrdered
    | WorkerPlaced
    | LoadingHeard
    | WorkerStarted
    | WorkerFailedToStart
    | Exited
    | Drained
    | LoadReported
    | WriterSuspected
    | ProcessEnded
    | EndingsTaken
    | RouterStarted
    | ClosingBegun
    | ShutdownRequested
    | ClockJumped
    | Tick
)


# --- instructions -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StartProcess:
    role: Role
    name: str
    incarnation: str


@dataclass(frozen=True)
class DrainWorker:
    """Let it finish what it holds; report `Drained`."""

    worker_id: str
    incarnation: str


@dataclass(frozen=True)
class StopProcess:
    """Ask it to stop; `Exited` follows."""

    name: str
    incarnation: str


@dataclass(frozen=True)
class KillProcess:
    """End it whatever it does; `Exited` follows."""

    name: str
    incarnation: str
    reason: str


@dataclass(frozen=True)
class NoteEnded:
    """Tell a worker that these incarnations have provably ended; `EndingsTaken` follows when it has taken it."""

    worker_id: str
    incarnation: str
    ended: tuple[str, ...]


@dataclass(frozen=True)
class PublishMembership:
    """Push to a router.

    Attributes:
        version: grows with every change of the rest.
        num_routers: that serve, this one included: what is bounded for the cluster is shared among them.
    """

    name: str
    incarnation: str
    version: int
    members: tuple[Member, ...]
    num_routers: int


Instruction = (
    StartProcess
    | StopProcess
    | KillProcess
    | DrainWorker
    | NoteEnded
    | PublishMembership
)
