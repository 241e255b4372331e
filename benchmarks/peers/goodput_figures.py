"""What the searches for goodput of two servers say beside each other. Pure.

A search leaves a bracket: the highest rate that was kept, and the lowest that was not. Where its time was up before the
two met it may be wide, so a ratio of two searches is an interval, and only that can reach or miss a goal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from benchmarks.peers.figures import Goal, Run
from benchmarks.peers.origin import are_together, hours


def _bracket(search: Run) -> tuple[float, float]:
    """The highest rate that was kept, 0 where none was, and the lowest that was not, infinite where none was met."""
    best, worst = search["goodput_per_s"], search["failed_from_per_s"]
    return best or 0.0, math.inf if worst is None else worst


def is_close(search: Run, precision: float) -> bool:
    """Its bracket is as narrow as was asked for: its goodput is known."""
    best, worst = _bracket(search)
    return worst <= best * precision


def rate_words(search: Run, precision: float) -> str:
    """Its goodput in requests/s, and what is not known of it."""
    best, worst = _bracket(search)
    if not best:
        return f"< {worst:.2f}"
    if worst == math.inf:
        return f"≥ {best:.2f}"
    return f"{best:.2f}" + ("" if is_close(search, precision) else f" (fails from {worst:.2f})")


@dataclass(frozen=True)
class GoodputRatio:
    """Of two searches, between which bounds it lies: 0 and infinity are none.

    Attributes:
        best: of the highest rates that were kept; `None` where either search is not close.
    """

    low: float
    high: float
    best: float | None

    @classmethod
    def of(cls, search: Run, base: Run, precision: float) -> GoodputRatio | None:
        """`None`: the searches lie too far apart."""
        if not are_together(search, base):
            return None
        (best, worst), (base_best, base_worst) = _bracket(search), _bracket(base)
        are_close = is_close(search, precision) and is_close(base, precision)
        return cls(
            low=best / base_worst,
            high=worst / base_best if base_best else math.inf,
            best=best / base_best if are_close else None,
        )

    def __str__(self) -> str:
        if self.low == 0.0 and self.high == math.inf:
            return "unknown"
        if self.low == 0.0:
            return f"< {self.high:.2f}"
        if self.high == math.inf:
            return f"> {self.low:.2f}"
        bounds = f"{self.low:.2f} to {self.high:.2f}"
        return bounds if self.best is None else f"{self.best:.2f} ({bounds})"

    def judged(self, goal: Goal) -> str:
        """How it stands to the goal: that is known where both bounds are on one side of it."""
        is_low, is_high = goal.is_reached_by(self.low), goal.is_reached_by(self.high)
        if is_low != is_high:
            return f"{goal}: undecided"
        return f"{goal}: {'reached' if is_low else '**missed**'}"


def ratio_words(ratio: GoodputRatio | None, goal: Goal | None) -> tuple[str, str]:
    """The ratio, `None` of searches too far apart, and how it stands to the goal."""
    if ratio is None:
        return f"more than {hours()} apart", ""
    return str(ratio), "" if goal is None else ratio.judged(goal)
