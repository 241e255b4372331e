"""Detects that this process itself has stood still: it could hear nobody then, so others do not count as silent.

A paused host, a sleeping laptop and a stopped process look alike from inside: the clock has jumped.
"""

from __future__ import annotations


class ClockJump:
    """Compares the time between two looks with what it should be; it has no clock of its own.

    Args:
        now: on the clock of `look`, in seconds.
        turn_s: the longest time between two looks while all is well.
        tolerance_s: a look that comes later than `turn_s` by more than this has found a jump.
    """

    def __init__(self, now: float, *, turn_s: float, tolerance_s: float) -> None:
        self._looked_at = now
        self._limit_s = turn_s + tolerance_s

    def look(self, now: float) -> float:
        """Seconds for which silence of others proves nothing; 0 unless this look comes too late."""
        passed_s, self._looked_at = now - self._looked_at, now
        return passed_s if passed_s > self._limit_s else 0.0
