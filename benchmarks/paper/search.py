"""Finds the most that still passes, and the least that does, with few tries. Pure.

All take for granted that what is easier passes too, as a sweep of the whole would show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

_T = TypeVar("_T")


def hardest(passes: Callable[[_T], bool], grid: Sequence[_T], start: int) -> _T | None:
    """The last of `grid`, which goes from easy to hard, that passes; `None`: not even the first. It is looked for from
    the place `start` on, first in strides that double, then by halves."""
    low, high, at, stride = -1, len(grid), min(max(start, 0), len(grid) - 1), 1
    while high - low > 1:
        if passes(grid[at]):
            low = at
        else:
            high = at
        if high == len(grid):
            at = min(low + stride, len(grid) - 1)
        elif low == -1:
            at = max(high - stride, 0)
        else:
            at = (low + high) // 2
        stride *= 2
    return grid[low] if low >= 0 else None


def frontier(
    passes: Callable[[int, int], bool], most: tuple[int, int], is_wanted: Callable[[int, int], bool] = lambda *_: True
) -> list[tuple[int, int]]:
    """Pairs of numbers from 1 to `most` that pass, among them all that pass with neither number one less.

    One way along the border is enough: from the most of the first and one of the second, down where it passes, else up.
    What `is_wanted` refuses, and with it all that has more, is not tried.
    """
    found = []
    (first, most_second), second = most, 1
    while first >= 1 and second <= most_second:
        if not is_wanted(first, second):
            first -= 1
        elif passes(first, second):
            found.append((first, second))
            first -= 1
        else:
            second += 1
    return found
