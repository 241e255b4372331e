"""A worker's load between two steps, as its routers see it. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tandem.core.pages import PageCounts
from tandem.worker.scheduler import BatchScheduler


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """Counts that belong together.

    Attributes:
        num_queued: requests that wait for pages or a place.
        num_queued_tokens: prompt tokens that are not computed yet, of those that run too.
    """

    pages: PageCounts
    num_running: int = 0
    num_queued: int = 0
    num_queued_tokens: int = 0


class LoadReport:
    """The newest snapshot. Taken with the scheduler's lock held, read from any thread.

    Args:
        on_change: called when the load differs from the last one.
        on_taken: called with every snapshot.
    """

    def __init__(self, scheduler: BatchScheduler, on_change: Callable[[], None], on_taken: Callable[[], None]) -> None:
        self._scheduler = scheduler
        self._on_change = on_change
        self._on_taken = on_taken
        self.newest = LoadSnapshot(scheduler.pool.counts())

    def take(self, num_queued: int, num_queued_tokens: int) -> None:
        """Note the load."""
        scheduler = self._scheduler
        now = LoadSnapshot(scheduler.pool.counts(), len(scheduler.running), num_queued, num_queued_tokens)
        if now != self.newest:
            self.newest = now
            self._on_change()
        self._on_taken()
