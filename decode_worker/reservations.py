"""Who gets pages for a prompt, and when: for a handoff, or to compute it here. Pure.

Reserved pages that are not committed yet are dead weight: together they may be at most a quarter of the pool, but one
request is always allowed when nothing else is reserved, however large. Pages of a prompt that is computed here need no
such cap: no other worker has to do anything before they are of use. The head of the queue is never overtaken.
Growth of what runs comes first: every running sequence keeps a page to grow into, and while a preempted one waits to
come back, nothing new is let in. So decode always goes on by itself, whatever prefill does: no cycle between the two
pools can stand still.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

from kvtransfer.protocol.messages import AttemptKey
from tandem.core.errors import OverloadedError
from tandem.core.pages import pages_for
from tandem.worker.scheduler import BatchScheduler

RESERVED_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Reservation:
    """A request for pages; `keys` are those of the prompt's full pages, none without a prefix cache."""

    key: AttemptKey
    turn: float  # lower goes first: `tandem.worker.turn`
    arrival: int
    num_tokens: int
    num_choices: int  # that will run
    keys: tuple[bytes, ...]
    max_local_tokens: int = 0  # computed here when no more than this are missing


@dataclass(frozen=True, slots=True)
class Taken:
    """Pages taken for a reservation: `cached` hold the prompt's beginning already and are pinned."""

    reservation: Reservation
    cached: tuple[int, ...]
    pages: tuple[int, ...]


class Granted(Taken):
    """`pages` are reserved for a writer."""


class Local(Taken):
    """`pages` are used: the prompt is computed here."""


class ReservationQueue:
    """Reservations that wait, and those that have pages. One thread owns it, the scheduler and the pool."""

    def __init__(self, scheduler: BatchScheduler, *, bound: int) -> None:
        self._scheduler = scheduler
        self._pool = scheduler.pool
        self._bound = bound
        # Invariant: sorted by (turn, arrival).
        self.waiting: list[Reservation] = []
        # Invariant: all and only grants whose pages are still reserved, by attempt.
        self.granted: dict[AttemptKey, Granted] = {}
        # Invariant: all and only attempts whose prompt is still computed here: one sequence, for all their choices.
        self.computing: dict[AttemptKey, Local] = {}

    def push(self, reservation: Reservation) -> None:
        """Queue a reservation.

        Raises:
            OverloadedError: as many as are allowed wait already.
        """
        if len(self.waiting) >= self._bound:
            raise OverloadedError(
                f"{len(self.waiting)} reservations wait here already", request_id=reservation.key.request_id
            )
        insort(self.waiting, reservation, key=lambda r: (r.turn, r.arrival))

    def drop(self, key: AttemptKey) -> None:
        """Nobody waits for this one any more."""
        self.waiting = [r for r in self.waiting if r.key != key]

    def take(self) -> Granted | Local | None:
        """Give pages to the head of the queue, if that may be now.

        The caller lets a `Local` into the batch before it asks again: what runs is looked at.
        """
        taken = self._take(self.waiting[0]) if self.waiting else None
        if taken is None:
            return None
        self.waiting.pop(0)
        if isinstance(taken, Granted):
            self.granted[taken.reservation.key] = taken
        else:
            self.computing[taken.reservation.key] = taken
        return taken

    # -- the ways out

    def admit(self, key: AttemptKey) -> Granted:
        """The handoff is verified: the pages, reserved so far, are used."""
        granted = self.granted.pop(key)
        self._pool.admit(granted.pages)
        return granted

    def end(
        self,
        key: AttemptKey,
        pages: Sequence[int],
        verified: Sequence[tuple[int, int]],
        *,
        quarantined: bool,
        keeps: bool,
    ) -> None:
        """The handoff is over without admission.

        Args:
            pages: of the grant, those that were not verified.
            verified: (index in the grant, page) of the others, in order: their writes have ended and their bytes are
                right.
            quarantined: an unfinished write may still reach `pages`.
            keeps: what of `verified` continues the cached beginning without a gap stays as a cached prefix.
        """
        granted = self.granted.pop(key)
        if quarantined:
            self._pool.quarantine(pages)
        else:
            self._pool.release(pages)
        kept = self._keep(granted, verified) if keeps else []
        self._pool.release([page for _, page in verified[len(kept) :]])
        self._pool.release([*granted.cached, *kept])

    def _keep(self, granted: Granted, verified: Sequence[tuple[int, int]]) -> list[int]:
        keys = granted.reservation.keys[len(granted.cached) :]
        kept: list[int] = []
        for (index, page), key in zip(verified, keys, strict=False):
            if index != len(kept):
                break
            self._pool.admit([page])
            self._pool.publish(page, key)
            kept.append(page)
        return kept

    def computed(self, key: AttemptKey) -> None:
        """The prompt is computed here, or nobody wants it any more; its pages are the scheduler's."""
        self.computing.pop(key, None)

    # -- deciding

    def _take(self, head: Reservation) -> Granted | Local | None:
        pool = self._pool
        if self._scheduler.waiting or not self._has_place(head):
            return None
        # At least the last page is always sent or computed: decode's own first step needs it private.
        cached = pool.acquire(head.keys[: (head.num_tokens - 1) // pool.page_size])
        needed = pages_for(head.num_tokens, pool.page_size) - len(cached)
        is_local = head.num_tokens - len(cached) * pool.page_size <= head.max_local_tokens
        if self._leaves_growth(needed):
            if is_local and (pages := pool.allocate(needed)) is not None:
                return Local(head, tuple(cached), tuple(pages))
            if not is_local and self._may_reserve(needed) and (pages := pool.reserve(needed)) is not None:
                return Granted(head, tuple(cached), tuple(pages))
        pool.release(cached)
        return None

    def _has_place(self, head: Reservation) -> bool:
        # A prompt that is computed here has one place, and will have one for each choice.
        coming = sum(g.reservation.num_choices for g in self.granted.values())
        coming += sum(c.reservation.num_choices - 1 for c in self.computing.values())
        busy = coming + len(self._scheduler.running)
        return busy == 0 or busy + head.num_choices <= self._scheduler.limits.max_num_seqs

    def _leaves_growth(self, needed: int) -> bool:
        return needed + len(self._scheduler.running) <= self._pool.num_available

    def _may_reserve(self, needed: int) -> bool:
        reserved = sum(len(g.pages) for g in self.granted.values())
        return not reserved or reserved + needed <= RESERVED_SHARE * self._pool.num_pages
