"""The gaps between tokens of a simulation. What a step gave several requests at once is one entry."""

from __future__ import annotations

import math
from array import array

import numpy as np
from numpy.typing import NDArray

from tandem.bench.report.summary import PERCENTILES, Distribution, ItlWindow


class Gaps:
    """Seconds."""

    def __init__(self) -> None:
        self._ends, self._gaps, self._nums = array("d"), array("d"), array("q")

    def note(self, end_s: float, gap_s: float, num: int = 1) -> None:
        """So many requests got a token at `end_s`, and the one before `gap_s` earlier."""
        if self._ends and self._ends[-1] == end_s and self._gaps[-1] == gap_s:
            self._nums[-1] += num
            return
        self._ends.append(end_s)
        self._gaps.append(gap_s)
        self._nums.append(num)

    def distribution(self) -> Distribution | None:
        """Of all; `None`: there is none."""
        if not self._nums:
            return None
        gaps, nums = np.frombuffer(self._gaps), np.frombuffer(self._nums, np.int64)
        total = int(nums.sum())
        mean = float(gaps @ nums) / total
        p50, p90, p99 = _percentiles(gaps, nums, PERCENTILES)
        return Distribution(total, mean, p50, p90, p99, float(gaps.max()))

    def windows(self, window_s: float) -> tuple[ItlWindow, ...]:
        """By the stretch of time in which they ended; those without any are left out."""
        if not self._nums:
            return ()
        ends, gaps, nums = np.frombuffer(self._ends), np.frombuffer(self._gaps), np.frombuffer(self._nums, np.int64)
        numbers = (ends // window_s).astype(np.int64)
        order = np.argsort(numbers, kind="stable")
        found, starts = np.unique(numbers[order], return_index=True)
        return tuple(
            ItlWindow(int(number) * window_s, int(nums[part].sum()), *_percentiles(gaps[part], nums[part], (50, 99)))
            for number, part in zip(found, np.split(order, starts[1:]), strict=True)
        )


def _percentiles(
    gaps: NDArray[np.float64], nums: NDArray[np.int64], percents: tuple[int, ...]
) -> tuple[float, ...]:
    """As `tandem.bench.report.summary.percentile`, of each gap `nums` times."""
    order = np.argsort(gaps)
    ordered, behind = gaps[order], np.cumsum(nums[order])
    found = []
    for percent in percents:
        position = (int(behind[-1]) - 1) * percent / 100
        lower = math.floor(position)
        upper = min(lower + 1, int(behind[-1]) - 1)
        low, high = (float(ordered[np.searchsorted(behind, rank, side="right")]) for rank in (lower, upper))
        found.append(low + (high - low) * (position - lower))
    return tuple(found)
