"""Whether this process itself has stood still: then others have not been silent, it has not listened.

A host that is paused, a laptop that sleeps and a stopped process all look alike from inside: time has jumped.
"""

from __future__ import annotations


class Standstill:
    """Compares when it is looked at with when it should be; no clock of its own.

    Args:
        now: on the clock of `look`, in seconds.
        turn_s: the longest time between two looks while all is well.
        tolerance_s: a look that is later than this by more is taken for the end of a standstill.
    """

    def __init__(self, now: float, *, turn_s: float, tolerance_s: float) -> None:
        self._looked_at = now
        self._limit_s = turn_s + tolerance_s

    def look(self, now: float) -> float:
        """Seconds for which nothing may be blamed on others, which is 0 unless this look comes too late."""
        passed_s, self._looked_at = now - self._looked_at, now
        return passed_s if passed_s > self._limit_s else 0.0
