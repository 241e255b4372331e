"""The places in the pools, each filled by one process after another. Plain data; `pools` decides on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from tandem.cluster.supervisor.events import Ending, Member, Placement
from tandem.core.identity import Role

MAX_UNTOLD = 1024
"""Endings that are kept for a worker that does not take them; long before that many its silence ends it."""


class Phase(Enum):
    """Of a slot; the value is what the membership says."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPING = "stopping"
    WAITING = "failed"


@dataclass(frozen=True)
class Policy:
    """How long the supervisor waits for what; all in seconds.

    Attributes:
        first_delay_s: wait before the second restart in a row; the first one is immediate.
        max_delay_s: the wait doubles up to here.
        max_lone_delay_s: the same for the first to start of a pool that has nobody: without it nothing is served.
        stable_s: a life that was ready for so long clears the record of failures.
        silence_s: a worker that answers no heartbeat for so long is killed.
        loading_silence_s: the same while it loads; longer, because loading may keep a process from answering.
        router_silence_s: the same for a router; shorter, because nobody keeps pages for it.
        stop_s: a process that was asked to stop and has not after so long is killed.
        drain_s: a worker that leaves a pool which was made smaller is killed when it still holds requests after that.
        place_s: how long a successor may wait for a node before the worker that it replaces drains without it.
        max_successor_failures: ends in a row of a successor that never was ready, after which the drain is given up.
    """

    first_delay_s: float = 0.5
    max_delay_s: float = 30.0
    max_lone_delay_s: float = 5.0
    stable_s: float = 30.0
    silence_s: float = 12.0
    loading_silence_s: float = 60.0
    router_silence_s: float = 10.0
    stop_s: float = 10.0
    drain_s: float = 300.0
    place_s: float = 30.0
    max_successor_failures: int = 3

    def delay(self, failures: int) -> float:
        """Seconds before the restart that follows `failures` ends in a row."""
        if failures <= 1:
            return 0.0
        return min(self.max_delay_s, self.first_delay_s * 2.0 ** min(failures - 2, 30))


@dataclass
class Slot:
    """A place in a pool, and the life that fills it now.

    Attributes:
        killed_for: set exactly once the kill of this life was decided on.
        leaving: it is not filled again when its process ends.
        refill: it is leaving, and another slot takes its place when it has gone.
        deadline: the kill, while DRAINING or STOPPING.
    """

    role: Role
    index: int
    incarnation: str = ""
    phase: Phase = Phase.WAITING
    failures: int = 0  # ends in a row without a stable run between them
    last_error: Ending | None = None
    ready_at: float | None = None  # of this incarnation
    heard_at: float = 0.0
    retry_at: float | None = None  # set exactly while WAITING
    killed_for: str = ""
    num_requests: int = 0
    leaving: bool = False
    refill: bool = False
    deadline: float | None = None

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"

    @property
    def counts(self) -> bool:
        """Its place is one of those that the pool shall have."""
        return not self.leaving or self.refill

    @property
    def overdue(self) -> str:
        """What it did not do until its deadline."""
        return "it did not stop in time"

    def silent_at(self, policy: Policy) -> float | None:
        """When it will have been silent for too long; `None`: nothing is expected of it now."""
        raise NotImplementedError

    def times(self, policy: Policy) -> list[float | None]:
        """When time alone changes something about it; `None`: never."""
        return [self.retry_at, self.deadline, self.silent_at(policy)]

    def is_due(self, now: float) -> bool:
        return self.retry_at is not None and self.retry_at <= now

    def begin(self, incarnation: str) -> None:
        self.incarnation, self.phase, self.killed_for = incarnation, Phase.STARTING, ""
        self.ready_at = self.retry_at = self.deadline = None
        self.num_requests = 0

    def ready(self, now: float) -> None:
        self.phase, self.ready_at, self.heard_at = Phase.READY, now, now

    def stop(self, deadline: float | None, kill: str) -> None:
        """It was asked to stop until then, or is killed for the reason in `kill`."""
        self.phase, self.deadline, self.killed_for = Phase.STOPPING, deadline, kill

    def end(self, error: Ending | None, now: float, policy: Policy) -> None:
        """Count an unwanted end and wait for the next start, which may be due at once."""
        if self.ready_at is not None and now - self.ready_at >= policy.stable_s:
            self.failures = 0
        self.failures += 1
        if self.killed_for:
            error = Ending("worker_lost", f"it was killed: {self.killed_for}")
        self.last_error = error or Ending("worker_lost", "it stopped without being asked to")
        self.phase, self.retry_at, self.deadline = Phase.WAITING, now + policy.delay(self.failures), None

    def excuse(self, seconds: float, now: float) -> None:
        """For so long nobody listened to it, or waited for it."""
        self.heard_at = min(now, self.heard_at + seconds)
        if self.deadline is not None:
            self.deadline += seconds


