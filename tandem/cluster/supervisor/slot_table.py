"""The slots of all pools, and what decisions ask of all of them, kept while they change. Plain data; no decisions.

An event changes a few slots. What is set of a slot is noted, and what follows from it is brought up to date when it is
asked for: so an event costs what it changes, however many workers there are. Not noted is what each heartbeat changes,
when a process was heard and what it holds: that is looked at where it counts.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from functools import partial
from typing import TypeVar

from tandem.cluster.supervisor.events import INSTALLED, Build, Drain, Member
from tandem.cluster.supervisor.slots import Phase, Policy, Slot, place_of
from tandem.core.identity import WORKER_ROLES, Role
from tandem.core.tally import Tally

_Value = TypeVar("_Value")


def _is_unbegun(slot: Slot) -> bool:
    return slot.phase is Phase.STARTING and slot.placement is None


def _is_replaced(slot: Slot) -> bool:
    return bool(slot.successor)


def _is_moving(slot: Slot) -> bool:
    return slot.leaving or (slot.phase is Phase.STARTING and slot.placement is not None)


def _is_unready(slot: Slot) -> bool:
    return slot.phase is not Phase.READY


_GROUPS: tuple[Callable[[Slot], bool], ...] = (_is_unbegun, _is_replaced, _is_moving, _is_unready)


class SlotTable(MutableMapping[str, Slot]):
    """Slots by name, in the order in which they came."""

    def __init__(self, policy: Policy) -> None:
        self._slots: dict[str, Slot] = {}
        self._numbers: dict[str, int] = {}  # grow: who came before whom
        self._num_came = 0
        self._pools: dict[Role, dict[str, Slot]] = {role: {} for role in Role}
        self._workers: dict[str, Slot] = {}
        self._free_from: Counter[Role] = Counter()  # no index below is free
        self._noted: dict[str, None] = {}  # names of those that came or went, or of which something was set
        # What follows, up to date but for those that are noted.
        self._members: dict[str, Member] = {}  # of workers
        self._all_members: tuple[Member, ...] | None = None  # `None`: some have changed
        self._shown: dict[str, object] = {}  # what people see of each
        self._revision = 0  # grows with each change of it
        self._drains: dict[str, Drain] = {}
        self._failures: dict[str, int] = {}
        self._lives: dict[str, str] = {}  # incarnations, by name
        self._builds: dict[str, Build] = {}  # of incarnations that do not run what is installed
        self._running = Tally[str, Build]()
        self._counted = Tally[str, Role]()
        self._nodes = {role: Tally[str, str]() for role in Role}
        self._groups: dict[Callable[[Slot], bool], dict[str, None]] = {belongs: {} for belongs in _GROUPS}
        self._times = _Times(self._slots, policy)

    # --- a mapping -----------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Slot:
        return self._slots[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def __setitem__(self, name: str, slot: Slot) -> None:
        if name in self._slots:
            del self[name]
        self._slots[name] = self._pools[slot.role][name] = slot
        if slot.role in WORKER_ROLES:
            self._workers[name] = slot
        self._num_came += 1
        self._numbers[name] = self._num_came
        self._noted.pop(name, None)  # it is looked at after all that came before
        self._noted[name] = None
        slot.on_set = partial(self._noted.__setitem__, name, None)

    def __delitem__(self, name: str) -> None:
        slot = self._slots.pop(name)
        slot.on_set = None
        del self._pools[slot.role][name], self._numbers[name]
        self._workers.pop(name, None)
        self._free_from[slot.role] = min(self._free_from[slot.role], slot.index)
        if self._members.pop(name, None) is not None:  # here, so that the next one of this name comes last
            self._all_members = None
        self._noted[name] = None

    # --- what is asked of all ------------------------------------------------------------------------------------

    @property
    def workers(self) -> Mapping[str, Slot]:
        return self._workers

    def of(self, role: Role) -> Mapping[str, Slot]:
        return self._pools[role]

    def staying_beside(self, name: str) -> list[str]:
        """The other slots of its pool that are not leaving."""
        pool = self._pools[place_of(name)[0]]
        return [slot.name for slot in pool.values() if slot.name != name and not slot.leaving]

    def free_index(self, role: Role) -> int:
        """The lowest that no slot of this pool has."""
        index = self._free_from[role]
        while f"{role}-{index}" in self._pools[role]:
            index += 1
        self._free_from[role] = index
        return index

    @property
    def members(self) -> tuple[Member, ...]:
        """All workers as routers see them."""
        self._look()
        if self._all_members is None:
            self._all_members = tuple(self._members.values())
        return self._all_members

    @property
    def revision(self) -> int:
        """Grows with each change that people can see; loads are none."""
        self._look()
        return self._revision

    @property
    def drains(self) -> dict[str, Drain]:
        """Of those that leave or wait to."""
        self._look()
        return dict(self._drains)

    @property
    def failures(self) -> dict[str, int]:
        """Of late, where there were any."""
        self._look()
        return dict(self._failures)

    @property
    def builds(self) -> dict[str, Build]:
        """Of incarnations that do not run what is installed."""
        self._look()
        return dict(self._builds)

    def all_run(self, build: Build) -> bool:
        self._look()
        return self._running.num[build] == len(self._slots)

    def num_on(self, role: Role) -> Counter[str]:
        """By node id, how many of the pool run or start there."""
        self._look()
        return self._nodes[role].num

    def num_counted(self, role: Role) -> int:
        """How many of its places the pool shall have."""
        self._look()
        return self._counted.num[role]

    @property
    def num_changed(self) -> int:
        """How many workers serve, or are to serve, in another role than they were started in."""
        return sum(slot.seat is not slot.role for slot in self._workers.values())

    @property
    def unbegun(self) -> list[Slot]:
        """Those that start, and that no node has begun yet."""
        return self._group(_is_unbegun)

    @property
    def replaced(self) -> list[Slot]:
        """Those that wait for their successors."""
        return self._group(_is_replaced)

    @property
    def has_moving(self) -> bool:
        """Whether somebody leaves, or loads the model."""
        self._look()
        return bool(self._groups[_is_moving])

    @property
    def all_ready(self) -> bool:
        self._look()
        return not self._groups[_is_unready]

    def first_time(self) -> float | None:
        """When time alone changes something about one of them; `None`: never."""
        self._look()
        return self._times.first()

    def due(self, now: float) -> list[Slot]:
        """Those for which such a time has come."""
        self._look()
        return self._in_order(self._times.due(now))

    # --- keeping it ----------------------------------------------------------------------------------------------

    def _group(self, belongs: Callable[[Slot], bool]) -> list[Slot]:
        self._look()
        return self._in_order(self._groups[belongs])

    def _in_order(self, names: Collection[str]) -> list[Slot]:
        return [self._slots[name] for name in sorted(names, key=self._numbers.__getitem__)]

    def _look(self) -> None:
        """At all that is noted."""
        for name in self._noted:
            slot = self._slots.get(name)
            self._look_at_face(name, slot)
            self._look_at_plan(name, slot)
            self._counted.put(name, slot.role if slot and slot.counts else None)
            for role, nodes in self._nodes.items():
                nodes.put(name, slot.node_id if slot and slot.seat is role else None)
            for belongs, group in self._groups.items():
                if slot and belongs(slot):
                    group[name] = None
                else:
                    group.pop(name, None)
            self._times.look_at(name)
        self._noted.clear()

    def _look_at_face(self, name: str, slot: Slot | None) -> None:
        """What routers and people see of it."""
        member = slot.member if slot else None
        shown = (member, slot.phase, slot.failures, slot.leaving, slot.note) if slot else None
        if self._shown.get(name) != shown:
            self._revision += 1
            _keep(self._shown, name, shown)
        if slot and slot.role in WORKER_ROLES and self._members.get(name) != member:
            _keep(self._members, name, member)
            self._all_members = None

    def _look_at_plan(self, name: str, slot: Slot | None) -> None:
        """What the next supervisor must know of it."""
        _keep(self._drains, name, slot.drain if slot else None)
        _keep(self._failures, name, (slot.failures or None) if slot else None)
        self._running.put(name, slot.build if slot else None)
        self._builds.pop(self._lives.pop(name, ""), None)
        if slot and slot.build != INSTALLED:
            self._lives[name] = slot.incarnation
            self._builds[slot.incarnation] = slot.build


def _keep(known: dict[str, _Value], name: str, value: _Value | None) -> None:
    if value is not None:
        known[name] = value
    else:
        known.pop(name, None)


class _Times:
    """When time alone changes something about each slot. Signs of life put that off, which is seen when it comes."""

    def __init__(self, slots: Mapping[str, Slot], policy: Policy) -> None:
        self._slots, self._policy = slots, policy
        self._queued: dict[str, float] = {}
        # Has all that are queued, and times of slots that were queued for later, or not at all any more.
        self._heap: list[tuple[float, str]] = []

    def look_at(self, name: str) -> None:
        at = self._time_of(name)
        if at is None:
            self._queued.pop(name, None)
        elif at < self._queued.get(name, math.inf):
            self._queued[name] = at
            heapq.heappush(self._heap, (at, name))

    def first(self) -> float | None:
        while self._heap:
            at, name = self._heap[0]
            if self._queued.get(name) == at == self._time_of(name):
                return at
            heapq.heappop(self._heap)
            if self._queued.get(name) == at:
                del self._queued[name]
                self.look_at(name)
        return None

    def due(self, now: float) -> list[str]:
        due = []
        while (at := self.first()) is not None and at <= now:
            _, name = heapq.heappop(self._heap)
            del self._queued[name]
            due.append(name)
        for name in due:
            self.look_at(name)
        return due

    def _time_of(self, name: str) -> float | None:
        slot = self._slots.get(name)
        return slot.next_time(self._policy) if slot else None
