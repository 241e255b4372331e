"""What a prefill worker does around each step: prompts in, sealed pages and first tokens out.

Runs on the runner thread. A prompt's pages have two holders: the sequence, until the prompt is computed, and the
sending desk, from when a page is sealed until decode has it or no write can read it any more.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kvtransfer.protocol.messages import AttemptKey, FirstToken, RefusalReason
from prefill_worker.sending import HandoffStats, SealedPages
from tandem.core.errors import DrainingError, HandoffError, TandemError
from tandem.core.pages import PageState, pages_for
from tandem.core.sampling import SamplingParams
from tandem.engine.sampler import Logits, SampledToken, SampleRow, SequenceState, repeat_rows, sample
from tandem.rpc.convert import sampling_from_proto
from tandem.rpc.v1 import prefill_pb2 as prefill_pb
from tandem.worker.intake import check_prompt, open_journals
from tandem.worker.process import WorkerProcess
from tandem.worker.scheduler import Batch, ScheduledSequence
from tandem.worker.sequence import FinishReason, Sequence, finish_reason
from tandem.worker.sessions import attempt_failed
from tandem.worker.tokens import token_event

_log = logging.getLogger(__name__)

# Attempts that ended and are remembered, so that a late repetition of their start is not taken for a new one.
_NUM_REMEMBERED = 4096


class Desk(Protocol):
    """The sending desk, called from the runner thread; each call is queued to the transfer thread, in order."""

    def sealed(self, pages: list[SealedPages]) -> None: ...

    def computed(self, key: AttemptKey, first_tokens: tuple[FirstToken, ...]) -> None: ...

    def cancel(self, key: AttemptKey) -> None:
        """Nothing more comes of this attempt, or nothing ever did."""


@dataclass(slots=True)
class PromptJob:
    """One attempt at one prompt."""

    key: AttemptKey
    session: int
    sequence: Sequence
    params: SamplingParams
    num_choices: int
    journal: dict[int, list[int]]  # tokens that the client has, by choice; such a choice is not sampled again
    finished: frozenset[int]  # choices that have ended already
    started_s: float | None = None
    compute_s: float = 0.0
    first_tokens: list[SampledToken] = field(default_factory=list)  # of `to_sample`, in order
    # True from the last logits on: the sequence is out of the batch, only the handoff goes on.
    computed: bool = False

    @property
    def to_sample(self) -> list[int]:
        return [c for c in range(self.num_choices) if c not in self.journal and c not in self.finished]


class Prompts:
    """The `Role` of a prefill worker.

    Args:
        emit: sends events to routers, by session; from the runner thread.
    """

    def __init__(
        self, worker: WorkerProcess, desk: Desk, emit: Callable[[int, list[prefill_pb.PrefillEvent]], None]
    ) -> None:
        self._worker = worker
        self._scheduler = worker.scheduler
        self._pool = worker.pool
        self._desk = desk
        self._emit = emit
        self._eos = frozenset(worker.engine.eos_token_ids)
        self._page_size = worker.pool.page_size
        # Invariant: all and only attempts whose handoff is not over, or that still compute.
        self.jobs: dict[AttemptKey, PromptJob] = {}
        self._ended_keys: OrderedDict[AttemptKey, None] = OrderedDict()
        self._arrivals = 0

    # -- commands

    def start(self, session: int, command: prefill_pb.StartPrefill) -> None:
        """Take a prompt in, whose handoff is open at the desk; a repeated command changes nothing."""
        key = AttemptKey(command.request_id, command.attempt)
        if key in self.jobs:
            return
        try:
            job = self._make_job(key, session, command)
            self._scheduler.add(job.sequence)
        except TandemError as error:
            self._desk.cancel(key)
            self._send(session, failed=attempt_failed(key.request_id, key.attempt, error))
            return
        self.jobs[key] = job

    def _make_job(self, key: AttemptKey, session: int, command: prefill_pb.StartPrefill) -> PromptJob:
        if self._worker.draining:
            raise DrainingError(f"{self._worker.worker_id} is draining", request_id=key.request_id)
        if key in self._ended_keys:
            reason = RefusalReason.ALREADY_ENDED.value
            raise HandoffError(f"{key} has ended at {self._worker.worker_id}", reason=reason)
        engine, prompt = self._worker.engine, list(command.prompt_ids)
        check_prompt(prompt, engine.vocab_size, engine.max_context, key.request_id)
        params = sampling_from_proto(command.sampling)
        journal, finished = open_journals(
            command.journal, params, len(prompt), engine.vocab_size, engine.max_context, self._eos, key.request_id
        )
        self._arrivals += 1
        sequence = Sequence(
            request_id=key.request_id,
            attempt=key.attempt,
            choice=0,
            priority=command.priority,
            arrival=self._arrivals,
            token_ids=prompt,
            num_prompt=len(prompt),
            params=params,
        )
        job = PromptJob(key, session, sequence, params, command.num_choices or 1, journal, finished)
        sequence.samples = bool(job.to_sample)
        sequence.owner = job
        return job

    def cancel(self, key: AttemptKey) -> None:
        """Nobody wants this attempt any more."""
        job = self.jobs.get(key)
        if job is not None:
            self._leave_batch(job)
            self._desk.cancel(key)

    def session_ended(self, session: int) -> None:
        """Its router is gone, and with it all that it had started."""
        for job in [j for j in self.jobs.values() if j.session == session]:
            self.cancel(job.key)

    # -- a step

    def before_schedule(self) -> None:
        """Prompts wait in the scheduler itself."""

    def before_forward(self, batch: Batch) -> Callable[[int], None]:
        now_s = time.monotonic()
        parts: list[tuple[AttemptKey, int, tuple[int, ...]]] = []
        for sequence in batch.admitted:
            self._begin(sequence, now_s)
        for item in batch.items:
            job: PromptJob = item.sequence.owner
            first, pages = self._sealed_by(item)
            if pages:
                parts.append((job.key, first, pages))

        def on_layer(layer: int) -> None:
            if layer == 0:  # the desk's hold begins as it hears of a page: a step that failed before leaves none
                for _, _, pages in parts:
                    self._pool.share(pages)
            if parts:
                self._desk.sealed([SealedPages(key, layer, first, pages) for key, first, pages in parts])

        return on_layer

    def _begin(self, sequence: Sequence, now_s: float) -> None:
        """The first chunk comes: pages found in the cache are sealed already."""
        job: PromptJob = sequence.owner
        job.started_s = now_s
        self._send(
            job.session,
            started=prefill_pb.PrefillStarted(request_id=job.key.request_id, attempt=job.key.attempt),
        )
        cached = tuple(sequence.pages[: sequence.num_cached // self._page_size])
        self._worker.num_prompt_tokens_cached += sequence.num_cached
        if cached:
            self._pool.share(cached)
            layers = range(self._worker.layout.num_layers)
            self._desk.sealed([SealedPages(job.key, layer, 0, cached) for layer in layers])

    def _sealed_by(self, item: ScheduledSequence) -> tuple[int, tuple[int, ...]]:
        """Pages that this step fills, or ends the prompt in: index of the first, and their ids.

        Chunks end on page borders or with the prompt, so the first page was not begun by an earlier chunk.
        """
        end = item.start + item.num_tokens
        first = item.start // self._page_size
        last = pages_for(end, self._page_size) if end == item.sequence.num_prompt else end // self._page_size
        return first, tuple(item.sequence.pages[first:last])

    def sample(self, batch: Batch, logits: Logits) -> list[int]:
        jobs: list[PromptJob] = [item.sequence.owner for item in batch.items if item.samples]
        counts = [len(job.to_sample) for job in jobs]
        rows = [
            SampleRow(SequenceState(job.sequence.token_ids), job.params, choice, 0)
            for job in jobs
            for choice in job.to_sample
        ]
        sampled = iter(sample(repeat_rows(logits, counts), rows, self._worker.engine.eos_token_ids))
        for job in jobs:
            job.first_tokens = [next(sampled) for _ in job.to_sample]
        return [job.first_tokens[0].token_id for job in jobs]

    def after_step(self, batch: Batch) -> None:
        self._worker.num_prompt_tokens_computed += batch.num_tokens
        for item in batch.items:
            job: PromptJob = item.sequence.owner
            if item.start + item.num_tokens == item.sequence.num_prompt:
                self._finish(job)
        self.snapshot()

    def _finish(self, job: PromptJob) -> None:
        """The prompt is computed: give out the first tokens, and let the handoff end."""
        job.compute_s = time.monotonic() - (job.started_s or 0.0)
        events: list[prefill_pb.PrefillEvent] = []
        going_on = [FirstToken(choice, ids[0]) for choice, ids in job.journal.items()]
        for choice, token in zip(job.to_sample, job.first_tokens, strict=True):
            ended = self._ended_by(job, token.token_id)
            events.append(prefill_pb.PrefillEvent(first_token=token_event(job.key, choice, 0, token, ended)))
            if ended is None:
                going_on.append(FirstToken(choice, token.token_id))
        self._leave_batch(job)
        if going_on:
            self._desk.computed(job.key, tuple(going_on))
        else:
            events.append(prefill_pb.PrefillEvent(ended=self._ended(job)))
            self._desk.cancel(job.key)
        if events:
            self._emit(job.session, events)

    def _ended_by(self, job: PromptJob, token_id: int) -> FinishReason | None:
        num_tokens = job.sequence.num_prompt + 1
        return finish_reason(job.params, token_id, 1, num_tokens, self._eos, self._worker.engine.max_context)

    def _ended(self, job: PromptJob) -> prefill_pb.PrefillEnded:
        return prefill_pb.PrefillEnded(
            request_id=job.key.request_id,
            attempt=job.key.attempt,
            compute_s=job.compute_s,
            num_computed_tokens=job.sequence.num_prompt - job.sequence.num_cached,
            num_cached_tokens=job.sequence.num_cached,
        )

    def step_failed(self, batch: Batch, error: Exception) -> None:
        for item in batch.items:
            job: PromptJob = item.sequence.owner
            self._send(job.session, failed=attempt_failed(job.key.request_id, job.key.attempt, error))
            self.cancel(job.key)

    def going_idle(self) -> None:
        self.snapshot()

    def _leave_batch(self, job: PromptJob) -> None:
        """Drop the sequence's own hold on its pages; the desk's goes on."""
        if not job.computed:
            job.computed = True
            self._pool.release(self._scheduler.remove(job.sequence))

    # -- what the desk says, on the runner thread

    def handed_off(self, key: AttemptKey, stats: HandoffStats) -> None:
        """Decode has acknowledged."""
        job = self.jobs[key]
        self._send(
            job.session,
            handoff_done=prefill_pb.HandoffDone(
                request_id=key.request_id,
                attempt=key.attempt,
                num_bytes=stats.num_bytes,
                num_extents=stats.num_extents,
                num_descriptors=stats.num_descriptors,
                handoff_s=stats.handoff_s,
                exposed_s=stats.exposed_s,
                compute_s=job.compute_s,
                num_computed_tokens=job.sequence.num_prompt - job.sequence.num_cached,
                num_cached_tokens=job.sequence.num_cached,
            ),
        )

    def fail(self, key: AttemptKey, error: TandemError) -> None:
        """The attempt cannot go on; ends it as a cancel does, but says why."""
        job = self.jobs.get(key)
        if job is not None:
            self._send(job.session, failed=attempt_failed(key.request_id, key.attempt, error))
            self.cancel(key)

    def handoff_failed(self, key: AttemptKey, error: TandemError) -> None:
        """The handoff is over; the router decides what comes next."""
        job = self.jobs.get(key)
        if job is None:  # the prompt was never taken, and the router has heard why
            return
        self._leave_batch(job)
        self._send(job.session, failed=attempt_failed(key.request_id, key.attempt, error))

    def quarantine(self, pages: tuple[int, ...]) -> None:
        """Writes that nobody waits for may still read these pages: they must not be overwritten.

        A page that others hold too stays theirs: reading it does no harm, and the desk's own reference keeps it.
        """
        self._pool.quarantine([p for p in pages if self._pool.references(p) == 1])

    def release(self, pages: tuple[int, ...]) -> None:
        """The desk's hold ends."""
        quarantined = [p for p in pages if self._pool.state(p) is PageState.QUARANTINED]
        self._pool.lift(quarantined)
        kept = set(quarantined)
        self._pool.release([p for p in pages if p not in kept])

    def closed(self, key: AttemptKey) -> None:
        """The desk is through with the attempt, or with a prompt that was not taken."""
        job = self.jobs.pop(key, None)
        if job is None:
            return
        self._leave_batch(job)
        self._ended_keys[key] = None
        if len(self._ended_keys) > _NUM_REMEMBERED:
            self._ended_keys.popitem(last=False)

    # -- load

    def snapshot(self) -> None:
        waiting = self._scheduler.waiting
        tokens = sum(s.num_to_compute for s in waiting) + sum(s.num_to_compute for s in self._scheduler.running)
        self._worker.take_snapshot(len(waiting), tokens)

    def _send(self, session: int, **event: object) -> None:
        self._emit(session, [prefill_pb.PrefillEvent(**event)])  # type: ignore[arg-type]
