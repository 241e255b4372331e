"""Who gets pages for a handoff, and when. Pure.

Reserved pages that are not committed yet are dead weight: together they may be at most a quarter of the pool, but one
request is always allowed when nothing else is reserved, however large. The head of the queue is never overtaken.
Growth of what runs comes first: every running sequence keeps a page to grow into, and while a preempted one waits to
come back, nothing new is let in. So decode always goes on by itself, whatever prefill does: no cycle between the two
pools can stand still.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from kvtransfer.protocol.messages import AttemptKey
from tandem.core.errors import OverloadedError
from tandem.core.pages import pages_for
from tandem.worker.scheduler import BatchScheduler

RESERVED_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Reservation:
    """A request for pages; `keys` are the prompt's page keys, empty without a prefix cache."""

    key: AttemptKey
    priority: int
    arrival: int
    num_tokens: int
    num_choices: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Granted:
    """Pages taken for a reservation: `cached` hold the prompt's beginning already and are pinned."""

    reservation: Reservation
    cached: tuple[int, ...]
    pages: tuple[int, ...]


class ReservationQueue:
    """Reservations that wait, and those granted but not settled. One thread owns it, the scheduler and the pool."""

    def __init__(self, scheduler: BatchScheduler, *, bound: int) -> None:
        self._scheduler = scheduler
        self._pool = scheduler.pool
        self._bound = bound
        # Invariant: sorted by (priority, arrival).
        self.waiting: list[Reservation] = []
        # Invariant: all and only grants whose pages are still reserved, by attempt.
        self.granted: dict[AttemptKey, Granted] = {}

    def push(self, reservation: Reservation) -> None:
        """Queue a reservation.

        Raises:
            OverloadedError: as many as are allowed wait already.
        """
        if len(self.waiting) >= self._bound:
            raise OverloadedError(
                f"{len(self.waiting)} reservations wait here already", request_id=reservation.key.request_id
            )
        insort(self.waiting, reservation, key=lambda r: (r.priority, r.arrival))

    def drop(self, key: AttemptKey) -> None:
        """Nobody waits for this one any more."""
        self.waiting = [r for r in self.waiting if r.key != key]

    def settle(self, key: AttemptKey) -> Granted | None:
        """The pages of a grant have left the reserved state; returns what was granted."""
        return self.granted.pop(key, None)

    def pump(self) -> list[Granted]:
        """Grant what may be granted now, in order."""
        granted: list[Granted] = []
        while self.waiting:
            taken = self._take(self.waiting[0])
            if taken is None:
                break
            self.waiting.pop(0)
            self.granted[taken.reservation.key] = taken
            granted.append(taken)
        return granted

    def _take(self, head: Reservation) -> Granted | None:
        scheduler, pool = self._scheduler, self._pool
        if scheduler.waiting or not self._has_place(head):
            return None
        num_prompt_pages = pages_for(head.num_tokens, pool.page_size)
        # At least the last page is always sent: decode's own first step needs it private.
        cached = pool.acquire(head.keys[: (head.num_tokens - 1) // pool.page_size])
        needed = num_prompt_pages - len(cached)
        if self._may_reserve(needed):
            pages = pool.reserve(needed)
            if pages is not None:
                return Granted(head, tuple(cached), tuple(pages))
        pool.release(cached)
        return None

    def _has_place(self, head: Reservation) -> bool:
        coming = sum(g.reservation.num_choices for g in self.granted.values())
        busy = coming + len(self._scheduler.running)
        return busy == 0 or busy + head.num_choices <= self._scheduler.limits.max_num_seqs

    def _may_reserve(self, needed: int) -> bool:
        reserved = sum(len(g.pages) for g in self.granted.values())
        if reserved and reserved + needed > RESERVED_SHARE * self._pool.num_pages:
            return False
        return needed + len(self._scheduler.running) <= self._pool.num_available
