"""Wakes a state machine when its next deadline has come, without anybody polling a clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class Ticker:
    """One timer in the event loop that is moved as deadlines change.

    Args:
        fire: called in the event loop at the deadline; it hands over to the thread that owns the machine.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, fire: Callable[[], None]) -> None:
        self._loop = loop
        self._fire = fire
        self._timer: asyncio.TimerHandle | None = None
        # The deadline, and when the timer looks at it. Written before it is armed, read after it is disarmed: so one of
        # the two threads sees what the other did.
        self._deadline_s: float | None = None
        self._armed_s: float | None = None

    def set(self, deadline_s: float | None) -> None:
        """The next tick is due at `deadline_s` of the monotonic clock, or never; from one thread.

        A timer that is set for an earlier time stays, and looks again then: deadlines that move away, as they do with
        each event, wake nobody.
        """
        self._deadline_s = deadline_s
        armed_s = self._armed_s
        if deadline_s is not None and (armed_s is None or deadline_s < armed_s):
            self._armed_s = deadline_s
            self._loop.call_soon_threadsafe(self._move, deadline_s)

    def _move(self, deadline_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(max(0.0, deadline_s - time.monotonic()), self._ring)

    def _ring(self) -> None:
        self._timer = self._armed_s = None
        deadline_s = self._deadline_s
        if deadline_s is None:
            return
        if deadline_s > time.monotonic():
            self._armed_s = deadline_s
            self._move(deadline_s)
        else:
            self._deadline_s = None
            self._fire()
