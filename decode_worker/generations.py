"""What a decode worker does around each step: reservations, admissions, tokens. Runs on the runner thread."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from decode_worker.reservations import Granted, Reservation, ReservationQueue
from kvtransfer.protocol.messages import AttemptKey, Commit, Grant, RefusalReason
from tandem.core.errors import DrainingError, HandoffError, TandemError
from tandem.core.pages import page_keys
from tandem.core.sampling import SamplingParams
from tandem.engine.sampler import Logits, SampledToken, SampleRow, SequenceState, sample
from tandem.rpc.convert import sampling_from_proto
from tandem.rpc.v1 import decode_pb2 as decode_pb
from tandem.worker.intake import check_prompt, open_journals
from tandem.worker.process import WorkerProcess
from tandem.worker.scheduler import Batch
from tandem.worker.sequence import Sequence, finish_reason
from tandem.worker.sessions import attempt_failed
from tandem.worker.tokens import token_event
from tandem.worker.wire import grant_to_proto

_log = logging.getLogger(__name__)


class Desk(Protocol):
    """The receiving desk, called from the runner thread; each call is queued to the transfer thread, in order."""

    def reserve(self, key: AttemptKey) -> None: ...

    def granted(self, key: AttemptKey, pages: tuple[int, ...], first_page: int) -> None: ...

    def denied(self, key: AttemptKey) -> None: ...

    def cancel(self, key: AttemptKey) -> None: ...


@dataclass(slots=True)
class Generation:
    """One attempt at one request."""

    key: AttemptKey
    session: int
    priority: int
    arrival: int
    prompt_ids: list[int]
    params: SamplingParams
    num_choices: int
    journal: dict[int, list[int]]
    queued: bool = False  # the protocol took it for a new attempt
    sequences: list[Sequence] = field(default_factory=list)  # of the choices that still run, once admitted


@dataclass(slots=True)
class _Choice:
    """What a sequence in the batch belongs to."""

    generation: Generation
    state: SequenceState


class Generations:
    """The `Role` of a decode worker.

    Args:
        emit: sends events to routers, by session; from the runner thread.
    """

    def __init__(
        self, worker: WorkerProcess, desk: Desk, emit: Callable[[dict[int, list[decode_pb.DecodeEvent]]], None]
    ) -> None:
        self._worker = worker
        self._scheduler = worker.scheduler
        self._pool = worker.pool
        self._desk = desk
        self._emit = emit
        self._eos = frozenset(worker.engine.eos_token_ids)
        self._sampled: list[SampledToken] = []
        self.reservations = ReservationQueue(worker.scheduler, bound=worker.config.scheduling.worker_queue_bound)
        # Invariant: all and only attempts that a router still wants.
        self.jobs: dict[AttemptKey, Generation] = {}
        self._arrivals = 0

    # -- commands

    def reserve(self, session: int, command: decode_pb.Reserve) -> None:
        """Take a request in; a repeated command is answered again by the protocol."""
        key = AttemptKey(command.request_id, command.attempt)
        if key not in self.jobs:
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
            raise DrainingError(f"{self._worker.worker_id} is draining", request_id=key.request_id)
        engine, prompt, params = self._worker.engine, list(command.prompt_ids), sampling_from_proto(command.sampling)
        limit = engine.max_context
        check_prompt(prompt, engine.vocab_size, limit, key.request_id)
        journal, _ = open_journals(
            command.journal, params, len(prompt), engine.vocab_size, limit, self._eos, key.request_id
        )
        # The oldest choice alone must be able to end here, or preemption could not help it.
        self._scheduler.check_fits(min(len(prompt) + params.max_tokens, limit), key.request_id)
        self._arrivals += 1
        return Generation(
            key=key,
            session=session,
            priority=command.priority,
            arrival=self._arrivals,
            prompt_ids=prompt,
            params=params,
            num_choices=command.num_choices or 1,
            journal=journal,
        )

    def cancel(self, key: AttemptKey) -> None:
        """Nobody wants this attempt any more; its pages follow, by the protocol where a writer may know them."""
        job = self.jobs.pop(key, None)
        if job is not None:
            self._release(job)
        self._desk.cancel(key)

    def session_ended(self, session: int) -> None:
        """Its router is gone, and with it all that it had started."""
        for job in [j for j in self.jobs.values() if j.session == session]:
            self.cancel(job.key)

    def _release(self, job: Generation) -> None:
        for sequence in job.sequences:
            self._pool.release(self._scheduler.remove(sequence))
        job.sequences = []

    # -- what the desk says

    def queue(self, key: AttemptKey) -> None:
        """The protocol accepted the reservation: it waits for pages."""
        job = self.jobs.get(key)
        if job is None:  # cancelled meanwhile
            self._desk.denied(key)
            return
        job.queued = True
        salt, caching = self._scheduler.salt, self._scheduler.prefix_cache
        keys = tuple(page_keys(job.prompt_ids, self._pool.page_size, salt)) if caching else ()
        reservation = Reservation(key, job.priority, job.arrival, len(job.prompt_ids), job.num_choices, keys)
        try:
            self.reservations.push(reservation)
        except TandemError as error:
            self.jobs.pop(key)
            self._desk.denied(key)
            self._fail(job.session, key, error)

    def drop(self, key: AttemptKey) -> None:
        self.reservations.drop(key)

    def grant(self, grant: Grant) -> None:
        """The protocol made a grant of the pages: the router hands it to prefill."""
        job = self.jobs.get(grant.key)
        if job is not None and not job.queued:  # a repeated Reserve of an attempt that has ended here
            self.refused(grant.key, RefusalReason.ALREADY_ENDED, "")
        elif job is not None:
            self._emit({job.session: [decode_pb.DecodeEvent(granted=grant_to_proto(grant))]})

    def admit(self, grant: Grant, commit: Commit) -> None:
        """The handoff is verified: its choices are in the batch from the next step on."""
        granted = self.reservations.settle(grant.key)
        assert granted is not None, grant
        self._pool.admit(granted.pages)
        pages = [*granted.cached, *granted.pages]
        job = self.jobs.get(grant.key)
        if job is None:  # cancelled while the commit was on its way
            self._pool.release(pages)
            return
        if not self._are_good(commit, job):
            self._pool.release(pages)
            del self.jobs[grant.key]
            text = f"the commit's first tokens make no sense: {commit.first_tokens}"
            self._fail(job.session, grant.key, HandoffError(text, reason=RefusalReason.INCOMPLETE.value))
            return
        for index, first in enumerate(commit.first_tokens):
            if index:
                self._pool.share(pages)
            self._enter(job, first.choice, first.token_id, list(pages), len(granted.cached))
        admitted = decode_pb.Admitted(request_id=grant.key.request_id, attempt=grant.key.attempt)
        self._emit({job.session: [decode_pb.DecodeEvent(admitted=admitted)]})

    def _are_good(self, commit: Commit, job: Generation) -> bool:
        choices = {first.choice for first in commit.first_tokens}
        known = all(c < job.num_choices for c in choices)
        in_vocabulary = all(first.token_id < self._worker.engine.vocab_size for first in commit.first_tokens)
        return bool(choices) and len(choices) == len(commit.first_tokens) and known and in_vocabulary

    def _enter(self, job: Generation, choice: int, first_token: int, pages: list[int], num_cached_pages: int) -> None:
        output = job.journal.get(choice, [first_token])
        sequence = Sequence(
            request_id=job.key.request_id,
            attempt=job.key.attempt,
            choice=choice,
            priority=job.priority,
            arrival=job.arrival,
            token_ids=job.prompt_ids + output,
            num_prompt=len(job.prompt_ids),
            params=job.params,
            num_computed=len(job.prompt_ids),
            pages=pages,
            num_published=num_cached_pages,
            owner=_Choice(job, SequenceState(job.prompt_ids, output)),
        )
        job.sequences.append(sequence)
        self._scheduler.enter(sequence)

    def over(self, key: AttemptKey, pages: tuple[int, ...], reason: RefusalReason, *, quarantined: bool) -> None:
        """The handoff ended without admission."""
        granted = self.reservations.settle(key)
        if quarantined:
            self._pool.quarantine(pages)
        else:
            self._pool.release(pages)
        if granted is not None:
            self._pool.release(granted.cached)
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
        job = self.jobs.pop(key, None)
        if job is not None:
            text = f"{self._worker.worker_id} refused the reservation: {reason.value} {detail}".rstrip()
            self._fail(job.session, key, HandoffError(text, reason=reason.value, request_id=key.request_id))

    # -- a step

    def before_schedule(self) -> None:
        for granted in self.reservations.pump():
            self._grant(granted)

    def _grant(self, granted: Granted) -> None:
        self._worker.num_prompt_tokens_cached += len(granted.cached) * self._pool.page_size
        self._desk.granted(granted.reservation.key, granted.pages, len(granted.cached))

    def before_forward(self, batch: Batch) -> None:
        self._worker.num_preemptions += len(batch.preempted)

    def sample(self, batch: Batch, logits: Logits) -> list[int]:
        rows = [
            SampleRow(s.owner.state, s.params, s.choice, s.num_output)
            for s in (item.sequence for item in batch.items if item.samples)
        ]
        self._sampled = sample(logits, rows, self._worker.engine.eos_token_ids)
        return [token.token_id for token in self._sampled]

    def after_step(self, batch: Batch) -> None:
        events: defaultdict[int, list[decode_pb.DecodeEvent]] = defaultdict(list)
        tokens = iter(self._sampled)
        for item in batch.items:
            if item.num_tokens > 1 or not item.samples:
                self._worker.num_prompt_tokens_computed += item.num_tokens - int(item.samples)
            if item.samples:
                self._worker.num_decode_tokens += 1
                self._book(item.sequence, next(tokens), events)
        if events:
            self._emit(events)
        self.snapshot()

    def _book(
        self, sequence: Sequence, token: SampledToken, events: defaultdict[int, list[decode_pb.DecodeEvent]]
    ) -> None:
        choice: _Choice = sequence.owner
        job = choice.generation
        choice.state.append(token.token_id)
        num_output, num_tokens = sequence.num_output, len(sequence.token_ids)
        limit = self._worker.engine.max_context
        ended = finish_reason(sequence.params, token.token_id, num_output, num_tokens, self._eos, limit)
        event = token_event(job.key, sequence.choice, num_output - 1, token, ended)
        events[job.session].append(decode_pb.DecodeEvent(token=event))
        if ended is not None:
            job.sequences.remove(sequence)
            self._pool.release(self._scheduler.remove(sequence))
            if not job.sequences:
                del self.jobs[job.key]

    def step_failed(self, batch: Batch, error: Exception) -> None:
        for job in {id(i.sequence.owner.generation): i.sequence.owner.generation for i in batch.items}.values():
            self._fail(job.session, job.key, error)
            self.cancel(job.key)

    def going_idle(self) -> None:
        self.snapshot()

    # -- load

    def snapshot(self) -> None:
        waiting = self._scheduler.waiting
        tokens = sum(s.num_to_compute for s in waiting) + sum(r.num_tokens for r in self.reservations.waiting)
        self._worker.take_snapshot(len(waiting) + len(self.reservations.waiting), tokens)

    def _fail(self, session: int, key: AttemptKey, error: BaseException) -> None:
        event = decode_pb.DecodeEvent(failed=attempt_failed(key.request_id, key.attempt, error))
        self._emit({session: [event]})
