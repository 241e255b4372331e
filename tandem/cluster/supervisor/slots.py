"""The places in the pools, each filled by one process after another. Plain data; `pools` decides on it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum

from tandem.cluster.supervisor.events import INSTALLED, Build, Drain, Ending, Member, Placement
from tandem.cluster.supervisor.nodes import Aim
from tandem.core.identity import Role

MAX_UNTOLD = 1024
"""Endings that are kept for a worker that does not take them; long before that many its silence ends it."""

_BY_HEARTBEAT = frozenset({"heard_at", "num_requests"})


class Phase(Enum):
    """Of a slot; the value is what the membership says."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPING = "stopping"
    WAITING = "failed"


@dataclass(frozen=True)
class Policy:
    """How long the supervisor waits for what; all in seconds."""

    first_delay_s: float = 0.5  # before the second restart in a row; the first one is immediate
    max_delay_s: float = 30.0  # the wait doubles up to here
    max_lone_delay_s: float = 5.0  # the same for the first to start of a pool that has nobody: it serves nothing
    stable_s: float = 30.0  # a life that was ready for so long clears the record of failures
    silence_s: float = 12.0  # a worker that answers no heartbeat for so long is killed
    router_silence_s: float = 10.0  # the same for a router; shorter, because nobody keeps pages for it
    loading_silence_s: float = 60.0  # the same of any process that starts: loading may keep it from answering
    stop_s: float = 10.0  # a process that was asked to stop and has not after so long is killed
    drain_s: float = 300.0  # a worker that leaves a pool which was made smaller is killed if it takes longer to drain
    place_s: float = 30.0  # a successor may wait so long for a node; then the worker that it replaces drains without it
    place_try_s: float = 30.0  # a node that has not begun a process after so long is left for another that has room
    flexible: int = 0  # workers that may serve in the other role than the one they were started in
    max_successor_failures: int = 3  # in a row, of a successor that never was ready: then the drain is given up

    def delay(self, failures: int) -> float:
        """Seconds before the restart that follows `failures` ends in a row."""
        if failures <= 1:
            return 0.0
        return min(self.max_delay_s, self.first_delay_s * 2.0 ** min(failures - 2, 30))


def place_of(name: str) -> tuple[Role, int]:
    """Pool and number of the slot with this name."""
    role, _, index = name.rpartition("-")
    return Role(role), int(index)


