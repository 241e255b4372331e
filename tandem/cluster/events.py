"""What happens to a cluster (events, past tense) and what shall be done about it (instructions, imperative).

Plain data between `tandem.cluster.pools`, which decides, and `tandem.cluster.supervisor`, which acts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class Ending:
    """Why a life ended: a wire code of `tandem.core.errors` and a sentence."""

    code: str
    message: str


@dataclass(frozen=True)
class Placement:
    """Where a process runs. `node` is the host's name or address."""

    node: str
    pid: int


@dataclass(frozen=True)
class Member:
    """One worker in the membership that the router gets. `state`: starting, ready, draining or failed."""

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

    incarnation: str


@dataclass(frozen=True)
class ClusterOpened:
    """Everything alive has been adopted: from here on the pools are brought to these sizes."""

    prefill: int
    decode: int


@dataclass(frozen=True)
class WantedChanged:
    role: Role
    workers: int


@dataclass(frozen=True)
class WorkerPlaced:
    """Its process runs; it loads the model now."""

    worker_id: str
    incarnation: str
    placement: Placement


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
class WorkerExited:
    """Its process has ended, or it has given up by itself. `error` is `None` when it was asked to stop."""

    worker_id: str
    incarnation: str
    error: Ending | None


@dataclass(frozen=True)
class Drained:
    """It holds nothing any more."""

    worker_id: str
    incarnation: str


@dataclass(frozen=True)
class LoadReported:
    """It answered a heartbeat. `num_requests`: running and queued."""

    worker_id: str
    incarnation: str
    num_requests: int


@dataclass(frozen=True)
class WriterSuspected:
    """A decode worker keeps pages in quarantine until this writer's end is certain."""

    worker_id: str
    incarnation: str


@dataclass(frozen=True)
class RouterStarted:
    """A router, the first or a later one, listens. It knows no membership yet."""

    incarnation: str
    url: str
    control_address: str


@dataclass(frozen=True)
class RouterExited:
    """It could not start, or its process has ended. `error` is `None` when it was asked to stop."""

    incarnation: str
    error: Ending | None


@dataclass(frozen=True)
class ShutdownRequested:
    """End everything; nothing that ends from here on is replaced."""


@dataclass(frozen=True)
class Tick:
    """Time has passed; sent at `Cluster.wake_at()`."""


Event = (
    WorkerAdopted
    | RouterAdopted
    | ClusterOpened
    | WantedChanged
    | WorkerPlaced
    | WorkerStarted
    | WorkerFailedToStart
    | WorkerExited
    | Drained
    | LoadReported
    | WriterSuspected
    | RouterStarted
    | RouterExited
    | ShutdownRequested
    | Tick
)


# --- instructions -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StartWorker:
    role: Role
    worker_id: str
    incarnation: str


@dataclass(frozen=True)
class DrainWorker:
    """Let it finish what it holds; report `Drained`."""

    worker_id: str
    incarnation: str


@dataclass(frozen=True)
class StopWorker:
    """Ask it to stop; `WorkerExited` follows."""

    worker_id: str
    incarnation: str


@dataclass(frozen=True)
class KillWorker:
    """End its process whatever it does; `WorkerExited` follows."""

    worker_id: str
    incarnation: str
    reason: str


@dataclass(frozen=True)
class StartRouter:
    incarnation: str


@dataclass(frozen=True)
class StopRouter:
    incarnation: str


@dataclass(frozen=True)
class PublishMembership:
    """Push to the router; `version` grows with every change of the membership."""

    version: int
    members: tuple[Member, ...]


Instruction = StartWorker | DrainWorker | StopWorker | KillWorker | StartRouter | StopRouter | PublishMembership
