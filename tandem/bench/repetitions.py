"""What is measured several times: in which order, and how far apart its figures lie. Pure."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

_TURN = 1e-9  # of a quantile


@dataclass(frozen=True)
class Spread:
    """Of one figure over the repetitions."""

    median: float
    low: float
    high: float
    num: int


def spread(values: Iterable[float | None]) -> Spread | None:
    """`None` of nothing; a `None` among them is left out."""
    found = [value for value in values if value is not None]
    return Spread(statistics.median(found), min(found), max(found), len(found)) if found else None


def rotated(items: Sequence[T], by: int) -> Sequence[T]:
    """The same, from the `by`th on, counted from 0 and round and round: none is always the first."""
    start = by % len(items) if items else 0
    return (*items[start:], *items[:start])


@dataclass(frozen=True)
class Difference:
    """How far one thing lies from another, with its interval of confidence."""

    value: float
    low: float
    high: float


def differences(values: Sequence[Sequence[float]], confidence: float) -> list[Difference]:
    """Of each row but the first from the first; a column is a repetition, which all rows share.

    The rows are treatments and the columns blocks of a randomised complete block design: what a repetition does to all
    of them alike is no noise. What is left over is taken together over all rows, as few repetitions tell little of it
    each. The intervals hold all at once (Bonferroni). With one column they are without bounds.
    """
    num_rows, num_columns = len(values), len(values[0])
    row_means = [math.fsum(row) / num_columns for row in values]
    found = [mean - row_means[0] for mean in row_means[1:]]
    if num_columns < 2:
        return [Difference(value, -math.inf, math.inf) for value in found]
    half = half_width(residual(values), num_rows, num_columns, confidence)
    return [Difference(value, value - half, value + half) for value in found]


def residual(values: Sequence[Sequence[float]]) -> float:
    """The standard deviation of what is left when rows and columns have explained what they can."""
    num_rows, num_columns = len(values), len(values[0])
    mean = math.fsum(value for row in values for value in row) / (num_rows * num_columns)
    row_means = [math.fsum(row) / num_columns for row in values]
    column_means = [math.fsum(column) / num_rows for column in zip(*values, strict=True)]
    left = [
        value - row_mean - column_mean + mean
        for row, row_mean in zip(values, row_means, strict=True)
        for value, column_mean in zip(row, column_means, strict=True)
    ]
    return math.hypot(*left) / math.sqrt((num_rows - 1) * (num_columns - 1))


def half_width(deviation: float, num_rows: int, num_columns: int, confidence: float) -> float:
    """Of the interval around the difference of a row from the first, where single values have such a `deviation`."""
    tail = (1 - confidence) / (num_rows - 1)
    return student_quantile(1 - tail, (num_rows - 1) * (num_columns - 1)) * deviation * math.sqrt(2 / num_columns)


@functools.cache
def student_quantile(confidence: float, num_free: int) -> float:
    """The `t` within ± which this share of Student's distribution lies; by bisection."""
    low, high = 0.0, 1.0
    while student_share(high, num_free) < confidence:
        high *= 2
    while high - low > _TURN * high:
        middle = (low + high) / 2
        low, high = (middle, high) if student_share(middle, num_free) < confidence else (low, middle)
    return high


def student_share(t: float, num_free: int) -> float:
    """The share of Student's distribution within ± `t` (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(num_free))
    cosine, is_odd = math.cos(angle), num_free % 2
    term = cosine if is_odd else 1.0
    total = 0.0
    for number in range(2 + is_odd, num_free + 1, 2):
        total += term
        term *= cosine**2 * (number - 1) / number
    if is_odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total
