"""What is learnt from what workers report. Pure."""

from __future__ import annotations

import math

#: What mixed steps and reads from tiers take holds so long without another figure.
REMEMBERED_S = 30.0
# Of the newest figure in the mean.
_WEIGHT = 1 / 16


class Learnt:
    """A mean of which the newest figures count most.

    Args:
        holds_s: so long after the last figure it is forgotten. What was slow once might otherwise be avoided for ever,
            and so never be seen again.
    """

    def __init__(self, holds_s: float = math.inf) -> None:
        self._holds_s = holds_s
        self._mean = 0.0
        self._noted_s = -math.inf

    def note(self, total: float, num: int, now_s: float) -> None:
        """`num` figures, whose sum is `total`."""
        if num < 1 or total <= 0:
            return
        newest, known = total / num, self.at(now_s)
        self._mean = known + (1 - (1 - _WEIGHT) ** num) * (newest - known) if known else newest
        self._noted_s = now_s

    def at(self, now_s: float) -> float:
        """0: it is not known."""
        return self._mean if now_s - self._noted_s <= self._holds_s else 0.0
