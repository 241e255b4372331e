"""One attempt at one prompt, as the role knows it."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field

from kvtransfer.protocol.messages import AttemptKey, FirstToken
from prefill_worker.events import PromptWork
from tandem.core.errors import TandemError
from tandem.core.layer_groups import LayerGroups
from tandem.core.pages import pages_for
from tandem.core.sampling import SampledToken, SampleRow, SequenceState
from tandem.core.token_ids import token_ids
from tandem.worker.batch import ScheduledSequence
from tandem.worker.guide import Guide
from tandem.worker.prompt_pooling import PromptPooling
from tandem.worker.request import AttemptSpec, RequestLimits
from tandem.worker.sequence import FinishReason, Sequence, finish_reason
from tandem.worker.spans import Spans
from tandem.worker.turn import turn_of
from tandem.worker.validate import open_journals, validate


@dataclass(slots=True)
class PromptJob:
    """One attempt at one prompt.

    waits ──> computes ──> parked: computed, decode has not acknowledged ──> over
      └──preempted, while no grant is attached──┘
    """

    key: AttemptKey
    session: int
    sequence: Sequence
    num_choices: int
    journal: dict[int, list[int]]  # tokens that the client has, by choice; such a choice is not sampled again
    finished: frozenset[int]  # choices that have ended already
    # By choice, sampled by this attempt or an earlier one here. Invariant: never sampled twice.
    first_tokens: dict[int, SampledToken] = field(default_factory=dict)
    vector: tuple[float, ...] = ()  # of a prompt that is pooled, once it is computed
    guide: Guide | None = None  # of its grammar: all choices begin alike
    error: TandemError | None = None  # its logits are of no use: the attempt ends when the step is booked
    spans: Spans = field(default_factory=Spans)
    started_s: float | None = None
    computed_s: float | None = None  # when it was computed, and its first tokens given out, for the first time
    sealed_s: float | None = None  # when it was computed last: again after a preemption
    num_computed_tokens: int = 0  # all that was computed for it, again after a preemption too
    # Decode has pages for it: what is sealed goes to the driver, and nothing preempts it.
    attached: bool = False
    repeated: bool = False  # its start came again, perhaps when the driver was through: then it is open there again
    over: bool = False  # nobody waits for it; only the driver may hold pages still

    @property
    def open_choices(self) -> list[int]:
        """Choices whose first token the client does not have."""
        return [c for c in range(self.num_choices) if c not in self.journal and c not in self.finished]

    @property
    def to_sample(self) -> list[int]:
        if self.sequence.pooling is not None:
            return []
        return [c for c in self.open_choices if c not in self.first_tokens]

    def sample_rows(self) -> list[SampleRow]:
        """What is asked of the sampler: a first token of each choice in `to_sample`."""
        state = SequenceState(self.sequence.token_ids)
        return [SampleRow(state, self.sequence.params, choice, 0, self.guide) for choice in self.to_sample]

    @property
    def needs_guide(self) -> bool:
        """Something is to be sampled by its grammar."""
        return bool(self.sequence.params.grammar and self.to_sample)

    @property
    def computed(self) -> bool:
        """All pages of the prompt are computed."""
        return self.sequence.num_computed == self.sequence.num_prompt

    @property
    def work(self) -> PromptWork:
        began_s, ended_s = self.started_s, self.computed_s
        compute_s = ended_s - began_s if ended_s is not None and began_s is not None else 0.0
        return PromptWork(compute_s, self.num_computed_tokens, self.sequence.num_cached)

    def ended_by(self, token_id: int, limits: RequestLimits) -> FinishReason | None:
        """Why nothing follows `token_id` as a first token; `None`: something does."""
        num_tokens = self.sequence.num_prompt + 1
        return finish_reason(self.sequence.params, token_id, 1, num_tokens, limits.eos, limits.max_context)

    def going_on(self, limits: RequestLimits) -> tuple[FirstToken, ...]:
        """What decode continues: choices that did not end with their first token."""
        going_on = [FirstToken(choice, ids[0]) for choice, ids in self.journal.items()]
        for choice, token in self.first_tokens.items():
            if self.ended_by(token.token_id, limits) is None:
                going_on.append(FirstToken(choice, token.token_id))
        return tuple(going_on)


def make_job(session: int, spec: AttemptSpec, limits: RequestLimits, arrival: int, now_s: float) -> PromptJob:
    """Raises `InvalidRequestError` for a prompt that the model cannot compute."""
    validate(spec, limits)
    journal, finished = open_journals(spec, limits)
    sequence = Sequence(
        request_id=spec.key.request_id,
        attempt=spec.key.attempt,
        choice=0,
        turn=turn_of(spec.priority, now_s - spec.age_s, limits.priority_ageing_s, spec.slack_s),
        arrival=arrival,
        token_ids=token_ids(spec.prompt_ids),
        num_prompt=len(spec.prompt_ids),
        params=spec.params,
        scoring=copy(spec.scoring),
        pooling=PromptPooling(limits.pooling.kind) if limits.pooling is not None else None,
        cache_salt=spec.cache_salt,
    )
    job = PromptJob(spec.key, session, sequence, spec.num_choices, journal, finished)
    sequence.owner = job
    return job


@dataclass(slots=True)
class StepPart:
    """The pages that one step fills, or ends a prompt in. Those from page `first` of the prompt on are `sent`."""

    job: PromptJob
    pages: tuple[int, ...]
    first: int
    sent: tuple[int, ...]
    next_layer: int = 0  # the driver knows of the layers before it


def part_of(item: ScheduledSequence, groups: LayerGroups) -> StepPart:
    """What a step does for one prompt, of which decode gets the pages that an output sees.

    Chunks end on page borders or with the prompt, so the first page was not begun by an earlier chunk.
    """
    sequence, page_size = item.sequence, groups.page_size
    end, num_prompt = item.start + item.num_tokens, sequence.num_prompt
    first = item.start // page_size
    last = pages_for(end, page_size) if end == num_prompt else end // page_size
    pages = groups.listed(sequence.pages, sequence.windowed, sequence.num_hidden, first, last)
    index, sent = sent_of(sequence, groups, first, last)
    return StepPart(sequence.owner, tuple(pages), index, sent)


def sent_of(sequence: Sequence, groups: LayerGroups, first: int, last: int) -> tuple[int, tuple[int, ...]]:
    """Of places `[first, last)` of a prompt the pages that an output sees, and how a handoff counts the first one."""
    num_hidden = groups.num_hidden(sequence.num_prompt)
    sent = tuple(groups.listed(sequence.pages, sequence.windowed, num_hidden, first, last))
    return groups.index_of(first if groups.num_windowed else max(first, num_hidden), num_hidden), sent
