"""A worker's load between two steps, as its routers see it. Pure."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from tandem.core.pages import CacheChange, PageCounts
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
        on_cache: called with what the prefix cache has entered and given up since the last snapshot.
    """

    def __init__(
        self,
        scheduler: BatchScheduler,
        on_change: Callable[[], None],
        on_taken: Callable[[], None],
        on_cache: Callable[[CacheChange], None] = lambda _: None,
    ) -> None:
        self._scheduler = scheduler
        self._on_cache = on_cache
        self._on_change = on_change
        self._on_taken = on_taken
        self._newest = LoadSnapshot(scheduler.pool.counts())
        self._numbers = itertools.count()
        # Prompt tokens of requests that no snapshot shows yet, by their numbers; of these, whom the next one shows.
        # No other thread sees a change of either half done.
        self._arriving: dict[int, int] = {}
        self._taken_in: deque[int] = deque()

    @property
    def newest(self) -> LoadSnapshot:
        newest, arriving = self._newest, list(self._arriving.values())
        if not arriving:
            return newest
        num_queued, num_tokens = newest.num_queued + len(arriving), newest.num_queued_tokens + sum(arriving)
        return replace(newest, num_queued=num_queued, num_queued_tokens=num_tokens)

    def arriving(self, num_tokens: int) -> int:
        """A request has come, with so many prompt tokens to compute here; from any thread.

        Returns its number, for `taken_in`.
        """
        number = next(self._numbers)
        self._arriving[number] = num_tokens
        self._on_change()
        return number

    def taken_in(self, number: int) -> None:
        """The next snapshot shows it, or it is refused before that."""
        self._taken_in.append(number)

    @property
    def is_behind(self) -> bool:
        """Whether something was taken in that no snapshot shows."""
        return bool(self._taken_in)

    def take(self, num_queued: int, num_queued_tokens: int, num_incoming: int = 0) -> None:
        """Note the load."""
        scheduler = self._scheduler
        now = LoadSnapshot(scheduler.pool.counts(), len(scheduler.running), num_queued, num_queued_tokens, num_incoming)
        has_changed, self._newest = bool(self._taken_in) or now != self._newest, now
        if (change := scheduler.pool.take_changes()) is not None:
            self._on_cache(change)
            has_changed = True
        while self._taken_in:
            del self._arriving[self._taken_in.popleft()]
        if has_changed:
            self._on_change()
        self._on_taken()
