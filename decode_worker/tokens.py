"""What a step's tokens are to the attempts in its batch. Pure; runs on the thread of the batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from decode_worker.events import Emit, Event
from decode_worker.job import Choice, DecodeJob, Prompt
from decode_worker.ledger import AttemptState, Ledger
from tandem.core.errors import InternalError
from tandem.core.sampling import SampledToken
from tandem.worker.counters import WorkerCounters
from tandem.worker.request import AttemptFailed, RequestLimits, TokenSampled
from tandem.worker.scheduler import Batch, BatchScheduler, ScheduledSequence
from tandem.worker.sequence import FinishReason, Sequence, finish_reason
from tandem.worker.step import SampleTokens

Events = defaultdict[int, list[Event]]  # by session


class TokenBook:
    """Samples each step, books its tokens and gives them out.

    Args:
        ledger: attempts that end are taken out.
        drop: ends an attempt whose tokens cannot be used.
    """

    def __init__(
        self,
        *,
        scheduler: BatchScheduler,
        ledger: Ledger[DecodeJob],
        limits: RequestLimits,
        sample: SampleTokens,
        counters: WorkerCounters,
        emit: Emit,
        drop: Callable[[DecodeJob], None],
    ) -> None:
        self._scheduler = scheduler
        self._pool = scheduler.pool
        self._ledger = ledger
        self._limits = limits
        self._sample = sample
        self._counters = counters
        self._emit = emit
        self._drop = drop
        # Of the step under way: what was sampled for each item that samples, or why it could not be.
        self._sampled: list[list[SampledToken] | InternalError] = []

    def sample(self, batch: Batch, logits: Any) -> list[list[int]]:
        """As `StepHooks.sample`."""
        owners = [(item.sequence.owner, item.sequence) for item in batch.items if item.samples]
        rows = [owner.rows(sequence) for owner, sequence in owners]
        self._sampled = [_all_or_error(tokens) for tokens in self._sample(logits, rows)]
        return [_to_append(owner, tokens) for (owner, _), tokens in zip(owners, self._sampled, strict=True)]

    def book(self, batch: Batch) -> int:
        """Give out what a step sampled, which the scheduler has booked; returns how many admissions it was the first
        step of. With the scheduler's lock held."""
        events: Events = defaultdict(list)
        sampled = iter(self._sampled)
        num_new = 0
        for item in batch.items:
            sequence = item.sequence
            job: DecodeJob = sequence.owner.job
            self._count(item)
            num_new += job.is_new
            job.is_new = False
            tokens = next(sampled) if item.samples else []
            if not self._ledger.has(job):  # cancelled, or another choice could not be sampled
                continue
            if isinstance(tokens, InternalError):
                self._fail(sequence, tokens, events)
                continue
            match sequence.owner:
                case Choice() if tokens:
                    self._book(sequence, tokens, events)
                case Prompt() if sequence.num_computed == sequence.num_prompt:
                    self._fork(sequence, tokens, events)
        if events:
            self._emit(events)
        return num_new

    def enter(self, job: DecodeJob, outputs: dict[int, list[int]], pages: list[int], num_published: int) -> None:
        """Let choices into the batch that share the prompt's `pages`; each copies what it writes to."""
        job.state = AttemptState.RUNNING
        for num_entered, (choice, output) in enumerate(outputs.items()):
            if num_entered:
                self._pool.share(pages)
            self._scheduler.enter(job.begin_choice(choice, output, pages, num_published))

    def _count(self, item: ScheduledSequence) -> None:
        end = min(item.start + item.num_tokens, item.sequence.num_prompt)
        self._counters.num_prompt_tokens_computed += max(0, end - item.start)

    def _fail(self, sequence: Sequence, error: InternalError, events: Events) -> None:
        """Its logits cannot be sampled. Its KV may be wrong too, so no other request may find it."""
        job: DecodeJob = sequence.owner.job
        self._pool.discard(sequence.keys)
        events[job.session].append(AttemptFailed(job.key, error))
        self._drop(job)

    def _fork(self, prompt: Sequence, tokens: list[SampledToken], events: Events) -> None:
        """The prompt is computed: its choices go on from here, those with a journal by replaying it."""
        job: DecodeJob = prompt.owner.job
        pages = self._scheduler.remove(prompt)
        job.sequences.remove(prompt)
        outputs = dict(job.journal)
        for choice, token in zip(job.to_sample, tokens, strict=True):
            if self._give_out(job, choice, 0, token, events) is None:
                outputs[choice] = [token.token_id]
        if outputs:
            self.enter(job, outputs, pages, prompt.num_published)
        else:
            self._pool.release(pages)
            self._ledger.remove(job)

    def _book(self, sequence: Sequence, tokens: list[SampledToken], events: Events) -> None:
        """Tokens of one choice, in order; what follows its end is nobody's."""
        choice: Choice = sequence.owner
        job = choice.job
        first_index = sequence.num_output - len(tokens)
        for index, token in enumerate(tokens, first_index):
            choice.state.append(token.token_id)
            if self._give_out(job, sequence.choice, index, token, events) is not None:
                self._end(job, sequence)
                return

    def _end(self, job: DecodeJob, sequence: Sequence) -> None:
        job.sequences.remove(sequence)
        self._pool.release(self._scheduler.remove(sequence))
        if not job.sequences:
            self._ledger.remove(job)

    def _give_out(
        self, job: DecodeJob, choice: int, index: int, token: SampledToken, events: Events
    ) -> FinishReason | None:
        """Send the `index`th token of a choice; returns why it was the last, or `None`."""
        self._counters.num_decode_tokens += 1
        num_tokens, limits = len(job.prompt_ids) + index + 1, self._limits
        ended = finish_reason(job.params, token.token_id, index + 1, num_tokens, limits.eos, limits.max_context)
        events[job.session].append(TokenSampled(job.key, choice, index, token, ended))
        return ended


def _to_append(owner: Choice | Prompt, tokens: list[SampledToken] | InternalError) -> list[int]:
    """What the scheduler books; a sequence that could not be sampled is gone before it is looked at again."""
    if isinstance(tokens, InternalError):
        return [0]
    # Of a prompt these are first tokens of several choices; one stands behind it until it forks.
    return [token.token_id for token in (tokens if isinstance(owner, Choice) else tokens[:1])]


def _all_or_error(sampled: list[SampledToken | InternalError]) -> list[SampledToken] | InternalError:
    tokens = []
    for token in sampled:
        if isinstance(token, InternalError):
            return token
        tokens.append(token)
    return tokens