@dataclass
class Slot:
    """A place in a pool, and the life that fills it now.

    A router is told of no endings: nobody keeps pages for it.
    """

    role: Role
    index: int
    incarnation: str = ""
    phase: Phase = Phase.WAITING
    build: Build = INSTALLED  # that this life runs
    failures: int = 0  # ends in a row without a stable run between them
    last_error: Ending | None = None
    placement: Placement | None = None
    address: str = ""  # of its control service; empty until it listens
    aim: Aim = field(default_factory=Aim)  # where this life shall be started
    asked: bool = False  # for its process, by this supervisor
    aim_by: float | None = None  # another node is looked for then; set while a certain one has not begun it
    tried: dict[str, None] = field(default_factory=dict)  # nodes that have not begun it since it was last placed
    url: str = ""  # where clients of a router go; empty before it has listened for the first time
    ready_at: float | None = None  # of this incarnation
    heard_at: float = 0.0
    num_requests: int = 0
    retry_at: float | None = None  # set exactly while WAITING
    killed_for: str = ""  # set exactly once the kill of this life was decided on
    moves: bool = False  # it is killed to be started on another node, which is no failure
    deadline: float | None = None  # the kill, while DRAINING or STOPPING
    leaving: bool = False  # it is not filled again when its process ends
    refill: bool = False  # it is leaving, and another slot takes its place when it has gone
    successor: str = ""  # it is leaving once this slot is ready, and serves until then; empty: it waits for none
    place_by: float | None = None  # it waits so long for its successor to be placed
    drain_s: float = 0.0  # how long its drain may take
    renews: bool = False  # it was started to replace one of another build, and has not been ready since
    spare: bool = False  # it is leaving since its pool needs it no more: the other one may have its process
    seat: Role = field(init=False)  # which of its node's places its process takes: that of the role it was started in
    awaits: str = ""  # name of the slot, of the other pool, whose process it is to get once that has drained
    is_heir: bool = False  # this life goes on in a process that was of the other pool
    untold: dict[str, None] = field(default_factory=dict)  # incarnations whose ends it must be told of, oldest first
    note: str = ""  # for people: what became of an order
    on_set: Callable[[], None] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.seat = self.role

    def __setattr__(self, name: str, value: object) -> None:
        """Tell `on_set` of all but what each heartbeat changes."""
        object.__setattr__(self, name, value)
        if name not in _BY_HEARTBEAT and (on_set := self.__dict__.get("on_set")) is not None:
            on_set()

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"

    @property
    def node_id(self) -> str:
        """Of the node where it runs or shall run; empty: not known."""
        if self.placement:
            return self.placement.node_id
        return self.aim.node_id

    @property
    def counts(self) -> bool:
        """Its place is one of those that the pool shall have."""
        return not self.leaving or self.refill

    @property
    def is_unplaced(self) -> bool:
        """It starts, and no node has begun it."""
        return self.phase is Phase.STARTING and self.placement is None and not self.awaits

    @property
    def listens(self) -> bool:
        """It answers heartbeats, or it should."""
        return self.phase in (Phase.READY, Phase.DRAINING)

    @property
    def member(self) -> Member:
        node, pid = (self.placement.node, self.placement.pid) if self.placement else ("", 0)
        if self.phase is not Phase.STOPPING:
            state = self.phase.value
        else:  # routers need not wait for a stopped process to be gone before they take its requests elsewhere
            state = Phase.WAITING.value if self.killed_for else Phase.DRAINING.value
        return Member(self.name, self.incarnation, self.role, self.address, state, node, pid)

    @property
    def overdue(self) -> str:
        """What it did not do until its deadline."""
        if self.phase is Phase.DRAINING:
            return f"it did not drain within {self.drain_s:.0f} s"
        return "it did not stop in time"

    @property
    def cannot_start(self) -> str:
        """`decode-1 cannot start (why)`."""
        return f"{self.name} cannot start ({self.last_error.message if self.last_error else ''})"

    def silent_at(self, policy: Policy) -> float | None:
        """When it will have been silent for too long; `None`: nothing is expected of it now."""
        if self.listens:
            return self.heard_at + (policy.router_silence_s if self.role is Role.ROUTER else policy.silence_s)
        if self.phase is Phase.STARTING and self.placement is not None:
            return self.heard_at + policy.loading_silence_s
        return None

    def next_time(self, policy: Policy) -> float | None:
        """When time alone changes something about it; `None`: never."""
        times = (self.retry_at, self.deadline, self.place_by, self.aim_by, self.silent_at(policy))
        return min((time for time in times if time is not None), default=None)

    @property
    def drain(self) -> Drain | None:
        """What a later supervisor must know of its leaving."""
        if not self.leaving or self.phase is Phase.STOPPING:
            return None
        return Drain(self.incarnation, self.drain_s, self.refill, self.successor, self.spare)

    def is_due(self, now: float) -> bool:
        return self.retry_at is not None and self.retry_at <= now

    def begin(self, incarnation: str, build: Build) -> None:
        self.incarnation, self.build, self.seat = incarnation, build, self.role
        self.awaits, self.is_heir = "", False
        self.phase, self.killed_for = Phase.STARTING, ""
        self.ready_at = self.retry_at = self.deadline = self.placement = None
        self.address, self.num_requests = "", 0
        self.aim, self.aim_by, self.asked, self.moves = Aim(), None, False, False
        self.untold.clear()

    def ask(self, now: float, policy: Policy) -> None:
        """Its process is asked for where it is aimed."""
        self.asked, self.aim_by = True, now + policy.place_try_s if self.aim.node_id else None

    def place(self, placement: Placement) -> None:
        self.placement, self.aim_by = placement, None
        self.tried.clear()

    def ready(self, now: float) -> None:
        self.phase, self.ready_at, self.heard_at, self.renews = Phase.READY, now, now, False

    def stop(self, deadline: float | None, kill: str) -> None:
        """It was asked to stop until then, or is killed for the reason in `kill`."""
        self.phase, self.deadline, self.killed_for, self.place_by = Phase.STOPPING, deadline, kill, None
        self.aim_by = None

    def end(self, error: Ending | None, now: float, policy: Policy) -> None:
        """Count an unwanted end and wait for the next start, which may be due at once."""
        if self.ready_at is not None and now - self.ready_at >= policy.stable_s:
            self.failures = 0
        self.failures += not self.moves
        if self.killed_for:
            error = Ending("worker_lost", self.killed_for if self.moves else f"it was killed: {self.killed_for}")
        self.last_error = error or Ending("worker_lost", "it stopped without being asked to")
        delay_s = 0.0 if self.moves else policy.delay(self.failures)
        self.phase, self.retry_at, self.deadline = Phase.WAITING, now + delay_s, None

    def excuse(self, seconds: float, now: float) -> None:
        """For so long nobody listened to it, or waited for it."""
        self.heard_at = min(now, self.heard_at + seconds)
        if self.deadline is not None:
            self.deadline += seconds
        if self.place_by is not None:
            self.place_by += seconds
        if self.aim_by is not None:
            self.aim_by += seconds

    def wait_for(self, successor: str, now: float, policy: Policy) -> None:
        """It leaves once that slot is ready. A router needs no free place on a node: it is awaited however long."""
        self.successor = successor
        self.place_by = now + policy.place_s if self.role is not Role.ROUTER else None

    def stay(self) -> None:
        """Take back that it leaves."""
        self.leaving = self.refill = False
        self.successor, self.place_by = "", None

    def owe(self, ended: str) -> None:
        """It must be told of this end."""
        self.untold[ended] = None
        if len(self.untold) > MAX_UNTOLD:
            del self.untold[next(iter(self.untold))]


def hurry(pool: Collection[Slot], now: float, policy: Policy) -> None:
    """In a pool where nobody serves or starts, the first of those that wait for a restart waits only briefly."""
    if any(slot.phase in (Phase.READY, Phase.STARTING) for slot in pool):
        return
    waiting = [(slot.retry_at, slot.index, slot) for slot in pool if slot.retry_at is not None]
    if waiting:
        retry_at, _, first = min(waiting, key=lambda timed: timed[:2])
        first.retry_at = min(retry_at, now + policy.max_lone_delay_s)
