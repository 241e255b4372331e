"""A histogram with buckets that grow by a fixed factor: small, quickly filled, and histograms can be added. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

_PER_OCTAVE = 4
"""Buckets for each doubling: a quantile is right within 9 %."""
_SMALLEST_S = 2.0**-14  # 61 µs; less counts as that


class Histogram:
    """Counts durations in seconds."""

    __slots__ = ("counts",)

    def __init__(self, counts: dict[int, int] | None = None) -> None:
        #: By bucket; only those that are not empty.
        self.counts: Counter[int] = Counter(counts or {})

    def add(self, *seconds: float) -> None:
        """Each once."""
        log2, counts = math.log2, self.counts
        for each in seconds:
            counts[round(log2(each if each > _SMALLEST_S else _SMALLEST_S) * _PER_OCTAVE)] += 1

    def quantile(self, share: float) -> float | None:
        """Seconds that so great a share of what was counted does not exceed; `None` where nothing was."""
        left = math.ceil(share * self.counts.total())
        for bucket in sorted(self.counts):
            left -= self.counts[bucket]
            if left <= 0:
                return float(2.0 ** (bucket / _PER_OCTAVE))
        return None


def merged(histograms: Iterable[Histogram]) -> Histogram:
    total = Histogram()
    for histogram in histograms:
        total.counts.update(histogram.counts)
    return total


def histogram_of(described: Mapping[str, int]) -> Histogram:
    """From JSON, which has made texts of the buckets' numbers."""
    return Histogram({int(bucket): count for bucket, count in described.items()})
