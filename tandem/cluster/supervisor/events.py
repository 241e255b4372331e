"""What happens to a cluster (events, past tense) and what shall be done about it (instructions, imperative).

Plain data between `pools`, which decides, and `supervisor`, which acts. A `name` is that of a slot (`prefill-0`,
`router-0`); a worker's name is its worker id.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.cluster.supervisor.autoscale import Range
from tandem.cluster.supervisor.nodes import Node
from tandem.core.identity import Role
from tandem.core.machine import HostBoot


@dataclass(frozen=True)
class Build:
    """Which code a process runs. `digest` is that of its wheel; empty: what is installed on its node."""

    digest: str = ""
    version: str = ""


INSTALLED = Build()


@dataclass(frozen=True)
class Ending:
    """Why a life ended: a wire code of `tandem.core.errors` and a sentence."""

    code: str
    message: str


@dataclass(frozen=True)
class Drain:
    """One worker or router shall leave."""

    incarnation: str  # of the process that leaves
    timeout_s: float  # from the start of its drain until it is killed
    refill: bool  # its place is filled when it has gone
    successor: str  # name of the slot that it waits for before it drains; empty: it waits for none
    spare: bool = False  # its pool needs it no more: the other one may have it


@dataclass(frozen=True)
class Intent:
    """What a later supervisor must know and the processes cannot tell it."""

    wanted: dict[Role, int]  # sizes of the pools
    drains: dict[str, Drain] = field(default_factory=dict)  # of those that leave, by name
    failures: dict[str, int] = field(default_factory=dict)  # of late, by slot: a crash loop stays backed off
    closing_s: float | None = None  # a shutdown was asked for, which gives requests so many seconds; `None`: none was
    build: Build = INSTALLED  # that all processes shall run
    build_before: Build = INSTALLED
    builds: dict[str, Build] = field(default_factory=dict)  # of incarnations that do not run what is installed
    unproven: dict[str, HostBoot] = field(default_factory=dict)  # incarnations of workers whose end nobody saw: where
    colocated: bool = False  # as of `PoolState.colocated`
    ranges: dict[Role, Range] = field(default_factory=dict)  # of pools that follow their load


@dataclass(frozen=True)
class Placement:
    """Where a process runs. `node` is the host's name or address, `node_id` is Ray's."""

    node: str
    pid: int
    node_id: str = ""
    boot: HostBoot | None = None


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


@dataclass(frozen=True)
class OtherRouter:
    """A router as another one is told of it. `shares_port`: both are on one host."""

    name: str
    address: str
    shares_port: bool


@dataclass(frozen=True)
class PoolSize:
    """Of a pool of workers, as routers are told it; `least` and `most` are equal where the size is fixed.

    Attributes:
        num_grown, num_shrunk: times that its load has changed it.
        num_refused: times that it was to grow and could not.
        num_taken: workers that came from the other pool, as this one's load asked for it.
    """

    role: Role
    wanted: int
    least: int
    most: int
    num_grown: int = 0
    num_shrunk: int = 0
    num_refused: int = 0
    num_taken: int = 0


@dataclass(frozen=True)
class NextLife:
    """As what a process is to go on, in the other pool."""

    role: Role
    worker_id: str
    incarnation: str


@dataclass(frozen=True)
class OfProcess:
    """About one life of a slot."""

    name: str
    incarnation: str


# --- events -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Adopted(OfProcess):
    """A restarted supervisor found this process alive. Without an `address` it still starts, and `Started` follows."""

    address: str = ""
    placement: Placement | None = None
    draining: bool = False
    seat: Role | None = None  # the role that its process was started in; `None`: its own
    url: str = ""  # where clients of a router go


@dataclass(frozen=True)
class ClusterOpened:
    """Everything alive has been adopted: from here on the pools are brought to what is intended."""

    intent: Intent


@dataclass(frozen=True)
class WantedChanged:
    """Somebody has ordered the size of a pool; with `most` it follows its load from `workers` on."""

    role: Role
    workers: int
    most: int | None = None


@dataclass(frozen=True)
class LoadFollowed:
    """The load of a pool that follows it asks for this size."""

    role: Role
    workers: int


@dataclass(frozen=True)
class RoleGiven:
    """A worker goes from one pool to the other as their loads ask for it, `instead` of one that starts."""

    giver: Role
    taker: Role
    instead: bool = False


@dataclass(frozen=True)
class GrowthRefused:
    """A pool was to grow with its load, and there is no room for it."""

    role: Role
    reason: str


@dataclass(frozen=True)
class BuildChanged:
    """All processes shall run this build."""

    build: Build


@dataclass(frozen=True)
class DrainOrdered:
    """Replace this worker or router; it must be ready and not be leaving already, or nothing happens."""

    name: str
    replace_first: bool  # start its successor before it drains
    timeout_s: float  # that it may take to drain


@dataclass(frozen=True)
class Placed(OfProcess):
    """Its process runs, and starts to listen; a worker loads the model before."""

    placement: Placement


@dataclass(frozen=True)
class LoadingHeard(OfProcess):
    """Its process answered while it starts."""


@dataclass(frozen=True)
class Started(OfProcess):
    """It listens. A router knows no membership yet."""

    address: str  # of its control service
    placement: Placement
    url: str = ""  # where clients of a router go
    draining: bool = False  # an earlier supervisor has told it to


@dataclass(frozen=True)
class Exited(OfProcess):
    """Its process has ended, could not start, or has given up. `error` is `None` when it was asked to stop."""

    error: Ending | None


@dataclass(frozen=True)
class RoleChanged(OfProcess):
    """This life has ended, and its process has begun the next one, which it was told of by `StopProcess`."""


@dataclass(frozen=True)
class Drained(OfProcess):
    """It holds nothing any more."""


@dataclass(frozen=True)
class LoadReported(OfProcess):
    """It answered a heartbeat. `num_requests`: that it holds, running and queued."""

    num_requests: int


@dataclass(frozen=True)
class HeartbeatMissed(OfProcess):
    """It did not answer in time; it may be stopped, busy or cut off."""


@dataclass(frozen=True)
class WriterSuspected(OfProcess):
    """A decode worker keeps pages in quarantine until this writer's end is certain; told again as long as it lives."""


