"""The batch scheduler of both roles: Sarathi-Serve's decode-maximal batches under a token budget.

    1  Waiting sequences that are promoted get places and pages, taken from others if need be.
    2  Every running sequence that needs one token decodes.
    3  Running sequences that need more tokens get chunks, from the budget that is left.
    4  Waiting sequences are admitted in order, while budget, places and pages last.

**Chunked prefill.** Chunks share a step only until they keep the processor busy. Further chunks would make all of them
end later and none sooner, so a step usually completes one prompt. There are two exceptions. A short prompt may join a
chunk of a long prompt that does not end with the step. While many prompts wait, a step may complete two of them
(`SchedulerLimits.num_to_pair`).

**Roles.** A prefill worker adds prompts only, so its phase 2 is empty. A decode worker adds admitted handoffs. Its
chunks are replay, after a preemption or of a journal, and *paced* prompts. Chunks of a paced prompt are as large as
leaves all who wait for the step the time per token that they want (`PromptRoom`).

**Preemption.** When pages run out, the last sequence in the order (`Sequence.order`) gives up its pages and waits to be
replayed. The first sequence in the order is never preempted. So it always ends, and then the next one is the first.

**Windows.** Where every layer sees the last tokens only (`SchedulerLimits.window`), pages behind them are given back as
a sequence goes on. A prompt gets pages for its window and a chunk when it is admitted, and in the moment in which it
gives one back another one for its end: so it never waits for a page in its middle, whoever else does. Pages enter the
prefix cache when they are given back, or all is computed, so that those of a prompt under way have no other owner.
In a mixed model (`tandem.core.layer_groups`) this holds for the pages of the layers with a window; a prompt gets those
of the layers that see all when it is admitted, for all its tokens.

**Promotion.** A prompt is *promoted* when decode holds pages for it. It goes first, and keeps its pages and place until
it is removed. A prompt is *parked* when it is computed and has left the batch, while its pages still wait for decode. A
promoted sequence takes pages and places from sequences that are not promoted, running or parked. That breaks the cycle
between the two pools: see docs/design.md.

The scheduler is pure: it owns the page accounting of its worker, imports no tensor library and reads no clock.
References: Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve", OSDI 2024; Zhong
et al., "DistServe", OSDI 2024 (section 3.1: prompts are batched up to where prefill is bound by compute).
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from operator import attrgetter

from tandem.core.errors import InvalidRequestError, OverloadedError
from tandem.core.layer_groups import LayerGroups
from tandem.core.page_keys import PageKeys
from tandem.core.pages import PagePool, PageTable, page_table, pages_for
from tandem.core.step_times import NO_PROMPTS, PromptSteps
from tandem.core.tiers import PageTiers
from tandem.worker.batch import NO_TOKENS, Batch, ScheduledSequence, SchedulerLimits
from tandem.worker.prompt_room import PromptRoom
from tandem.worker.sequence import Sequence
from tandem.worker.step_budget import StepBudget

_order = attrgetter("order")

# Where no time is left beside what generates, the first prompt still gets its chunk's full size divided by this.
_LEAST_CHUNK_PART = 8

# Pages that came computed, with a handoff: so many of them a step adds to the prefix cache. Were it all of them, a step
# in which many long prompts come would be late for everybody.
_PAGES_TO_PUBLISH = 512


class BatchScheduler:
    """Decides which sequences compute which tokens in the next step. One thread owns the batch.

    Args:
        lock: guards the pool where a second thread uses it too; none: one thread has all.
    """

    def __init__(
        self,
        pool: PagePool,
        limits: SchedulerLimits,
        *,
        salt: bytes,
        prefix_cache: bool = True,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        if limits.chunk_size % pool.page_size:
            raise ValueError(f"chunk size {limits.chunk_size} is no multiple of the page size {pool.page_size}")
        self.pool = pool
        self.limits = limits
        self.groups = LayerGroups(pool.page_size, limits.window, limits.num_windowed)
        self.salt = salt
        self.prefix_cache = prefix_cache
        # Invariants: each list is sorted by `Sequence.order`, none shares a sequence, and waiting ones hold no pages.
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.parked: list[Sequence] = []
        # Held to read or change the pool and what is decided from it; never held while a step is computed.
        # Invariants: only the owning thread changes the batch, between two steps; no page that the present step reads
        # or writes becomes free before the step has ended.
        self.lock = lock or nullcontext()
        # Source pages of the present step's copies. The sequence that gets the copy gives up its reference to them when
        # the step has ended.
        self._copied: list[int] = []
        # Entered since the last step was decided.
        self._entered: list[Sequence] = []
        # What keeps pages that the pool evicts; `None`: nothing does.
        self.tiers: PageTiers | None = None
        # How long steps take: the first bounds chunks of prompts that yield, the second those of paced ones.
        self.budget = StepBudget()
        self.prompt_room = PromptRoom()
        self._bounds_chunks = False  # a prompt was computed that yields and is not paced: the cluster is colocated

    # -- coming and going

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that holds no pages.

        Raises:
            OverloadedError: the queue is full.
            InvalidRequestError: the sequence does not fit into the whole pool.
        """
        self.check_fits(len(sequence.token_ids), sequence.request_id)
        if len(self.waiting) >= self.limits.queue_bound:
            raise OverloadedError(f"{len(self.waiting)} sequences wait here already", request_id=sequence.request_id)
        insort(self.waiting, sequence, key=_order)

    def check_fits(self, num_tokens: int, request_id: str) -> None:
        """Raise `InvalidRequestError` when `num_tokens` need more pages than the pool has in all."""
        needed = self.most_pages(num_tokens)
        if needed > self.pool.num_pages:
            raise InvalidRequestError(
                f"{num_tokens} tokens need {needed} pages, this worker has {self.pool.num_pages}; "
                "shorten the prompt or max_tokens, or give cache.memory_bytes more",
                request_id=request_id,
            )

    def enter(self, sequence: Sequence) -> None:
        """Add a sequence whose pages already hold its KV to the batch, from the next step on."""
        insort(self.running, sequence, key=_order)
        self._entered.append(sequence)

    def park(self, sequence: Sequence) -> None:
        """Take a computed sequence out of the batch; it keeps its pages until `remove`.

        While it is not promoted it may lose its pages. Then it waits, and is computed again.
        """
        self._take_out(sequence)
        if self.limits.window:  # its pages are given back no more, so others may have them too
            self.publish_computed(sequence)
        insort(self.parked, sequence, key=_order)

    def promote(self, sequence: Sequence) -> None:
        """Let `sequence` go before all that are not promoted, because decode holds pages for it."""
        queue = self._take_out(sequence)
        sequence.promoted = True
        if queue is not None:
            insort(queue, sequence, key=_order)

    def remove(self, sequence: Sequence) -> Seq[int]:
        """Take a sequence out and return its pages. The caller must release them."""
        self._take_out(sequence)
        return self._take_pages(sequence)

    def retire(self, sequence: Sequence) -> Seq[int]:
        """`remove` of a sequence whose KV is right: first all its full pages are added to the prefix cache."""
        self.publish_computed(sequence)
        return self.remove(sequence)

    def _take_out(self, sequence: Sequence) -> list[Sequence] | None:
        """Return the queue that it was in; `None`: in none."""
        for queue in (self.running, self.waiting, self.parked):
            if sequence in queue:
                queue.remove(sequence)
                return queue
        return None

    # -- one step

    def schedule(self) -> Batch:
        """Decide the next step and take the pages that it needs. `apply` or `abandon` comes before the next call."""
        batch, budget = Batch(), self.limits.max_num_batched_tokens
        with self.lock:
            self._admit_promoted(batch)
            budget = self._schedule_decodes(batch, budget)
            budget = self._schedule_chunks(batch, budget)
            self._admit_waiting(batch, budget)
            self._entered.clear()
        return batch

    def schedule_behind(self, batch: Batch) -> Batch | None:
        """Decide the step behind `batch`, of one token of each of its sequences, while that is computed; as if each got
        a token that does not end it. `None` where more than generation goes on, or pages might have to be taken from
        somebody: `batch` uses them. `join` comes before it is computed."""
        behind = Batch()
        with self.lock:
            if self.waiting or self.pool.num_available < self.num_to_grow(len(self.running)):
                return None
            if not all(sequence.is_decode for sequence in self.running):
                return None
            for item in batch.items:
                item.sequence.token_ids.append(0)
                item.sequence.num_computed += 1
            if not any(self._must_copy(sequence) for sequence in self.running):
                self._schedule_decodes(behind, self.limits.max_num_batched_tokens)
            for item in batch.items:
                item.sequence.token_ids.pop()
                item.sequence.num_computed -= 1
            self._entered.clear()
        return behind if behind.items else None

    def join(self, batch: Batch) -> bool:
        """Add to a step that was decided ahead, and in which nothing is computed yet, those that have entered since.
        `False`: somebody waits, or has more to compute than a token, and the step is to be decided anew."""
        with self.lock:
            if self.waiting or not all(one.is_decode for one in self._entered if one.pages):
                return False
            budget = self.limits.max_num_batched_tokens - len(batch.items)
            for sequence in self._entered:
                if budget < 1 or sequence not in self.running:  # it may have left, or be preempted already
                    continue
                if self._grow_or_preempt(batch, sequence, 1):
                    self._put(batch, sequence, 1)
                    budget -= 1
            self._entered.clear()
        return True

    def _admit_promoted(self, batch: Batch) -> None:
        """Admit promoted sequences first, before anything is planned for the sequences that they preempt."""
        while self.waiting and self.waiting[0].promoted:
            sequence = self.waiting[0]
            num_places = self.limits.max_num_seqs - sum(s.promoted for s in self.running)
            if num_places < 1 or not self._give_pages(batch, sequence):
                return
            self.waiting.pop(0)
            if len(self.running) >= self.limits.max_num_seqs:
                self._preempt(batch, self.running[-1])
            self.enter(sequence)
            batch.admitted.append(sequence)

    def _schedule_decodes(self, batch: Batch, budget: int) -> int:
        for sequence in [s for s in self.running if s.is_decode]:
            if budget < 1:
                break
            if batch.preempted and sequence not in self.running:  # a sequence before it has preempted it
                continue
            if self._grow_or_preempt(batch, sequence, 1):  # guesses stay within the page
                guesses = sequence.guesses[: budget - 1]
                self._put(batch, sequence, 1, guesses)
                budget -= 1 + len(guesses)
        return budget

    def _schedule_chunks(self, batch: Batch, budget: int) -> int:
        for sequence in [s for s in self.running if not s.is_decode and s.num_to_compute]:
            if batch.preempted and sequence not in self.running:
                continue
            num_tokens = self._chunk(batch, sequence, budget)
            if num_tokens < 1 or not self._may_join(batch, sequence, num_tokens):
                continue
            if self._grow_or_preempt(batch, sequence, num_tokens):
                self._put_chunk(batch, sequence, num_tokens)
                budget -= num_tokens
        return budget

    def _admit_waiting(self, batch: Batch, budget: int) -> None:
        while self.waiting and not batch.preempted and len(self.running) < self.limits.max_num_seqs:
            sequence = self.waiting[0]
            if sequence.promoted or budget < min(self.pool.page_size, sequence.num_to_compute) or self._is_full(batch):
                return  # the head is not overtaken
            if self._is_saturated(batch) and sequence.num_to_compute > min(budget, self.limits.chunk_size):
                return  # the second prompt of two must end with this step
            if not self._give_pages(batch, sequence):
                return
            self.waiting.pop(0)
            self.enter(sequence)
            batch.admitted.append(sequence)
            num_tokens = self._chunk(batch, sequence, budget)
            if not self._may_join(batch, sequence, num_tokens):
                return
            if num_tokens:
                self._put_chunk(batch, sequence, num_tokens)
                budget -= num_tokens

    def apply(self, batch: Batch, sampled: Seq[Seq[int]]) -> None:
        """Book a computed step. `sampled` has the tokens of each item that samples, in order. One that has none was not
        sampled after all: its newest token is computed again, for its logits."""
        tokens = iter(sampled)
        num_to_publish = _PAGES_TO_PUBLISH
        with self.lock:
            self._release_copied()
            for item in batch.items:
                sequence = item.sequence
                following = next(tokens) if item.samples else ()
                # Behind a guess that was wrong all is wrong; with each token that came one more was right.
                num_right = len(following) if item.guesses else item.num_tokens
                if item.samples and not following and not item.guesses:
                    num_right -= 1
                sequence.num_computed = item.start + num_right
                sequence.token_ids.extend(following)
                if self.limits.window:
                    num_to_publish -= self._publish_hidden(sequence, num_to_publish)
                    self.slide(sequence)
                else:
                    num_to_publish -= self._publish(item, num_to_publish)

    @property
    def num_unfilled_slots(self) -> int:
        """Slots without a token in the pages that the batch's sequences are filling: less than a page of each.

        It looks at each of them, and so is not for steps; any thread may ask, without the lock.
        """
        num_slots = sum(-sequence.num_computed % self.pool.page_size for sequence in list(self.running))
        return self.groups.num_of_place * num_slots

    @property
    def learns_steps(self) -> bool:
        """Whether `note_step` has a use: else it would be work of every step for nothing."""
        return self._bounds_chunks or self.limits.computes_prompts

    def note_step(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """A step that generated for so many sequences, and computed so many tokens of prompts, took so long."""
        if self._bounds_chunks:
            self.budget.note(num_rows, num_tokens, seconds)
        if self.limits.computes_prompts:
            self.prompt_room.note(num_rows, num_tokens, seconds)

    def abandon(self) -> None:
        """The step has failed, and computes nothing any more."""
        with self.lock:
            self._release_copied()

    # -- pages

    def _chunk(self, batch: Batch, sequence: Sequence, budget: int) -> int:
        """Tokens of the next chunk. It fills whole pages, unless it completes the sequence or is paced."""
        left = sequence.num_to_compute
        if sequence.paced:  # even if it is alone: a handoff may be admitted during the step
            return min(left, budget, self.limits.chunk_size, self._paced_room(batch))
        room = min(budget, self.limits.chunk_size)
        if sequence.yields:
            room = min(room, self._room_beside(batch))
        if sequence.is_to_score:  # all logits of a step together are bounded as those of a chunk
            room = min(room, self.limits.chunk_size - batch.num_scored_tokens)
        if left <= room:
            return left
        end = (sequence.num_computed + room) // self.pool.page_size * self.pool.page_size
        return max(0, end - sequence.num_computed)

    def _room_beside(self, batch: Batch) -> int:
        """Tokens of prompts that leave those that generate the time per token that the most urgent of them wants. The
        first chunk always has a part of its full size: prompts go on also where the time cannot be kept."""
        if batch.most_beside is None:
            self._bounds_chunks = True
            batch.most_beside = self._most_beside(batch)
        if batch.num_chunk_tokens:
            return max(0, batch.most_beside - batch.num_chunk_tokens)
        return max(batch.most_beside, self.limits.chunk_size // _LEAST_CHUNK_PART, self.pool.page_size)

    def _most_beside(self, batch: Batch) -> int:
        """Of all prompts together that yield; those that generate are in the batch already."""
        wanted_s = [item.sequence.tpot_s for item in batch.items if item.sequence.is_decode]
        target_s = min(wanted_s, default=math.inf)
        most = self.budget.most_tokens(len(wanted_s), target_s) if target_s < math.inf else None
        return self.limits.max_num_batched_tokens if most is None else most

    def _paced_room(self, batch: Batch) -> int:
        """Tokens of paced prompts that the step has room for. The first prompt always gets a page, so that it ends."""
        if batch.most_paced is None:
            num_rows = sum(item.sequence.is_decode for item in batch.items)
            batch.most_paced = self.prompt_room.tokens(
                num_rows, max(1, self.num_prompts), self.wanted_step_s, self._most_paced(num_rows)
            )
        room = max(0, batch.most_paced - batch.num_paced_tokens - batch.num_chunk_tokens)
        return room if batch.num_paced_tokens else max(room, self.pool.page_size)

    @property
    def wanted_step_s(self) -> float:
        """In which all who run want a step to end: also prompts, as others in their place soon will."""
        return min((sequence.tpot_s for sequence in self.running), default=math.inf)

    @property
    def num_prompts(self) -> int:
        """That are computed beside what generates, or wait for that."""
        return sum(sequence.paced and not sequence.is_decode for sequence in (*self.running, *self.waiting))

    def _most_paced(self, num_rows: int) -> int:
        """Tokens of paced prompts beside so many sequences that generate, whatever the time."""
        limits = self.limits
        bound = limits.paced_tokens - num_rows if limits.paced_tokens else limits.chunk_size
        return max(0, min(bound, limits.chunk_size))

    def prompt_steps(self) -> PromptSteps:
        """What prompts would take now beside those that run."""
        if not self.limits.computes_prompts:
            return NO_PROMPTS
        num_rows = sum(sequence.is_decode for sequence in self.running)
        return self.prompt_room.steps(num_rows, 1 + self.num_prompts, self.wanted_step_s, self._most_paced(num_rows))

    def _give_pages(self, batch: Batch, sequence: Sequence) -> bool:
        """Give a waiting sequence pages for all its tokens, cached ones first; or no page at all."""
        if not sequence.promoted and self._still_lacks(sequence):
            return False
        keys = self.wanted_keys(sequence)
        num_hidden, cached = self.groups.acquire(self.pool, keys)
        num_cached = self.groups.places_of(len(cached), num_hidden)
        needed = self.num_to_take(len(sequence.token_ids), num_cached)
        if sequence.promoted:
            has_room = self._reclaim(batch, needed)
        else:
            has_room = self._has_room(sequence, needed, self.pool.num_available, self.pool.counts().used)
        fresh = self.pool.allocate(needed) if has_room else None
        if fresh is None:
            sequence.shortage = self.groups.give_up(self.pool, cached, needed, num_cached, keys, num_cached)
            return False
        num_places = pages_for(len(sequence.token_ids), self.pool.page_size)
        sequence.pages, sequence.windowed = self.groups.tables(cached + fresh, num_hidden, num_places)
        sequence.num_hidden = num_hidden
        sequence.num_computed = sequence.num_cached = num_cached * self.pool.page_size
        sequence.num_published = num_cached
        return True

    def num_hidden(self, num_computed: int) -> int:
        """Leading places that no layer with a window sees behind so many tokens."""
        return self.groups.num_hidden(num_computed)

    def num_to_take(self, num_tokens: int, num_cached: int) -> int:
        """Pages to take for a sequence of so many tokens whose first `num_cached` places are there, so that it takes no
        more until all these are computed: for all of them, or for its window and a chunk."""
        num_missing = pages_for(num_tokens, self.pool.page_size) - num_cached
        if not self.limits.window:
            return num_missing
        most_in_window = self.groups.most_in_window(self.limits.chunk_size)
        return self.groups.pages_of(num_missing, min(num_missing, most_in_window))

    def most_pages(self, num_tokens: int) -> int:
        """Pages that a sequence of so many tokens has at a time, at most; some may be cached ones, beside its own."""
        return self.groups.most_pages(num_tokens, self.limits.chunk_size)

    def slide(self, sequence: Sequence) -> None:
        """Give back the pages that no token sees any more, and take as many for the tokens that are to come."""
        num_hidden = self.num_hidden(sequence.num_computed)
        if num_hidden <= sequence.num_hidden:
            return
        if self.prefix_cache:
            self._publish_between(sequence, max(sequence.num_published, sequence.num_hidden), num_hidden)
        table, of_place = self.sliding(sequence)
        first, last = sequence.num_hidden * of_place, num_hidden * of_place
        num_available = self.pool.num_available
        self.pool.release(table[first:last], behind=True)
        num_back = self.pool.num_available - num_available
        table.hide(first, last)
        sequence.num_hidden = num_hidden
        if not sequence.is_decode:
            num_places = pages_for(len(sequence.token_ids), self.pool.page_size)
            if self.limits.num_windowed:  # an output that is replayed gets pages of both kinds as its chunks need them
                num_places = len(sequence.pages)
            num_missing = num_places - len(table) // of_place
            taken = self.pool.allocate(of_place * max(0, min(num_back // of_place, num_missing)))
            assert taken is not None  # no more than came back just now
            table.extend(taken)

    def sliding(self, sequence: Sequence) -> tuple[PageTable, int]:
        """The table whose pages are given back behind the window, and how many of them a place has."""
        num_windowed = self.limits.num_windowed
        return (sequence.windowed, num_windowed) if num_windowed else (sequence.pages, 1)

    def held_pages(self, sequence: Sequence) -> Seq[int]:
        """All and only the pages that it has, in the order of its places."""
        return self.groups.listed(sequence.pages, sequence.windowed, sequence.num_hidden)

    def _take_pages(self, sequence: Sequence) -> Seq[int]:
        pages = self.held_pages(sequence)
        sequence.pages, sequence.windowed, sequence.num_hidden = page_table(), page_table(), 0
        return pages

    def wanted_keys(self, sequence: Sequence) -> PageKeys:
        """Keys of the leading pages that a waiting sequence takes from the cache if they are there."""
        if self.prefix_cache:
            sequence.extend_keys(self.pool.page_size, self.salt, len(sequence.token_ids))
        return sequence.keys[: sequence.num_cacheable // self.pool.page_size]

    def discard(self, keys: Seq[bytes]) -> None:
        """The KV of these pages may be wrong: nobody finds it any more, neither in the pool nor below it."""
        self.pool.discard(self.groups.listed_keys(keys, 0))
        if self.tiers is not None:
            self.tiers.discarded(keys)

    def _has_room(self, sequence: Sequence, needed: int, num_available: int, num_used: int) -> bool:
        """Whether a sequence that is not promoted may take `needed` new pages, beside the cached ones that it has,
        where so many are available and used with these."""
        limit = self.limits.unpromoted_share * self.pool.num_pages
        if (self.running or self.parked) and num_used + needed > limit:
            return False
        # A preempted sequence comes back only when all others can grow by a place; else it is preempted again at once.
        headroom = self.num_to_grow(len(self.running)) if sequence.num_preemptions else 0
        return needed + headroom <= num_available

    def num_to_grow(self, num_sequences: int) -> int:
        """Pages with which so many sequences grow by a place."""
        return num_sequences * self.groups.num_of_place

    def _still_lacks(self, sequence: Sequence) -> bool:
        """Whether one that is not promoted and lacked pages would lack them again, as far as that can be told without
        a look through its beginning."""
        shortage, since = sequence.shortage, self.pool.since(sequence.shortage)
        return shortage is not None and since is not None and not self._has_room(sequence, shortage.needed, *since)

    def _reclaim(self, batch: Batch, needed: int) -> bool:
        """Preempt sequences that are not promoted until `needed` pages are available; none if that is not enough."""
        if needed <= self.pool.num_available:  # as mostly: what the others hold is not looked through
            return True
        victims = sorted((s for s in (*self.running, *self.parked) if not s.promoted), key=_order)
        holders = Counter(page for victim in victims for page in self.held_pages(victim))
        num_theirs = sum(self.pool.references(page) == num for page, num in holders.items())
        if needed > self.pool.num_available + num_theirs:
            return False
        while needed > self.pool.num_available:
            self._preempt(batch, victims.pop())
        return True

    def _grow_or_preempt(self, batch: Batch, sequence: Sequence, num_tokens: int) -> bool:
        """Make the slots of the next `num_tokens` writable; where pages are short, preempt the last in the order."""
        while not self._grow(batch, sequence, num_tokens):
            victim = self._victim(batch)
            if victim is None:
                batch.stalled.append(sequence)
                return False
            self._preempt(batch, victim)
            if victim is sequence:
                return False
        return True

    def _grow(self, batch: Batch, sequence: Sequence, num_tokens: int) -> bool:
        first = sequence.num_computed // self.pool.page_size
        last = (sequence.num_computed + num_tokens - 1) // self.pool.page_size
        is_there = first == last < len(sequence.pages) and not self._is_shared(sequence.pages[first])
        if is_there and not self.limits.num_windowed:
            return True  # as in most steps
        tables = self._tables(sequence)
        shared = [
            (table, index)
            for table, of_place in tables
            for index in range(first * of_place, min((last + 1) * of_place, len(table)))
            if self._is_shared(table[index])
        ]
        targets = self._take_places(sequence, last + 1, len(shared))
        if targets is None:
            return False
        for (table, index), target in zip(shared, targets, strict=True):  # another choice still reads the old page
            batch.copies.append((table[index], target))
            self._copied.append(table[index])
            table[index] = target
        return True

    def grow(self, sequence: Sequence, num_places: int) -> bool:
        """Give it pages for so many places; `False`: they cannot be had."""
        return self._take_places(sequence, num_places, 0) is not None

    def _take_places(self, sequence: Sequence, num_places: int, num_beside: int) -> list[int] | None:
        """Pages for so many places, and others beside them, which are returned; `None`: they cannot be had."""
        tables = self._tables(sequence)
        num_new = [max(0, num_places * of_place - len(table)) for table, of_place in tables]
        pages = self.pool.allocate(num_beside + sum(num_new))
        if pages is None:
            return None
        beside, taken = pages[:num_beside], iter(pages[num_beside:])
        for (table, _), num in zip(tables, num_new, strict=True):
            table.extend(islice(taken, num))
        return beside

    def _must_copy(self, sequence: Sequence) -> bool:
        """Whether the place of its next token is in a page that others have, too."""
        place = sequence.num_computed // self.pool.page_size
        return any(
            self._is_shared(page)
            for table, of_place in self._tables(sequence)
            for page in table[place * of_place : (place + 1) * of_place]
        )

    def _tables(self, sequence: Sequence) -> tuple[tuple[PageTable, int], ...]:
        """Its tables, and how many pages of a place each has."""
        num_windowed = self.limits.num_windowed
        all_seen = (sequence.pages, 1)
        return (all_seen, (sequence.windowed, num_windowed)) if num_windowed else (all_seen,)

    def _is_shared(self, page: int) -> bool:
        num_owners = self.pool.references(page)
        return num_owners > 1 and num_owners - self._copied.count(page) > 1

    def _release_copied(self) -> None:
        copied, self._copied = self._copied, []
        self.pool.release(copied)

    def _victim(self, batch: Batch) -> Sequence | None:
        """The last sequence in the order that is not in this step; never the first one of all."""
        in_step = {id(item.sequence) for item in batch.items}
        for sequence in reversed(self.running[1:]):
            if id(sequence) not in in_step:
                return sequence
        return None

    def _preempt(self, batch: Batch, sequence: Sequence) -> None:
        self.publish_computed(sequence)
        self._take_out(sequence)
        self.pool.release(self._take_pages(sequence))
        sequence.num_computed = sequence.num_published = 0
        sequence.num_preemptions += 1
        insort(self.waiting, sequence, key=_order)
        batch.preempted.append(sequence)

    def _put(self, batch: Batch, sequence: Sequence, num_tokens: int, guesses: tuple[int, ...] = ()) -> None:
        samples = num_tokens == sequence.num_to_compute and sequence.samples
        scored = pooled = NO_TOKENS
        if sequence.scoring is not None:
            scored = sequence.scoring.in_step(sequence.num_computed, num_tokens, sequence.num_prompt)
            batch.num_scored_tokens += len(scored)
        if sequence.pooling is not None:
            pooled = sequence.pooling.in_step(sequence.num_computed, num_tokens, sequence.num_prompt)
        num_tokens += len(guesses)
        start = sequence.num_computed
        batch.items.append(ScheduledSequence(sequence, start, num_tokens, samples, scored, pooled, guesses))

    def _may_join(self, batch: Batch, sequence: Sequence, num_tokens: int) -> bool:
        """Whether a chunk may share the step. Where a long prompt keeps the processor busy and does not end, a chunk
        that completes its prompt may join: else it would wait for all of the long one."""
        if sequence.paced:  # its chunk was cut to the room that is left
            return True
        is_busy = batch.num_chunk_tokens >= self.limits.saturating_tokens
        return not self._is_full(batch) and (not is_busy or num_tokens == sequence.num_to_compute)

    def _is_full(self, batch: Batch) -> bool:
        """Whether the prompts that end with this step keep the processor busy: any further chunk delays them."""
        return self._is_saturated(batch) and batch.num_ending >= self._num_to_end(batch)

    def _is_saturated(self, batch: Batch) -> bool:
        return batch.num_ending_tokens >= self.limits.saturating_tokens

    def _num_to_end(self, batch: Batch) -> int:
        """How many prompts a step should complete where one of them keeps the processor busy."""
        goes_on = batch.num_chunk_tokens > batch.num_ending_tokens
        many_wait = 0 < self.limits.num_to_pair <= len(self.running) + len(self.waiting)
        return 2 if many_wait and not goes_on else 1

    def _put_chunk(self, batch: Batch, sequence: Sequence, num_tokens: int) -> None:
        self._put(batch, sequence, num_tokens)
        if sequence.paced:
            batch.num_paced_tokens += num_tokens
        else:
            batch.num_chunk_tokens += num_tokens
            if num_tokens == sequence.num_to_compute:
                batch.num_ending += 1
                batch.num_ending_tokens += num_tokens

    def _publish(self, item: ScheduledSequence, num_older: int) -> int:
        """Add to the prefix cache as many pages as this step has filled, and up to `num_older` that were full before;
        returns how many of these there were."""
        sequence, page_size = item.sequence, self.pool.page_size
        num_full, begin = sequence.num_computed // page_size, sequence.num_published
        if not self.prefix_cache or num_full <= begin:
            return 0
        num_new = num_full - item.start // page_size
        end = min(num_full, begin + num_new + num_older)
        self._publish_to(sequence, end)
        return max(0, end - begin - num_new)

    def publish_computed(self, sequence: Sequence) -> None:
        """Add all its full pages to the prefix cache."""
        if self.prefix_cache:
            self._publish_to(sequence, sequence.num_computed // self.pool.page_size)

    def _publish_hidden(self, sequence: Sequence, most: int) -> int:
        """Add to the prefix cache up to `most` places that came with a handoff and that no layer with a window sees: in
        a mixed model pages of the others. Returns how many."""
        num_older = min(most, sequence.num_hidden - sequence.num_published) if self.prefix_cache else 0
        if num_older > 0:
            self._publish_to(sequence, sequence.num_published + num_older)
        return max(0, num_older)

    def _publish_to(self, sequence: Sequence, end: int) -> None:
        """Add the pages before the `end`th, which are full."""
        self._publish_between(sequence, sequence.num_published, end)

    def _publish_between(self, sequence: Sequence, begin: int, end: int) -> None:
        """Add full pages; those before the `begin`th may be added later."""
        sequence.extend_keys(self.pool.page_size, self.salt, end * self.pool.page_size)
        if self.limits.num_windowed:
            self._publish_groups(sequence, begin, end)
        else:
            self._publish_pages(sequence, max(begin, sequence.num_hidden), end)
        if begin == sequence.num_published:
            sequence.num_published = max(begin, end)

    def _publish_pages(self, sequence: Sequence, begin: int, end: int) -> None:
        before = sequence.keys[begin - 1] if 0 < begin < end else b""
        for page, key in zip(sequence.pages[begin:end], sequence.keys[begin:end], strict=True):
            self.pool.publish(page, key)
            if self.tiers is not None:
                self.tiers.entered(key, before)
            before = key

    def _publish_groups(self, sequence: Sequence, begin: int, end: int) -> None:
        """Of a mixed model, whose pages no tier keeps."""
        if end <= begin:
            return
        pages = self.groups.listed(sequence.pages, sequence.windowed, sequence.num_hidden, begin, end)
        keys = self.groups.listed_keys(sequence.keys[begin:end], sequence.num_hidden, begin)
        for page, key in zip(pages, keys, strict=True):
            self.pool.publish(page, key)
