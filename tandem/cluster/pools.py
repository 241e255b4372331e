"""What the supervisor decides: events in, instructions out; no clock, no I/O, no Ray.

A *slot* is a place in a pool (`prefill-0`); it outlives the processes that fill it. Each process is one
*incarnation* of its slot. A life goes

    StartWorker ─> STARTING ─WorkerStarted─> READY ─scaled down─> DRAINING ─Drained─> STOPPING ─WorkerExited─> gone
                      │                        │
                      └── failed to start ─────┴── exited ──> STARTING again, at once or after WAITING

An event that names another incarnation than the slot's present one is stale and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from tandem.cluster.events import (
    ClusterOpened,
    Drained,
    DrainWorker,
    Ending,
    Event,
    Instruction,
    KillWorker,
    LoadReported,
    Member,
    Placement,
    PublishMembership,
    Role,
    RouterAdopted,
    RouterExited,
    RouterStarted,
    ShutdownRequested,
    StartRouter,
    StartWorker,
    StopRouter,
    StopWorker,
    Tick,
    WantedChanged,
    WorkerAdopted,
    WorkerExited,
    WorkerFailedToStart,
    WorkerPlaced,
    WorkerStarted,
    WriterSuspected,
)


class Phase(Enum):
    """Of a slot or of the router; the value is what the membership says."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPING = "stopping"
    WAITING = "failed"


@dataclass(frozen=True)
class Policy:
    """How patient the supervisor is; all in seconds.

    Attributes:
        first_delay_s: wait before the second restart in a row; the first one is immediate.
        max_delay_s: the wait doubles up to here.
        stable_s: a life that was ready for so long clears the record of failures.
        silence_s: a worker that answers no heartbeat for so long is killed.
        stop_s: a worker that was asked to stop and has not after so long is killed.
    """

    first_delay_s: float = 0.5
    max_delay_s: float = 30.0
    stable_s: float = 30.0
    silence_s: float = 12.0
    stop_s: float = 10.0

    def delay(self, failures: int) -> float:
        """Seconds before the restart that follows `failures` ends in a row."""
        if failures <= 1:
            return 0.0
        return min(self.max_delay_s, self.first_delay_s * 2.0 ** min(failures - 2, 30))


@dataclass
class Life:
    """One process after another in one place: what slots and the router have in common."""

    incarnation: str = ""
    phase: Phase = Phase.WAITING
    failures: int = 0  # ends in a row without a stable run between them
    last_error: Ending | None = None
    ready_at: float | None = None  # of this incarnation
    retry_at: float | None = None  # set exactly while WAITING
    deadline: float | None = None  # set exactly while STOPPING, until the kill

    def end(self, error: Ending | None, now: float, policy: Policy) -> None:
        """Count an unwanted end and wait for the next start, which may be due at once."""
        if self.ready_at is not None and now - self.ready_at >= policy.stable_s:
            self.failures = 0
        self.failures += 1
        self.last_error = error or Ending("worker_lost", "it stopped without being asked to")
        self.phase, self.retry_at = Phase.WAITING, now + policy.delay(self.failures)

    def begin(self, incarnation: str) -> None:
        self.incarnation, self.phase = incarnation, Phase.STARTING
        self.ready_at = self.retry_at = self.deadline = None

    def ready(self, now: float) -> None:
        self.phase, self.ready_at = Phase.READY, now


@dataclass
class Slot(Life):
    """A worker's place in its pool. `leaving`: it is not filled again when its process ends."""

    role: Role = Role.PREFILL
    index: int = 0
    address: str = ""
    placement: Placement | None = None
    heard_at: float = 0.0
    num_requests: int = 0
    leaving: bool = False

    @property
    def worker_id(self) -> str:
        return f"{self.role}-{self.index}"

    @property
    def member(self) -> Member:
        node, pid = (self.placement.node, self.placement.pid) if self.placement else ("", 0)
        state = "draining" if self.phase is Phase.STOPPING else self.phase.value
        return Member(self.worker_id, self.incarnation, self.role, self.address, state, node, pid)


@dataclass
class RouterLife(Life):
    url: str = ""
    control_address: str = ""


_DISMISSAL_ORDER = {Phase.WAITING: 0, Phase.STARTING: 1, Phase.READY: 2}


