"""Ends a worker when one of its threads is stuck in a call that does not return.

Such a process looks alive: its event loop sends heartbeats and renews leases. But it never gives back what it holds,
and an orderly stop would wait for the stuck thread. Its exit helps: it is a fence for its pages, and a new process
starts.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping

from tandem.core.clock_jump import ClockJump

_log = logging.getLogger(__name__)

EXIT_CODE = 70  # EX_SOFTWARE of sysexits.h

# Monotonic seconds since when a thread has been busy without a break; `None` while it waits for work.
BusySince = Callable[[], float | None]


def end_process(thread: str, busy_s: float) -> None:
    """End at once: neither threads that are stuck nor what waits for them can be ended in order."""
    _log.critical("the %s thread has been busy for %.0f s: it is stuck, this process ends itself", thread, busy_s)
    for handler in logging.getLogger().handlers:
        handler.flush()
    sys.stderr.flush()
    os._exit(EXIT_CODE)


async def watch_threads(
    threads: Mapping[str, BusySince], max_busy_s: float, on_stuck: Callable[[str, float], None] = end_process
) -> None:
    """Look at `threads`, given by name, a few times in `max_busy_s`; runs as long as the worker.

    A process that was stopped, or whose host was, has computed nothing meanwhile: what a thread was in the midst of
    gets its whole time again.

    Args:
        max_busy_s: the longest time that one turn of a thread may take, in seconds.
        on_stuck: called with the thread's name and the seconds that it has been busy.
    """
    turn_s = max_busy_s / 4
    resumed_s = time.monotonic()
    clock_jump = ClockJump(resumed_s, turn_s=turn_s, tolerance_s=turn_s)
    while True:
        await asyncio.sleep(turn_s)
        now_s = time.monotonic()
        if clock_jump.look(now_s):
            resumed_s = now_s
        for name, busy_s in find_stuck(threads, max_busy_s, resumed_s):
            on_stuck(name, busy_s)


def find_stuck(
    threads: Mapping[str, BusySince], max_busy_s: float, resumed_s: float = -math.inf
) -> list[tuple[str, float]]:
    """The threads that have been busy for longer than `max_busy_s`, each with its seconds.

    `resumed_s`: when the process went on after it had stood still; what was before does not count.
    """
    now_s = time.monotonic()
    since = [(name, busy_since()) for name, busy_since in threads.items()]
    busy = [(name, now_s - max(since_s, resumed_s)) for name, since_s in since if since_s is not None]
    return [(name, busy_s) for name, busy_s in busy if busy_s > max_busy_s]
