"""Notices that nobody takes care of a worker any more: neither a supervisor nor a router has been there for long.

That is so when the head's host has died, or is cut off for good. No later head knows this process, as it asks its own
Ray for workers. So nobody would ever use it or end it, and it would keep memory that the next worker here needs.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

ORPHAN_LEASES = 12
"""Of `transport.lease_s` each. A supervisor that is started again, and a short partition, take less; Ray's own
processes wait longer for their head."""


class OrphanWatch:
    """Of one worker. One that never had a supervisor needs none, and is never an orphan.

    Args:
        lease_s: `transport.lease_s`.
    """

    def __init__(self, lease_s: float, now_s: Callable[[], float] = time.monotonic) -> None:
        self.orphan_s = ORPHAN_LEASES * lease_s
        self._now_s = now_s
        self._cared_s: float | None = None  # when somebody was last there; `None`: no supervisor ever was
        self._is_orphan = False
        self._is_over = threading.Event()

    def supervised(self) -> None:
        """A supervisor has asked for something."""
        self._cared_s = self._now_s()

    def look(self, num_routers: int) -> bool:
        """Whether the worker is an orphan by now.

        Args:
            num_routers: that are connected.
        """
        if self._cared_s is None:
            return False
        if num_routers > 0:
            self._cared_s = self._now_s()
        return self._now_s() - self._cared_s > self.orphan_s

    async def watch(self, num_routers: Callable[[], int]) -> None:
        """Until the worker is an orphan."""
        while True:
            await asyncio.sleep(self.orphan_s / ORPHAN_LEASES)
            if self.look(num_routers()):
                break
        self._is_orphan = True
        self._is_over.set()

    def end(self) -> None:
        """Let `wait` return: the worker has ended."""
        self._is_over.set()

    def wait(self) -> bool:
        """Block until the worker is an orphan, or has ended; return whether it is an orphan."""
        self._is_over.wait()
        return self._is_orphan
