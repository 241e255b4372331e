"""What a worker's prefix cache holds, as its routers are told: all at first, then what changes. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from tandem.core.pages import CacheChange

_T = TypeVar("_T")

#: Of a page's key this much is told. Two pages that begin alike cost a router a poor choice, and nothing else.
SHORT_KEY_BYTES = 8
#: Keys in one message, which stays well below what gRPC takes.
_MOST = 1 << 16


@dataclass(frozen=True, slots=True)
class CacheNews:
    """An event for routers: short keys that came and went.

    Attributes:
        is_first: what was told before is void; with the ones that follow it is all that there is.
    """

    came: tuple[bytes, ...] = ()
    went: tuple[bytes, ...] = ()
    is_first: bool = False


class CacheReport:
    """`note` is called by whoever holds the scheduler's lock; all else in the worker's event loop."""

    def __init__(self) -> None:
        self._changes: deque[CacheChange] = deque()
        # Short keys of all that is held, as of the changes that were taken from the queue.
        self._held: dict[bytes, None] = {}

    def note(self, change: CacheChange) -> None:
        self._changes.append(change)

    def news(self) -> list[CacheNews]:
        """What changed since the last call, in messages of a bounded size."""
        changed: dict[bytes, bool] = {}
        while self._changes:
            change = self._changes.popleft()
            for key in _short(change.came):
                changed[key] = True
                self._held[key] = None
            for key in _short(change.went):
                changed[key] = False
                self._held.pop(key, None)
        pairs = iter(changed.items())
        return [
            CacheNews(tuple(k for k, is_held in piece if is_held), tuple(k for k, is_held in piece if not is_held))
            for piece in _pieces(pairs)
        ]

    def everything(self) -> list[CacheNews]:
        """All that is held, for a router that has just come; what `news` has not told is not in it."""
        pieces = list(_pieces(iter(self._held))) or [()]
        return [CacheNews(tuple(piece), is_first=number == 0) for number, piece in enumerate(pieces)]


def _short(keys: Iterable[bytes]) -> Iterator[bytes]:
    return (key[:SHORT_KEY_BYTES] for key in keys)


def _pieces(items: Iterator[_T]) -> Iterator[Sequence[_T]]:
    while piece := tuple(islice(items, _MOST)):
        yield piece
