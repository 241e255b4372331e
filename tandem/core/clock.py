"""The one source of time for everything that decides: real in a process, virtual in the simulator and tests."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Gives monotonic seconds; the origin is arbitrary, differences are what counts."""

    def now(self) -> float: ...


class MonotonicClock:
    """The process's own monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


class VirtualClock:
    """A clock that stands still until it is moved."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move on by `seconds`, which must not be negative."""
        if seconds < 0:
            raise ValueError(f"time cannot go back by {-seconds} s")
        self._now_s += seconds
