"""Where pages are: which workers hold the page of which key, as they tell and as is foreseen. Pure.

Keys are whatever is hashable; the router's are the first bytes of page keys, which are chained over all tokens before
them, so a key stands for a whole beginning. What stands here may be wrong (a page that has just been given up, two keys
that begin alike): that costs a poor choice, and nothing else, since workers look for themselves.

A look-up costs as much as pages are found, whatever the number of workers and of pages. What a worker held that is gone
is taken out in pieces, while others tell of theirs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from router.policy.prefix import KnownPrefix

Key = TypeVar("Key", bound=Hashable)
Worker = TypeVar("Worker", bound=Hashable)

# Keys of workers that are gone which one call takes out, within some two milliseconds.
_MOST_SWEPT = 1 << 12


class PageIndex(Generic[Key, Worker]):
    """Not thread-safe.

    Args:
        most: keys at most; beyond that the one is forgotten that was entered or found least lately. `None`: no bound.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        # Invariant: the bit of w is in _holders[k] exactly when k is in _keys[w]. No key is without holders. Those that
        # were entered or found lately stand behind.
        self._holders: OrderedDict[Key, int] = OrderedDict()  # a plain one looks for its first key among all that left
        self._keys: dict[Worker, set[Key]] = {}
        # Invariant: these two are each other's inverse, for the workers in `_keys`. Numbers of bits are used again.
        self._bits: dict[Worker, int] = {}
        self._workers: dict[int, Worker] = {}
        # Of workers that are gone, by the number of their bit: what is still to be taken out of `_holders`. Until then
        # the number is taken, and the bit counts for nothing.
        self._leaving: dict[int, set[Key]] = {}
        self._leaving_bits = 0
        # By worker: keys of its own that it has not told of.
        self._foreseen: dict[Worker, set[Key]] = {}

    def __len__(self) -> int:
        """Keys that somebody holds, or that are to be taken out."""
        return len(self._holders)

    def add(self, worker: Worker, keys: Iterable[Key]) -> None:
        """The worker holds these."""
        self._sweep()
        foreseen = self._foreseen.get(worker)
        for key in keys:
            self._enter(worker, key)
            if foreseen is not None:
                foreseen.discard(key)

    def foresee(self, worker: Worker, keys: Iterable[Key]) -> list[Key]:
        """The worker is about to hold these. Returns those that are new, for `forget`."""
        new = [key for key in keys if self._enter(worker, key)]
        if new:
            self._foreseen.setdefault(worker, set()).update(new)
        return new

    def forget(self, worker: Worker, keys: Iterable[Key]) -> None:
        """Of these the worker holds only what it has told of."""
        foreseen = self._foreseen.get(worker, set())
        self.remove(worker, [key for key in keys if key in foreseen])
        if not foreseen:
            self._foreseen.pop(worker, None)

    def remove(self, worker: Worker, keys: Iterable[Key]) -> None:
        """The worker does not hold these any more; unknown ones are fine."""
        own, foreseen = self._keys.get(worker, set()), self._foreseen.get(worker, set())
        for key in keys:
            if key in own:
                own.remove(key)
                foreseen.discard(key)
                self._take_out(key, self._bits[worker])

    def drop(self, worker: Worker) -> None:
        """The worker holds nothing any more, as far as is known."""
        self._foreseen.pop(worker, None)
        bit = self._bits.pop(worker, 0)
        if bit:
            number = bit.bit_length() - 1
            del self._workers[number]
            self._leaving[number] = self._keys.pop(worker)
            self._leaving_bits |= bit
        if self._bits:
            self._sweep()
        else:
            self._holders, self._leaving, self._leaving_bits = OrderedDict(), {}, 0

    def prefix(self, keys: Iterable[Key], page_size: int = 1) -> KnownPrefix[Worker]:
        """Who holds how many leading `keys`. Takes one key more than anybody holds."""
        runs: list[tuple[int, int]] = []
        alive, num = ~self._leaving_bits, 0
        for key in keys:
            holders = self._holders.get(key, 0)
            if holders:
                self._holders.move_to_end(key)
            now = alive & holders
            if num and now != alive:
                runs.append((num, alive))
            alive = now
            if not alive:
                break
            num += 1
        if num and alive:
            runs.append((num, alive))
        return KnownPrefix(runs[::-1], self._bits, self._workers, page_size)

    def _enter(self, worker: Worker, key: Key) -> bool:
        """Whether it is new."""
        own = self._keys.get(worker)
        if own is None:
            own = self._keys[worker] = set()
            most = len(self._workers) + len(self._leaving)
            number = next(n for n in range(most + 1) if n not in self._workers and n not in self._leaving)
            self._bits[worker], self._workers[number] = 1 << number, worker
        elif key in own:
            return False
        own.add(key)
        self._holders[key] = self._holders.get(key, 0) | self._bits[worker]
        self._holders.move_to_end(key)
        if self._most is not None and len(self._holders) > self._most:
            self._forget_one()
        return True

    def _forget_one(self) -> None:
        key, holders = next(iter(self._holders.items()))
        while holders:
            lowest = holders & -holders
            holders ^= lowest
            number = lowest.bit_length() - 1
            if number in self._leaving:
                self._leaving[number].remove(key)
                self._take_out(key, lowest)
            else:
                self.remove(self._workers[number], [key])

    def _sweep(self) -> None:
        """Take some of what is leaving out."""
        left = _MOST_SWEPT
        for number in list(self._leaving):
            keys, bit = self._leaving[number], 1 << number
            for _ in range(min(left, len(keys))):
                self._take_out(keys.pop(), bit)
                left -= 1
            if keys:
                break
            del self._leaving[number]
            self._leaving_bits ^= bit

    def _take_out(self, key: Key, bit: int) -> None:
        left = self._holders[key] & ~bit
        if left:
            self._holders[key] = left
        else:
            del self._holders[key]