@dataclass
class Cluster:
    """The pools and the router as they are and as they shall be.

    Attributes:
        new_incarnation: a name never used before in this Ray cluster.
        version: of the membership; starts above every version of an earlier supervisor.
    """

    policy: Policy
    new_incarnation: Callable[[], str]
    version: int = 0
    wanted: dict[Role, int] = field(default_factory=lambda: dict.fromkeys(Role, 0))
    slots: dict[str, Slot] = field(default_factory=dict)
    router: RouterLife | None = None
    stopping: bool = False
    _published: tuple[Member, ...] = ()

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take one event at `now` (seconds on any steady clock) and say what shall be done, in order."""
        out = self._dispatch(event, now)
        members = tuple(slot.member for slot in self.slots.values())
        if members != self._published:
            self._published, self.version = members, self.version + 1
            if self.router and self.router.phase is Phase.READY:
                out.append(PublishMembership(self.version, members))
        elif isinstance(event, RouterStarted):
            out.append(PublishMembership(self.version, members))
        return out

    def wake_at(self) -> float | None:
        """When the next `Tick` is due on the clock of `handle`; `None`: nothing is timed."""
        lives: list[Life] = [*self.slots.values(), *([self.router] if self.router else [])]
        times = [t for life in lives for t in (life.retry_at, life.deadline) if t is not None]
        times += [slot.heard_at + self.policy.silence_s for slot in self.slots.values() if self._listens_to(slot)]
        return min(times, default=None)

    @property
    def settled(self) -> bool:
        """Every pool has exactly its wanted workers, all ready, and the router is ready."""
        return (
            not self.stopping
            and self.router is not None
            and self.router.phase is Phase.READY
            and all(slot.phase is Phase.READY for slot in self.slots.values())
            and all(len(self._of(role)) == wanted for role, wanted in self.wanted.items())
        )

    @property
    def closed(self) -> bool:
        """A shutdown was asked for and nothing is left."""
        return self.stopping and not self.slots and self.router is None

    def _dispatch(self, event: Event, now: float) -> list[Instruction]:
        match event:
            case WorkerAdopted():
                return self._adopt(event, now)
            case RouterAdopted():
                self.router = RouterLife(incarnation=event.incarnation, phase=Phase.STARTING)
                return []
            case ClusterOpened():
                return self._open(event, now)
            case WantedChanged():
                self.wanted[event.role] = event.workers
                return self._reconcile(event.role, now)
            case ShutdownRequested():
                return self._shut_down(now)
            case Tick():
                return self._tick(now)
            case RouterStarted() | RouterExited():
                return self._on_router(event, now)
            case _:
                slot = self.slots.get(event.worker_id)
                if slot is None or slot.incarnation != event.incarnation:
                    return []
                return self._on_worker(slot, event, now)

    # --- sizes ---------------------------------------------------------------------------------------------------

    def _open(self, event: ClusterOpened, now: float) -> list[Instruction]:
        self.wanted = {Role.PREFILL: event.prefill, Role.DECODE: event.decode}
        out: list[Instruction] = []
        if self.router is None:
            self.router = RouterLife()
            out += self._start_router()
        return out + [step for role in Role for step in self._reconcile(role, now)]

    def _reconcile(self, role: Role, now: float) -> list[Instruction]:
        """Bring the pool to its wanted size; slots that are leaving already do not count."""
        if self.stopping:
            return []
        staying = [slot for slot in self._of(role) if not slot.leaving]
        missing = self.wanted[role] - len(staying)
        if missing >= 0:
            return [self._start(self._new_slot(role)) for _ in range(missing)]
        # Those that hold least go first; of equals the latest, so that low numbers stay.
        staying.sort(key=lambda slot: (_DISMISSAL_ORDER[slot.phase], slot.num_requests, -slot.index))
        return [step for slot in staying[:-missing] for step in self._dismiss(slot, now)]

    def _dismiss(self, slot: Slot, now: float) -> list[Instruction]:
        slot.leaving = True
        if slot.phase is Phase.WAITING:
            del self.slots[slot.worker_id]
            return []
        if slot.phase is Phase.STARTING:  # holds nothing yet
            return self._stop(slot, now, kill="the pool was made smaller while it started")
        slot.phase = Phase.DRAINING
        return [DrainWorker(slot.worker_id, slot.incarnation)]

    def _new_slot(self, role: Role) -> Slot:
        taken = {slot.index for slot in self._of(role)}
        slot = Slot(role=role, index=next(i for i in range(len(taken) + 1) if i not in taken))
        self.slots[slot.worker_id] = slot
        return slot

    def _of(self, role: Role) -> list[Slot]:
        return [slot for slot in self.slots.values() if slot.role is role]

    # --- one worker's life ---------------------------------------------------------------------------------------

    def _start(self, slot: Slot) -> Instruction:
        slot.begin(self.new_incarnation())
        slot.address, slot.placement, slot.num_requests = "", None, 0
        return StartWorker(slot.role, slot.worker_id, slot.incarnation)

    def _stop(self, slot: Slot, now: float, kill: str = "") -> list[Instruction]:
        slot.phase, slot.deadline = Phase.STOPPING, None if kill else now + self.policy.stop_s
        if kill:
            return [KillWorker(slot.worker_id, slot.incarnation, kill)]
        return [StopWorker(slot.worker_id, slot.incarnation)]

    def _on_worker(self, slot: Slot, event: Event, now: float) -> list[Instruction]:
        match event:
            case WorkerPlaced() if slot.phase is Phase.STARTING:
                slot.placement = event.placement
            case WorkerStarted() if slot.phase is Phase.STARTING:
                slot.address, slot.placement, slot.heard_at = event.address, event.placement, now
                slot.ready(now)
            case LoadReported():
                slot.heard_at, slot.num_requests = now, event.num_requests
            case Drained() if slot.phase is Phase.DRAINING:
                return self._stop(slot, now)
            case WriterSuspected() if self._listens_to(slot):
                return self._stop(slot, now, kill="it is silent beyond its lease, and pages wait for its end")
            case WorkerFailedToStart() if slot.phase is Phase.STARTING:
                # Its process is still there, and it may hold memory that the next one needs.
                corpse = KillWorker(slot.worker_id, slot.incarnation, "it failed to start")
                return [corpse, *self._ended(slot, event.error, now)]
            case WorkerExited() if slot.phase is not Phase.WAITING:
                return self._ended(slot, event.error, now)
        return []

    def _ended(self, slot: Slot, error: Ending | None, now: float) -> list[Instruction]:
        if slot.leaving or self.stopping:
            del self.slots[slot.worker_id]
            return []
        slot.end(error, now, self.policy)
        return self._start_due(now)

    def _start_due(self, now: float) -> list[Instruction]:
        due = [slot for slot in self.slots.values() if slot.retry_at is not None and slot.retry_at <= now]
        return [self._start(slot) for slot in due]

    def _listens_to(self, slot: Slot) -> bool:
        return slot.phase in (Phase.READY, Phase.DRAINING)

    def _tick(self, now: float) -> list[Instruction]:
        out = self._start_due(now)
        for slot in self.slots.values():
            silent_s = now - slot.heard_at
            if self._listens_to(slot) and silent_s >= self.policy.silence_s:
                out += self._stop(slot, now, kill=f"it answered no heartbeat for {silent_s:.0f} s")
            elif slot.deadline is not None and slot.deadline <= now:
                out += self._stop(slot, now, kill=f"it did not stop within {self.policy.stop_s:.0f} s")
        if self.router and self.router.retry_at is not None and self.router.retry_at <= now:
            out += self._start_router()
        return out

    def _adopt(self, event: WorkerAdopted, now: float) -> list[Instruction]:
        slot = Slot(role=event.role, index=int(event.worker_id.rpartition("-")[2]), incarnation=event.incarnation)
        self.slots[slot.worker_id] = slot
        slot.phase, slot.placement, slot.heard_at = Phase.STARTING, event.placement, now
        if event.address:
            slot.address = event.address
            slot.ready(now)
        return self._dismiss(slot, now) if event.draining else []

    # --- the router and the end ----------------------------------------------------------------------------------

    def _start_router(self) -> list[Instruction]:
        assert self.router is not None
        self.router.begin(self.new_incarnation())
        self.router.control_address = ""
        return [StartRouter(self.router.incarnation)]

    def _on_router(self, event: RouterStarted | RouterExited, now: float) -> list[Instruction]:
        router = self.router
        if router is None or router.incarnation != event.incarnation:
            return []
        if isinstance(event, RouterStarted):
            if router.phase is Phase.STARTING:
                router.url, router.control_address = event.url, event.control_address
                router.ready(now)
            return []
        if self.stopping:
            self.router = None
            return []
        if router.phase is not Phase.WAITING:
            router.end(event.error, now, self.policy)
        return self._start_router() if router.retry_at is not None and router.retry_at <= now else []

    def _shut_down(self, now: float) -> list[Instruction]:
        self.stopping = True
        out: list[Instruction] = []
        for slot in list(self.slots.values()):
            slot.leaving = True
            if slot.phase is Phase.WAITING:
                del self.slots[slot.worker_id]
            elif slot.phase is not Phase.STOPPING:
                out += self._stop(slot, now, kill="the cluster stops" if slot.phase is Phase.STARTING else "")
        if self.router is not None:
            if self.router.phase is Phase.WAITING:
                self.router = None
            else:
                self.router.phase = Phase.STOPPING
                out.append(StopRouter(self.router.incarnation))
        return out
