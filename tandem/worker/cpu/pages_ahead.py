"""Makes KV pages resident before they are used, so that no step waits while the operating system clears memory.

The first use of a page takes a huge page in each layer. Until the whole arena has been used, that makes some steps
slower by tens of milliseconds. This thread takes memory somewhat ahead of its use, and mostly while the worker rests.
It has the lowest priority, because another worker may compute on these cores: on virtual machines whose host gives
memory on first touch, a gigabyte takes two seconds of a core.

A thread of the lowest priority that holds a lock, or the interpreter's, while others have its core holds up whoever
wants that lock. So it is woken only where there is memory to take, and shares no lock with the worker.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from queue import SimpleQueue

from tandem.engine.arena import KVArena

_log = logging.getLogger(__name__)

# These parts of the arena are kept ready beyond what has been used: while the worker rests, and while it computes.
_AHEAD_AT_REST, _AHEAD_AT_WORK = 8, 16
_HUGE_PAGE_BYTES = 2 << 20
_LEAST_PRIORITY = 19


class PagesAhead:
    """A thread that keeps ahead of a worker's use of its arena, which lies in host memory."""

    def __init__(self, arena: KVArena, name: str) -> None:
        self._arena = arena
        self._step = max(1, _HUGE_PAGE_BYTES // arena.layout.extent_bytes)
        self._ahead_at_rest = -(-arena.num_pages // _AHEAD_AT_REST)
        self._ahead_at_work = -(-arena.num_pages // _AHEAD_AT_WORK)
        self._first_untouched = 0
        self._is_resting = True
        self._stopping = False
        self._wakes = SimpleQueue[None]()
        self._is_woken = False
        #: Pages that are resident.
        self.num_ready = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def has_started(self) -> bool:
        return self._thread.ident is not None

    def used(self, first_untouched: int) -> None:
        """The worker computes now, and has not used the pages from this one on; on one thread, as `rest` is."""
        self._first_untouched = max(self._first_untouched, first_untouched)
        self._is_resting = False
        self._wake_if_wanted()

    def rest(self) -> None:
        """The worker computes nothing until `used` is called."""
        self._is_resting = True
        self._wake_if_wanted()

    def stop(self) -> None:
        self._stopping = True
        self._wakes.put(None)
        self._thread.join()

    def _wake_if_wanted(self) -> None:
        if self.num_ready < self._num_wanted() and not self._is_woken:
            self._is_woken = True
            self._wakes.put(None)

    def _num_wanted(self) -> int:
        ahead = self._ahead_at_rest if self._is_resting else self._ahead_at_work
        return min(self._arena.num_pages, self._first_untouched + ahead)

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # Linux alone has priorities of threads
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LEAST_PRIORITY)
        while not self._stopping:
            self._is_woken = False  # before the look: what is wanted behind it wakes anew
            while self.num_ready < self._num_wanted() and not self._stopping:
                end = min(self.num_ready + self._step, self._arena.num_pages)
                try:
                    self._arena.populate(self.num_ready, end)
                except OSError as error:  # then each page is made at its first use, as ever
                    _log.warning("KV pages are not made resident ahead of use: %s", error)
                    return
                self.num_ready = end
            self._wakes.get()
