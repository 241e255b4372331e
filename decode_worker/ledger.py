"""All attempts that are wanted or hold pages at a decode worker: their states, and which one gets pages when. Pure.

    NEW ──> WAITING ──┬──> GRANTED ──admit──┬──> ENTERING ──> COMPUTING ──> RUNNING
                      └──── computed here ──┘        └──── handed off ───────┘

**Reserved pages** are of no use before their commit. Together they may be at most a quarter of the pool, beside those
of one request that needs more than that by itself. Pages of a prompt that is computed here have no such cap, because
they wait for no other worker.

**The head of the queue waits for as many pages as it needs, and for as many again.** While they cannot be had, requests
behind it pass that need fewer. All that pass it have together no more pages than it needs itself; then nobody passes
any more, what runs ends, and it is the head that takes what comes back.

**Prompts of a colocated cluster** take turns before they take pages: the next one gets its own when those before it
that are computed have no more than two chunks left. So what waits here counts as waiting at the routers too.

**Running sequences come first.** Each of them keeps a place to grow into. While a preempted one waits, no new attempt
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
from tandem.core.pages import Shortage
from tandem.worker.scheduler import BatchScheduler

RESERVED_SHARE = 0.25
_MOST_LOOKED_AT = 16
"""From the head of the queue on, for one that passes it."""


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
    shortage: Shortage | None = None  # of its last try for pages
    num_passed: int = 0  # pages of those that have passed it at the head of the queue
    # Of the prompt, from when they are taken: the first `num_hidden` are of no use, since no token sees them; then come
    # those that are `cached` here already, and are pinned; then those that are sent or computed, or the first of these.
    # Of a mixed model it is those of the layers with a window that are of no use, and they stand in one list as
    # `tandem.core.layer_groups` says.
    num_hidden: int = 0
    cached: tuple[int, ...] = ()
    pages: tuple[int, ...] = ()
    num_leading: int = 0  # pages of the prompt that are not sent and not computed, as a handoff counts them
    num_there: int = 0  # places of the prompt of which all pages are among these

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
        self._in_state: dict[AttemptState, dict[AttemptKey, A]] = {state: {} for state in AttemptState}  # of these
        # Invariant: all and only those in WAITING, sorted by (turn, arrival).
        self.waiting: list[A] = []
        # Invariant: the sum over all attempts.
        self.num_to_come = 0

    def of_state(self, state: AttemptState) -> list[A]:
        return list(self._in_state[state].values())

    def has(self, attempt: A) -> bool:
        return self.attempts.get(attempt.key) is attempt

    def set_state(self, attempt: A, state: AttemptState) -> None:
        if not self.has(attempt):
            attempt.state = state
            return
        self.num_to_come -= attempt.num_to_come
        del self._in_state[attempt.state][attempt.key]
        attempt.state = state
        self._in_state[state][attempt.key] = attempt
        self.num_to_come += attempt.num_to_come

    def note(self, attempt: A) -> None:
        """A router wants this attempt, which is new or known."""
        self.attempts[attempt.key] = self._in_state[attempt.state][attempt.key] = attempt

    def push(self, attempt: A) -> None:
        """Queue a new attempt for pages.

        Raises:
            OverloadedError: as many as are allowed wait already.
        """
        if len(self.waiting) >= self._bound:
            raise OverloadedError(
                f"{len(self.waiting)} reservations wait here already", request_id=attempt.key.request_id
            )
        self.note(attempt)
        self.set_state(attempt, AttemptState.WAITING)
        insort(self.waiting, attempt, key=lambda a: (a.turn, a.arrival))

    def take(self) -> A | None:
        """Give pages to the head of the queue, or where it lacks them to one that may pass it: that one is GRANTED
        then, or ENTERING."""
        if not self.waiting or not self._may_come(head := self.waiting[0]):
            return None
        if self._give_pages(head):
            return self.waiting.pop(0)
        for place, passing in enumerate(self.waiting[1:_MOST_LOOKED_AT], 1):
            num_pages = self._most_pages(passing)
            may_pass = head.num_passed + num_pages <= self._most_pages(head)
            if may_pass and self._may_come(passing) and self._give_pages(passing):
                head.num_passed += num_pages
                return self.waiting.pop(place)
        return None

    def _most_pages(self, attempt: A) -> int:
        return self._scheduler.most_pages(attempt.num_tokens)

    # -- the ways out

    def remove(self, attempt: A) -> None:
        """Forget an attempt that was cancelled or has ended. The caller gives back its pages."""
        if not self.has(attempt):
            return
        self.num_to_come -= attempt.num_to_come
        del self.attempts[attempt.key], self._in_state[attempt.state][attempt.key]
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
        keys: Sequence[bytes] = (),
    ) -> None:
        """The handoff has ended without admission, and the attempt with it.

        Args:
            pages: of the grant, those that were not verified.
            verified: (index in the grant, page) of the others, in order: their writes have ended and their bytes are
                right.
            quarantined: an unfinished write may still reach `pages`.
            keys: as of `keys_to_keep`; none: nothing of `verified` stays as a cached prefix.
        """
        self.remove(attempt)
        if quarantined:
            self._pool.quarantine(pages)
        else:
            self._pool.release(pages)
        kept = [page for (_, page), _ in zip(verified, keys, strict=False)]
        self._pool.admit(kept)
        for page, key in zip(kept, keys, strict=True):
            self._pool.publish(page, key)
        self._pool.release([page for _, page in verified[len(kept) :]])
        self._pool.release([*attempt.cached, *kept])

    def keys_to_keep(self, attempt: A, verified: Sequence[tuple[int, int]]) -> list[bytes]:
        """Of those of `verified`, as of `end`, that continue the cached beginning without a gap, as far as they have
        keys. Needs no lock: nothing that it reads changes between grant and end."""
        groups, first, num_cached = self._scheduler.groups, attempt.num_there, len(attempt.cached)
        num = next((place for place, (index, _) in enumerate(verified) if index != place), len(verified))
        # Each place has a page; of the first one, in a mixed model, some may be cached.
        keys = groups.listed_keys(attempt.page_keys[first : first + num + 1], attempt.num_hidden, first)
        num_before = groups.index_of(first, attempt.num_hidden) if groups.num_windowed else num_cached
        return keys[num_cached - num_before :][:num]

    # -- deciding

    def _may_come(self, attempt: A) -> bool:
        """Whether it may, where its pages can be had."""
        may_compute = not attempt.unpaced or self._has_turn(attempt)
        return not self._scheduler.waiting and self._has_place(attempt) and may_compute

    def _give_pages(self, attempt: A) -> bool:
        pool = self._pool
        if self._still_lacks(attempt):
            return False
        # At least the last page is always sent or computed: decode's first step writes to it, so it must not be shared.
        keys = attempt.page_keys[: (attempt.num_tokens - 1) // pool.page_size]
        groups = self._scheduler.groups
        num_hidden, cached = groups.acquire(pool, keys)
        num_there = groups.places_of(len(cached), num_hidden)
        needed = self._scheduler.num_to_take(attempt.num_tokens, num_there)
        looked_for: Sequence[bytes] = keys
        num_to_begin = num_found = num_there
        is_local = self._is_local(attempt, num_there)
        if not is_local and groups.window:  # its pages are wanted as far as its first step sees them
            pool.release(cached)
            num_hidden = groups.num_hidden(attempt.num_tokens)
            looked_for = groups.listed_keys(keys, num_hidden)
            cached = pool.acquire(looked_for)
            needed = groups.num_seen(attempt.num_tokens) - len(cached)
            num_there, num_found = groups.places_of(len(cached), num_hidden), len(cached)
        pages = None
        if self._leaves_growth(needed, pool.num_available) and (is_local or self._may_reserve(needed)):
            pages = pool.allocate(needed) if is_local else pool.reserve(needed)
        if pages is None:
            attempt.shortage = groups.give_up(pool, cached, needed, num_to_begin, looked_for, num_found)
            return False
        attempt.num_hidden, attempt.cached, attempt.pages = num_hidden, tuple(cached), tuple(pages)
        attempt.num_leading = len(cached) if groups.num_windowed else num_hidden + len(cached)
        attempt.num_there = num_there
        self.set_state(attempt, AttemptState.ENTERING if is_local else AttemptState.GRANTED)
        return True

    def _has_place(self, attempt: A) -> bool:
        busy = len(self._scheduler.running) + self.num_to_come
        return busy == 0 or busy + attempt.num_running <= self._scheduler.limits.max_num_seqs

    def _has_turn(self, attempt: A) -> bool:
        """Whether what is left of the prompts before it that are computed here hardly fills the next two steps."""
        turn = (attempt.turn, attempt.arrival)
        running = (s for s in self._scheduler.running if (s.turn, s.arrival) <= turn)
        computed = (s.num_to_compute for s in running if not (s.is_decode or s.paced))
        entering = (
            other.num_tokens - other.num_there * self._pool.page_size
            for other in self.of_state(AttemptState.ENTERING)
            if other.unpaced and not other.waits_for_grammar and (other.turn, other.arrival) <= turn
        )
        return sum(computed) + sum(entering) <= 2 * self._scheduler.limits.chunk_size

    def _still_lacks(self, attempt: A) -> bool:
        """Whether one that lacked pages would lack them again, as far as that can be told without a look through its
        beginning."""
        shortage, since = attempt.shortage, self._pool.since(attempt.shortage)
        if shortage is None or since is None:
            return False
        has_room = self._leaves_growth(shortage.needed, since[0])
        return not has_room or not (self._is_local(attempt, shortage.num_there) or self._may_reserve(shortage.needed))

    def _is_local(self, attempt: A, num_there: int) -> bool:
        """Whether it is computed here where so many places of its beginning are there."""
        return attempt.num_tokens - num_there * self._pool.page_size <= attempt.max_local_tokens

    def _leaves_growth(self, needed: int, num_available: int) -> bool:
        entering = sum(attempt.num_running for attempt in self.of_state(AttemptState.ENTERING))
        return needed + self._scheduler.num_to_grow(len(self._scheduler.running) + entering) <= num_available

    def _may_reserve(self, needed: int) -> bool:
        share = RESERVED_SHARE * self._pool.num_pages
        reserved = [len(attempt.pages) for attempt in self.of_state(AttemptState.GRANTED)]
        if needed > share:
            return all(num_pages <= share for num_pages in reserved)
        return sum(num_pages for num_pages in reserved if num_pages <= share) + needed <= share
