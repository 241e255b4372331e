"""What a worker's prefix cache and the tiers below it hold, as its routers are told: all at first, then what changes.
Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from tandem.core.pages import CacheChange

_T = TypeVar("_T")

#: Of a page's key this much is told. Two pages that begin alike cost a router a poor choice, and nothing else.
SHORT_KEY_BYTES = 8
#: Keys in one event. One call of `news` gives at most two events of a kind: a router takes them in within some
#: milliseconds, and does other things before the next message.
_MOST = 1 << 12


@dataclass(frozen=True, slots=True)
class CacheNews:
    """An event for routers: short keys that came and went.

    Attributes:
        tier_came: as `came`, of the tiers below the pool, all of them together.
        near_came: as `came`, of the nearest of these, where there are several.
        is_first: what was told before is void; with the ones that follow it is all that there is.
    """

    came: tuple[bytes, ...] = ()
    went: tuple[bytes, ...] = ()
    tier_came: tuple[bytes, ...] = ()
    tier_went: tuple[bytes, ...] = ()
    near_came: tuple[bytes, ...] = ()
    near_went: tuple[bytes, ...] = ()
    is_first: bool = False


class CacheReport:
    """All but `note` and `note_tiers` is called in the worker's event loop."""

    def __init__(self) -> None:
        self._pool = _Told()
        self._tiers = _Told()
        self._near = _Told()

    def note(self, change: CacheChange) -> None:
        """The pool's cache has changed; by whoever holds the scheduler's lock."""
        self._pool.note(change)

    def note_tiers(self, change: CacheChange, near: CacheChange) -> None:
        """What the tiers hold has changed, and the nearest one of several; by one thread at a time."""
        self._tiers.note(change)
        self._near.note(near)

    def news(self) -> list[CacheNews]:
        """What changed since the last call; of very much the rest by the next ones."""
        in_pool = [CacheNews(came, went) for came, went in self._pool.take()]
        in_tiers = [CacheNews(tier_came=came, tier_went=went) for came, went in self._tiers.take()]
        return in_pool + in_tiers + [CacheNews(near_came=came, near_went=went) for came, went in self._near.take()]

    def everything(self) -> list[CacheNews]:
        """All that is held, for a router that has just come; what `news` has not told is not in it."""
        in_pool, in_tiers, in_near = (_pieces(iter(each.held)) for each in (self._pool, self._tiers, self._near))
        first = CacheNews(next(in_pool, ()), is_first=True)
        of_tiers = [CacheNews(tier_came=piece) for piece in in_tiers]
        of_near = [CacheNews(near_came=piece) for piece in in_near]
        return [first, *(CacheNews(piece) for piece in in_pool), *of_tiers, *of_near]


class _Told:
    """Of one kind of memory: what it holds, and which changes of that are not told yet."""

    def __init__(self) -> None:
        self._changes: deque[CacheChange] = deque()  # of at most `_MOST` keys each
        #: Short keys of all that is held, as of the changes that were taken from the queue.
        self.held: dict[bytes, None] = {}

    def note(self, change: CacheChange) -> None:
        for keys, is_held in ((change.came, True), (change.went, False)):
            for start in range(0, len(keys), _MOST):
                piece = keys[start : start + _MOST]
                self._changes.append(CacheChange(came=piece) if is_held else CacheChange(went=piece))

    def take(self) -> Iterator[tuple[tuple[bytes, ...], tuple[bytes, ...]]]:
        """What came and what went, in pieces."""
        changed: dict[bytes, bool] = {}
        while self._changes and len(changed) < _MOST:
            change = self._changes.popleft()
            for key in change.came:
                short = key[:SHORT_KEY_BYTES]
                changed[short] = True
                self.held[short] = None
            for key in change.went:
                short = key[:SHORT_KEY_BYTES]
                changed[short] = False
                self.held.pop(short, None)
        for piece in _pieces(iter(changed.items())):
            yield tuple(k for k, is_held in piece if is_held), tuple(k for k, is_held in piece if not is_held)


def _pieces(items: Iterator[_T]) -> Iterator[tuple[_T, ...]]:
    while piece := tuple(islice(items, _MOST)):
        yield piece
