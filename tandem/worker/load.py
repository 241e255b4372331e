"""A worker's load between two steps, as its routers see it. Pure."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from tandem.core.pages import PageCounts
from tandem.worker.scheduler import BatchScheduler


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """Counts that belong together.

    Attributes:
        num_queued: requests that wait for pages or a place.
        num_queued_tokens: prompt tokens that are not computed yet, of those that run too.
        num_incoming: sequences that have pages, and whose handoff is not over.
    """

    pages: PageCounts
    num_running: int = 0
    num_queued: int = 0
    num_queued_tokens: int = 0
    num_incoming: int = 0


class LoadReport:
    """The newest snapshot. Taken with the scheduler's lock held, read from any thread.

    Between two snapshots it also has what routers have sent meanwhile: a step may take long, and until its end nobody
    looks at what has come.

    Args:
        on_change: called when the load differs from the last one.
        on_taken: called with every snapshot.
    """

    def __init__(self, scheduler: BatchScheduler, on_change: Callable[[], None], on_taken: Callable[[], None]) -> None:
        self._scheduler = scheduler
        self._on_change = on_change
        self._on_taken = on_taken
        self._lock = threading.Lock()
        self._newest = LoadSnapshot(scheduler.pool.counts())
        # Requests and their prompt tokens that no snapshot shows yet; of these, what the next one shows.
        self._arriving, self._taken_in = (0, 0), (0, 0)

    @property
    def newest(self) -> LoadSnapshot:
        with self._lock:
            num, num_tokens = self._arriving
            if not num:
                return self._newest
            newest = self._newest
        return replace(
            newest, num_queued=newest.num_queued + num, num_queued_tokens=newest.num_queued_tokens + num_tokens
        )

    def arriving(self, num_tokens: int) -> None:
        """A request has come, with so many prompt tokens to compute here; from any thread. `taken_in` follows."""
        with self._lock:
            self._arriving = _sum(self._arriving, 1, num_tokens)
        self._on_change()

    def taken_in(self, num_tokens: int) -> None:
        """The next snapshot shows it, or it is refused before that; of any thread that takes snapshots."""
        with self._lock:
            self._taken_in = _sum(self._taken_in, 1, num_tokens)

    @property
    def is_behind(self) -> bool:
        """Whether something was taken in that no snapshot shows."""
        return self._taken_in != (0, 0)

    def take(self, num_queued: int, num_queued_tokens: int, num_incoming: int = 0) -> None:
        """Note the load."""
        scheduler = self._scheduler
        now = LoadSnapshot(
            scheduler.pool.counts(), len(scheduler.running), num_queued, num_queued_tokens, num_incoming
        )
        with self._lock:
            num, num_tokens = self._taken_in
            self._arriving, self._taken_in = _sum(self._arriving, -num, -num_tokens), (0, 0)
            has_changed, self._newest = num > 0 or now != self._newest, now
        if has_changed:
            self._on_change()
        self._on_taken()


def _sum(counts: tuple[int, int], num: int, num_tokens: int) -> tuple[int, int]:
    return counts[0] + num, counts[1] + num_tokens
