"""Tiers below the page pool: what they hold, which of it goes first, and what is worth reading back. Pure.

A tier keeps the bytes of full pages under the keys of the prefix cache. Pages are written there while they are in the
pool, so that evicting one costs nothing, and are read back into fresh pages before their prompt is computed.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

_K = TypeVar("_K", bound=Hashable)

# A prompt waits for pages this much longer than they are expected to take, and at least so long.
_PATIENCE = 4.0
_LEAST_PATIENCE_S = 2.0
# The newest figure of a rate weighs so much.
_NEWEST = 0.3


Fetched = Callable[[Sequence[int]], None]
"""Hears of pages that have been read: their bytes are new. On the thread that owns the pool, without its lock."""


class PageTiers(Protocol):
    """What the scheduler and the roles see of the tiers. Called with the pool's lock held."""

    def entered(self, key: bytes, parent: bytes) -> None:
        """The prefix cache has a page under `key`; `parent` is the key of the page before it, empty: it is the first.

        Never called for private keys.
        """

    def discarded(self, keys: Iterable[bytes]) -> None:
        """What is kept under these keys may be wrong: nobody finds it any more."""

    def used(self, keys: Sequence[bytes]) -> None:
        """A prompt begins with these pages: they go later than what was used before."""

    def fetch(self, keys: Sequence[bytes], then: Fetched, *, at_least: int = 1) -> bool:
        """Read pages of a prompt back into the pool's cache, where that is worth it. They are in use from now on.

        Args:
            keys: of the prompt's leading pages, as many as would be used.
            then: called once, in bounded time and never by this call, when the prompt is to go on.
            at_least: so many leading pages must be cached afterwards, or it is not worth it.

        Returns:
            Whether `then` is called. If not, the prompt goes on at once.
        """

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step has computed so many tokens of prompts in this time."""


class TierIndex(Generic[_K]):
    """What a tier holds, in the order in which it goes: what was used least recently first.

    A page is of no use without those before it. So pages that were used together are a group, in the order of their
    prompt, and the group is given up from its end.

    Args:
        most_bytes: of all that is held.
        most_items: as many at most, whatever their size.
    """

    def __init__(self, most_bytes: int, most_items: int = 1 << 20) -> None:
        self.most_bytes = most_bytes
        self._most_items = most_items
        self.num_bytes = 0
        # Invariants: no group is empty; an item is in the group that `_group_of` names, and in no other; `num_bytes` is
        # the sum over all. The oldest group comes first.
        self._groups: OrderedDict[int, dict[_K, int]] = OrderedDict()
        self._group_of: dict[_K, int] = {}
        self._num_groups = 0  # that there ever were

    def __len__(self) -> int:
        return len(self._group_of)

    def __contains__(self, key: object) -> bool:
        return key in self._group_of

    def add(self, key: _K, num_bytes: int, parent: _K | None = None) -> list[_K]:
        """Enter one item behind its parent, if that is held; else it is the newest of all.

        Returns:
            What had to go. Where the item alone is too large that is the item itself.
        """
        self.drop(key)
        group = self._group_of.get(parent) if parent is not None else None
        if group is None:
            group = self._new_group()
        self._put(key, num_bytes, group)
        return self._shrink()

    def add_all(self, groups: Iterable[Iterable[tuple[_K, int]]]) -> list[_K]:
        """Enter what was found, oldest group first, as if all of it were older than what is held."""
        newer = list(self._groups)
        for items in groups:
            group = self._new_group()
            for key, num_bytes in items:
                if key not in self._group_of:
                    self._put(key, num_bytes, group)
        for group in newer:
            self._groups.move_to_end(group)
        return self._shrink()

    def use(self, keys: Iterable[_K]) -> None:
        """These are used now, one behind the other; those that are not held are passed over."""
        group = self._new_group()
        for key in keys:
            if key in self._group_of:
                self._put(key, self._take(key), group)

    def drop(self, key: _K) -> bool:
        """Forget one item. Returns whether it was held."""
        if key not in self._group_of:
            return False
        self._take(key)
        return True

    def _new_group(self) -> int:
        """Its number; it is there with its first item."""
        self._num_groups += 1
        return self._num_groups

    def _put(self, key: _K, num_bytes: int, group: int) -> None:
        self._groups.setdefault(group, {})[key] = num_bytes
        self._group_of[key] = group
        self.num_bytes += num_bytes

    def _take(self, key: _K) -> int:
        return self._taken(key, self._groups[self._group_of[key]].pop(key))

    def _taken(self, key: _K, num_bytes: int) -> int:
        """Book that the item has been taken out of its group."""
        group = self._group_of.pop(key)
        if not self._groups[group]:
            del self._groups[group]
        self.num_bytes -= num_bytes
        return num_bytes

    def _shrink(self) -> list[_K]:
        gone: list[_K] = []
        while self.num_bytes > self.most_bytes or len(self) > self._most_items:
            oldest = next(iter(self._groups.values()))
            # Not by looking at the last key: a dictionary passes over all that were removed behind it, each time.
            key, num_bytes = oldest.popitem()
            self._taken(key, num_bytes)
            gone.append(key)
        return gone

    def check(self) -> None:
        """Verify every invariant; for tests.

        Raises:
            AssertionError: naming what breaks one.
        """
        items = [(key, group) for group, held in self._groups.items() for key in held]
        assert all(self._groups.values()), self._groups
        assert len(items) == len(self._group_of), (len(items), len(self._group_of))
        assert dict(items) == self._group_of
        assert self.num_bytes == sum(size for held in self._groups.values() for size in held.values())
        assert self.num_bytes <= self.most_bytes, (self.num_bytes, self.most_bytes)
        assert len(self) <= self._most_items, len(self)


class Rate:
    """So much in a second, as learnt; the newest figures count most. What is not seen for a while is forgotten.

    Args:
        guess: what is taken for it until something is learnt; 0: it is not known.
        holds_s: so long after the last figure it is a guess again.
    """

    def __init__(self, guess: float = 0.0, holds_s: float = 60.0) -> None:
        self._guess = guess
        self._holds_s = holds_s
        self._value = 0.0
        self._ends_s = float("-inf")

    def learn(self, amount: float, seconds: float, now_s: float) -> None:
        """So much took so long."""
        if amount <= 0 or seconds <= 0:
            return
        seen = amount / seconds
        known = now_s < self._ends_s
        self._value = (1 - _NEWEST) * self._value + _NEWEST * seen if known else seen
        self._ends_s = now_s + self._holds_s

    def at(self, now_s: float) -> float:
        return self._value if now_s < self._ends_s else self._guess


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Pages to read for one prompt.

    Attributes:
        num_pages: as many leading ones of those that the pool lacks.
        read_s: seconds in which they are expected to be read, once it is their turn.
        patience_s: after this long the prompt goes on with what has come.
    """

    num_pages: int
    read_s: float
    patience_s: float


def plan_read(page_s: Sequence[float], page_size: int, *, ahead_s: float, tokens_per_s: float) -> ReadPlan | None:
    """How many pages to read before the others are computed; `None`: computing all is sooner.

    A page is of no use without those before it, so it is as many leading ones as save most: those of a slow tier behind
    those of a quick one only where reading them is sooner than computing them, too.

    Args:
        page_s: seconds in which each page that could be read is read, in the order of the prompt.
        page_size: tokens of a page.
        ahead_s: seconds in which those are read that come before.
        tokens_per_s: at which prompts are computed; 0: not known, and reading is taken to be sooner.
    """
    num_pages, most_saved_s, ends_s = 0, 0.0, 0.0
    saved_s, read_s = -ahead_s, ahead_s
    for number, each_s in enumerate(page_s, 1):
        read_s += each_s
        saved_s += page_size / tokens_per_s - each_s if tokens_per_s else math.inf
        if saved_s > most_saved_s or not tokens_per_s:
            num_pages, most_saved_s, ends_s = number, saved_s, read_s
    if not num_pages:
        return None
    return ReadPlan(num_pages, ends_s - ahead_s, max(_LEAST_PATIENCE_S, _PATIENCE * ends_s))
