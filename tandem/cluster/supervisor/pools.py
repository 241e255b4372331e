"""What the supervisor decides: events in, instructions out; no clock, no I/O, no Ray.

A *slot* is a place in a pool (`prefill-0`, `router-0`); it outlives the processes that fill it. Each process is one
*incarnation* of its slot. A life goes

    StartProcess ─> STARTING ─Started─> READY ──leaves──> DRAINING ─Drained─> STOPPING ─Exited─> gone
                       │                  │
                       └──────Exited──────┴──> STARTING again, at once or after WAITING

A router goes the same way. A process leaves because its pool was made smaller, or by an order (`tandem drain`): then
another slot takes its place, as a rule one that is READY before the old one drains.

An event that names another incarnation than the slot's present one is stale and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from tandem.cluster.supervisor import events as ev
from tandem.cluster.supervisor.news import Ends, RouterSeat, membership_for, remind, seat_of
from tandem.cluster.supervisor.nodes import Aim, NodeBook
from tandem.cluster.supervisor.placing import best_aim, to_move
from tandem.cluster.supervisor.sizes import Sizes
from tandem.cluster.supervisor.slot_table import SlotTable
from tandem.cluster.supervisor.slots import Phase, Policy, Slot, hurry, place_of
from tandem.cluster.supervisor.surplus import least_needed
from tandem.cluster.supervisor.upgrade import Upgrade
from tandem.core.identity import WORKER_ROLES, Role

_Published: TypeAlias = tuple[
    tuple[ev.Member, ...], tuple[RouterSeat, ...], tuple[str, ...], tuple[str, ...], bool, tuple[ev.PoolSize, ...]
]
"""Workers, routers that listen and names of those that serve, ends, whether the cluster is colocated, and sizes."""


@dataclass
class PoolState:
    """The pools as they are and as they shall be."""

    policy: Policy
    new_incarnation: Callable[[], str]  # a name never used before in this Ray cluster
    version: int = 0  # of the membership; starts above every version of an earlier supervisor
    sizes: Sizes = field(default_factory=Sizes)
    slots: SlotTable = field(init=False)  # of all pools, by name
    upgrade: Upgrade = field(default_factory=Upgrade)
    book: NodeBook = field(default_factory=NodeBook)  # the nodes on which workers run
    ends: Ends = field(default_factory=Ends)  # of workers, that are proven
    closing_s: float | None = None  # a shutdown was asked for, which gives requests so many seconds; `None`: none was
    # Decode workers compute all prompts: no prefill workers are wanted, or none of those that are has been ready since.
    colocated: bool = False
    stopping: bool = False  # everything is being stopped, and nothing that ends is started again
    _published: _Published = ((), (), (), (), False, ())
    # Before, nobody is told anything: who has not been adopted yet is not gone, and serves.
    _is_open: bool = False

    def __post_init__(self) -> None:
        self.slots = SlotTable(self.policy)

    def handle(self, event: ev.Event, now: float) -> list[ev.Instruction]:
        """Take one event at `now` (seconds on any steady clock) and say what shall be done, in order."""
        out = self._dispatch(event, now) + self._relieve(now)
        out += self._renew(now)
        return out + self._publish(event)

    def _publish(self, event: ev.Event) -> list[ev.Instruction]:
        """Tell the routers what has changed; one that drains serves requests too."""
        if not self._is_open:
            return []
        routers = [router for router in self.routers.values() if router.listens]
        serving = tuple(router.name for router in routers if router.phase is Phase.READY)
        shares = serving or self._published[2]  # while none serves, nobody's share has changed
        self._look_at_prefill()
        seats = tuple(map(seat_of, routers)) if len(routers) > 1 else ()  # of one nobody else is told
        published = self.slots.members, seats, shares, self.ends.newest, self.colocated, self.sizes.told
        if published != self._published:
            self._published, self.version = published, self.version + 1
        elif isinstance(event, ev.Started):
            routers = [router for router in routers if router.incarnation == event.incarnation]
        else:
            return []
        return membership_for(routers, self.version, *published)

    def _look_at_prefill(self) -> None:
        if not self.wanted[Role.PREFILL]:
            self.colocated = True
        elif any(slot.phase is Phase.READY for slot in self.slots.of(Role.PREFILL).values()):
            self.colocated = False

    def wake_at(self) -> float | None:
        """When the next `Tick` is due on the clock of `handle`; `None`: nothing is timed."""
        return self.slots.first_time()

    @property
    def wanted(self) -> dict[Role, int]:
        return self.sizes.wanted

    @property
    def workers(self) -> Mapping[str, Slot]:
        return self.slots.workers

    @property
    def routers(self) -> Mapping[str, Slot]:
        return self.slots.of(Role.ROUTER)

    @property
    def shown(self) -> object:
        """Changes whenever something does that people can see, without loads and the errors of requests."""
        upgrade = self.upgrade.wanted, self.upgrade.note
        sizes = tuple(self.wanted.items()), tuple(self.sizes.ranges.items())
        return self.slots.revision, sizes, upgrade, self.closing, self.stopping

    @property
    def intent(self) -> ev.Intent:
        """What the next supervisor must be told if this one dies now."""
        return ev.Intent(
            wanted=dict(self.wanted),
            drains=self.slots.drains,
            failures=self.slots.failures,
            closing_s=self.closing_s,
            build=self.upgrade.wanted,
            build_before=self.upgrade.before,
            builds=self.slots.builds,
            unproven=dict(self.book.unproven),
            colocated=self.colocated,
            ranges=dict(self.sizes.ranges),
        )

    @property
    def closing(self) -> bool:
        """A shutdown was asked for."""
        return self.closing_s is not None

    @property
    def settled(self) -> bool:
        """Every pool has exactly its wanted processes, all ready."""
        return (
            not self.closing
            and self.slots.all_ready
            and all(len(self.slots.of(role)) == wanted for role, wanted in self.wanted.items())
        )

    @property
    def closed(self) -> bool:
        """A shutdown was asked for and nothing is left."""
        return self.stopping and not self.slots

    def _dispatch(self, event: ev.Event, now: float) -> list[ev.Instruction]:
        match event:
            case ev.Adopted():
                return self._adopt(event, now)
            case ev.ClusterOpened():
                return self._open(event.intent, now)
            case ev.WantedChanged() | ev.LoadFollowed() | ev.GrowthRefused():
                self.sizes.take(event)
                return self._reconcile(event.role, now)
            case ev.RoleGiven():
                return self._give(event, now)
            case ev.BuildChanged():
                self.upgrade.change(event.build)
                unplaced = [slot for slot in self.slots.values() if slot.is_unplaced and not slot.leaving]
                return [step for slot in unplaced for step in self._move(slot, "another build is wanted", now)]
            case ev.DrainOrdered():
                return self._order_drain(event, now)
            case ev.ProcessEnded():
                return self.ends.note(self.workers, [event.incarnation])
            case ev.EndUnproven() | ev.NodesListed() | ev.NodeKnocked() | ev.NodeMet():
                return self._on_node(event, now)
            case ev.ClosingBegun():
                self.closing_s = event.grace_s if self.closing_s is None else min(self.closing_s, event.grace_s)
                return []
            case ev.ShutdownRequested():
                return self._shut_down(now)
            case ev.ClockJumped():  # nobody counts as silent or late for that time
                for each in self.slots.values():
                    each.excuse(event.seconds, now)
                return []
            case ev.Tick():
                return self._tick(now)
            case ev.OfProcess():
                slot = self.slots.get(event.name)
                return self._on_life(slot, event, now) if slot and slot.incarnation == event.incarnation else []

    # --- sizes ---------------------------------------------------------------------------------------------------

    def _open(self, intent: ev.Intent, now: float) -> list[ev.Instruction]:
        self._is_open = True
        self.closing_s, self.colocated = intent.closing_s, intent.colocated
        self.sizes.open(intent)
        self.upgrade.wanted, self.upgrade.before = intent.build, intent.build_before
        for slot in self.slots.values():
            slot.build = intent.builds.get(slot.incarnation, ev.INSTALLED)
        self.book.unproven.update(intent.unproven)
        out: list[ev.Instruction] = []
        for name, order in intent.drains.items():
            leaving = self.slots.get(name)
            if leaving is not None and leaving.incarnation == order.incarnation:
                out += self._resume_drain(leaving, order, now)
        for slot in self.slots.values():
            slot.failures = intent.failures.get(slot.name, 0)
        if self.closing:  # what is missing has been stopped already, or will not be missed
            return out
        roles = (Role.ROUTER, *WORKER_ROLES)  # clients are answered before anything is loaded
        return out + [step for role in roles for step in self._reconcile(role, now, intent.failures)]

    def _reconcile(self, role: Role, now: float, failures: dict[str, int] | None = None) -> list[ev.Instruction]:
        """Bring the pool to its wanted size; slots that leave without a refill do not count.

        `failures` of an earlier supervisor's slots: those that failed of late wait before they start.
        """
        if self.stopping:
            return []
        missing = self.wanted[role] - self.slots.num_counted(role)
        if missing >= 0:
            added = [self._new_slot(role) for _ in range(missing)]
            for slot in added:
                slot.failures = (failures or {}).get(slot.name, 0)
                slot.retry_at = now + self.policy.delay(slot.failures)
                if not slot.failures:
                    self._take_over(slot)
            hurry(self.slots.of(role).values(), now, self.policy)
            return self._start_due(now)
        surplus = least_needed([slot for slot in self.slots.of(role).values() if slot.counts], -missing)
        return [step for slot in surplus for step in self._dismiss(slot, now)]

    def _take_over(self, slot: Slot) -> None:
        """Let a new slot have the process of one that the other pool gives up, where there is one and it may.

        It begins when that one has drained. If that process ends otherwise, another is started (`_ended`).
        """
        if slot.role not in WORKER_ROLES:
            return
        for giving in self._given_up(slot.role):
            if giving.seat is slot.role or self.slots.num_changed < self.policy.flexible:
                slot.begin(self.new_incarnation(), giving.build)
                slot.seat, slot.awaits, slot.is_heir = giving.seat, giving.name, True
                return

    def _given_up(self, role: Role) -> list[Slot]:
        """Of the other pool's workers, those that drain as it has given them up, and that nobody awaits."""
        is_awaited = {slot.awaits for slot in self.slots.workers.values()}
        return [
            slot
            for slot in self.slots.workers.values()
            if slot.role is not role and slot.spare and slot.phase is Phase.DRAINING
            and slot.name not in is_awaited and slot.build == self.upgrade.wanted
        ]  # fmt: skip

    def num_given_up(self, role: Role) -> int:
        """Workers of the other pool that drain as it has given them up, and that this one may take over."""
        given = self._given_up(role)
        num_home = sum(slot.seat is role for slot in given)
        return num_home + min(len(given) - num_home, max(0, self.policy.flexible - self.slots.num_changed))

    def num_to_take_over(self, role: Role, added: Mapping[Role, int]) -> int:
        """How many workers this pool gets from the other one, if the pools grow and shrink by so many at once."""
        if role not in WORKER_ROLES:
            return 0
        (other,) = (each for each in WORKER_ROLES if each is not role)
        pool = self.slots.of(other).values()
        num_home = sum(slot.seat is role for slot in pool)
        num_given = -added.get(other, 0) - sum(slot.phase is not Phase.READY for slot in pool)  # these go first
        num_free = max(0, self.policy.flexible - self.slots.num_changed) + num_home
        return max(0, min(added[role], num_given, num_free))

    def _give(self, event: ev.RoleGiven, now: float) -> list[ev.Instruction]:
        """One that serves goes, and not one that waits for a node, which the other pool could not take over."""
        if not (able := self._able(event.giver)):
            return []
        before = self.wanted[event.giver]
        self.sizes.take(event)
        if self.wanted[event.giver] == before:
            return []
        out = self._dismiss(least_needed(able, 1)[0], now)
        if event.instead:
            pool = self.slots.of(event.taker).values()
            starting = [slot for slot in pool if slot.counts and slot.phase is Phase.STARTING and not slot.is_heir]
            starting.sort(key=lambda slot: (not slot.is_unplaced, -slot.index))
            out += [step for slot in starting[:1] for step in self._dismiss(slot, now)]
        return out + self._reconcile(event.taker, now)

    def _able(self, role: Role) -> list[Slot]:
        """Those that serve and whose process the other pool could take over."""
        return [
            slot
            for slot in self.slots.of(role).values()
            if slot.phase is Phase.READY and slot.counts and slot.build == self.upgrade.wanted
        ]

    def may_go(self, giver: Role, taker: Role) -> bool:
        """Whether a worker of the one pool may change its role to the other's now."""
        able = self._able(giver)
        is_free = self.slots.num_changed < self.policy.flexible
        return bool(able) and (is_free or any(slot.seat is taker for slot in able))

    @property
    def is_changing_role(self) -> bool:
        """A worker is on its way from one pool to the other: until it serves there."""
        return any(slot.is_heir and slot.phase is Phase.STARTING for slot in self.slots.workers.values())

    def _heir_of(self, slot: Slot) -> Slot | None:
        """The slot that awaits its process."""
        return next((each for each in self.slots.unbegun if each.awaits == slot.name), None)

    def _dismiss(self, slot: Slot, now: float) -> list[ev.Instruction]:
        """The pool needs it no more."""
        if slot.refill:  # on its way already; now nobody takes its place
            slot.refill = False
            return []
        slot.leaving = True
        if slot.phase is Phase.WAITING or slot.awaits:
            del self.slots[slot.name]
            return []
        if slot.phase is Phase.STOPPING:  # its end is on its way
            return []
        if slot.phase is Phase.STARTING:  # holds nothing yet
            return self._stop(slot, now, kill="the pool was made smaller while it started")
        slot.drain_s, slot.spare = self.policy.drain_s, True
        return self._drain(slot, now)

    def _new_slot(self, role: Role) -> Slot:
        slot = Slot(role, self.slots.free_index(role))
        self.slots[slot.name] = slot
        return slot

    # --- replacing one process by an order -----------------------------------------------------------------------

    def _order_drain(self, order: ev.DrainOrdered, now: float) -> list[ev.Instruction]:
        slot = self.slots.get(order.name)
        if slot is None or slot.leaving or slot.phase is not Phase.READY:
            return []
        slot.leaving, slot.drain_s, slot.note = True, order.timeout_s, ""
        if not order.replace_first:
            slot.refill = True
            return self._drain(slot, now)
        successor = self._new_slot(slot.role)
        successor.renews = slot.build != self.upgrade.wanted
        slot.wait_for(successor.name, now, self.policy)
        return [self._start(successor)]

    def _renew(self, now: float) -> list[ev.Instruction]:
        """Replace the next process that does not run the wanted build."""
        if self.closing or self.stopping or self.slots.has_moving or self.slots.all_run(self.upgrade.wanted):
            return []
        if (slot := self.upgrade.next(self.slots.values())) is None:
            return []
        return self._order_drain(ev.DrainOrdered(slot.name, replace_first=True, timeout_s=self.policy.drain_s), now)

    def _resume_drain(self, slot: Slot, order: ev.Drain, now: float) -> list[ev.Instruction]:
        """An earlier supervisor began it. A worker that it has told to drain is DRAINING already."""
        slot.leaving, slot.drain_s, slot.refill = True, order.timeout_s, order.refill
        slot.spare = order.spare
        if slot.phase is Phase.DRAINING:
            slot.deadline = now + slot.drain_s
            return []
        slot.successor = order.successor
        return self._go_on_leaving(slot, now) if slot.phase is Phase.READY else []

    def _go_on_leaving(self, slot: Slot, now: float) -> list[ev.Instruction]:
        """Drain a worker that an earlier supervisor let leave: at once, or once its successor is ready."""
        if not slot.successor:
            return self._drain(slot, now)
        if (successor := self.slots.get(slot.successor)) is not None and successor.phase is not Phase.READY:
            successor.renews = slot.build != self.upgrade.wanted
        slot.wait_for(slot.successor, now, self.policy)
        return []

    def _relieve(self, now: float) -> list[ev.Instruction]:
        """Drain those whose successor is ready, or finds no node; keep those whose successor cannot start."""
        out: list[ev.Instruction] = []
        for slot in [slot for slot in self.slots.replaced if slot.phase is Phase.READY]:
            successor = self.slots.get(slot.successor)
            if successor is None or successor.leaving or successor.phase is Phase.READY:
                out += self._drain(slot, now)
            elif successor.failures >= self.policy.max_successor_failures:
                slot.stay()
                slot.note = f"it stays: its successor {successor.cannot_start}"
                self.upgrade.give_up(slot, successor.cannot_start)
                out += self._dismiss(successor, now)
            elif slot.place_by is not None and slot.place_by <= now:
                slot.place_by = None
                if successor.placement is None:
                    slot.note = f"no node has room for {successor.name} beside it: it goes first"
                    out += self._drain(slot, now)
        return out

    def _drain(self, slot: Slot, now: float) -> list[ev.Instruction]:
        slot.phase, slot.deadline = Phase.DRAINING, now + slot.drain_s
        slot.successor, slot.place_by = "", None
        return [ev.DrainProcess(slot.name, slot.incarnation)]

    # --- nodes ----------------------------------------------------------------------------------------------------

    def aim(self, name: str) -> Aim:
        """Choose where the life that begins in this slot is started; its place there is taken from now on."""
        slot = self.slots[name]
        slot.aim = best_aim(slot, self.slots, self.book)
        return slot.aim

    def _on_node(
        self, event: ev.EndUnproven | ev.NodesListed | ev.NodeKnocked | ev.NodeMet, now: float
    ) -> list[ev.Instruction]:
        match event:
            case ev.EndUnproven():
                return self.ends.note(self.workers, self.book.leave_unproven(event.incarnation, event.boot))
            case ev.NodeMet():
                return self.ends.note(self.workers, self.book.meet(event.node_id, event.boot))
            case ev.NodesListed():
                self.book.take_list(event.nodes)
            case ev.NodeKnocked():
                if not self.book.take_knock(event.node_id, event.answered):
                    return []
        moved = to_move(self.slots, self.book)
        return [step for slot in moved for step in self._move(slot, "its node does not answer", now)]

    def _meet(self, placement: ev.Placement) -> list[ev.Instruction]:
        return self.ends.note(self.workers, self.book.meet(placement.node_id, placement.boot)) if placement.boot else []

    def _try_another_node(self, slot: Slot, now: float) -> list[ev.Instruction]:
        """Its node has not begun it in time. Where no other has room, it waits on."""
        slot.tried[slot.node_id] = None
        best = best_aim(slot, self.slots, self.book)
        if not best.node_id or best.node_id in slot.tried:
            slot.aim_by = now + self.policy.place_try_s
            return []
        return self._move(slot, f"its node did not begin it within {self.policy.place_try_s:.0f} s", now)

    def _move(self, slot: Slot, why: str, now: float) -> list[ev.Instruction]:
        slot.moves = True
        return self._stop(slot, now, kill=why)

    # --- one life ------------------------------------------------------------------------------------------------

    def _start(self, slot: Slot) -> ev.Instruction:
        slot.begin(self.new_incarnation(), self.upgrade.wanted)
        return ev.StartProcess(slot.name, slot.incarnation, slot.role, slot.build)

    def _stop(
        self, slot: Slot, now: float, kill: str = "", then: ev.NextLife | None = None
    ) -> list[ev.Instruction]:
        slot.stop(None if kill else now + self.policy.stop_s, kill)
        if kill:
            return [ev.KillProcess(slot.name, slot.incarnation, kill)]
        return [ev.StopProcess(slot.name, slot.incarnation, then)]

    def _on_life(self, slot: Slot, event: ev.OfProcess, now: float) -> list[ev.Instruction]:
        match event:
            case ev.Placed() if slot.phase is Phase.STARTING:
                slot.place(event.placement)
                slot.heard_at = now
                return self._meet(event.placement)
            case ev.LoadingHeard() if slot.phase is Phase.STARTING:
                slot.heard_at = now
            case ev.Started() if slot.phase is Phase.STARTING:
                slot.address, slot.url, slot.placement = event.address, event.url, event.placement
                slot.ready(now)
                if event.draining and not slot.leaving:
                    return self._dismiss(slot, now) + self._reconcile(slot.role, now)
                return remind(slot) + (self._go_on_leaving(slot, now) if slot.leaving else [])
            case ev.LoadReported():
                slot.heard_at, slot.num_requests = now, event.num_requests
                return remind(slot)
            case ev.HeartbeatMissed() if slot.listens and slot.node_id:
                self.book.miss(slot.node_id)
            case ev.EndingsTaken():
                for ended in event.ended:
                    slot.untold.pop(ended, None)
            case ev.Drained() if slot.phase is Phase.DRAINING:
                heir = self._heir_of(slot)
                then = ev.NextLife(heir.role, heir.name, heir.incarnation) if heir else None
                return self._stop(slot, now, then=then)
            case ev.RoleChanged():
                if (heir := self._heir_of(slot)) is not None:
                    heir.awaits, heir.asked, heir.heard_at = "", True, now
                    heir.placement = slot.placement
                    heir.note = f"its process was {slot.name} before"
                del self.slots[slot.name]
            case ev.WriterSuspected() if slot.listens:
                return self._stop(slot, now, kill="it is silent beyond its lease, and pages wait for its end")
            case ev.Exited() if slot.phase is not Phase.WAITING:
                return self._ended(slot, event.error, now)
        return []

    def _ended(self, slot: Slot, error: ev.Ending | None, now: float) -> list[ev.Instruction]:
        if slot.leaving or self.stopping:
            heir = self._heir_of(slot)
            del self.slots[slot.name]
            return ([self._start(heir)] if heir else []) + self._reconcile(slot.role, now)
        slot.end(error, now, self.policy)
        has_predecessor = any(other.successor == slot.name for other in self.slots.replaced)
        if slot.renews and slot.failures >= self.policy.max_successor_failures and not has_predecessor:
            slot.renews = False
            self.upgrade.take_back(slot.cannot_start)
        hurry(self.slots.of(slot.role).values(), now, self.policy)
        return self._start_due(now)

    def _start_due(self, now: float) -> list[ev.Instruction]:
        return [self._start(slot) for slot in self.slots.due(now) if slot.is_due(now)]

    def _tick(self, now: float) -> list[ev.Instruction]:
        due = self.slots.due(now)
        out = [self._start(slot) for slot in due if slot.is_due(now)]
        for slot in due:
            if slot.aim_by is not None and slot.aim_by <= now:
                out += self._try_another_node(slot, now)
            silent_at = slot.silent_at(self.policy)
            if silent_at is not None and silent_at <= now:
                out += self._stop(slot, now, kill=f"it answered no heartbeat for {now - slot.heard_at:.0f} s")
            elif slot.deadline is not None and slot.deadline <= now:
                out += self._stop(slot, now, kill=slot.overdue)
        return out

    def _adopt(self, event: ev.Adopted, now: float) -> list[ev.Instruction]:
        slot = self.slots[event.name] = Slot(*place_of(event.name), event.incarnation, Phase.STARTING)
        slot.seat = event.seat or slot.role
        slot.placement, slot.heard_at = event.placement, now
        out = self._meet(event.placement) if event.placement else []
        if event.address:
            slot.address, slot.url = event.address, event.url
            slot.ready(now)
        return out + (self._dismiss(slot, now) if event.draining else [])

    def _shut_down(self, now: float) -> list[ev.Instruction]:
        self.closing_s, self.stopping = 0.0, True
        out: list[ev.Instruction] = []
        for slot in list(self.slots.values()):
            slot.leaving = True
            if slot.phase is Phase.WAITING or slot.awaits:
                del self.slots[slot.name]
            elif slot.phase is not Phase.STOPPING:
                out += self._stop(slot, now, kill="the cluster stops" if slot.phase is Phase.STARTING else "")
        return out
