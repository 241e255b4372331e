"""Whose turn it is: requests that wait in the router, in the order in which they are to be placed. Pure.

Requests are held here and bound to workers late (`router.policy.gate`): what is at a worker cannot be overtaken.
The next one is found in four steps:

1. *Priority*, with ageing: of the first request of each level the one that goes before the others as it does at the
   workers, where a level is worth `ageing_s` seconds of waiting.
2. *Tenants*: within a level, the one that has been served least for its weight. Each has a counter of the tokens of its
   prompts and its answers, divided by its weight. Who has waited for nothing is lifted to the least counter of those
   that wait, so that nobody saves up a claim. (The virtual token counter of Sheng et al., OSDI 2024.)
3. *Sessions* of that tenant: the one that has got fewest tokens (least attained service); a request without a session
   is one by itself. Every fourth turn of a tenant goes to its oldest request, so that no session waits for ever.
4. Of one session the request that is due first, then the oldest. A long prompt is due later.

**The bound.** While two tenants both have requests waiting in a level, what they get for their weights differs by at
most the tokens of one prompt and of all answers that are under way, divided by the smaller weight. So a tenant waits
for its next turn at most as long as the others take to get that much.

Of several routers each has a queue of its own, and hears of the others' (`router.policy.other_turns`): the counter of a
tenant is of what it got from all of them.

Nothing here grows with what has ended. A turn costs a logarithm of those that wait, a token two additions. Only those
levels are looked at whose oldest request would go before the one that is found: about one for each `ageing_s` for which
that request has been passed over.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count, islice

#: Tenants and sessions that are remembered while they have nothing waiting; the least recently served are forgotten.
MAX_TENANTS, MAX_SESSIONS = 4096, 16384
#: Every so many turns of a tenant its oldest request goes first.
OLDEST_EVERY = 4
_STALE = 32


@dataclass(eq=False, slots=True)
class Waiting:
    """One request.

    Attributes:
        owner: its tenant.
        weight: the tenant's, above 0.
        session: of the tenant; empty: none.
        due_s: by when its first token is wanted, on the router's clock; `math.inf`: never.
        arrived_s: on the router's clock.
        num_tokens: of its prompt.
        turn: of its prompt at a worker among others of its priority, on the router's clock.
        num_sequences: that it will have in decode's batch; 0: no decode worker serves it.
    """

    owner: str
    weight: float
    priority: int
    session: str
    due_s: float
    arrived_s: float
    num_tokens: int
    num_sequences: int = 1
    turn: float = math.inf
    number: int = 0  # in the order of entering; set by the queue
    waits: bool = False  # set by the queue


@dataclass(frozen=True, slots=True)
class Served:
    """What a router tells of one tenant.

    Attributes:
        counter: what all routers gave it, as far as this one knows, divided by its weight; and what it was lifted by.
        given: what this router gave it since its start, divided by its weight.
    """

    counter: float
    given: float


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """What is known of the queues of other routers.

    Attributes:
        least: the least counter of those that wait there; `None`: nobody waits there, as far as is known.
        last: the greatest counter with which a tenant had its turn there.
    """

    least: float | None = None
    last: float = 0.0


NOWHERE = Elsewhere()


class TurnQueue:
    """Not thread-safe."""

    def __init__(self, ageing_s: float) -> None:
        """`ageing_s`: seconds of waiting that one level of `priority` is worth."""
        self._ageing_s = ageing_s
        self._numbers = count(1)
        self._tenants: dict[str, _Tenant] = {}
        # Invariant: has all tenants of whom nothing waits, by when they were served as of when they were entered, and
        # others that have not been met here since.
        self._idle: list[tuple[int, _Tenant]] = []
        self._num_tenants_waiting, self._weight_waiting = 0, 0.0  # tenants of whom something waits, and their weights
        self._sessions: OrderedDict[tuple[str, str], float] = OrderedDict()
        # Invariant: has every level in which somebody waits.
        self._levels: dict[int, _Level] = {}
        # Invariant: the same levels in the order of their least keys. A key never changes: all age alike.
        self._by_least: list[tuple[float, int, _Level]] = []
        # Of the tenants that wait, by counters as of when they were entered: later ones are never less.
        self._by_served: list[tuple[float, int, _Tenant]] = []
        self.last_served = 0.0  # the counter of the tenant that had the last turn
        # Tenants whose counters have changed here since they were told, in that order. Bounded by the tenants.
        self._untold: dict[str, None] = {}
        self._num_grown = 0.0  # what all counters grew by since `grown` was asked for
        self._grown: set[str] = set()  # whose counters
        self.num_waiting = 0
        self.num_tokens = 0  # of all prompts that wait

    def enter(self, waiting: Waiting, elsewhere: Elsewhere = NOWHERE) -> None:
        tenant = self._tenant(waiting.owner, waiting.weight)
        if not tenant.num_waiting:
            known = [least for least in (self.least_served(), elsewhere.least) if least is not None]
            tenant.served = max(tenant.served, min(known, default=max(self.last_served, elsewhere.last)))
            self._untold[waiting.owner] = None
            if not tenant.is_listed:
                tenant.is_listed = True
                heapq.heappush(self._by_served, (tenant.served, next(self._numbers), tenant))
            self._weight_waiting += tenant.weight
            self._num_tenants_waiting += 1
        waiting.number, waiting.waits = next(self._numbers), True
        tenant.num_waiting += 1
        tenant.num_tokens += waiting.num_tokens
        self.num_waiting += 1
        self.num_tokens += waiting.num_tokens
        level = self._levels.get(waiting.priority)
        if level is None:
            level = self._levels[waiting.priority] = _Level()
        level.enter(waiting, tenant, self._attained(waiting), self._key(waiting))
        self._put_in_order(level)

    def leave(self, waiting: Waiting) -> None:
        """It no longer waits; nothing happens where it does not."""
        if not waiting.waits:
            return
        waiting.waits = False
        tenant = self._tenants[waiting.owner]
        tenant.num_waiting -= 1
        tenant.num_tokens -= waiting.num_tokens
        if not tenant.num_waiting:
            self._num_tenants_waiting -= 1
            # Sums of fractions are not exact, but that of none is.
            self._weight_waiting = self._weight_waiting - tenant.weight if self._num_tenants_waiting else 0.0
            self._list_idle(tenant)
        self.num_waiting -= 1
        self.num_tokens -= waiting.num_tokens
        level = self._levels[waiting.priority]
        level.leave(waiting)
        self._put_in_order(level)
        if not level.num_waiting:
            del self._levels[waiting.priority]

    def first(self, *, oldest: bool = True) -> Waiting | None:
        """Whose turn is next. `oldest`: of a tenant, where that one has the turn."""
        best, best_key = None, (0.0, 0)
        for at, number, level in self._by_least:
            if best is not None and best_key < (at, number):
                break  # so nobody in the levels that are left goes before it
            found = level.first(self._attained, oldest=oldest)
            if best is None or self._key(found) < best_key:
                best, best_key = found, self._key(found)
        return best

    def _key(self, waiting: Waiting) -> _Key:
        return waiting.arrived_s + waiting.priority * self._ageing_s, waiting.number

    def _put_in_order(self, level: _Level) -> None:
        """Somebody has entered or left it."""
        key = level.least_key()
        if key == level.key:
            return
        if level.key is not None:
            del self._by_least[bisect_left(self._by_least, level.key)]
        if key is not None:
            insort(self._by_least, (*key, level))
        level.key = key

    def take(self, waiting: Waiting) -> None:
        """It is `first`, and its turn has come: its prompt counts as served."""
        self._levels[waiting.priority].had_turn(waiting.owner)
        self.leave(waiting)
        self.charge(waiting, waiting.num_tokens)
        self.last_served = self._tenants[waiting.owner].served

    def charge(self, waiting: Waiting, num_tokens: int) -> None:
        """It gets so many tokens more, waiting or not."""
        grown, tenant = num_tokens / waiting.weight, self._tenant(waiting.owner, waiting.weight)
        tenant.given += grown
        self._grow(tenant, grown)
        self._untold[waiting.owner] = None
        if waiting.session:
            key = (waiting.owner, waiting.session)
            self._sessions[key] = self._sessions.get(key, 0.0) + num_tokens
            self._sessions.move_to_end(key)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)

    def tokens_in_front(self, owner: str, weight: float) -> float:
        """Tokens of prompts that go before the next request of this tenant, if all have one level: about so many."""
        tenant = self._tenants.get(owner)
        own = tenant.num_tokens if tenant is not None else 0
        if not own:
            return 0.0
        assert tenant is not None
        others = self._weight_waiting - tenant.weight if self._num_tenants_waiting > 1 else 0.0
        return min(float(self.num_tokens), own * (1 + others / weight))

    # -- for other routers, and from them

    def served(self, owner: str) -> float:
        """The counter of a tenant."""
        tenant = self._tenants.get(owner)
        return tenant.served if tenant is not None else 0.0

    def take_changed(self, most: int) -> dict[str, Served]:
        """Of up to so many tenants whose counters have changed here since they were taken, the longest ago first."""
        owners = list(islice(self._untold, most))
        for owner in owners:
            del self._untold[owner]
        return {owner: self.tell(owner) for owner in owners}

    def tell(self, owner: str) -> Served:
        """Of a tenant that waits, or whose counter has changed."""
        tenant = self._tenants[owner]
        return Served(tenant.served, tenant.given)

    def take_growth(self) -> float:
        """What the counter of a tenant grew by since this was asked for, on average of those that grew."""
        growth = self._num_grown / len(self._grown) if self._grown else 0.0
        self._num_grown = 0.0
        self._grown.clear()
        return growth

    def learn(self, owner: str, counter: float, more: float) -> None:
        """Another router has given the tenant so much more, and knows of so much in all."""
        tenant = self._known(owner)
        self._grow(tenant, more)
        tenant.served = max(tenant.served, counter)

    def lift(self, least: float) -> None:
        """Of those that wait nobody has a claim to more than who has got so much."""
        while (served := self.least_served()) is not None and served < least:
            _, number, tenant = self._by_served[0]
            tenant.served = least
            heapq.heapreplace(self._by_served, (least, number, tenant))

    def _grow(self, tenant: _Tenant, more: float) -> None:
        tenant.served += more
        self._num_grown += more
        self._grown.add(tenant.owner)

    # -- what is known of whom

    def _tenant(self, owner: str, weight: float) -> _Tenant:
        tenant = self._known(owner)
        if tenant.num_waiting:
            self._weight_waiting += weight - tenant.weight
        tenant.weight = weight
        return tenant

    def _known(self, owner: str) -> _Tenant:
        tenant = self._tenants.get(owner)
        if tenant is None:
            self._forget_one()
            tenant = self._tenants[owner] = _Tenant(owner)
        tenant.touched = next(self._numbers)
        if not tenant.num_waiting:
            self._list_idle(tenant)
        return tenant

    def _list_idle(self, tenant: _Tenant) -> None:
        if not tenant.is_idle_listed:
            tenant.is_idle_listed = True
            heapq.heappush(self._idle, (tenant.touched, tenant))

    def _forget_one(self) -> None:
        """Make room for another tenant, unless of all that are remembered something waits."""
        heap = self._idle
        while heap and len(self._tenants) >= MAX_TENANTS:
            touched, tenant = heap[0]
            if not tenant.num_waiting and tenant.touched > touched:
                heapq.heapreplace(heap, (tenant.touched, tenant))
                continue
            heapq.heappop(heap)
            tenant.is_idle_listed = False
            if not tenant.num_waiting:
                del self._tenants[tenant.owner]
                self._untold.pop(tenant.owner, None)
                self._grown.discard(tenant.owner)

    def least_served(self) -> float | None:
        """Of the tenants that wait."""
        heap = self._by_served
        while heap:
            served, number, tenant = heap[0]
            if not tenant.num_waiting:
                heapq.heappop(heap)
                tenant.is_listed = False
            elif tenant.served > served:
                heapq.heapreplace(heap, (tenant.served, number, tenant))
            else:
                return served
        return None

    def _attained(self, waiting: Waiting) -> float:
        return self._sessions.get((waiting.owner, waiting.session), 0.0) if waiting.session else 0.0


@dataclass(eq=False, slots=True)
class _Tenant:
    owner: str
    weight: float = 1.0
    served: float = 0.0
    given: float = 0.0  # by this router; never set back
    num_waiting: int = 0
    num_tokens: int = 0  # of its prompts that wait
    is_listed: bool = False  # whether the queue's order of counters has it
    touched: int = 0  # when it was served or came last, in the order of such events
    is_idle_listed: bool = False  # whether the queue's list of those of whom nothing waits has it


_Key = tuple[float, int]
"""By which requests of several levels go before each other: a time that stands for priority and age, and a number."""

_Attained = Callable[[Waiting], float]
"""What the session of a request has got."""


@dataclass(eq=False, slots=True)
class _Line:
    """The requests of one tenant in one level."""

    tenant: _Tenant
    num_turns: int = 0
    by_age: dict[int, Waiting] = field(default_factory=dict)
    # Sessions by what they had got when entered, which is never more than now; then the first request of each.
    sessions: list[tuple[float, float, float, int, Waiting]] = field(default_factory=list)


class _Level:
    """The requests of one priority."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self.key: _Key | None = None  # its place in the queue's order of levels; set by the queue
        self._by_key: list[tuple[float, int, Waiting]] = []  # all that wait here; some that have left, too
        # Invariant: a line is in both; one of which nobody waits goes when it is met.
        self._lines: dict[str, _Line] = {}
        self._by_served: list[tuple[float, int, _Line]] = []

    def enter(self, waiting: Waiting, tenant: _Tenant, attained: float, key: _Key) -> None:
        line = self._lines.get(waiting.owner)
        if line is None or line.tenant is not tenant:  # else of one that was forgotten since: nobody waits in it
            line = self._lines[waiting.owner] = _Line(tenant)
            heapq.heappush(self._by_served, (tenant.served, waiting.number, line))
        line.by_age[waiting.number] = waiting
        heapq.heappush(line.sessions, (attained, waiting.due_s, waiting.arrived_s, waiting.number, waiting))
        heapq.heappush(self._by_key, (*key, waiting))
        self.num_waiting += 1

    def leave(self, waiting: Waiting) -> None:
        line = self._lines[waiting.owner]
        del line.by_age[waiting.number]
        if len(line.sessions) > 2 * len(line.by_age) + _STALE:  # many have left before their turn
            line.sessions = [entry for entry in line.sessions if entry[-1].waits]
            heapq.heapify(line.sessions)
        self.num_waiting -= 1
        if len(self._by_key) > 2 * self.num_waiting + _STALE:
            self._by_key = [entry for entry in self._by_key if entry[-1].waits]
            heapq.heapify(self._by_key)
        if len(self._by_served) > 2 * self.num_waiting + _STALE:  # nobody has looked here for long
            self._by_served = [entry for entry in self._by_served if entry[-1].by_age]
            heapq.heapify(self._by_served)
            self._lines = {line.tenant.owner: line for *_, line in self._by_served}

    def least_key(self) -> _Key | None:
        """Of those that wait."""
        heap = self._by_key
        while heap and not heap[0][-1].waits:
            heapq.heappop(heap)
        return heap[0][:2] if heap else None

    def had_turn(self, owner: str) -> None:
        self._lines[owner].num_turns += 1

    def first(self, attained: _Attained, *, oldest: bool) -> Waiting:
        """Somebody waits."""
        heap = self._by_served
        while True:
            served, number, line = heap[0]
            if not line.by_age:
                heapq.heappop(heap)
                if self._lines.get(line.tenant.owner) is line:
                    del self._lines[line.tenant.owner]
            elif line.tenant.served > served:
                heapq.heapreplace(heap, (line.tenant.served, number, line))
            else:
                return _first_of(line, attained, oldest=oldest)


def _first_of(line: _Line, attained: _Attained, *, oldest: bool) -> Waiting:
    if oldest and line.num_turns % OLDEST_EVERY == OLDEST_EVERY - 1:
        return next(iter(line.by_age.values()))
    heap = line.sessions
    while True:
        had, due_s, arrived_s, number, waiting = heap[0]
        if not waiting.waits:
            heapq.heappop(heap)
        elif (has := attained(waiting)) > had:
            heapq.heapreplace(heap, (has, due_s, arrived_s, number, waiting))
        else:
            return waiting
