"""What a step's tokens are to the attempts in its batch. Pure; runs on the thread of the batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as SeqOf
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from decode_worker.events import Emit, Event
from decode_worker.job import Choice, DecodeJob, Prompt
from decode_worker.ledger import AttemptState, Ledger
from tandem.core import fault_points
from tandem.core.errors import InternalError, TandemError
from tandem.core.prompt_scores import TokenScore
from tandem.core.sampling import SampledToken
from tandem.worker.batch import Batch, ScheduledSequence
from tandem.worker.counters import WorkerCounters
from tandem.worker.guide import GuideMaker
from tandem.worker.prompt_scoring import ScoreTokens, take_scores
from tandem.worker.request import AttemptFailed, PromptScored, RequestLimits, TokenSampled
from tandem.worker.scheduler import BatchScheduler
from tandem.worker.sequence import FinishReason, Sequence, finish_reason
from tandem.worker.step import SampleTokens, may_be_wrong

Events = defaultdict[int, list[Event]]  # by session


@dataclass(slots=True, kw_only=True)
class TokenBook:
    """Samples each step, books its tokens and gives them out."""

    scheduler: BatchScheduler
    ledger: Ledger[DecodeJob]  # attempts that end are taken out
    limits: RequestLimits
    sample_tokens: SampleTokens
    score_tokens: ScoreTokens
    counters: WorkerCounters
    emit: Emit
    drop: Callable[[DecodeJob], None]  # ends an attempt whose tokens cannot be used
    guides: GuideMaker
    # Of the step under way: what was sampled for each item that samples, or why it could not be.
    _sampled: list[list[SampledToken] | TandemError] = field(default_factory=list, init=False)
    # Sequences that have their last token, while that waits to be given out.
    _ended: set[int] = field(default_factory=set, init=False)  # by `id`
    # Of these items, by `id`, all tokens were guessed and are noted, since what comes next cannot be told yet.
    _all_noted: set[int] = field(default_factory=set, init=False)
    # Of these items, by `id`, why what comes behind the guesses that were right could not be sampled.
    _errors_behind: dict[int, TandemError] = field(default_factory=dict, init=False)

    def begin_masks(self, batch: Batch) -> None:
        """Have the masks made that this step's sampling needs, while it is computed."""
        guided = [item.sequence.owner for item in batch.items if item.samples and item.sequence.params.grammar]
        if guided:
            self.guides.begin([owner.guide for owner in guided])

    def score(self, batch: Batch, logits: Any) -> Any:
        """As `StepHooks.score`."""
        return take_scores(batch.items, logits, self.score_tokens, self._scored)

    def _scored(self, item: ScheduledSequence, first: int, tokens: list[TokenScore] | InternalError) -> None:
        prompt: Prompt = item.sequence.owner
        if isinstance(tokens, InternalError):
            prompt.error = tokens
        elif item.sequence.scoring is not None:
            item.sequence.scoring.num_known = first + len(tokens)
            self.emit({prompt.job.session: [PromptScored(prompt.job.key, first, tuple(tokens))]})

    def sample(self, batch: Batch, logits: Any) -> list[list[int]]:
        """As `StepHooks.sample`."""
        items = [item for item in batch.items if item.samples]
        has_guesses = any(item.guesses for item in items)
        late = self._late(items, awaits_one=len(items) == len(batch.items))
        self.counters.num_late_masks += len(late)
        self._sampled = self._sample_but(late, items, logits[_newest_rows(items)] if has_guesses else logits)
        self._all_noted.clear()
        self._errors_behind.clear()
        if has_guesses:
            self._follow_guesses(items, logits)
        return [_to_append(item.sequence.owner, tokens) for item, tokens in zip(items, self._sampled, strict=True)]

    def _late(self, items: list[ScheduledSequence], *, awaits_one: bool) -> set[int]:
        """Of which the masks are not there yet, by index: they are sampled in a later step."""
        if not any(item.sequence.params.grammar for item in items):
            return set()
        return self.guides.late([item.sequence.owner.guide for item in items], awaits_one=awaits_one)

    def _sample_but(
        self, late: set[int], items: list[ScheduledSequence], logits: Any
    ) -> list[list[SampledToken] | TandemError]:
        """The tokens that come next, and none of those that are late."""
        if not late:
            return self._sample(items, logits, 0)
        ready = [index for index in range(len(items)) if index not in late]
        sampled = iter(self._sample([items[index] for index in ready], logits[ready], 0) if ready else ())
        return [[] if index in late else next(sampled) for index in range(len(items))]

    def _sample(
        self, items: list[ScheduledSequence], logits: Any, ahead: int
    ) -> list[list[SampledToken] | TandemError]:
        """The tokens that come next, or behind `ahead` of them that are noted."""
        rows = [item.sequence.owner.rows(item.sequence, ahead) for item in items]
        return [_all_or_error(tokens) for tokens in self.sample_tokens(logits, rows)]

    def _follow_guesses(self, items: list[ScheduledSequence], logits: Any) -> None:
        """Where a guess is what was sampled, sample behind it too; add that to what was sampled, and note what comes
        before it."""
        newest_rows, sampled = _newest_rows(items), self._sampled
        indices = list(range(len(items)))
        ahead = 0
        while indices := [index for index in indices if _is_right(items[index].guesses, sampled[index], ahead)]:
            going_on = [items[index] for index in indices]
            for item in going_on:
                item.sequence.owner.append(item.guesses[ahead])
            if guided := [guide for item in going_on if (guide := item.sequence.owner.guide) is not None]:
                self.guides.begin(guided)
                late = self._late(going_on, awaits_one=False)
                self._all_noted.update(id(going_on[at]) for at in late)
                indices = [index for at, index in enumerate(indices) if at not in late]
                going_on = [items[index] for index in indices]
                if not indices:
                    return
            ahead += 1
            fault_points.reach("decode.guessed")
            behind = self._sample(going_on, logits[[newest_rows[index] + ahead for index in indices]], ahead)
            for index, item, tokens in zip(indices, going_on, behind, strict=True):
                before = sampled[index]
                assert not isinstance(before, TandemError)
                if isinstance(tokens, TandemError):  # what comes before it is right, and is given out first
                    self._all_noted.add(id(item))
                    self._errors_behind[id(item)] = tokens
                else:
                    sampled[index] = before + tokens

    def book(self, batch: Batch) -> None:
        """Give out what a step sampled, which the scheduler has booked. With the scheduler's lock held."""
        events: Events = defaultdict(list)
        self._ended.clear()
        sampled = iter(self._sampled)
        for item in batch.items:
            sequence = item.sequence
            job: DecodeJob = sequence.owner.job
            self._count(item)
            tokens = next(sampled) if item.samples else []
            if not self.ledger.has(job):  # cancelled, or another choice could not be sampled
                continue
            if isinstance(tokens, TandemError):
                self._fail(sequence, tokens, events)
                continue
            match sequence.owner:
                case Choice() if tokens and any(each is sequence for each in job.sequences):  # else nobody wants it
                    num_noted = len(tokens) - 1 if item.guesses else 0
                    num_noted += id(item) in self._all_noted
                    if item.guesses:
                        sequence.guessed_by.judge(len(item.guesses), num_noted)
                        self.counters.note_guesses(sequence.guessed_by.source, len(item.guesses), num_noted)
                    self._book(sequence, tokens, num_noted, events)
                    if (error := self._errors_behind.get(id(item))) and any(one is sequence for one in job.sequences):
                        self._fail(sequence, error, events)
                case Prompt(error=InternalError() as error):
                    self._fail(sequence, error, events)
                case Prompt() if sequence.num_computed == sequence.num_prompt:
                    self._fork(sequence, tokens, events)
        if events:
            self.emit(events)

    def may_wait(self, batch: Batch) -> bool:
        """Whether a step of one token of each choice may be given out after the next one is launched; notes then who
        has ended. An error takes the request's other choices with it."""
        if any(isinstance(tokens, TandemError) for tokens in self._sampled):
            return False
        limits = self.limits
        for item, tokens in zip(batch.items, self._sampled, strict=True):
            one = item.sequence
            token_id = tokens[0].token_id  # type: ignore[index] # no errors, as above
            num_tokens = len(one.token_ids)
            if finish_reason(one.params, token_id, one.num_output, num_tokens, limits.eos, limits.max_context):
                self._ended.add(id(one))
        return True

    def has_ended(self, sequence: Sequence) -> bool:
        """Whether it has its last token, which is not given out yet."""
        return id(sequence) in self._ended

    def enter(
        self,
        job: DecodeJob,
        outputs: dict[int, list[int]],
        pages: SeqOf[int],
        num_published: int,
        num_hidden: int,
    ) -> None:
        """Let choices into the batch that share the prompt's `pages`, behind `num_hidden` that no token sees any more;
        each copies what it writes to. Those of which nobody wants more stay out."""
        wanted = {choice: output for choice, output in outputs.items() if choice not in job.ended}
        if not wanted:
            self.scheduler.pool.release(list(pages))
            self.ledger.remove(job)
            return
        self.ledger.set_state(job, AttemptState.RUNNING)
        groups = self.scheduler.groups
        for num_entered, (choice, output) in enumerate(wanted.items()):
            if num_entered:
                self.scheduler.pool.share(pages)
            self.scheduler.enter(job.begin_choice(groups, choice, output, pages, num_published, num_hidden))

    def _count(self, item: ScheduledSequence) -> None:
        end = min(item.start + item.num_tokens, item.sequence.num_prompt)
        self.counters.num_prompt_tokens_computed += max(0, end - item.start)

    def _fail(self, sequence: Sequence, error: TandemError, events: Events) -> None:
        """Its logits cannot be sampled. Where its KV may be wrong too, no other request may find it, nor that of the
        other choices, which are dropped with it: what is wrong may be the prompt's."""
        job: DecodeJob = sequence.owner.job
        if may_be_wrong(error):
            self.scheduler.discard(list(dict.fromkeys(key for each in job.sequences for key in each.keys)))
        events[job.session].append(AttemptFailed(job.key, error))
        self.drop(job)

    def _fork(self, prompt: Sequence, tokens: list[SampledToken], events: Events) -> None:
        """The prompt is computed: its choices go on from here, those with a journal by replaying it."""
        job: DecodeJob = prompt.owner.job
        num_hidden = prompt.num_hidden
        pages = self.scheduler.remove(prompt)
        job.sequences.remove(prompt)
        outputs = dict(job.journal)
        for choice, token in zip(job.to_sample, tokens, strict=True):
            if self._give_out(job, choice, 0, token, events) is None:
                outputs[choice] = [token.token_id]
        if outputs:
            self.enter(job, outputs, pages, prompt.num_published, num_hidden)
        else:
            self.scheduler.pool.release(pages)
            self.ledger.remove(job)

    def _book(self, sequence: Sequence, tokens: list[SampledToken], num_noted: int, events: Events) -> None:
        """Tokens of one choice, in order; the first `num_noted` are noted already. What follows its end is nobody's."""
        choice: Choice = sequence.owner
        job = choice.job
        first_index = sequence.num_output - len(tokens)
        for index, token in enumerate(tokens, first_index):
            if index >= first_index + num_noted:
                choice.append(token.token_id)
            if self._give_out(job, sequence.choice, index, token, events) is not None:
                self.end(job, sequence)
                return

    def end(self, job: DecodeJob, sequence: Sequence) -> None:
        """Nothing more comes of a choice; the attempt ends with its last one."""
        job.sequences.remove(sequence)
        self.scheduler.pool.release(self.scheduler.retire(sequence))
        if not job.sequences:
            self.ledger.remove(job)

    def _give_out(
        self, job: DecodeJob, choice: int, index: int, token: SampledToken, events: Events
    ) -> FinishReason | None:
        """Send the `index`th token of a choice; returns why it was the last, or `None`."""
        self.counters.num_decode_tokens += 1
        num_tokens, limits = len(job.prompt_ids) + index + 1, self.limits
        ended = finish_reason(job.params, token.token_id, index + 1, num_tokens, limits.eos, limits.max_context)
        events[job.session].append(TokenSampled(job.key, choice, index, token, ended))
        return ended


def _newest_rows(items: list[ScheduledSequence]) -> list[int]:
    """Of the logits that are sampled from, the row of each item's newest token; there are some items."""
    return list(accumulate((item.num_to_sample for item in items[:-1]), initial=0))


def _is_right(guesses: tuple[int, ...], sampled: list[SampledToken] | TandemError, place: int) -> bool:
    """Whether the guess at this place is the token that was sampled there."""
    if isinstance(sampled, TandemError) or place >= min(len(guesses), len(sampled)):
        return False
    return sampled[place].token_id == guesses[place]


def _to_append(owner: Choice | Prompt, tokens: list[SampledToken] | TandemError) -> list[int]:
    """What the scheduler books; a sequence that could not be sampled is gone before it is looked at again."""
    if isinstance(tokens, TandemError):
        return [0]
    # Of a prompt these are first tokens of several choices; one stands behind it until it forks.
    return [token.token_id for token in (tokens if isinstance(owner, Choice) else tokens[:1])]


def _all_or_error(sampled: list[SampledToken | TandemError]) -> list[SampledToken] | TandemError:
    errors = [token for token in sampled if isinstance(token, TandemError)]
    return errors[0] if errors else [token for token in sampled if isinstance(token, SampledToken)]
