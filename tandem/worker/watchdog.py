"""Ends a worker when one of its threads is stuck in a call that does not return.

Such a process looks alive: its event loop sends heartbeats and renews leases. But it never gives back what it holds,
and an orderly stop would wait for the stuck thread. Its exit helps: it is a fence for its pages, and a new process
starts.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping

_log = logging.getLogger(__name__)

EXIT_CODE = 70  # EX_SOFTWARE of sysexits.h

# Monotonic seconds since when a thread has been busy without a break; `None` while it waits for work.
BusySince = Callable[[], float | None]


class Watchdog:
    """Looks at threads from the event loop, a few times in the longest time that they may be busy.

    Args:
        threads: what to look at, by name.
        max_busy_s: longest time that one turn may take, in seconds.
        on_stuck: called with the thread's name and the seconds that it has been busy; ends the process by default.
    """

    def __init__(
        self,
        threads: Mapping[str, BusySince],
        max_busy_s: float,
        on_stuck: Callable[[str, float], None] | None = None,
    ) -> None:
        self._threads = threads
        self._max_busy_s = max_busy_s
        self._on_stuck = on_stuck or end_process

    async def watch(self) -> None:
        """Runs as long as the worker."""
        while True:
            await asyncio.sleep(self._max_busy_s / 4)
            self.look()

    def look(self) -> None:
        """Compare each thread with the clock, once."""
        now_s = time.monotonic()
        for name, busy_since in self._threads.items():
            since_s = busy_since()
            if since_s is not None and now_s - since_s > self._max_busy_s:
                self._on_stuck(name, now_s - since_s)


def end_process(thread: str, busy_s: float) -> None:
    """End at once: neither threads that are stuck nor what waits for them can be ended in order."""
    _log.critical("the %s thread has been busy for %.0f s: it is stuck, this process ends itself", thread, busy_s)
    for handler in logging.getLogger().handlers:
        handler.flush()
    sys.stderr.flush()
    os._exit(EXIT_CODE)
