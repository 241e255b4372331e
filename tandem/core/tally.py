"""A value of each key, and how many keys have the same. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value", bound=Hashable)


class Tally(Generic[_Key, _Value]):
    """What is asked of all keys is asked of their values: few differ.

    Attributes:
        num: keys by their value; it has no value that no key has.
    """

    def __init__(self) -> None:
        # Invariant: `num` counts the values of this.
        self._of: dict[_Key, _Value] = {}
        self.num: Counter[_Value] = Counter()

    def __contains__(self, key: _Key) -> bool:
        return key in self._of

    def put(self, key: _Key, value: _Value | None) -> None:
        """From now on `key` has this value; `None`: none any more."""
        before = self._of.get(key)
        if before == value:
            return
        if before is not None:
            self.num[before] -= 1
            if not self.num[before]:
                del self.num[before]
        if value is None:
            del self._of[key]
        else:
            self._of[key] = value
            self.num[value] += 1
