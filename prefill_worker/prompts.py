"""What a prefill worker does around each step: prompts in, sealed pages and first tokens out.

Runs on the runner thread. A prompt's pages have two holders: its sequence, until decode has the pages or nobody wants
them, and the sending desk, from when it hears of a page until no write can read it. It hears of pages only when a
grant is attached; before that the scheduler may take them for a prompt that has one.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Protocol

from kvtransfer.protocol.messages import AttemptKey, FirstToken, RefusalReason
from prefill_worker.job import PromptJob, StepPart
from prefill_worker.kept import KeptPrompts
from prefill_worker.sending import HandoffStats, SealedPages
from tandem.core import points
from tandem.core.errors import DrainingError, HandoffError, TandemError, WorkerLostError
from tandem.core.pages import PageState, pages_for
from tandem.core.sampling import SampledToken, SampleRow, SequenceState
from tandem.engine.sampler import Logits, Sampler
from tandem.rpc.v1 import prefill_pb2 as prefill_pb
from tandem.worker.limits import request_limits
from tandem.worker.process import WorkerProcess
from tandem.worker.request import AttemptFailed, TokenSampled
from tandem.worker.scheduler import Batch, ScheduledSequence
from tandem.worker.sequence import FinishReason, Sequence, finish_reason
from tandem.worker.turn import turn_of
from tandem.worker.validate import open_journals, validate
from tandem.worker.wire import failed_to_proto, spec_from_proto, token_to_proto

_log = logging.getLogger(__name__)

# Attempts that ended and are remembered, so that a late repetition of their start is not taken for a new one.
_NUM_REMEMBERED = 4096


class Desk(Protocol):
    """The sending desk, called from the runner thread; each call is queued to the transfer thread, in order."""

    def computed_layer(self, layer: int, pages: tuple[int, ...]) -> None: ...

    def sealed(self, pages: list[SealedPages]) -> None: ...

    def computed(self, key: AttemptKey, first_tokens: tuple[FirstToken, ...], computed_s: float) -> None: ...

    def let_it_speak(self) -> None:
        """Give it time to take in which prompts are computed, a little of it."""

    def cancel(self, key: AttemptKey) -> None:
        """Nothing more comes of this attempt, or nothing ever did."""


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
        self._sampler = Sampler(worker.engine.eos_token_ids)
        self._eos = frozenset(worker.engine.eos_token_ids)
        self._limits = request_limits(worker.engine, worker.config)
        self._page_size = worker.pool.page_size
        # Invariant: all and only attempts whose handoff is not over, or that still compute.
        self.jobs: dict[AttemptKey, PromptJob] = {}
        self.kept = KeptPrompts(worker.pool, worker.scheduler.salt, shares=worker.scheduler.prefix_cache)
        # Attached, and the runner may be in a step still. Added to by any thread, read by the runner.
        self._newly_attached: set[AttemptKey] = set()
        self._ended_keys: OrderedDict[AttemptKey, None] = OrderedDict()
        self._arrivals = 0

    # -- commands

    def start(self, session: int, command: prefill_pb.StartPrefill) -> None:
        """Take a prompt in, whose handoff is open at the desk; a repeated command changes nothing."""
        key = AttemptKey(command.request_id, command.attempt)
        if key in self.jobs:
            self.jobs[key].repeated = True
            return
        try:
            job = self._make_job(key, session, command)
            is_kept = self._recall(job)
            if not is_kept:
                self._scheduler.add(job.sequence)
        except TandemError as error:
            self._desk.cancel(key)
            self._send(session, failed=failed_to_proto(AttemptFailed(key, error)))
            return
        for older in [k for k in self.jobs if k.request_id == key.request_id and k.attempt < key.attempt]:
            self.cancel(older)
        self.jobs[key] = job
        points.reach("prefill.queued")
        if is_kept:
            self._begin(job)
            self._finish([job])

    def _make_job(self, key: AttemptKey, session: int, command: prefill_pb.StartPrefill) -> PromptJob:
        if self._worker.draining:
            raise DrainingError(f"{self._worker.worker_id} is draining", request_id=key.request_id)
        if key in self._ended_keys:
            reason = RefusalReason.ALREADY_ENDED.value
            raise HandoffError(f"{key} has ended at {self._worker.worker_id}", reason=reason)
        spec, prompt = spec_from_proto(command), list(command.prompt_ids)
        validate(spec, self._limits)
        journal, finished = open_journals(spec, self._limits)
        self._arrivals += 1
        sequence = Sequence(
            request_id=key.request_id,
            attempt=key.attempt,
            choice=0,
            turn=turn_of(spec.priority, time.monotonic() - spec.age_s, self._limits.priority_ageing_s),
            arrival=self._arrivals,
            token_ids=prompt,
            num_prompt=len(prompt),
            params=spec.params,
        )
        job = PromptJob(key, session, sequence, spec.num_choices, journal, finished, command.decode.incarnation)
        sequence.owner = job
        return job

    def _recall(self, job: PromptJob) -> bool:
        """Take over what an earlier attempt has left; whether that is all, so that nothing is to compute."""
        recalled = self.kept.recall(job.sequence)
        if recalled is not None:
            job.first_tokens = {c: recalled.first_tokens[c] for c in job.open_choices if c in recalled.first_tokens}
        job.sequence.samples = bool(job.to_sample)
        return recalled is not None and not job.to_sample and self.kept.give_pages(job.sequence, recalled)

    def grant_attached(self, key: AttemptKey) -> None:
        """Decode took this worker as the grant's writer, and the desk will hear of it first; from any thread."""
        self._newly_attached.add(key)
        self._worker.runner.submit(lambda: self._attach(key))

    def _attach(self, key: AttemptKey) -> None:
        """Decode's pages wait for this prompt from now on: it goes first, and what is sealed goes to the desk."""
        self._newly_attached.discard(key)
        job = self.jobs.get(key)
        if job is None or job.over or job.attached:
            return
        job.attached = True
        self._scheduler.promote(job.sequence)
        self._seal_computed(job)
        if job.computed and job.sealed_s is not None:
            self._desk.computed(key, self._going_on(job), job.sealed_s)

    def cancel(self, key: AttemptKey) -> None:
        """Nobody wants this attempt any more. What it computed may serve the request's next one."""
        job = self.jobs.get(key)
        if job is not None and not job.over:
            self._leave(job)
            self._desk.cancel(key)

    def release_request(self, request_id: str) -> None:
        """The request has ended: no attempt will ask for its pages again."""
        self.kept.drop(request_id)

    def session_ended(self, session: int) -> None:
        """Its router is gone, and with it all that it had started."""
        for job in [j for j in self.jobs.values() if j.session == session]:
            self.cancel(job.key)
        self.kept.drop_session(session)

    def receiver_ended(self, keys: Iterable[AttemptKey], error: WorkerLostError) -> None:
        """The decode worker of these attempts is gone; of those with a grant the desk says so itself."""
        for key in keys:
            job = self.jobs.get(key)
            if job is not None and not job.attached:
                self.fail(key, error)

    # -- a step

    def give_way(self) -> bool:
        """Prompts wait while decode has the cores for what it was just given."""
        return self._worker.pacing.give_way(has_work=bool(self._scheduler.running or self._scheduler.waiting))

    def before_schedule(self) -> None:
        """Prompts wait in the scheduler itself."""

    def before_forward(self, batch: Batch) -> Callable[[int], None]:
        self._worker.counters.num_preemptions += len(batch.preempted)
        for sequence in batch.admitted:
            self._begin(sequence.owner)
        parts = [self._filled_by(item) for item in batch.items]
        filled = tuple(page for part in parts for page in part.pages)
        points.reach("prefill.chunk")

        def on_layer(layer: int) -> None:
            self._desk.computed_layer(layer, filled)
            sealed = [pages for part in parts if (pages := self._seal_part(part, layer)) is not None]
            if sealed:
                self._desk.sealed(sealed)

        return on_layer

    def _begin(self, job: PromptJob) -> None:
        """It has its pages; those found in the cache hold what they shall."""
        num_cached = job.sequence.num_cached
        self._worker.counters.num_prompt_tokens_cached += num_cached
        if job.attached:
            self._seal_computed(job)
        if job.started_s is None:
            job.started_s = time.monotonic()
            request_id, attempt = job.key.request_id, job.key.attempt
            started = prefill_pb.PrefillStarted(request_id=request_id, attempt=attempt, num_cached_tokens=num_cached)
            self.snapshot()  # goes with it: from now on the router counts the prompt by the worker's figures
            self._send(job.session, started=started)

    def _seal_computed(self, job: PromptJob) -> None:
        """Give the desk all pages that are computed so far, in all layers."""
        num_computed = job.sequence.num_computed
        num_pages = pages_for(num_computed, self._page_size) if job.computed else num_computed // self._page_size
        pages = tuple(job.sequence.pages[:num_pages])
        if pages:
            self._pool.share(pages)
            self._desk.sealed([SealedPages(job.key, range(self._worker.layout.num_layers), 0, pages)])

    def _filled_by(self, item: ScheduledSequence) -> StepPart:
        """Chunks end on page borders or with the prompt, so the first page was not begun by an earlier chunk."""
        end, num_prompt = item.start + item.num_tokens, item.sequence.num_prompt
        first = item.start // self._page_size
        last = pages_for(end, self._page_size) if end == num_prompt else end // self._page_size
        return StepPart(item.sequence.owner, first, tuple(item.sequence.pages[first:last]))

    def _seal_part(self, part: StepPart, layer: int) -> SealedPages | None:
        """What the desk may hear of the step now that `layer` is computed: it may have been attached just now."""
        job = part.job
        if job.key in self._newly_attached:
            self._attach(job.key)
        if not job.attached or not part.pages:
            return None
        if part.next_layer == 0:  # the desk's hold begins as it hears of a page: a step that failed before leaves none
            self._pool.share(part.pages)
        layers, part.next_layer = range(part.next_layer, layer + 1), layer + 1
        return SealedPages(job.key, layers, part.first, part.pages)

    def sample(self, batch: Batch, logits: Logits) -> list[list[int]]:
        jobs: list[PromptJob] = [item.sequence.owner for item in batch.items if item.samples]
        choices = [job.to_sample for job in jobs]
        rows = []
        for job, of_one in zip(jobs, choices, strict=True):
            state = SequenceState(job.sequence.token_ids)
            rows.append([SampleRow(state, job.sequence.params, choice, 0) for choice in of_one])
        for job, of_one, tokens in zip(jobs, choices, self._sampler(logits, rows), strict=True):
            for choice, token in zip(of_one, tokens, strict=True):
                if isinstance(token, SampledToken):
                    job.first_tokens[choice] = token
                else:
                    job.error = token
        # The scheduler books a token behind each prompt; it goes away with the prompt, which is never decoded here.
        return [[0] for _ in jobs]

    def after_step(self, batch: Batch) -> None:
        self._worker.counters.num_prompt_tokens_computed += batch.num_tokens
        pacing = self._worker.pacing
        pacing.before_handoffs({item.sequence.owner.receiver for item in batch.items})
        ended: list[PromptJob] = []
        for item in batch.items:
            job: PromptJob = item.sequence.owner
            job.num_computed_tokens += item.num_tokens
            if job.error is not None:
                self._fail_sampling(job, job.error)
            elif item.start + item.num_tokens == item.sequence.num_prompt:
                ended.append(job)
        self._finish(ended)
        pacing.after_handoffs(job.receiver for job in ended if job.attached and not job.over)
        self.snapshot()

    def _finish(self, jobs: list[PromptJob]) -> None:
        """They are computed: let their handoffs end, and then give out their first tokens."""
        for job in jobs:
            self._hand_over(job)
        if jobs:
            self._desk.let_it_speak()
        for job in jobs:
            self._give_out(job)

    def _hand_over(self, job: PromptJob) -> None:
        sequence = job.sequence
        del sequence.token_ids[sequence.num_prompt :]
        sequence.samples = False
        self._scheduler.park(sequence)
        self.kept.keep(job.session, sequence, job.first_tokens)
        job.sealed_s = time.monotonic()
        going_on = self._going_on(job)
        if going_on and job.attached:
            self._desk.computed(job.key, going_on, job.sealed_s)

    def _give_out(self, job: PromptJob) -> None:
        """Its first tokens; its end, where they are the last ones."""
        going_on = self._going_on(job)
        if job.computed_s is None:
            job.computed_s = job.sealed_s
            self._tell(job, ends=not going_on)
        if not going_on:
            self.cancel(job.key)
            self.kept.drop(job.key.request_id)

    def _going_on(self, job: PromptJob) -> tuple[FirstToken, ...]:
        """What decode continues: choices that did not end with their first token."""
        going_on = [FirstToken(choice, ids[0]) for choice, ids in job.journal.items()]
        for choice, token in job.first_tokens.items():
            if self._ended_by(job, token.token_id) is None:
                going_on.append(FirstToken(choice, token.token_id))
        return tuple(going_on)

    def _tell(self, job: PromptJob, *, ends: bool) -> None:
        events = []
        for choice, token in job.first_tokens.items():
            event = token_to_proto(TokenSampled(job.key, choice, 0, token, self._ended_by(job, token.token_id)))
            events.append(prefill_pb.PrefillEvent(first_token=event))
        if ends:
            events.append(prefill_pb.PrefillEvent(ended=job.describe_end()))
        if events:
            self._emit(job.session, events)

    def _ended_by(self, job: PromptJob, token_id: int) -> FinishReason | None:
        num_tokens = job.sequence.num_prompt + 1
        return finish_reason(job.sequence.params, token_id, 1, num_tokens, self._eos, self._worker.engine.max_context)

    def _fail_sampling(self, job: PromptJob, error: TandemError) -> None:
        """Its logits are of no use; what it computed may be none either, so nobody else shall find it."""
        self._pool.discard(job.sequence.keys)
        self.fail(job.key, error)

    def step_failed(self, batch: Batch, error: Exception) -> None:
        for item in batch.items:
            job: PromptJob = item.sequence.owner
            self._send(job.session, failed=failed_to_proto(AttemptFailed(job.key, error)))
            self.cancel(job.key)

    def going_idle(self) -> None:
        self.snapshot()

    def _leave(self, job: PromptJob) -> None:
        """Drop the sequence's own hold on its pages; the desk's goes on."""
        if not job.over:
            job.over = True
            self._pool.release(self._scheduler.remove(job.sequence))

    # -- what the desk says, on the runner thread

    def handed_off(self, key: AttemptKey, stats: HandoffStats) -> None:
        """Decode has acknowledged."""
        job = self.jobs[key]
        self._send(job.session, handoff_done=job.describe_handoff(stats))

    def fail(self, key: AttemptKey, error: TandemError) -> None:
        """The attempt cannot go on; ends it as a cancel does, but says why."""
        job = self.jobs.get(key)
        if job is not None and not job.over:
            self._send(job.session, failed=failed_to_proto(AttemptFailed(key, error)))
            self.cancel(key)

    def handoff_failed(self, key: AttemptKey, error: TandemError) -> None:
        """The handoff is over; the router decides what comes next."""
        job = self.jobs.get(key)
        if job is None or job.over:  # never taken, or ended from here: the router has heard why
            return
        if isinstance(error, HandoffError) and error.reason == RefusalReason.DIGEST_MISMATCH.value:
            # The bytes may have changed here since they were sealed: the next attempt computes them anew.
            self._pool.discard(job.sequence.keys)
            self.kept.drop(key.request_id)
        self._leave(job)
        self._send(job.session, failed=failed_to_proto(AttemptFailed(key, error)))

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
        # After an acknowledgement, this is the last hold: the pages become evictable, a prompt's last one first.
        self._leave(job)
        if job.repeated:
            self._desk.cancel(key)
        self._ended_keys[key] = None
        if len(self._ended_keys) > _NUM_REMEMBERED:
            self._ended_keys.popitem(last=False)

    # -- load

    @property
    def num_wanted(self) -> int:
        """Attempts that have not ended for those who asked for them."""
        return sum(not job.over for job in self.jobs.values())

    def snapshot(self) -> None:
        waiting = self._scheduler.waiting
        tokens = sum(s.num_to_compute for s in waiting) + sum(s.num_to_compute for s in self._scheduler.running)
        self._worker.load.take(len(waiting), tokens)

    def _send(self, session: int, **event: object) -> None:
        self._emit(session, [prefill_pb.PrefillEvent(**event)])  # type: ignore[arg-type]
