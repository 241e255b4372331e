"""What a prefill worker does around each step: prompts in, sealed pages and first tokens out.

A prompt's pages have two holders. Its sequence holds them until decode has them or the attempt is cancelled. The sender
driver holds a page from when it hears of it until no write can read it. It hears of pages only when a grant is
attached; before that the scheduler may take them for a prompt that has a grant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SeqOf
from functools import partial
from typing import Any

from kvtransfer.protocol.messages import AttemptKey, FailureReason, RefusalReason
from prefill_worker.events import Event, HandedOff, HandoffStats, PromptEnded, PromptStarted
from prefill_worker.job import PromptJob, StepPart, make_job, part_of, sent_of
from prefill_worker.prompt_logits import PromptLogits
from prefill_worker.prompt_vectors import PromptVectors
from prefill_worker.retained_prompts import RetainedPrompts
from prefill_worker.sending import SealedPages, SenderPort
from prefill_worker.step_spans import StepSpans
from tandem.core import fault_points
from tandem.core.clock import Clock
from tandem.core.errors import DrainingError, HandoffError, TandemError
from tandem.core.pages import PageState, pages_for
from tandem.core.remembered import Remembered
from tandem.worker.batch import Batch
from tandem.worker.counters import WorkerCounters
from tandem.worker.guide import Guide, GuideMaker
from tandem.worker.load import LoadReport
from tandem.worker.prompt_scoring import ScoreTokens
from tandem.worker.request import AttemptFailed, AttemptSpec, PromptPooled, RequestLimits, TokenSampled
from tandem.worker.scheduler import BatchScheduler
from tandem.worker.spans import before
from tandem.worker.step import SampleTokens, may_be_wrong

# So many ended attempts are remembered, so that a late repetition of a start is not taken for a new attempt.
_NUM_REMEMBERED = 4096

# Layers of a step go to the driver together until they have so many bytes: each time that some go costs about a
# millisecond of both workers' processors, for which the prompt itself waits where they share a host. At a gigabyte a
# second the last of them are on their way for as long.
_BYTES_AT_ONCE = 1 << 20


class PrefillRole:
    """The `StepHooks` of a prefill worker. One thread calls it: in a worker, the runner.

    Args:
        emit: takes events for routers, by session.
        num_layers, extent_bytes: of a page; bytes of it in one layer.
        is_draining: whether prompts are refused.
        vectors: reads hidden states of a model that pools; `None`: it generates.
    """

    def __init__(
        self,
        *,
        worker_id: str,
        scheduler: BatchScheduler,
        driver: SenderPort,
        emit: Callable[[dict[int, list[Event]]], None],
        limits: RequestLimits,
        num_layers: int,
        extent_bytes: int,
        sample: SampleTokens,
        guides: GuideMaker,
        score: ScoreTokens,
        counters: WorkerCounters,
        load: LoadReport,
        clock: Clock,
        is_draining: Callable[[], bool],
        vectors: PromptVectors | None = None,
    ) -> None:
        self._worker_id = worker_id
        self._scheduler = scheduler
        self._pool = scheduler.pool
        self._driver = driver
        self._emit = emit
        self._limits = limits
        self._num_layers, self._extent_bytes = num_layers, extent_bytes
        self._rows = vectors or PromptLogits(sample, score, self._send)
        self._counters = counters
        self._load = load
        self._guides = guides
        self._now = clock.now
        self._is_draining = is_draining
        # Invariant: all and only attempts whose handoff is not over, or that still compute.
        self.jobs: dict[AttemptKey, PromptJob] = {}
        self.retained = RetainedPrompts(
            scheduler.pool, scheduler.salt, shares=scheduler.prefix_cache, groups=scheduler.groups
        )
        # Attached, and a step may be under way still. Added to by any thread.
        self._newly_attached: set[AttemptKey] = set()
        self._ended_keys = Remembered[AttemptKey](_NUM_REMEMBERED)
        # Pages of their prompts are being read; those that are over, too.
        self._fetching: dict[AttemptKey, PromptJob] = {}
        self._arrivals = 0
        self._times = StepSpans(self._now)

    # -- commands

    def start(self, session: int, spec: AttemptSpec) -> None:
        """Take a prompt in, whose handoff is open at the driver; a repeated command changes nothing."""
        key = spec.key
        if key in self.jobs:
            self.jobs[key].repeated = True
            return
        try:
            job = self._make_job(session, spec)
            is_computed = self._recall(job)
            if not is_computed and not job.needs_guide:
                self._enter(job)
        except TandemError as error:
            self._driver.cancel(key)
            self._send(session, AttemptFailed(key, error))
            return
        for older in [k for k in self.jobs if k.request_id == key.request_id and k.attempt < key.attempt]:
            self.cancel(older)
        self.jobs[key] = job
        fault_points.reach("prefill.queued")
        if is_computed:
            self._begin(job)
            self._finish([job])
        elif job.needs_guide:
            self._guides.prepare(spec.params.grammar, [()], partial(self._guided, job), lambda: not job.over)

    def _guided(self, job: PromptJob, made: list[Guide] | TandemError) -> None:
        """Its grammar is compiled, so no step waits for that: its prompt may be computed."""
        if job.over:
            return
        try:
            if isinstance(made, TandemError):
                raise made
            (job.guide,) = made
            self._enter(job)
        except TandemError as error:
            self.fail(job.key, error)

    def _enter(self, job: PromptJob) -> None:
        """Queue its prompt to be computed. Pages of it that lie below the pool are read before, where that is worth it.

        Raises as `BatchScheduler.add` does.
        """
        sequence, tiers = job.sequence, self._scheduler.tiers
        if tiers is not None:
            self._scheduler.check_fits(len(sequence.token_ids), job.key.request_id)
            keys = self._scheduler.wanted_keys(sequence)
            num_hidden = self._scheduler.num_hidden(len(keys) * self._pool.page_size)
            if tiers.fetch(keys[num_hidden:], partial(self._fetched, job)):
                self._fetching[job.key] = job
                return
        self._scheduler.add(sequence)

    def _fetched(self, job: PromptJob, pages: SeqOf[int]) -> None:
        """What could be read of its pages is in the cache."""
        if pages:
            self._driver.computed_layers(range(self._num_layers), tuple(pages))
        if self._fetching.get(job.key) is job:
            del self._fetching[job.key]
        if job.over:
            return
        try:
            self._scheduler.add(job.sequence)
        except TandemError as error:
            self.fail(job.key, error)

    def refuse(self, session: int, key: AttemptKey, error: TandemError) -> None:
        """A router's start of this attempt could not be read."""
        if key not in self.jobs:
            self._send(session, AttemptFailed(key, error))

    def _make_job(self, session: int, spec: AttemptSpec) -> PromptJob:
        key = spec.key
        if self._is_draining():
            raise DrainingError(f"{self._worker_id} is draining", request_id=key.request_id)
        if key in self._ended_keys:
            reason = RefusalReason.ALREADY_ENDED.value
            raise HandoffError(f"{key} has ended at {self._worker_id}", reason=reason)
        self._arrivals += 1
        return make_job(session, spec, self._limits, self._arrivals, self._now())

    def _recall(self, job: PromptJob) -> bool:
        """Take over what an earlier attempt has left. Return whether nothing is left to compute."""
        recalled = self.retained.recall(job.sequence)
        if recalled is not None:
            job.first_tokens = {c: recalled.first_tokens[c] for c in job.open_choices if c in recalled.first_tokens}
        job.sequence.samples = bool(job.to_sample)
        is_left = bool(job.to_sample) or job.sequence.is_to_score or job.sequence.pooling is not None
        return recalled is not None and not is_left and self.retained.give_pages(job.sequence, recalled)

    def grant_attached(self, key: AttemptKey) -> None:
        """Decode took this worker as the grant's writer, and the driver knows it. From any thread. `attach` follows;
        the step under way already sees this."""
        self._newly_attached.add(key)

    def attach(self, key: AttemptKey) -> None:
        """Decode holds pages for this prompt: it goes first, and its sealed pages go to the driver."""
        self._newly_attached.discard(key)
        job = self.jobs.get(key)
        if job is None or job.over or job.attached:
            return
        job.attached = True
        self._scheduler.promote(job.sequence)
        self._seal_computed(job)
        if job.computed and job.sealed_s is not None:
            self._driver.computed(key, job.going_on(self._limits), job.sealed_s)

    def cancel(self, key: AttemptKey) -> None:
        """Cancel this attempt. Its computed pages may serve the request's next attempt."""
        job = self.jobs.get(key)
        if job is not None and not job.over:
            self._leave(job)
            self._driver.cancel(key)

    def release_request(self, request_id: str) -> None:
        """The request has ended: drop the pages that are retained for it."""
        self.retained.drop(request_id)

    def session_ended(self, session: int) -> None:
        """A router is gone: end all attempts that it had started."""
        for job in [j for j in self.jobs.values() if j.session == session]:
            self.cancel(job.key)
        self.retained.drop_session(session)

    def receiver_ended(self, keys: Iterable[AttemptKey], receiver: str) -> None:
        """The decode worker of these attempts is gone; of those with a grant the driver says so itself."""
        reason = FailureReason.RECEIVER_EXITED.value
        for key in keys:
            job = self.jobs.get(key)
            if job is not None and not job.attached:
                self.fail(key, HandoffError(f"decode worker {receiver} has ended", reason=reason))

    # -- a step

    def before_schedule(self) -> None:
        """Prompts wait in the scheduler itself."""

    def before_forward(self, batch: Batch) -> Callable[[int], None]:
        self._counters.num_preemptions += len(batch.preempted)
        for sequence in batch.admitted:
            self._begin(sequence.owner)
        self._times.begin()
        parts = [part_of(item, self._scheduler.groups) for item in batch.items]
        filled = tuple(page for part in parts for page in part.pages)
        at_once = max(1, _BYTES_AT_ONCE // max(1, len(filled) * self._extent_bytes))
        told = 0  # the driver knows of the layers before it
        fault_points.reach("prefill.chunk")

        def on_layer(layer: int) -> None:
            nonlocal told
            if layer + 1 - told < at_once and layer + 1 < self._num_layers:
                return
            layers, told = range(told, layer + 1), layer + 1
            sealed = [pages for part in parts if (pages := self._seal_part(part, layer)) is not None]
            self._driver.computed_layers(layers, filled, sealed)

        return on_layer

    def _begin(self, job: PromptJob) -> None:
        """The sequence has its pages; those from the cache are computed already."""
        num_cached = job.sequence.num_cached
        self._counters.num_prompt_tokens_cached += num_cached
        if job.attached:
            self._seal_computed(job)
        if job.started_s is None:
            job.started_s = self._now()
            self.snapshot()  # goes with it: from now on the router counts the prompt by the worker's figures
            self._send(job.session, PromptStarted(job.key, num_cached))

    def _seal_computed(self, job: PromptJob) -> None:
        """Give the driver all pages that are computed so far, in all layers."""
        num_computed, page_size = job.sequence.num_computed, self._pool.page_size
        num_places = pages_for(num_computed, page_size) if job.computed else num_computed // page_size
        first, pages = sent_of(job.sequence, self._scheduler.groups, 0, num_places)
        if pages:
            self._pool.share(pages)
            self._driver.sealed([SealedPages(job.key, range(self._num_layers), first, pages)])

    def _seal_part(self, part: StepPart, layer: int) -> SealedPages | None:
        """Pages of this step that the driver may hear of now that `layer` is computed. The attempt may just have been
        attached."""
        job = part.job
        if job.key in self._newly_attached:
            self.attach(job.key)
        if not job.attached or not part.sent:
            return None
        if part.next_layer == 0:  # its hold begins when it hears of a page: a step that fails earlier leaves none
            self._pool.share(part.sent)
        layers, part.next_layer = range(part.next_layer, layer + 1), layer + 1
        return SealedPages(job.key, layers, part.first, part.sent)

    def score(self, batch: Batch, logits: Any) -> Any:
        return self._rows.score(batch, logits)

    def sample(self, batch: Batch, logits: Any) -> list[list[int]]:
        self._times.computed()
        return self._rows.sample(batch, logits)

    def after_step(self, batch: Batch) -> None:
        self._counters.num_prompt_tokens_computed += batch.num_tokens
        self._counters.num_steps += 1
        self._counters.busy_s += self._times.elapsed_s
        if self._scheduler.tiers is not None:
            self._scheduler.tiers.computed(batch.num_tokens, self._times.elapsed_s)
        ended: list[PromptJob] = []
        self._times.end(batch)
        for item in batch.items:
            job: PromptJob = item.sequence.owner
            job.num_computed_tokens += item.num_tokens
            if job.error is not None:
                self._fail_sampling(job, job.error)
            elif item.start + item.num_tokens == item.sequence.num_prompt:
                ended.append(job)
        self._finish(ended)
        self.snapshot()

    def _finish(self, jobs: list[PromptJob]) -> None:
        """These prompts are computed: let their handoffs end first, then give out their first tokens."""
        for job in jobs:
            self._hand_over(job)
        if jobs:
            self._driver.wait_taken()
        for job in jobs:
            self._give_out(job)

    def _hand_over(self, job: PromptJob) -> None:
        sequence = job.sequence
        del sequence.token_ids[sequence.num_prompt :]
        sequence.samples = False
        self._scheduler.park(sequence)
        self.retained.retain(job.session, sequence, job.first_tokens)
        job.sealed_s = self._now()
        going_on = job.going_on(self._limits)
        if going_on and job.attached:
            self._driver.computed(job.key, going_on, job.sealed_s)

    def _give_out(self, job: PromptJob) -> None:
        """Give out its first tokens, and its end where they are the last ones."""
        going_on = job.going_on(self._limits)
        if job.computed_s is None:
            job.computed_s = job.sealed_s
            self._tell(job, ends=not going_on)
        if not going_on:
            self.cancel(job.key)
            self.retained.drop(job.key.request_id)

    def _tell(self, job: PromptJob, *, ends: bool) -> None:
        events: list[Event] = [
            TokenSampled(job.key, choice, 0, token, job.ended_by(token.token_id, self._limits))
            for choice, token in job.first_tokens.items()
        ]
        if job.vector:
            events.append(PromptPooled(job.key, job.vector))
        if ends:
            events.append(PromptEnded(job.key, job.work, before(job.spans.kept, self._now())))
        if events:
            self._emit({job.session: events})

    def _fail_sampling(self, job: PromptJob, error: TandemError) -> None:
        """Its logits cannot be sampled. Where its KV may be wrong too, no other request may find it."""
        if may_be_wrong(error):
            self._scheduler.discard(job.sequence.keys)
        self.fail(job.key, error)

    def step_failed(self, batch: Batch, error: Exception) -> None:
        for item in batch.items:
            job: PromptJob = item.sequence.owner
            self._send(job.session, AttemptFailed(job.key, error))
            self.cancel(job.key)

    def going_idle(self) -> None:
        self.snapshot()

    def _leave(self, job: PromptJob) -> None:
        """Release the sequence's hold on its pages; the driver keeps its own."""
        if not job.over:
            job.over = True
            self._pool.release(self._scheduler.remove(job.sequence))

    # -- what the driver says

    def handed_off(self, key: AttemptKey, stats: HandoffStats) -> None:
        """Decode has acknowledged."""
        job = self.jobs[key]
        spans = before((*job.spans.kept, *stats.spans), self._now())
        self._send(job.session, HandedOff(key, stats, job.work, spans))

    def fail(self, key: AttemptKey, error: TandemError) -> None:
        """The attempt cannot go on; ends it as a cancel does, but says why."""
        job = self.jobs.get(key)
        if job is not None and not job.over:
            self._send(job.session, AttemptFailed(key, error))
            self.cancel(key)

    def handoff_failed(self, key: AttemptKey, error: TandemError) -> None:
        """The handoff is over; the router decides what comes next."""
        job = self.jobs.get(key)
        if job is None or job.over:  # refused, or ended by this worker: the router has heard why
            return
        if isinstance(error, HandoffError) and error.reason == RefusalReason.DIGEST_MISMATCH.value:
            # The bytes may have changed here since they were sealed: the next attempt computes them anew.
            self._scheduler.discard(job.sequence.keys)
            self.retained.drop(key.request_id)
        self._leave(job)
        self._send(job.session, AttemptFailed(key, error))

    def quarantine(self, pages: tuple[int, ...]) -> None:
        """Keep these pages from being overwritten: writes of an ended attempt may still read them.

        A page that others hold too stays theirs: reading it does no harm, and the driver's own reference keeps it.
        """
        self._pool.quarantine([p for p in pages if self._pool.references(p) == 1])

    def release(self, pages: tuple[int, ...]) -> None:
        """Release the driver's hold on these pages."""
        quarantined = [p for p in pages if self._pool.state(p) is PageState.QUARANTINED]
        self._pool.lift(quarantined)
        kept = set(quarantined)
        self._pool.release([p for p in pages if p not in kept])

    def closed(self, key: AttemptKey) -> None:
        """The driver has closed the attempt, or a prompt that was refused."""
        job = self.jobs.pop(key, None)
        if job is None:
            return
        # After an acknowledgement, this is the last hold: the pages become evictable, a prompt's last one first.
        self._leave(job)
        if job.repeated:
            self._driver.cancel(key)
        self._ended_keys.add(key)

    # -- load

    @property
    def num_wanted(self) -> int:
        """Attempts that their routers still wait for."""
        return sum(not job.over for job in self.jobs.values())

    def snapshot(self) -> None:
        fetching = [job.sequence for job in self._fetching.values() if not job.over]
        waiting = [*self._scheduler.waiting, *fetching]
        tokens = sum(s.num_to_compute for s in waiting) + sum(s.num_to_compute for s in self._scheduler.running)
        self._load.take(len(waiting), tokens)

    def _send(self, session: int, event: Event) -> None:
        self._emit({session: [event]})
