"""What a decode worker does with attempts: reservations and handoffs as they come, tokens around each step. Pure.

Two threads run it. On the *driver's* thread, which in a worker is the transfer thread, attempts come, get pages and go:
so no grant waits for a step. On the *runner's* thread they are in the batch. The scheduler's lock guards what both use.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as SeqOf
from copy import copy
from functools import partial
from typing import Any

from decode_worker.events import Admitted, ComputesHere, Emit, Event, GrantMade, PromptComputed
from decode_worker.job import PROMPT, Choice, DecodeJob, Prompt
from decode_worker.ledger import AttemptState, Ledger
from decode_worker.receiver_driver import ReceiverDriver
from decode_worker.tokens import TokenBook
from kvtransfer.protocol.messages import AttemptKey, Commit, Grant, RefusalReason
from tandem.core import fault_points
from tandem.core.clock import Clock
from tandem.core.errors import DrainingError, HandoffError, InternalError, TandemError
from tandem.core.page_keys import PageKeys
from tandem.core.pages import next_page_keys, pages_for, salted
from tandem.core.token_ids import token_ids
from tandem.worker.batch import Batch
from tandem.worker.counters import WorkerCounters
from tandem.worker.guesses import Guesses
from tandem.worker.guide import Guide, GuideMaker
from tandem.worker.load import LoadReport
from tandem.worker.prompt_scoring import ScoreTokens
from tandem.worker.request import AttemptFailed, AttemptSpec, RequestLimits
from tandem.worker.scheduler import BatchScheduler
from tandem.worker.sequence import Sequence
from tandem.worker.spans import before
from tandem.worker.step import SampleTokens
from tandem.worker.turn import turn_of
from tandem.worker.validate import open_journals, validate

# What prompts would take beside steps that do nothing but generate is looked at this often.
_PROMPT_STEPS_S = 0.1

Submit = Callable[[Callable[[], None]], None]
"""Runs a call on a thread, in order."""


class DecodeRole:
    """The `StepHooks` and `AheadHooks` of a decode worker, and where its driver's results go.

    Args:
        queue_bound: attempts that may wait for pages.
        guesses: of tokens that may come next; `None`: none are made.
        to_runner: queues a call for the runner thread, before its next step.
        to_driver: queues a call for the driver's thread.
    """

    def __init__(
        self,
        *,
        worker_id: str,
        scheduler: BatchScheduler,
        driver: ReceiverDriver,
        emit: Emit,
        limits: RequestLimits,
        queue_bound: int,
        sample: SampleTokens,
        guides: GuideMaker,
        score: ScoreTokens,
        counters: WorkerCounters,
        load: LoadReport,
        clock: Clock,
        is_draining: Callable[[], bool],
        guesses: Guesses | None = None,
        to_runner: Submit,
        to_driver: Submit,
    ) -> None:
        self._worker_id = worker_id
        self._scheduler = scheduler
        self._pool = scheduler.pool
        self._lock = scheduler.lock
        self._driver = driver
        self._emit = emit
        self._limits = limits
        self._counters = counters
        self._load = load
        self._guides = guides
        self._clock = clock
        self._is_draining = is_draining
        self._to_runner = to_runner
        self._to_driver = to_driver
        self.ledger = Ledger[DecodeJob](scheduler, bound=queue_bound)
        self._tokens = TokenBook(
            scheduler=scheduler,
            ledger=self.ledger,
            limits=limits,
            sample_tokens=sample,
            score_tokens=score,
            counters=counters,
            emit=emit,
            drop=self._drop,
            guides=guides,
        )
        self._guesses = guesses
        self._arrivals = 0
        self._will_give_pages = False  # `give_pages` is on its way to the driver's thread
        # Who is held or waits, or what is free, since `give_pages` last looked; of the driver's thread.
        self._has_changed = False
        self._num_fetching = 0  # attempts that wait for pages to be read; of the driver's thread
        self._step_began_s = 0.0
        # Beside how many who ran it was noted what prompts take, whether some were computed, and when.
        self._prompt_steps_noted: tuple[int, bool, float] = 0, False, -math.inf
        self._num_generating: int | None = None  # in that step; `None`: nobody asks
        self._taken: tuple[float, int | None] = 0.0, None  # of the last one that was sampled: seconds, and the same

    # -- what routers ask; on the driver's thread

    def reserve(self, session: int, spec: AttemptSpec, max_local_tokens: int, *, unpaced: bool = False) -> None:
        """Take a request in; a repeated command is answered again.

        Args:
            max_local_tokens: the prompt is computed here if no more of its tokens than this are missing.
            unpaced: in chunks of full size then, also in the first attempt.
        """
        key = spec.key
        job = self.ledger.attempts.get(key)
        if job is None:
            try:
                job = self._make_job(session, spec, max_local_tokens, unpaced=unpaced)
                self._take_in(job)
            except TandemError as error:
                self._fail(session, key, error)
                return
            self._cancel_all(lambda job: job.key.request_id == key.request_id and job.key.attempt < key.attempt)
            if spec.params.grammar:  # compiled while prefill computes
                self._guides.prepare(spec.params.grammar, (), lambda _: None, partial(self.ledger.has, job))
        elif job.local is not None:
            self._emit({job.session: [job.local]})
            return
        self._driver.reserve(key)

    def _take_in(self, job: DecodeJob) -> None:
        with self._lock:  # a drain either sees this attempt, or it is refused here
            if self._is_draining():
                raise self._draining(job.key)
            self.ledger.note(job)

    def _make_job(self, session: int, spec: AttemptSpec, max_local_tokens: int, *, unpaced: bool) -> DecodeJob:
        key, num_prompt = spec.key, len(spec.prompt_ids)
        validate(spec, self._limits)
        journal, finished = open_journals(spec, self._limits)
        going_on = [c for c in range(spec.num_choices) if c not in finished]
        if unpaced and not going_on:  # else it would be granted pages that nobody fills
            raise InternalError("every choice has ended already", request_id=key.request_id)
        # The first attempt in the order must be able to end when it is alone, or preemption could not help.
        num_tokens = min(num_prompt + spec.params.max_tokens, self._limits.max_context)
        self._scheduler.check_fits(num_tokens, key.request_id)
        prompt = token_ids(spec.prompt_ids)
        salt = salted(self._scheduler.salt, spec.cache_salt)
        # A cached prefix has no logits.
        caching = self._scheduler.prefix_cache and not (spec.scoring and spec.scoring.num_known < num_prompt)
        self._arrivals += 1
        turn = turn_of(spec.priority, self._clock.now() - spec.age_s, self._limits.priority_ageing_s)
        return DecodeJob(
            key=key,
            turn=turn + spec.slack_s,
            own_turn=turn,
            tpot_s=spec.tpot_s,
            arrival=self._arrivals,
            num_tokens=num_prompt,
            num_running=max(1, len(going_on)),
            page_keys=PageKeys(next_page_keys(prompt, self._pool.page_size, salt) if caching else ()),
            # Prefill ends a request that has ended by its own rules.
            max_local_tokens=max_local_tokens if going_on else 0,
            session=session,
            prompt_ids=prompt,
            params=spec.params,
            num_choices=spec.num_choices,
            going_on=going_on,
            journal=journal,
            scoring=copy(spec.scoring),
            unpaced=unpaced,
            cache_salt=spec.cache_salt,
        )

    def cancel(self, key: AttemptKey, *, discards: bool = False) -> None:
        """Drop this attempt. Its pages come back now, or by the protocol where a writer may know them.

        Args:
            discards: what prefill computed for it may be wrong, also where it is what prefill sealed.
        """
        with self._lock:
            job = self.ledger.attempts.get(key)
            if job is not None and job.state is AttemptState.GRANTED:
                job.is_cancelled, job.may_be_wrong = True, discards
            elif job is not None:
                self.ledger.remove(job)
                self._to_runner(lambda: self._leave(job))
        self._has_changed = True
        self._driver.cancel(key)

    def end_choice(self, key: AttemptKey, choice: int) -> None:
        """Nobody wants more of this choice; the attempt goes on with the others."""
        job = self.ledger.attempts.get(key)
        if job is not None:
            job.ended.add(choice)
            self._to_runner(lambda: self._end_choices(job))

    def session_ended(self, session: int) -> None:
        """A router is gone: drop all attempts that it had started."""
        self._cancel_all(lambda job: job.session == session)

    def _cancel_all(self, is_meant: Callable[[DecodeJob], bool]) -> None:
        with self._lock:
            keys = [job.key for job in self.ledger.attempts.values() if is_meant(job)]
        for key in keys:
            self.cancel(key)

    # -- what the driver says; on its thread

    def queue(self, key: AttemptKey) -> None:
        """The protocol accepted the reservation: it waits for pages."""
        job = self.ledger.attempts.get(key)
        if job is None or job.state is not AttemptState.NEW:  # it runs, for so long that the protocol has forgotten it
            self._driver.denied(key, RefusalReason.ALREADY_ENDED)
            return
        self._has_changed = True
        with self._lock:
            is_fetched = self._fetches(job)
        if not is_fetched:
            self._push(job)

    def _fetches(self, job: DecodeJob) -> bool:
        """Whether pages below the pool are read before this one is queued.

        Only where it can be computed here then: else its pages come from prefill, and a grant does not wait for a disk.
        Those that are there are in use all the same, and what comes behind them is kept with them.
        """
        tiers, page_size = self._scheduler.tiers, self._pool.page_size
        if tiers is None:
            return False
        num_wanted = (job.num_tokens - 1) // page_size  # as the ledger takes
        num_hidden = self._scheduler.num_hidden(num_wanted * page_size)
        keys = job.page_keys[num_hidden:num_wanted]
        if not job.max_local_tokens:
            tiers.used(keys)
            return False
        at_least = pages_for(max(0, job.num_tokens - job.max_local_tokens), page_size) - num_hidden
        begins = tiers.fetch(keys, partial(self._fetched, job), at_least=at_least)
        self._num_fetching += begins
        return begins

    def _fetched(self, job: DecodeJob, _: SeqOf[int]) -> None:
        """What could be read of its pages is in the cache."""
        self._num_fetching -= 1
        if self.ledger.has(job) and job.state is AttemptState.NEW:
            self._push(job)
        self.give_pages()  # reading has held some, too
        self._to_runner(self.snapshot)  # as in `lift`

    def _push(self, job: DecodeJob) -> None:
        try:
            with self._lock:
                self.ledger.push(job)
        except TandemError as error:
            self._deny(job, RefusalReason.NO_ROOM, error)
            return
        fault_points.reach("decode.queued")

    def _deny(self, job: DecodeJob, reason: RefusalReason, error: TandemError) -> None:
        """This attempt gets no pages."""
        with self._lock:
            self.ledger.remove(job)
        self._driver.denied(job.key, reason)
        self._fail(job.session, job.key, error)

    def carried_out(self) -> None:
        """All instructions of one event are carried out: give pages to attempts that may have them now."""
        if self._has_changed:
            self.give_pages()

    def give_pages(self) -> None:
        """Give pages to all that may have them now."""
        self._will_give_pages = self._has_changed = False
        with self._lock:
            refused = list(self.ledger.waiting) if self._is_draining() else []
            taken = [] if refused else list(iter(self.ledger.take, None))
            num_cached = sum(self._num_cached(job) for job in taken)
            self._counters.num_prompt_tokens_cached += num_cached * self._pool.page_size
        for job in refused:
            self._deny(job, RefusalReason.DRAINING, self._draining(job.key))
        self.snapshot()
        for job in taken:
            if job.state is AttemptState.GRANTED:
                fault_points.reach("decode.granted")
                self._driver.granted(job.key, job.pages, job.num_leading)
            else:
                # For the protocol the attempt has ended, and it says so to a late repetition of its Reserve.
                self._driver.denied(job.key, RefusalReason.ALREADY_ENDED)
                self._enter_guided(job, {PROMPT: [], **job.journal}, partial(self._compute_here, job))

    def _num_cached(self, job: DecodeJob) -> int:
        """Places of its prompt that were in the cache; without those that a handoff passes over."""
        is_short = job.state is AttemptState.GRANTED and not self._scheduler.limits.num_windowed
        return len(job.cached) if is_short else job.num_there

    def grant(self, grant: Grant) -> None:
        """The protocol made a grant of the pages. The router passes it on to prefill."""
        job = self.ledger.attempts.get(grant.key)
        if job is not None and job.state is AttemptState.NEW:  # a repeated Reserve of an attempt that has ended here
            self.refused(grant.key, RefusalReason.ALREADY_ENDED, "")
        elif job is not None:
            self._emit({job.session: [GrantMade(grant)]})

    def admit(self, grant: Grant, commit: Commit, committed_s: float) -> None:
        """The handoff is verified, of a commit that came at `committed_s`: its choices are in the next step's batch."""
        job = self.ledger.attempts[grant.key]
        is_good = self._is_good(commit, job)
        with self._lock:
            self.ledger.admit(job)
            if not is_good:
                self.ledger.remove(job)
        if not is_good:
            text = f"the commit's first tokens make no sense: {commit.first_tokens}"
            self._fail(job.session, grant.key, HandoffError(text, reason=RefusalReason.INCOMPLETE.value))
        outputs = {first.choice: job.journal.get(first.choice, [first.token_id]) for first in commit.first_tokens}
        self._has_changed = True
        self._enter_guided(job, outputs, lambda: self._begin_choices(job, outputs, committed_s))

    def _is_good(self, commit: Commit, job: DecodeJob) -> bool:
        choices = {first.choice for first in commit.first_tokens}
        known = all(c < job.num_choices for c in choices)
        in_vocabulary = all(first.token_id < self._limits.vocab_size for first in commit.first_tokens)
        return bool(choices) and len(choices) == len(commit.first_tokens) and known and in_vocabulary

    def over(
        self,
        key: AttemptKey,
        pages: tuple[int, ...],
        verified: tuple[tuple[int, int], ...],
        reason: RefusalReason,
        *,
        quarantined: bool,
    ) -> None:
        """The handoff ended without admission."""
        # A writer that stops by itself may have found that its computation failed.
        has_stopped = reason is RefusalReason.WRITER_STOPPED
        with self._lock:
            job = self.ledger.attempts[key]
        # As many as there are pages of the prompt: no step is to wait for them.
        keys = [] if has_stopped else self.ledger.keys_to_keep(job, verified)
        with self._lock:
            self.ledger.end(job, pages, verified, quarantined=quarantined, keys=[] if job.may_be_wrong else keys)
        self._has_changed = True
        # A writer that stops by itself tells the router why itself.
        if not job.is_cancelled and not has_stopped:
            error = HandoffError(f"the handoff to {self._worker_id} failed: {reason.value}", reason=reason.value)
            error.retryable = reason.retryable
            self._fail(job.session, key, error)

    def lift(self, pages: tuple[int, ...]) -> None:
        """A fence was seen."""
        with self._lock:
            self._pool.lift(pages)
        self._has_changed = True
        self._to_runner(self.snapshot)  # it may rest, with a sequence that found no page

    def refused(self, key: AttemptKey, reason: RefusalReason, detail: str) -> None:
        """The protocol refuses this reservation, or a repetition of it after the attempt has gone on."""
        job = self.ledger.attempts.get(key)
        if job is None or job.state not in (AttemptState.NEW, AttemptState.WAITING):
            return
        with self._lock:
            self.ledger.remove(job)
        self._has_changed = True
        text = f"{self._worker_id} refused the reservation: {reason.value} {detail}".rstrip()
        self._fail(job.session, key, HandoffError(text, reason=reason.value, request_id=key.request_id))

    def _enter_guided(self, job: DecodeJob, outputs: dict[int, list[int]], enter: Callable[[], None]) -> None:
        """Have `enter` called by the runner; where there is a grammar, once it is compiled and knows these outputs."""
        if not job.params.grammar:
            self._to_runner(enter)
            return

        job.waits_for_grammar = True

        def guided(made: list[Guide] | TandemError) -> None:
            job.waits_for_grammar = False
            if isinstance(made, TandemError):
                self._unguided(job, made)
            else:
                job.guides = dict(zip(outputs, made, strict=True))
                enter()

        self._guides.prepare(job.params.grammar, list(outputs.values()), guided, lambda: self.ledger.has(job))

    # -- the batch; on the runner's thread

    def _unguided(self, job: DecodeJob, error: TandemError) -> None:
        """Its grammar holds for nothing."""
        with self._lock:
            if self._may_enter(job):
                self.ledger.remove(job)
                self._pool.release([*job.cached, *job.pages])
                self._fail(job.session, job.key, error)

    def _compute_here(self, job: DecodeJob) -> None:
        """Put the prompt into the batch, to be computed in chunks; there is no writer."""
        with self._lock:
            if not self._may_enter(job):
                return
            num_cached = job.num_there * self._pool.page_size
            job.local = ComputesHere(job.key, num_cached, len(job.prompt_ids) - num_cached)
            self.ledger.set_state(job, AttemptState.COMPUTING)
            self._scheduler.enter(job.begin_prompt(self._scheduler.groups))
            self.snapshot()  # goes with it: from now on the router counts the prompt by the worker's figures
            self._emit({job.session: [job.local]})
        fault_points.reach("decode.admitted")

    def _begin_choices(self, job: DecodeJob, outputs: dict[int, list[int]], committed_s: float) -> None:
        with self._lock:
            if not self._may_enter(job):
                return
            self._tokens.enter(job, outputs, [*job.cached, *job.pages], job.num_there, job.num_hidden)
            self._emit({job.session: [Admitted(job.key, self._clock.now() - committed_s)]})
        fault_points.reach("decode.admitted")

    def _may_enter(self, job: DecodeJob) -> bool:
        """Whether the attempt is still wanted; else release its pages."""
        if self.ledger.has(job):
            return True
        self._pool.release([*job.cached, *job.pages])
        return False

    def _leave(self, job: DecodeJob) -> None:
        """The attempt has left the ledger: take its sequences out of the batch too."""
        self._take_out(job, self._scheduler.retire)

    def _take_out(self, job: DecodeJob, take: Callable[[Sequence], SeqOf[int]]) -> None:
        with self._lock:
            for sequence in job.sequences:
                self._pool.release(take(sequence))
            job.sequences = []

    def _end_choices(self, job: DecodeJob) -> None:
        """Those of which nobody wants more leave the batch; where they are to come, they do not enter it."""
        with self._lock:
            if self.ledger.has(job) and job.state is AttemptState.RUNNING:
                for sequence in [each for each in job.sequences if each.choice in job.ended]:
                    self._tokens.end(job, sequence)

    def _drop(self, job: DecodeJob) -> None:
        """Drop an attempt whose result nobody needs, and whose KV may be wrong."""
        self.ledger.remove(job)
        self._take_out(job, self._scheduler.remove)

    def before_schedule(self) -> None:
        if self._guesses is not None:
            self._guesses.plan(self._scheduler.running)
        if self.ledger.waiting and not self._will_give_pages:  # the last step may have freed some
            self._will_give_pages = True
            self._to_driver(self.give_pages)

    def before_forward(self, batch: Batch) -> None:
        with self._lock:
            num_cached = sum(min(s.num_cached, s.num_prompt) for s in batch.admitted)
            self._counters.num_prompt_tokens_cached += num_cached
        self._counters.num_preemptions += len(batch.preempted)
        self._step_began_s = self._clock.now()
        is_asked = self._scheduler.learns_steps
        self._num_generating = sum(item.sequence.is_decode for item in batch.items) if is_asked else None
        self._tokens.begin_masks(batch)
        fault_points.reach("decode.step")

    def score(self, batch: Batch, logits: Any) -> Any:
        return self._tokens.score(batch, logits)

    def sample(self, batch: Batch, logits: Any) -> list[list[int]]:
        sampled = self._tokens.sample(batch, logits)
        # Before the next step begins, which may be told of before this one is.
        self._taken = self._clock.now() - self._step_began_s, self._num_generating
        return sampled

    def after_step(self, batch: Batch) -> None:
        took_s, num_generating = self._taken
        if num_generating is not None:
            num_tokens = batch.num_chunk_tokens + batch.num_paced_tokens
            self._scheduler.note_step(num_generating, num_tokens, took_s)
        self._counters.num_steps += 1
        self._counters.busy_s += took_s
        if batch.num_paced_tokens:
            self._counters.num_mixed_steps += 1
            self._counters.mixed_s += took_s
        if self._guesses is not None:
            self._guesses.step_took(batch, took_s)
        if batch.num_chunk_tokens:
            self._counters.num_chunk_tokens += batch.num_chunk_tokens
            self._counters.chunk_s += took_s
        with self._lock:
            if self._scheduler.tiers is not None:
                num_tokens = sum(item.num_tokens for item in batch.items if item.num_tokens > 1 and not item.guesses)
                self._scheduler.tiers.computed(num_tokens, took_s)
            has_prompts = batch.num_chunk_tokens + batch.num_paced_tokens > 0
            if has_prompts:
                self._note_chunks(batch, took_s)
            self._tokens.book(batch)
            now_s = self._clock.now()
            num_running, had_prompts, noted_s = self._prompt_steps_noted
            # Where steps go on to generate for the same and do nothing else, it hardly changes.
            has_changed = has_prompts or had_prompts or len(self._scheduler.running) != num_running
            if has_changed or now_s - noted_s >= _PROMPT_STEPS_S:
                self._note_prompt_steps(now_s, has_prompts=has_prompts)
        self.snapshot()

    def _note_prompt_steps(self, now_s: float, *, has_prompts: bool) -> None:
        """What prompts would take beside those who are left."""
        self._counters.prompt_steps = self._scheduler.prompt_steps()
        self._prompt_steps_noted = len(self._scheduler.running), has_prompts, now_s

    def _note_chunks(self, batch: Batch, took_s: float) -> None:
        """Note the chunks of prompts, and tell of those that are computed. No other step has begun since."""
        events: dict[int, list[Event]] = defaultdict(list)
        for item in batch.items:
            sequence = item.sequence
            match sequence.owner:
                case Prompt(job=job, spans=spans, error=None) if self.ledger.has(job):
                    spans.add("chunk", self._step_began_s, self._step_began_s + took_s, item.num_tokens)
                    if sequence.num_computed >= sequence.num_prompt:
                        events[job.session].append(PromptComputed(job.key, before(spans.kept, self._clock.now())))
        if events:
            self._emit(events)

    def may_plan_behind(self, batch: Batch) -> bool:
        if self._guesses is not None:  # which tokens come decides what is guessed behind them
            return False
        return all(  # whose mask is late has the same place again at the next step
            item.num_tokens == 1 and isinstance(item.sequence.owner, Choice) and not item.sequence.params.grammar
            for item in batch.items
        )

    def may_tell_later(self, batch: Batch) -> bool:
        return self._tokens.may_wait(batch)

    def goes_on(self, sequence: Sequence) -> bool:
        return bool(sequence.pages) and not self._tokens.has_ended(sequence)  # who was taken out has none

    def step_failed(self, batch: Batch, error: Exception) -> None:
        with self._lock:
            for item in batch.items:
                job: DecodeJob = item.sequence.owner.job
                if self.ledger.has(job):
                    self._fail(job.session, job.key, error)
                    self._drop(job)

    def going_idle(self) -> None:
        with self._lock:
            self._note_prompt_steps(self._clock.now(), has_prompts=False)
        self.snapshot()

    # -- on either thread

    def snapshot(self) -> None:
        """Note the load."""
        with self._lock:
            waiting, attempts = self._scheduler.waiting, self.ledger.waiting
            computing = (s for s in self._scheduler.running if not s.is_decode)
            tokens = sum(s.num_to_compute for s in (*waiting, *computing))
            tokens += sum(attempt.num_tokens for attempt in attempts if attempt.max_local_tokens)
            num_waiting = len(waiting) + len(attempts) + self._num_fetching
            self._load.take(num_waiting, tokens, self.ledger.num_to_come)

    def _draining(self, key: AttemptKey) -> DrainingError:
        return DrainingError(f"{self._worker_id} is draining", request_id=key.request_id)

    def _fail(self, session: int, key: AttemptKey, error: BaseException) -> None:
        self._emit({session: [AttemptFailed(key, error)]})
