"""Makes KV pages resident before they are used, so that no step waits while the operating system clears memory.

A page's first use costs a huge page in each layer: some tens of milliseconds a step, now and then, until all of the
arena has been used. Memory is still taken as it is needed, only somewhat ahead.
"""

from __future__ import annotations

import logging
import threading

from tandem.engine.arena import KVArena

_log = logging.getLogger(__name__)

# This part of the arena is kept ready beyond what has been used.
_AHEAD = 8
_HUGE_PAGE_BYTES = 2 << 20


class PagesAhead:
    """A thread that keeps ahead of a worker's use of its arena, which lies in host memory."""

    def __init__(self, arena: KVArena, name: str) -> None:
        self._arena = arena
        self._step = max(1, _HUGE_PAGE_BYTES // arena.layout.extent_bytes)
        self._ahead = -(-arena.num_pages // _AHEAD)
        self._wanted = 0
        self._stopping = False
        self._changed = threading.Condition()
        #: Pages that are resident.
        self.num_ready = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()
        self.used(0)

    def used(self, first_untouched: int) -> None:
        """All pages from this one on have not been used yet; from any thread."""
        wanted = min(self._arena.num_pages, first_untouched + self._ahead)
        if wanted > self._wanted:
            with self._changed:
                self._wanted = wanted
                self._changed.notify()

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self._wanted > self.num_ready)
                if self._stopping:
                    return
            end = min(self.num_ready + self._step, self._arena.num_pages)
            try:
                self._arena.populate(self.num_ready, end)
            except OSError as error:  # then each page is made at its first use, as ever
                _log.warning("KV pages are not made resident ahead of use: %s", error)
                return
            self.num_ready = end