@dataclass(frozen=True)
class ProcessEnded:
    """This worker's process has provably ended, seen on its own node. May come before or after `Exited`."""

    incarnation: str


@dataclass(frozen=True)
class EndUnproven:
    """This worker's process is taken for lost, and its node cannot be asked whether it has ended."""

    incarnation: str
    boot: HostBoot  # where it ran


@dataclass(frozen=True)
class NodesListed:
    """Ray takes these nodes for alive, and no others."""

    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class NodeKnocked:
    """A node was asked for a sign of life."""

    node_id: str
    answered: bool


@dataclass(frozen=True)
class NodeMet:
    """The boot under which a node runs is known."""

    node_id: str
    boot: HostBoot


@dataclass(frozen=True)
class EndingsTaken(OfProcess):
    """A worker has taken the news of `NoteEnded`."""

    ended: tuple[str, ...]


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
    Adopted
    | ClusterOpened
    | WantedChanged
    | LoadFollowed
    | RoleGiven
    | GrowthRefused
    | BuildChanged
    | DrainOrdered
    | Placed
    | LoadingHeard
    | Started
    | Exited
    | RoleChanged
    | Drained
    | LoadReported
    | HeartbeatMissed
    | WriterSuspected
    | ProcessEnded
    | EndUnproven
    | NodesListed
    | NodeKnocked
    | NodeMet
    | EndingsTaken
    | ClosingBegun
    | ShutdownRequested
    | ClockJumped
    | Tick
)


# --- instructions -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StartProcess(OfProcess):
    role: Role
    build: Build = INSTALLED


@dataclass(frozen=True)
class DrainProcess(OfProcess):
    """Let it finish what it holds; report `Drained`. A router leaves new connections to the others."""


@dataclass(frozen=True)
class StopProcess(OfProcess):
    """Ask it to stop; `Exited` follows. With `then`: ask its process to begin that life, and keep its weights;
    `RoleChanged` follows, or `Exited` where it cannot."""

    then: NextLife | None = None


@dataclass(frozen=True)
class KillProcess(OfProcess):
    """End it whatever it does; `Exited` follows."""

    reason: str


@dataclass(frozen=True)
class NoteEnded(OfProcess):
    """Tell a worker that these incarnations have provably ended; `EndingsTaken` follows when it has taken it."""

    ended: tuple[str, ...]


@dataclass(frozen=True)
class PublishMembership(OfProcess):
    """Push to a router."""

    version: int  # grows with every change of the rest
    members: tuple[Member, ...]
    num_routers: int  # that serve, this one included: what is bounded for the cluster is shared among them
    router_number: int  # which of them this one is, from 0
    ended: tuple[str, ...] = ()  # incarnations of workers that have provably ended, the newest last
    colocated: bool = False  # as of `PoolState.colocated`
    pools: tuple[PoolSize, ...] = ()  # of workers
    others: tuple[OtherRouter, ...] = ()  # that listen


Instruction = StartProcess | StopProcess | KillProcess | DrainProcess | NoteEnded | PublishMembership