@dataclass
class WorkerSlot(Slot):
    """A worker's place in its pool.

    Attributes:
        successor: it is leaving once this slot is ready; it serves on until then. Empty: it waits for none.
        place_by: when it stops waiting for the successor to be placed; set exactly while there is a successor.
        drain_s: how long its drain may take.
        untold: incarnations whose ends this one has still to be told of, oldest first.
        note: for people: what became of an order.
    """

    address: str = ""
    placement: Placement | None = None
    successor: str = ""
    place_by: float | None = None
    drain_s: float = 0.0
    untold: dict[str, None] = field(default_factory=dict)
    note: str = ""

    @property
    def member(self) -> Member:
        node, pid = (self.placement.node, self.placement.pid) if self.placement else ("", 0)
        if self.phase is not Phase.STOPPING:
            state = self.phase.value
        else:  # routers need not wait for a stopped process to be gone before they take its requests elsewhere
            state = Phase.WAITING.value if self.killed_for else Phase.DRAINING.value
        return Member(self.name, self.incarnation, self.role, self.address, state, node, pid)

    @property
    def listens(self) -> bool:
        """It answers heartbeats, or it should."""
        return self.phase in (Phase.READY, Phase.DRAINING)

    @property
    def overdue(self) -> str:
        if self.phase is Phase.DRAINING:
            return f"it did not drain within {self.drain_s:.0f} s"
        return super().overdue

    def silent_at(self, policy: Policy) -> float | None:
        if self.listens:
            return self.heard_at + policy.silence_s
        if self.phase is Phase.STARTING and self.placement is not None:
            return self.heard_at + policy.loading_silence_s
        return None

    def times(self, policy: Policy) -> list[float | None]:
        return [*super().times(policy), self.place_by]

    def begin(self, incarnation: str) -> None:
        super().begin(incarnation)
        self.address, self.placement = "", None
        self.untold.clear()

    def stop(self, deadline: float | None, kill: str) -> None:
        super().stop(deadline, kill)
        self.place_by = None

    def excuse(self, seconds: float, now: float) -> None:
        super().excuse(seconds, now)
        if self.place_by is not None:
            self.place_by += seconds

    def stay(self) -> None:
        """Take back that it leaves."""
        self.leaving = self.refill = False
        self.successor, self.place_by = "", None

    def owe(self, ended: str) -> None:
        """It must be told of this end."""
        self.untold[ended] = None
        if len(self.untold) > MAX_UNTOLD:
            del self.untold[next(iter(self.untold))]


@dataclass
class RouterSlot(Slot):
    """A router's place. It has fewer phases than a worker: it loads no model, and nobody keeps pages for it."""

    url: str = ""
    control_address: str = ""

    def silent_at(self, policy: Policy) -> float | None:
        return self.heard_at + policy.router_silence_s if self.phase is Phase.READY else None

    def begin(self, incarnation: str) -> None:
        super().begin(incarnation)
        self.control_address = ""
