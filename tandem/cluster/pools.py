"""What the supervisor decides: events in, instructions out; no clock, no I/O, no Ray.

A *slot* is a place in a pool (`prefill-0`); it outlives the processes that fill it. Each process is one
*incarnation* of its slot. A life goes

    StartWorker ─> STARTING ─WorkerStarted─> READY ──leaves──> DRAINING ─Drained─> STOPPING ─WorkerExited─> gone
                      │                        │
                      └── failed to start ─────┴── exited ──> STARTING again, at once or after WAITING

A worker leaves because its pool was made smaller, or by an order (`tandem drain`): then another slot takes its place,
as a rule one that is READY before the old one drains.

An event that names another incarnation than the slot's present one is stale and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tandem.cluster.events import (
    ClosingBegun,
    ClusterOpened,
    Drain,
    Drained,
    DrainOrdered,
    DrainWorker,
    Ending,
    EndingsTaken,
    Event,
    Instruction,
    Intent,
    KillRouter,
    KillWorker,
    LoadingHeard,
    LoadReported,
    Member,
    NoteEnded,
    ProcessEnded,
    PublishMembership,
    Role,
    RouterAdopted,
    RouterExited,
    RouterHeard,
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
from tandem.cluster.lives import Phase, Policy, RouterLife, Slot

_DISMISSAL_ORDER = {Phase.DRAINING: 0, Phase.STOPPING: 0, Phase.WAITING: 1, Phase.STARTING: 2, Phase.READY: 3}


@dataclass
class Cluster:
    """The pools and the router as they are and as they shall be.

    Attributes:
        new_incarnation: a name never used before in this Ray cluster.
        version: of the membership; starts above every version of an earlier supervisor.
        closing: a shutdown was asked for; requests under way may still end.
        stopping: everything is being stopped, and nothing that ends is started again.
    """

    policy: Policy
    new_incarnation: Callable[[], str]
    version: int = 0
    wanted: dict[Role, int] = field(default_factory=lambda: dict.fromkeys(Role, 0))
    slots: dict[str, Slot] = field(default_factory=dict)
    router: RouterLife | None = None
    closing: bool = False
    stopping: bool = False
    _published: tuple[Member, ...] = ()

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take one event at `now` (seconds on any steady clock) and say what shall be done, in order."""
        out = self._dispatch(event, now) + self._relieve(now)
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
        slots = self.slots.values()
        timed = [(slot.retry_at, slot.deadline, slot.place_by, slot.silent_at(self.policy)) for slot in slots]
        times = [t for of_slot in timed for t in of_slot if t is not None]
        if self.router and self.router.phase is Phase.READY:
            times.append(self.router.heard_at + self.policy.router_silence_s)
        if self.router and self.router.retry_at is not None:
            times.append(self.router.retry_at)
        return min(times, default=None)

    @property
    def intent(self) -> Intent:
        """What the next supervisor must be told if this one dies now."""
        drains = {
            slot.worker_id: Drain(slot.incarnation, slot.drain_s, slot.refill, slot.successor)
            for slot in self.slots.values()
            if slot.leaving and slot.listens
        }
        failures = {slot.worker_id: slot.failures for slot in self.slots.values() if slot.failures}
        return Intent(dict(self.wanted), drains, failures)

    @property
    def settled(self) -> bool:
        """Every pool has exactly its wanted workers, all ready, and the router is ready."""
        return (
            not self.closing
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
                return self._open(event.intent, now)
            case WantedChanged():
                self.wanted[event.role] = event.workers
                return self._reconcile(event.role, now)
            case DrainOrdered():
                return self._order_drain(event, now)
            case ProcessEnded():
                return self._tell_all(event.incarnation)
            case ClosingBegun():
                self.closing = True
                return []
            case ShutdownRequested():
                return self._shut_down(now)
            case Tick():
                return self._tick(now)
            case RouterStarted() | RouterExited() | RouterHeard():
                return self._on_router(event, now)
            case _:
                slot = self.slots.get(event.worker_id)
                if slot is None or slot.incarnation != event.incarnation:
                    return []
                return self._on_worker(slot, event, now)

    # --- sizes ---------------------------------------------------------------------------------------------------

    def _open(self, intent: Intent, now: float) -> list[Instruction]:
        self.wanted = dict(intent.wanted)
        out: list[Instruction] = []
        if self.router is None:
            self.router = RouterLife()
            out += self._start_router()
        for worker_id, order in intent.drains.items():
            slot = self.slots.get(worker_id)
            if slot is not None and slot.incarnation == order.incarnation:
                out += self._resume_drain(slot, order, now)
        for slot in self.slots.values():
            slot.failures = intent.failures.get(slot.worker_id, 0)
        return out + [step for role in Role for step in self._reconcile(role, now, intent.failures)]

    def _reconcile(self, role: Role, now: float, failures: dict[str, int] | None = None) -> list[Instruction]:
        """Bring the pool to its wanted size; slots that leave without a refill do not count.

        `failures` of an earlier supervisor's slots: those that failed of late wait before they start.
        """
        if self.stopping:
            return []
        counted = [slot for slot in self._of(role) if slot.counts]
        missing = self.wanted[role] - len(counted)
        if missing >= 0:
            added = [self._new_slot(role) for _ in range(missing)]
            for slot in added:
                slot.failures = (failures or {}).get(slot.worker_id, 0)
                slot.retry_at = now + self.policy.delay(slot.failures)
            return self._start_due(now)
        # Those that hold least go first; of equals the latest, so that low numbers stay.
        counted.sort(key=lambda slot: (_DISMISSAL_ORDER[slot.phase], slot.num_requests, -slot.index))
        return [step for slot in counted[:-missing] for step in self._dismiss(slot, now)]

    def _dismiss(self, slot: Slot, now: float) -> list[Instruction]:
        """The pool needs it no more."""
        if slot.refill:  # on its way already; now nobody takes its place
            slot.refill = False
            return []
        slot.leaving = True
        if slot.phase is Phase.WAITING:
            del self.slots[slot.worker_id]
            return []
        if slot.phase is Phase.STARTING:  # holds nothing yet
            return self._stop(slot, now, kill="the pool was made smaller while it started")
        slot.drain_s = self.policy.drain_s
        return self._drain(slot, now)

    def _new_slot(self, role: Role) -> Slot:
        taken = {slot.index for slot in self._of(role)}
        slot = Slot(role=role, index=next(i for i in range(len(taken) + 1) if i not in taken))
        self.slots[slot.worker_id] = slot
        return slot

    def _of(self, role: Role) -> list[Slot]:
        return [slot for slot in self.slots.values() if slot.role is role]

    # --- replacing one worker by an order ------------------------------------------------------------------------

    def _order_drain(self, order: DrainOrdered, now: float) -> list[Instruction]:
        slot = self.slots.get(order.worker_id)
        if slot is None or slot.leaving or slot.phase is not Phase.READY:
            return []
        slot.leaving, slot.drain_s, slot.note = True, order.timeout_s, ""
        if not order.replace_first:
            slot.refill = True
            return self._drain(slot, now)
        successor = self._new_slot(slot.role)
        slot.successor, slot.place_by = successor.worker_id, now + self.policy.place_s
        return [self._start(successor)]

    def _resume_drain(self, slot: Slot, order: Drain, now: float) -> list[Instruction]:
        """An earlier supervisor began it. A worker that it has told to drain is DRAINING already."""
        slot.leaving, slot.drain_s, slot.refill = True, order.timeout_s, order.refill
        if slot.phase is Phase.DRAINING:
            slot.deadline = now + slot.drain_s
        elif slot.phase is Phase.READY and order.successor:
            slot.successor, slot.place_by = order.successor, now + self.policy.place_s
        elif slot.phase is Phase.READY:
            return self._drain(slot, now)
        return []

    def _relieve(self, now: float) -> list[Instruction]:
        """Workers whose successor has come, or will not come while they wait."""
        out: list[Instruction] = []
        for slot in [slot for slot in self.slots.values() if slot.successor and slot.phase is Phase.READY]:
            successor = self.slots.get(slot.successor)
            if successor is None or successor.leaving or successor.phase is Phase.READY:
                out += self._drain(slot, now)
            elif successor.failures >= self.policy.max_successor_failures:
                slot.stay()
                reason = successor.last_error.message if successor.last_error else ""
                slot.note = f"it stays: its successor {successor.worker_id} cannot start ({reason})"
                out += self._dismiss(successor, now)
            elif slot.place_by is not None and slot.place_by <= now:
                slot.place_by = None
                if successor.placement is None:
                    slot.note = f"no node has room for {successor.worker_id} beside it: it goes first"
                    out += self._drain(slot, now)
        return out

    def _drain(self, slot: Slot, now: float) -> list[Instruction]:
        slot.phase, slot.deadline = Phase.DRAINING, now + slot.drain_s
        slot.successor, slot.place_by = "", None
        return [DrainWorker(slot.worker_id, slot.incarnation)]

    # --- one worker's life ---------------------------------------------------------------------------------------

    def _start(self, slot: Slot) -> Instruction:
        slot.begin(self.new_incarnation())
        return StartWorker(slot.role, slot.worker_id, slot.incarnation)

    def _stop(self, slot: Slot, now: float, kill: str = "") -> list[Instruction]:
        slot.phase, slot.deadline = Phase.STOPPING, None if kill else now + self.policy.stop_s
        slot.place_by = None
        if kill:
            slot.killed_for = kill
            return [KillWorker(slot.worker_id, slot.incarnation, kill)]
        return [StopWorker(slot.worker_id, slot.incarnation)]

    def _on_worker(self, slot: Slot, event: Event, now: float) -> list[Instruction]:
        match event:
            case WorkerPlaced() if slot.phase is Phase.STARTING:
                slot.placement, slot.heard_at = event.placement, now
            case LoadingHeard() if slot.phase is Phase.STARTING:
                slot.heard_at = now
            case WorkerStarted() if slot.phase is Phase.STARTING:
                slot.address, slot.placement = event.address, event.placement
                slot.ready(now)
                return self._remind(slot)
            case LoadReported():
                slot.heard_at, slot.num_requests = now, event.num_requests
                return self._remind(slot)
            case EndingsTaken():
                for ended in event.ended:
                    slot.untold.pop(ended, None)
            case Drained() if slot.phase is Phase.DRAINING:
                return self._stop(slot, now)
            case WriterSuspected() if slot.listens:
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
            return self._reconcile(slot.role, now)
        slot.end(error, now, self.policy)
        return self._start_due(now)

    def _start_due(self, now: float) -> list[Instruction]:
        return [self._start(slot) for slot in self.slots.values() if slot.is_due(now)]

    def _tell_all(self, ended: str) -> list[Instruction]:
        """Every other process may have dealt with the one that has ended."""
        others = [s for s in self.slots.values() if s.phase is not Phase.WAITING and s.incarnation != ended]
        for slot in others:
            slot.owe(ended)
        return [NoteEnded(slot.worker_id, slot.incarnation, (ended,)) for slot in others if slot.listens]

    def _remind(self, slot: Slot) -> list[Instruction]:
        return [NoteEnded(slot.worker_id, slot.incarnation, tuple(slot.untold))] if slot.untold else []

    def _tick(self, now: float) -> list[Instruction]:
        out = self._start_due(now)
        for slot in self.slots.values():
            silent_at = slot.silent_at(self.policy)
            if silent_at is not None and silent_at <= now:
                out += self._stop(slot, now, kill=f"it answered no heartbeat for {now - slot.heard_at:.0f} s")
            elif slot.deadline is not None and slot.deadline <= now:
                late = f"drain within {slot.drain_s:.0f} s" if slot.phase is Phase.DRAINING else "stop in time"
                out += self._stop(slot, now, kill=f"it did not {late}")
        return out + self._tick_router(now)

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

    def _on_router(self, event: RouterStarted | RouterExited | RouterHeard, now: float) -> list[Instruction]:
        router = self.router
        if router is None or router.incarnation != event.incarnation:
            return []
        match event:
            case RouterHeard():
                router.heard_at = now
            case RouterStarted() if router.phase is Phase.STARTING:
                router.url, router.control_address = event.url, event.control_address
                router.ready(now)
            case RouterExited() if self.stopping:
                self.router = None
            case RouterExited() if router.phase is not Phase.WAITING:
                router.end(event.error, now, self.policy)
                return self._start_router() if router.is_due(now) else []
        return []

    def _tick_router(self, now: float) -> list[Instruction]:
        router = self.router
        if router is None:
            return []
        silent_s = now - router.heard_at
        if router.phase is Phase.READY and silent_s >= self.policy.router_silence_s:
            router.phase = Phase.STOPPING
            router.killed_for = f"it answered no heartbeat for {silent_s:.0f} s"
            return [KillRouter(router.incarnation, router.killed_for)]
        return self._start_router() if router.is_due(now) else []

    def _shut_down(self, now: float) -> list[Instruction]:
        self.closing = self.stopping = True
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
