"""What a decode worker does around each step: reservations, admissions, tokens. Runs on the runner thread."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Protocol

from decode_worker.generation import Choice, Generation, Prompt
from decode_worker.reservations import Granted, Local, Reservation, ReservationQueue
from kvtransfer.protocol.messages import AttemptKey, Commit, Grant, RefusalReason
from tandem.core import points
from tandem.core.errors import DrainingError, HandoffError, InternalError, InvalidRequestError, TandemError
from tandem.core.pages import page_keys
from tandem.core.sampling import SampledToken
from tandem.engine.sampler import Logits, Sampler
from tandem.rpc.v1 import decode_pb2 as decode_pb
from tandem.worker.limits import request_limits
from tandem.worker.process import WorkerProcess
from tandem.worker.request import AttemptFailed, TokenSampled
from tandem.worker.scheduler import Batch, ScheduledSequence
from tandem.worker.sequence import FinishReason, Sequence, finish_reason
from tandem.worker.turn import turn_of
from tandem.worker.validate import open_journals, validate
from tandem.worker.wire import failed_to_proto, grant_to_proto, spec_from_proto, token_to_proto

_log = logging.getLogger(__name__)

Events = defaultdict[int, list[decode_pb.DecodeEvent]]  # by session


class Desk(Protocol):
    """The receiving desk, called from the runner thread; each call is queued to the transfer thread, in order."""

    def reserve(self, key: AttemptKey) -> None: ...

    def granted(self, key: AttemptKey, pages: tuple[int, ...], first_page: int) -> None: ...

    def denied(self, key: AttemptKey, reason: RefusalReason) -> None: ...

    def cancel(self, key: AttemptKey) -> None: ...


class Generations:
    """The `Role` of a decode worker.

    Args:
        emit: sends events to routers, by session; from the runner thread.
    """

    def __init__(
        self,
        worker: WorkerProcess,
        desk: Desk,
        emit: Callable[[dict[int, list[decode_pb.DecodeEvent]]], None],
    ) -> None:
        self._worker = worker
        self._scheduler = worker.scheduler
        self._pool = worker.pool
        self._desk = desk
        self._emit = emit
        self._sampler = Sampler(worker.engine.eos_token_ids)
        self._eos = frozenset(worker.engine.eos_token_ids)
        self._limits = request_limits(worker.engine, worker.config)
        # Of the step under way: what was sampled for each item that samples, or why it could not be.
        self._sampled: list[list[SampledToken] | InternalError] = []
        self.reservations = ReservationQueue(worker.scheduler, bound=worker.config.scheduling.worker_queue_bound)
        # Invariant: all and only attempts that a router still wants; what waits for pages or computes is among them.
        self.jobs: dict[AttemptKey, Generation] = {}
        self._arrivals = 0

    # -- commands

    def reserve(self, session: int, command: decode_pb.Reserve) -> None:
        """Take a request in; a repeated command is answered again."""
        key = AttemptKey(command.request_id, command.attempt)
        job = self.jobs.get(key)
        if job is not None and job.local is not None:
            self._emit({job.session: [decode_pb.DecodeEvent(local=job.local)]})
            return
        if job is None:
            try:
                self.jobs[key] = self._make_job(key, session, command)
            except TandemError as error:
                self._fail(session, key, error)
                return
            for older in [k for k in self.jobs if k.request_id == key.request_id and k.attempt < key.attempt]:
                self.cancel(older)
        self._desk.reserve(key)

    def _make_job(self, key: AttemptKey, session: int, command: decode_pb.Reserve) -> Generation:
        if self._worker.draining:
            raise self._draining(key)
        spec, limit = spec_from_proto(command), self._limits.max_context
        prompt, params, num_choices = list(spec.prompt_ids), spec.params, spec.num_choices
        validate(spec, self._limits)
        journal, finished = open_journals(spec, self._limits)
        if strange := [c for c in (*journal, *finished) if c >= num_choices]:
            raise InvalidRequestError(f"a journal for choices {strange} of {num_choices}", request_id=key.request_id)
        # The first in the order alone must be able to end here, or preemption could not help it.
        self._scheduler.check_fits(min(len(prompt) + params.max_tokens, limit), key.request_id)
        self._arrivals += 1
        return Generation(
            key=key,
            session=session,
            turn=turn_of(spec.priority, time.monotonic() - spec.age_s, self._limits.priority_ageing_s),
            arrival=self._arrivals,
            prompt_ids=prompt,
            params=params,
            num_choices=num_choices,
            journal=journal,
            finished=finished,
            max_local_tokens=command.max_local_tokens,
        )

    def cancel(self, key: AttemptKey) -> None:
        """Nobody wants this attempt any more; its pages follow, by the protocol where a writer may know them."""
        job = self.jobs.pop(key, None)
        if job is not None:
            self._leave(job)
        self._desk.cancel(key)

    def session_ended(self, session: int) -> None:
        """Its router is gone, and with it all that it had started."""
        for job in [j for j in self.jobs.values() if j.session == session]:
            self.cancel(job.key)

    def _leave(self, job: Generation) -> None:
        self.reservations.drop(job.key)
        self.reservations.computed(job.key)
        for sequence in job.sequences:
            self._pool.release(self._scheduler.remove(sequence))
        job.sequences = []
        self._worker.pacing.first_steps_taken(int(job.is_new))
        job.is_new = False

    # -- what the desk says

    def queue(self, key: AttemptKey) -> None:
        """The protocol accepted the reservation: it waits for pages."""
        job = self.jobs.get(key)
        if job is None:  # cancelled meanwhile
            self._desk.denied(key, RefusalReason.CANCELLED)
            return
        if job.queued:  # it runs, for so long that the protocol has forgotten it
            self._desk.denied(key, RefusalReason.ALREADY_ENDED)
            return
        job.queued = True
        salt, caching = self._scheduler.salt, self._scheduler.prefix_cache
        keys = tuple(page_keys(job.prompt_ids, self._pool.page_size, salt)) if caching else ()
        reservation = Reservation(
            key,
            job.turn,
            job.arrival,
            len(job.prompt_ids),
            max(1, len(job.going_on)),
            keys,
            # A request that has ended by its own rules is prefill's to end.
            job.max_local_tokens if job.going_on else 0,
        )
        try:
            self.reservations.push(reservation)
        except TandemError as error:
            self._deny(job, RefusalReason.NO_ROOM, error)
            return
        points.reach("decode.queued")

    def _deny(self, job: Generation, reason: RefusalReason, error: TandemError) -> None:
        """This attempt gets no pages."""
        del self.jobs[job.key]
        self.reservations.drop(job.key)
        self._desk.denied(job.key, reason)
        self._fail(job.session, job.key, error)

    def drop(self, key: AttemptKey) -> None:
        self.reservations.drop(key)

    def grant(self, grant: Grant) -> None:
        """The protocol made a grant of the pages: the router hands it to prefill."""
        job = self.jobs.get(grant.key)
        if job is not None and not job.queued:  # a repeated Reserve of an attempt that has ended here
            self.refused(grant.key, RefusalReason.ALREADY_ENDED, "")
        elif job is not None:
            self._emit({job.session: [decode_pb.DecodeEvent(granted=grant_to_proto(grant))]})

    def admit(self, grant: Grant, commit: Commit, committed_s: float) -> None:
        """The handoff is verified, of a commit that came at `committed_s`: its choices are in the next step's batch."""
        granted = self.reservations.admit(grant.key)
        pages = [*granted.cached, *granted.pages]
        job = self.jobs.get(grant.key)
        if job is None:  # cancelled while the commit was on its way
            self._pool.release(pages)
            self._worker.pacing.first_steps_taken(1)
            return
        if not self._are_good(commit, job):
            self._pool.release(pages)
            self._worker.pacing.first_steps_taken(1)
            del self.jobs[grant.key]
            text = f"the commit's first tokens make no sense: {commit.first_tokens}"
            self._fail(job.session, grant.key, HandoffError(text, reason=RefusalReason.INCOMPLETE.value))
            return
        outputs = {first.choice: job.journal.get(first.choice, [first.token_id]) for first in commit.first_tokens}
        job.is_new = True
        self._enter(job, outputs, pages, len(granted.cached))
        key, admission_s = grant.key, time.monotonic() - committed_s
        admitted = decode_pb.Admitted(request_id=key.request_id, attempt=key.attempt, admission_s=admission_s)
        self._emit({job.session: [decode_pb.DecodeEvent(admitted=admitted)]})
        points.reach("decode.admitted")

    def _are_good(self, commit: Commit, job: Generation) -> bool:
        choices = {first.choice for first in commit.first_tokens}
        known = all(c < job.num_choices for c in choices)
        in_vocabulary = all(first.token_id < self._worker.engine.vocab_size for first in commit.first_tokens)
        return bool(choices) and len(choices) == len(commit.first_tokens) and known and in_vocabulary

    def _enter(self, job: Generation, outputs: dict[int, list[int]], pages: list[int], num_published: int) -> None:
        """Let choices into the batch that share the prompt's `pages`; each copies what it writes to."""
        for num_entered, (choice, output) in enumerate(outputs.items()):
            if num_entered:
                self._pool.share(pages)
            self._scheduler.enter(job.begin_choice(choice, output, pages, num_published))

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
        # A writer that stops by itself may have found that what it computed is of no use.
        keeps = reason is not RefusalReason.WRITER_STOPPED
        self.reservations.end(key, pages, verified, quarantined=quarantined, keeps=keeps)
        self._worker.pacing.first_steps_taken(1)
        job = self.jobs.pop(key, None)
        # A writer that stops by itself tells the router why, or that there was nothing to hand off.
        if job is not None and reason is not RefusalReason.WRITER_STOPPED:
            error = HandoffError(f"the handoff to {self._worker.worker_id} failed: {reason.value}", reason=reason.value)
            error.retryable = reason.retryable
            self._fail(job.session, key, error)

    def lift(self, pages: tuple[int, ...]) -> None:
        """A fence was seen."""
        self._pool.lift(pages)

    def refused(self, key: AttemptKey, reason: RefusalReason, detail: str) -> None:
        """The protocol will not have this reservation."""
        job = self.jobs.get(key)
        if job is None or job.local is not None:  # it was told itself that there will be no grant
            return
        if job.queued and reason is RefusalReason.ALREADY_ENDED:  # of the repetition alone
            return
        del self.jobs[key]
        text = f"{self._worker.worker_id} refused the reservation: {reason.value} {detail}".rstrip()
        self._fail(job.session, key, HandoffError(text, reason=reason.value, request_id=key.request_id))

    # -- a step

    def give_way(self) -> bool:
        """A step begins a little later where one more handoff is about to be admitted."""
        return self._worker.pacing.give_way(has_work=any(s.is_decode for s in self._scheduler.running))

    def before_schedule(self) -> None:
        self._scheduler.has_spare_threads = self._worker.pacing.has_spare_threads
        if self._worker.draining:
            for reservation in self.reservations.waiting:
                self._deny(self.jobs[reservation.key], RefusalReason.DRAINING, self._draining(reservation.key))
        while (taken := self.reservations.take()) is not None:
            self._worker.counters.num_prompt_tokens_cached += len(taken.cached) * self._pool.page_size
            if isinstance(taken, Granted):
                points.reach("decode.granted")
                self._desk.granted(taken.reservation.key, taken.pages, len(taken.cached))
            else:
                self._compute_here(taken)

    def _compute_here(self, taken: Local) -> None:
        """The prompt goes into the batch, to be computed by chunks; no writer takes part."""
        key = taken.reservation.key
        job = self.jobs[key]
        num_cached = len(taken.cached) * self._pool.page_size
        job.local = decode_pb.ComputesHere(
            request_id=key.request_id,
            attempt=key.attempt,
            num_cached_tokens=num_cached,
            num_computed_tokens=len(job.prompt_ids) - num_cached,
        )
        # For the protocol the attempt has ended: a late repetition of its Reserve hears so.
        self._desk.denied(key, RefusalReason.ALREADY_ENDED)
        self._scheduler.enter(job.begin_prompt(taken, self._pool.page_size))
        self.snapshot()  # goes with it: from now on the router counts the prompt by the worker's figures
        self._emit({job.session: [decode_pb.DecodeEvent(local=job.local)]})
        points.reach("decode.admitted")

    def before_forward(self, batch: Batch) -> None:
        self._worker.counters.num_preemptions += len(batch.preempted)
        self._worker.counters.num_prompt_tokens_cached += sum(min(s.num_cached, s.num_prompt) for s in batch.admitted)
        points.reach("decode.step")

    def sample(self, batch: Batch, logits: Logits) -> list[list[int]]:
        rows = [item.sequence.owner.rows(item.sequence) for item in batch.items if item.samples]
        self._sampled = [_all_or_error(tokens) for tokens in self._sampler(logits, rows)]
        # A sequence that could not be sampled is gone before it is looked at again.
        return [[0 if isinstance(tokens, InternalError) else tokens[0].token_id] for tokens in self._sampled]

    def after_step(self, batch: Batch) -> None:
        events: Events = defaultdict(list)
        sampled = iter(self._sampled)
        num_new = 0
        for item in batch.items:
            sequence = item.sequence
            self._count(item)
            num_new += sequence.owner.generation.is_new
            sequence.owner.generation.is_new = False
            tokens = next(sampled) if item.samples else []
            if sequence.owner.generation.key not in self.jobs:  # another choice could not be sampled
                continue
            if isinstance(tokens, InternalError):
                self._fail_sampling(sequence, tokens, events)
                continue
            match sequence.owner:
                case Choice() if tokens:
                    self._book(sequence, tokens[0], events)
                case Prompt() if sequence.num_computed == sequence.num_prompt:
                    self._fork(sequence, tokens, events)
        if events:
            self._emit(events)
        self._worker.pacing.first_steps_taken(num_new)
        self.snapshot()

    def _fail_sampling(self, sequence: Sequence, error: InternalError, events: Events) -> None:
        """Its logits are of no use; what it computed may be none either, so nobody else shall find it."""
        job: Generation = sequence.owner.generation
        self._pool.discard(sequence.keys)
        failed = failed_to_proto(AttemptFailed(job.key, error))
        events[job.session].append(decode_pb.DecodeEvent(failed=failed))
        self.cancel(job.key)

    def _count(self, item: ScheduledSequence) -> None:
        end = min(item.start + item.num_tokens, item.sequence.num_prompt)
        self._worker.counters.num_prompt_tokens_computed += max(0, end - item.start)

    def _fork(self, prompt: Sequence, tokens: list[SampledToken], events: Events) -> None:
        """The prompt is computed: its choices go on from here, those with a journal by replaying it."""
        job: Generation = prompt.owner.generation
        pages = self._scheduler.remove(prompt)
        job.sequences.remove(prompt)
        self.reservations.computed(job.key)
        outputs = dict(job.journal)
        for choice, token in zip(job.to_sample, tokens, strict=True):
            if self._give_out(job, choice, 0, token, events) is None:
                outputs[choice] = [token.token_id]
        if outputs:
            self._enter(job, outputs, pages, prompt.num_published)
        else:
            self._pool.release(pages)
            del self.jobs[job.key]

    def _book(self, sequence: Sequence, token: SampledToken, events: Events) -> None:
        choice: Choice = sequence.owner
        job = choice.generation
        choice.state.append(token.token_id)
        if self._give_out(job, sequence.choice, sequence.num_output - 1, token, events) is not None:
            job.sequences.remove(sequence)
            self._pool.release(self._scheduler.remove(sequence))
            if not job.sequences:
                del self.jobs[job.key]

    def _give_out(
        self, job: Generation, choice: int, index: int, token: SampledToken, events: Events
    ) -> FinishReason | None:
        """Send the `index`th token of a choice; returns why it was the last, or `None`."""
        self._worker.counters.num_decode_tokens += 1
        num_tokens = len(job.prompt_ids) + index + 1
        limit = self._worker.engine.max_context
        ended = finish_reason(job.params, token.token_id, index + 1, num_tokens, self._eos, limit)
        event = token_to_proto(TokenSampled(job.key, choice, index, token, ended))
        events[job.session].append(decode_pb.DecodeEvent(token=event))
        return ended

    def step_failed(self, batch: Batch, error: Exception) -> None:
        for job in {id(i.sequence.owner.generation): i.sequence.owner.generation for i in batch.items}.values():
            self._fail(job.session, job.key, error)
            self.cancel(job.key)

    def going_idle(self) -> None:
        self.snapshot()

    # -- load

    def snapshot(self) -> None:
        waiting, reservations = self._scheduler.waiting, self.reservations.waiting
        computing = (s for s in self._scheduler.running if not s.is_decode)
        tokens = sum(s.num_to_compute for s in (*waiting, *computing))
        tokens += sum(r.num_tokens for r in reservations if r.max_local_tokens)
        self._worker.load.take(len(waiting) + len(reservations), tokens)

    def _draining(self, key: AttemptKey) -> DrainingError:
        return DrainingError(f"{self._worker.worker_id} is draining", request_id=key.request_id)

    def _fail(self, session: int, key: AttemptKey, error: BaseException) -> None:
        event = decode_pb.DecodeEvent(failed=failed_to_proto(AttemptFailed(key, error)))
        self._emit({session: [event]})


def _all_or_error(sampled: list[SampledToken | InternalError]) -> list[SampledToken] | InternalError:
    tokens = []
    for token in sampled:
        if isinstance(token, InternalError):
            return token
        tokens.append(token)
    return tokens
