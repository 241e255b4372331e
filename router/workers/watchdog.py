"""How long a worker has said nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

# A worker tells its status a quarter of a lease after the last time, at the latest. One that is later than this, in
# leases, gets nothing new until it is heard: it may be stopped, or cut off.
_OVERDUE_LEASES = 0.4


class Watchdog:
    """Says when nothing has been heard for a while, and when for a whole lease. One timer for each, not one a message.

    A late timer means that this process itself stood still (it was stopped, or its host stalled) and has not read yet
    what the worker sent meanwhile. The worker then gets the time of two more heartbeats.

    Args:
        on_silent: called once, after `lease_s`.
        on_overdue: called after a part of that with when something was last heard, by the loop's clock; and with `None`
            when something is heard then.
    """

    def __init__(
        self, lease_s: float, on_silent: Callable[[], object], on_overdue: Callable[[float | None], object]
    ) -> None:
        self._lease_s = lease_s
        self._overdue_s = _OVERDUE_LEASES * lease_s
        self._on_silent, self._on_overdue = on_silent, on_overdue
        self.has_fired = False
        self._is_overdue = False
        self._loop = asyncio.get_running_loop()
        self.heard()
        self._set(self._overdue_s)

    def heard(self) -> None:
        self._heard_s = self._loop.time()
        if self._is_overdue:
            self._is_overdue = False
            self._on_overdue(None)

    def _set(self, delay_s: float) -> None:
        self._due_s = self._loop.time() + delay_s
        self._timer = self._loop.call_later(delay_s, self._look)

    def _look(self) -> None:
        now_s = self._loop.time()
        silent_s = now_s - self._heard_s
        if now_s - self._due_s > self._lease_s / 4:
            self._set(max(self._lease_s - silent_s, self._lease_s / 2))
        elif silent_s >= self._lease_s:
            self.has_fired = True
            self._on_silent()
        elif silent_s >= self._overdue_s:
            self._is_overdue = True
            self._on_overdue(self._heard_s)
            self._set(self._lease_s - silent_s)
        else:
            self._set(self._overdue_s - silent_s)

    def stop(self) -> None:
        self._timer.cancel()
