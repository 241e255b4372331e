"""Which workers hold how much of a prompt's beginning, as a routing decision is told. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Worker = TypeVar("Worker", bound=Hashable)


@dataclass(frozen=True, slots=True)
class KnownPrefix(Generic[Worker]):
    """The pages that a prompt begins with, and who is known to hold them; to be used at once.

    Workers are bits of an integer, so that a thousand of them are compared as fast as one.

    Attributes:
        runs: `(pages, holders)`, the longest run first: who holds at least so many leading pages. Each run has all
            holders of the one before, and more.
        bits: the bit of each worker.
        workers: by the number of their bit.
        page_size: tokens in a page.
    """

    runs: Sequence[tuple[int, int]] = ()
    bits: Mapping[Worker, int] = field(default_factory=dict)
    workers: Mapping[int, Worker] = field(default_factory=dict)
    page_size: int = 1

    def __bool__(self) -> bool:
        return bool(self.runs)

    def num_pages(self, worker: Worker) -> int:
        """How many leading pages the worker holds."""
        bit = self.bits.get(worker, 0)
        if not self.runs or not self.runs[-1][1] & bit:
            return 0
        # The first run that has it: all behind have it too.
        return self.runs[bisect_left(self.runs, True, key=lambda run: bool(run[1] & bit))][0]

    def num_tokens(self, worker: Worker) -> int:
        """How many leading tokens the worker holds."""
        return self.num_pages(worker) * self.page_size

    @property
    def most_tokens(self) -> int:
        """Leading tokens that some worker holds."""
        return self.runs[0][0] * self.page_size if self.runs else 0

    def longest(self, most: int) -> list[Worker]:
        """Up to so many workers, those that hold most first."""
        found: list[Worker] = []
        seen = 0
        for _, reached in self.runs:
            new = reached & ~seen
            seen = reached
            while new:
                if len(found) == most:
                    return found
                lowest = new & -new
                new ^= lowest
                found.append(self.workers[lowest.bit_length() - 1])
        return found


@dataclass(frozen=True, slots=True)
class HeldPrefix(Generic[Worker]):
    """Who holds a prompt's beginning, and where.

    Attributes:
        pool: in page pools, ready to be used.
        tiers: below them, to be read back first. Most of these pages are in a pool too.
        near: of those in tiers, in the nearest of a worker's several ones.
    """

    pool: KnownPrefix[Worker] = field(default_factory=KnownPrefix)
    tiers: KnownPrefix[Worker] = field(default_factory=KnownPrefix)
    near: KnownPrefix[Worker] = field(default_factory=KnownPrefix)

    def __bool__(self) -> bool:
        return bool(self.pool) or bool(self.tiers)

    def num_ready(self, worker: Worker) -> int:
        """Leading tokens in the worker's pool."""
        return self.pool.num_tokens(worker)

    def num_stored(self, worker: Worker) -> int:
        """The tokens behind these that the worker can read back."""
        return max(0, self.tiers.num_tokens(worker) - self.pool.num_tokens(worker))

    def num_near(self, worker: Worker) -> int:
        """Those of `num_stored` that come first, in the nearest tier of several."""
        return min(self.num_stored(worker), max(0, self.near.num_tokens(worker) - self.pool.num_tokens(worker)))

    def is_at(self, worker: Worker) -> bool:
        """Whether the worker has some of it, wherever."""
        return self.num_ready(worker) > 0 or self.num_stored(worker) > 0

    @property
    def most_tokens(self) -> int:
        """Leading tokens that some worker has, wherever."""
        return max(self.pool.most_tokens, self.tiers.most_tokens)

    def longest(self, most: int) -> list[Worker]:
        """Up to so many workers of each kind, those that hold most first."""
        return list(dict.fromkeys([*self.pool.longest(most), *self.tiers.longest(most)]))
