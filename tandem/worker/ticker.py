"""Wakes a state machine when its next deadline has come, without anybody polling a clock."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable


class Ticker:
    """One timer in the event loop that is moved as deadlines change.

    Args:
        fire: called in the event loop at the deadline; it hands over to the thread that owns the machine.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, fire: Callable[[], object]) -> None:
        self._loop = loop
        self._fire = fire
        self._timer: asyncio.TimerHandle | None = None
        self._lock = threading.Lock()
        # Guarded by _lock: the deadline, and when the timer looks at it.
        self._deadline_s: float | None = None
        self._armed_s: float | None = None

    def set(self, deadline_s: float | None) -> None:
        """The next tick is due at `deadline_s` of the monotonic clock, or never; from one thread.

        A timer that is set for an earlier time stays, and looks again then: deadlines that move away, as they do with
        each event, wake nobody.
        """
        with self._lock:
            self._deadline_s = deadline_s
            is_sooner = deadline_s is not None and (self._armed_s is None or deadline_s < self._armed_s)
            if is_sooner:
                self._armed_s = deadline_s
        if is_sooner:
            self._loop.call_soon_threadsafe(self._move)

    def _move(self) -> None:
        """Set the timer for when it is to look."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        with self._lock:
            armed_s = self._armed_s
        if armed_s is not None:  # else it has rung meanwhile
            self._timer = self._loop.call_later(max(0.0, armed_s - time.monotonic()), self._ring)

    def _ring(self) -> None:
        with self._lock:
            is_due = self._deadline_s is not None and self._deadline_s <= time.monotonic()
            if is_due:
                self._deadline_s = None
            self._armed_s = self._deadline_s
        self._move()
        if is_due:
            self._fire()
