"""The newest of what has happened, so that a late word about it is known for what it is."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

_T = TypeVar("_T", bound=Hashable)


class Remembered(Generic[_T]):
    """A set that forgets the oldest of more than `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._items: OrderedDict[_T, None] = OrderedDict()

    def add(self, item: _T) -> None:
        self._items[item] = None
        if len(self._items) > self._most:
            self._items.popitem(last=False)

    def __contains__(self, item: _T) -> bool:
        return item in self._items
