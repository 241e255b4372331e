"""What was asked for last, within bounds of number and of size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class Recent(Generic[_K, _V]):
    """Values by keys; those that were asked for least recently go first.

    Args:
        most: values that are kept.
        max_size: of all together; one alone may be larger.
        size_of: of one.
    """

    def __init__(self, most: int, max_size: int, size_of: Callable[[_K, _V], int]) -> None:
        self._most, self._max_size = most, max_size
        self._size_of = size_of
        self._items: OrderedDict[_K, _V] = OrderedDict()
        self._size = 0

    def get(self, key: _K) -> _V | None:
        if (found := self._items.get(key)) is not None:
            self._items.move_to_end(key)
        return found

    def put(self, key: _K, value: _V) -> None:
        self.drop(key)
        self._items[key] = value
        self._size += self._size_of(key, value)
        while len(self._items) > self._most or (self._size > self._max_size and len(self._items) > 1):
            self.drop(next(iter(self._items)))

    def drop(self, key: _K) -> None:
        if (value := self._items.pop(key, None)) is not None:
            self._size -= self._size_of(key, value)


class RecentByCost(Generic[_K, _V]):
    """Two of them, of which one has what took long to make: much that did not cannot push it out.

    Args:
        costly, others: a key is in one of them at most.
    """

    def __init__(self, costly: Recent[_K, _V], others: Recent[_K, _V]) -> None:
        self._costly, self._others = costly, others

    def get(self, key: _K) -> _V | None:
        found = self._costly.get(key)
        return self._others.get(key) if found is None else found

    def put(self, key: _K, value: _V, *, is_costly: bool) -> None:
        for some in (self._costly, self._others):
            some.drop(key)
        (self._costly if is_costly else self._others).put(key, value)
