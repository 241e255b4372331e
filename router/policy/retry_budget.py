"""Bounds retries: a token bucket that every request fills and every retry draws from.

Retries add load just when workers are missing. Bounded to a share of the requests, they cannot become a storm that
keeps the cluster down, as in Finagle's `RetryBudget` and gRPC's retry throttling. The budget is the cluster's: each
router has its share of it, and fills it with the requests that it serves.

The bucket also gains a few retries each minute, because the requests of a quiet cluster earn next to nothing. With a
share of 0 nothing refills it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tandem.core.clock import Clock

REFILL_PER_MINUTE = 3.0
_MIN_BURST = 10


def retry_burst(max_num_seqs: int) -> int:
    """The most that all buckets hold, where a decode worker has so many sequences: its death must not spend them."""
    return max(_MIN_BURST, max_num_seqs)


class RetryBudget:
    """A bucket of retries. Not thread-safe.

    Attributes:
        num_refused: retries that found it empty.
    """

    def __init__(self, share: float, burst: int, clock: Clock, num_routers: Callable[[], int] = lambda: 1) -> None:
        """`share`: the part of a retry that each request earns. `burst`: the most that the buckets of all routers hold
        together; they begin full. `num_routers`: how many there are now."""
        self._share = share
        self._refill_per_s = REFILL_PER_MINUTE / 60 if share > 0 else 0.0
        self._burst = burst
        self._num_routers = num_routers
        self._clock = clock
        # Invariant: between 0 and this router's share of the burst, as of `_filled_s`.
        self._left = float(self._share_of_burst())
        self._filled_s = clock.now()
        self.num_refused = 0

    @property
    def num_left(self) -> float:
        """Retries that may be made now."""
        self._fill(0.0)
        return self._left

    def earn(self) -> None:
        """A request has begun."""
        self._fill(self._share)

    def draw(self) -> bool:
        """Take one retry out; `False` where there is none."""
        self._fill(0.0)
        if self._left < 1.0:
            self.num_refused += 1
            return False
        self._left -= 1.0
        return True

    def _fill(self, amount: float) -> None:
        now_s, num_routers = self._clock.now(), self._num_routers()
        amount += (now_s - self._filled_s) * self._refill_per_s / num_routers
        self._left, self._filled_s = min(self._left + amount, self._share_of_burst()), now_s

    def _share_of_burst(self) -> int:
        """Whole retries, rounded up: with a part of one no router would ever retry."""
        return math.ceil(self._burst / self._num_routers())
