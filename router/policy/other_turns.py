"""Turns at several routers: what each tells the others of its queue, and who waits for whom. Pure.

Each router has a queue of its own (`router.policy.turns`). While it has something to tell it tells the others, every
`EVERY_S` seconds, or so much for each of them:

- *counters* of tenants that have changed, and how much of each this router gave itself. So the counter of a tenant is
  of what it got from all routers, wherever its connections lie, and within each router turns are fair.
- *whose turn is next* there. Where that tenant is behind the one whose turn is next here, this router places nothing,
  and what comes free goes to the other. So turns are fair between routers too.

Who has waited for nothing is lifted to the least counter of all that wait, at whichever router.

**The bound.** What a router knows of another is as old as the time between two words, and counters count as equal that
differ by no more than they grow in twice that time. So beside the bound of one queue, two tenants that both have a
backlog differ by at most what all workers give in three times that time, divided by the smaller weight: no more after
an hour than after a second. With more than `MOST_TOLD` tenants that are served at a time, their counters take turns to
be told.

**Nothing waits for a router that says nothing.** What it said holds for `FRESH_S`, and with many routers for as long as
three of its words take; and when one is heard again of which words were lost, nobody who waits has a claim from that
time. One that had nothing to tell has lost none. Who asks now and then, and has waited for nothing before, is not
behind the others by much: so no place stays empty for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from router.policy.turns import MAX_TENANTS, Elsewhere, Served, TurnQueue, Waiting

EVERY_S = 0.05
"""The least time between two words of a router, for each that hears them. About so often turns go over from one router
to another: with a longer time, what waits at one of them runs out meanwhile."""
FRESH_S = 1.0
"""What a router said holds for so long at least."""
MOST_TOLD = 96
"""Tenants in one word."""


@dataclass(frozen=True, slots=True)
class Next:
    """Whose turn is next at a router.

    Attributes:
        owner, priority: of the request.
        least: the least counter of the tenants that wait there.
    """

    owner: str
    priority: int
    least: float


@dataclass(frozen=True, slots=True)
class TurnNews:
    """A word of one router to the others.

    Attributes:
        life: of this router; a process that is started again has another one.
        number: of this word; that of the next one is one more.
        last: the counter of the tenant that had the last turn.
        next: `None`: nobody waits.
        served: of tenants whose counters have changed, and of the next one's.
    """

    life: str
    number: int
    last: float
    next: Next | None
    served: Mapping[str, Served]


@dataclass(slots=True)
class _Other:
    """Another router, as it was heard last."""

    life: str
    heard_s: float
    number: int | None = None
    next: Next | None = None
    given: OrderedDict[str, float] = field(default_factory=OrderedDict)  # by tenant, as it told


class OtherTurns:
    """What one router knows of the turns at others. Not thread-safe.

    Args:
        queue: of this router.
        life: as of `TurnNews`.
    """

    def __init__(self, queue: TurnQueue, life: str) -> None:
        self._queue, self._life = queue, life
        self._others: dict[str, _Other] = {}
        self._last = 0.0  # as of `Elsewhere`
        self._slack = 0.0
        self._num_told = 0

    # -- what is told

    def tell(self) -> TurnNews:
        """What is new since the last call."""
        queue = self._queue
        self._slack = 2 * queue.take_growth()
        served = queue.take_changed(MOST_TOLD)
        self._num_told += 1
        entry, least = queue.first(), queue.least_served()
        if entry is None or least is None:
            return TurnNews(self._life, self._num_told, queue.last_served, None, served)
        first = Next(entry.owner, entry.priority, least)
        served |= {entry.owner: queue.tell(entry.owner)}
        return TurnNews(self._life, self._num_told, queue.last_served, first, served)

    # -- what is heard

    def hear(self, name: str, news: TurnNews, now_s: float) -> None:
        """The router of this name says so."""
        other = self._others.get(name)
        if other is None or other.life != news.life:
            other = self._others[name] = _Other(news.life, now_s)
        is_back = other.number is None or news.number != other.number + 1
        for owner, served in news.served.items():
            self._queue.learn(owner, served.counter, _more(other, owner, served.given))
        if is_back and news.next is not None:
            self._queue.lift(news.next.least)
        other.heard_s, other.number, other.next = now_s, news.number, news.next
        self._last = max(self._last, news.last)

    def elsewhere(self, now_s: float) -> Elsewhere:
        """For who begins to wait here."""
        return Elsewhere(min((first.least for first in self._waiting(now_s)), default=None), self._last)

    def go_first(self, entry: Waiting, now_s: float) -> bool:
        """Whether the turn of this one, which is next here, comes after one at another router."""
        return any(
            first.priority <= entry.priority and self._lead(entry.owner, first.owner) > self._slack
            for first in self._waiting(now_s)
        )

    def _lead(self, owner: str, other: str) -> float:
        return self._queue.served(owner) - self._queue.served(other)

    def _waiting(self, now_s: float) -> Iterator[Next]:
        """At each other router."""
        fresh_s = max(FRESH_S, 3 * EVERY_S * len(self._others))
        for other in self._others.values():
            if other.next is not None and now_s - other.heard_s < fresh_s:
                yield other.next


def _more(other: _Other, owner: str, given: float) -> float:
    """What it has given to a tenant since it told of that one; what it gave before its first word is not counted."""
    before = other.given.get(owner, given)
    other.given[owner] = given
    other.given.move_to_end(owner)
    if len(other.given) > MAX_TENANTS:
        other.given.popitem(last=False)
    return given - before if given >= before else given
