"""All attempts that are wanted or hold pages at a decode worker: their states, and which one gets pages when. Pure.

    NEW ──> WAITING ──┬──> GRANTED ──admit──┬──> ENTERING ──> COMPUTING ──> RUNNING
                      └──── computed here ──┘        └──── handed off ───────┘

**Reserved pages** are of no use before their commit. Together they may be at most a quarter of the pool, but one
request is always granted when no other page is reserved. Pages of a prompt that is computed here have no such cap,
because they wait for no other worker. The head of the queue is never overtaken.

**Prompts of a colocated cluster** take turns before they take pages: the next one gets its own when those before it
that are computed have no more than two chunks left. So what waits here counts as waiting at the routers too.

**Running sequences come first.** Each of them keeps a page to grow into. While a preempted one waits, no new attempt
gets pages. So decode always goes on by itself, whatever prefill does, and no cycle between the two pools can stand
still.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from kvtransfer.protocol.messages import AttemptKey
from tandem.core.errors import OverloadedError
from tandem.core.page_keys import PageKeys
from tandem.core.pages import pages_for
from tandem.worker.scheduler import BatchScheduler

RESERVED_SHARE = 0.25


class AttemptState(Enum):
    NEW = "new"  # the protocol has not accepted it
    WAITING = "waiting"  # for pages
    GRANTED = "granted"  # its pages are reserved for a writer
    ENTERING = "entering"  # it has its pages; it is in the batch with the next step
    COMPUTING = "computing"  # its prompt is computed here, by one sequence for all its choices
    RUNNING = "running"  # its choices generate


@dataclass(slots=True, kw_only=True, eq=False)
class Attempt:
    """What the ledger knows of an attempt; `page_keys` are those of the prompt's full pages, none without a prefix
    cache."""

    key: AttemptKey
    turn: float  # of its prompt; lower goes first: `tandem.worker.turn`
    arrival: int
    num_tokens: int  # of the prompt
    num_running: int  # choices that will run
    page_keys: PageKeys
    max_local_tokens: int = 0  # computed here when no more than this are missing
    unpaced: bool = False  # in chunks of full size then, also in the first attempt
    waits_for_grammar: bool = False  # which is being compiled: nothing of the prompt is computed before
    state: AttemptState = AttemptState.NEW
    # Of the prompt, from when they are taken: the first `num_hidden` are of no use, since no token sees them; then come
    # those that are `cached` here already, and are pinned; then those that are sent or computed, or the first of these.
    num_hidden: int = 0
    cached: tuple[int, ...] = ()
    pages: tuple[int, ...] = ()

    @property
    def num_leading(self) -> int:
        """Pages of the prompt that are not sent and not computed."""
        return self.num_hidden + len(self.cached)

    @property
    def num_to_come(self) -> int:
        """Sequences of this attempt that are not in the batch yet."""
        match self.state:
            case AttemptState.GRANTED | AttemptState.ENTERING:
                return self.num_running
            case AttemptState.COMPUTING:
                return self.num_running - 1
        return 0


A = TypeVar("A", bound=Attempt)


class Ledger(Generic[A]):
    """All attempts of one decode worker. Guarded by the scheduler's lock, as the pool is.

    Args:
        bound: attempts that may wait.
    """

    def __init__(self, scheduler: BatchScheduler, *, bound: int) -> None:
        self._scheduler = scheduler
        self._pool = scheduler.pool
        self._bound = bound
        # Invariant: all and only attempts that a router still wants or whose pages are not given back.
        self.attempts: dict[AttemptKey, A] = {}
        # Invariant: all and only those in WAITING, sorted by (turn, arrival).
        self.waiting: list[A] = []
        # Invariant: the sum over all attempts.
        self.num_to_come = 0

    def of_state(self, state: AttemptState) -> list[A]:
        return [attempt for attempt in self.attempts.values() if attempt.state is state]

    def has(self, attempt: A) -> bool:
        return self.attempts.get(attempt.key) is attempt

    def set_state(self, attempt: A, state: AttemptState) -> None:
        if self.has(attempt):
            self.num_to_come -= attempt.num_to_come
        attempt.state = state
        if self.has(attempt):
            self.num_to_come += attempt.num_to_come

    def push(self, attempt: A) -> None:
        """Queue a new attempt for pages.

        Raises:
            OverloadedError: as many as are allowed wait already.
        """
        if len(self.waiting) >= self._bound:
            raise OverloadedError(
                f"{len(self.waiting)} reservations wait here already", request_id=attempt.key.request_id
            )
        self.set_state(attempt, AttemptState.WAITING)
        self.attempts[attempt.key] = attempt
        insort(self.waiting, attempt, key=lambda a: (a.turn, a.arrival))

    def take(self) -> A | None:
        """Give pages to the head of the queue, if that may be now: it is GRANTED then, or ENTERING."""
        if not self.waiting or not self._give_pages(self.waiting[0]):
            return None
        return self.waiting.pop(0)

    # -- the ways out

    def remove(self, attempt: A) -> None:
        """Forget an attempt that was cancelled or has ended. The caller gives back its pages."""
        if not self.has(attempt):
            return
        self.num_to_come -= attempt.num_to_come
        del self.attempts[attempt.key]
        if attempt.state is AttemptState.WAITING:
            self.waiting.remove(attempt)

    def admit(self, attempt: A) -> None:
        """The handoff is verified: its reserved pages become used ones."""
        self._pool.admit(attempt.pages)
        self.set_state(attempt, AttemptState.ENTERING)

    def end(
        self,
        attempt: A,
        pages: Sequence[int],
        verified: Sequence[tuple[int, int]],
        *,
        quarantined: bool,
        keeps: bool,
    ) -> None:
        """The handoff has ended without admission, and the attempt with it.

        Args:
            pages: of the grant, those that were not verified.
            verified: (index in the grant, page) of the others, in order: their writes have ended and their bytes are
                right.
            quarantined: an unfinished write may still reach `pages`.
            keeps: what of `verified` continues the cached beginning without a gap stays as a cached prefix.
        """
        self.remove(attempt)
        if quarantined:
            self._pool.quarantine(pages)
        else:
            self._pool.release(pages)
        kept = self._keep(attempt, verified) if keeps else []
        self._pool.release([page for _, page in verified[len(kept) :]])
        self._pool.release([*attempt.cached, *kept])

    def _keep(self, attempt: A, verified: Sequence[tuple[int, int]]) -> list[int]:
        keys = attempt.page_keys[attempt.num_leading :]
        kept: list[int] = []
        for (index, page), key in zip(verified, keys, strict=False):
            if index != len(kept):
                break
            self._pool.admit([page])
            self._pool.publish(page, key)
            kept.append(page)
        return kept

    # -- deciding

    def _give_pages(self, head: A) -> bool:
        pool = self._pool
        if self._scheduler.waiting or not self._has_place(head) or (head.unpaced and not self._has_turn(head)):
            return False
        # At least the last page is always sent or computed: decode's first step writes to it, so it must not be shared.
        keys = head.page_keys[: (head.num_tokens - 1) // pool.page_size]
        num_hidden, cached = pool.acquire_seen(keys, self._scheduler.limits.window)
        num_leading = num_hidden + len(cached)
        needed = self._scheduler.num_to_take(head.num_tokens, num_leading)
        is_local = head.num_tokens - num_leading * pool.page_size <= head.max_local_tokens
        if not is_local and self._scheduler.limits.window:  # its pages are wanted as far as its first step sees them
            pool.release(cached)
            num_hidden = self._scheduler.num_hidden(head.num_tokens)
            cached = pool.acquire(keys[num_hidden:])
            needed = pages_for(head.num_tokens, pool.page_size) - num_hidden - len(cached)
        pages = None
        if self._leaves_growth(needed) and (is_local or self._may_reserve(needed)):
            pages = pool.allocate(needed) if is_local else pool.reserve(needed)
        if pages is None:
            pool.release(cached)
            return False
        head.num_hidden, head.cached, head.pages = num_hidden, tuple(cached), tuple(pages)
        self.set_state(head, AttemptState.ENTERING if is_local else AttemptState.GRANTED)
        return True

    def _has_place(self, head: A) -> bool:
        busy = len(self._scheduler.running) + self.num_to_come
        return busy == 0 or busy + head.num_running <= self._scheduler.limits.max_num_seqs

    def _has_turn(self, head: A) -> bool:
        """Whether what is left of the prompts before it that are computed here hardly fills the next two steps."""
        turn = (head.turn, head.arrival)
        running = (s for s in self._scheduler.running if (s.turn, s.arrival) <= turn)
        computed = (s.num_to_compute for s in running if not (s.is_decode or s.paced))
        entering = (
            attempt.num_tokens - attempt.num_leading * self._pool.page_size
            for attempt in self.of_state(AttemptState.ENTERING)
            if attempt.unpaced and not attempt.waits_for_grammar and (attempt.turn, attempt.arrival) <= turn
        )
        return sum(computed) + sum(entering) <= 2 * self._scheduler.limits.chunk_size

    def _leaves_growth(self, needed: int) -> bool:
        entering = sum(attempt.num_running for attempt in self.of_state(AttemptState.ENTERING))
        return needed + len(self._scheduler.running) + entering <= self._pool.num_available

    def _may_reserve(self, needed: int) -> bool:
        reserved = sum(len(attempt.pages) for attempt in self.of_state(AttemptState.GRANTED))
        return not reserved or reserved + needed <= RESERVED_SHARE * self._pool.num_pages
