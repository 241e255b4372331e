"""One attempt at one request at a decode worker, and its sequences in the batch. Pure."""

from __future__ import annotations

from collections.abc import Sequence as SeqOf
from dataclasses import dataclass, field

from decode_worker.events import ComputesHere
from decode_worker.ledger import Attempt
from tandem.core.errors import InternalError
from tandem.core.layer_groups import LayerGroups
from tandem.core.page_keys import PageKeys
from tandem.core.pages import pages_for
from tandem.core.sampling import SampleRow, SamplingParams, SequenceState
from tandem.core.token_ids import TokenIds, token_ids
from tandem.worker.guide import Guide
from tandem.worker.prompt_scoring import PromptScoring
from tandem.worker.sequence import Sequence
from tandem.worker.spans import Spans

#: Stands for the prompt where choices are numbered.
PROMPT = -1


@dataclass(slots=True, kw_only=True, eq=False)
class DecodeJob(Attempt):
    """One attempt at one request."""

    session: int
    tpot_s: float  # in which each further token is wanted
    own_turn: float  # of its choices: without the slack that its prompt has
    prompt_ids: TokenIds[int]
    params: SamplingParams
    num_choices: int
    going_on: list[int]  # the choices that have not ended
    journal: dict[int, list[int]]  # tokens that the client has, by choice; they are replayed, not sampled again
    scoring: PromptScoring | None = None  # of the prompt, where decode computes it
    cache_salt: str = ""
    ended: set[int] = field(default_factory=set)  # choices of which nobody wants more
    is_cancelled: bool = False  # it was cancelled; its pages come back when the protocol says so
    may_be_wrong: bool = False  # what was handed off of it: no other request may find it
    local: ComputesHere | None = None  # set from when its prompt is computed here
    sequences: list[Sequence] = field(default_factory=list)  # in the batch, or preempted
    # Of a request with a grammar, when it enters the batch: by choice, and of `PROMPT` where that is computed here.
    # Each choice takes its own; one that has none begins as the prompt does.
    guides: dict[int, Guide] = field(default_factory=dict)

    @property
    def to_sample(self) -> list[int]:
        """The choices that have no first token yet."""
        return [c for c in self.going_on if c not in self.journal]

    def begin_prompt(self, groups: LayerGroups) -> Sequence:
        """The prompt, computed here once for all choices; see `Prompt`."""
        pages, num_there = [*self.cached, *self.pages], self.num_there
        sequence = self._make_sequence(groups, 0, [], pages, num_there * groups.page_size, num_there, self.num_hidden)
        sequence.turn = self.turn
        sequence.samples = bool(self.to_sample)
        sequence.scoring = self.scoring
        # A retry is not paced: it has waited long enough, and prefill has no time for it.
        sequence.paced = self.key.attempt == 1 and not self.unpaced
        sequence.yields = self.key.attempt == 1
        sequence.owner = Prompt(self, SequenceState(self.prompt_ids), self.guides.get(PROMPT))
        self.sequences.append(sequence)
        return sequence

    def begin_choice(
        self,
        groups: LayerGroups,
        choice: int,
        output: list[int],
        pages: SeqOf[int],
        num_published: int,
        num_hidden: int = 0,
    ) -> Sequence:
        """A choice whose prompt is in `pages`, without those of `num_hidden` places that it does not see. Of all its
        places the first `num_published` are in the cache. `output` is replayed."""
        sequence = self._make_sequence(groups, choice, output, pages, len(self.prompt_ids), num_published, num_hidden)
        sequence.owner = Choice(self, SequenceState(self.prompt_ids, output), self._guide(choice, output))
        self.sequences.append(sequence)
        return sequence

    def _guide(self, choice: int, output: list[int]) -> Guide | None:
        """Of a choice that has this output."""
        if not self.params.grammar:
            return None
        if (guide := self.guides.pop(choice, None)) is None:  # its first token was sampled here
            guide = self.guides[PROMPT].anew()
            for token_id in output:
                guide.push(token_id)
        return guide

    def _make_sequence(
        self,
        groups: LayerGroups,
        choice: int,
        output: list[int],
        pages: SeqOf[int],
        num_computed: int,
        num_published: int,
        num_hidden: int,
    ) -> Sequence:
        own_ids = token_ids(self.prompt_ids)
        own_ids.extend(output)
        num_places = pages_for(len(self.prompt_ids), groups.page_size)
        table, windowed = groups.tables(pages, num_hidden, num_places)
        return Sequence(
            request_id=self.key.request_id,
            attempt=self.key.attempt,
            choice=choice,
            turn=self.own_turn,
            arrival=self.arrival,
            token_ids=own_ids,
            num_prompt=len(self.prompt_ids),
            params=self.params,
            num_computed=num_computed,
            pages=table,
            windowed=windowed,
            num_hidden=num_hidden,
            keys=PageKeys(self.page_keys),
            num_published=num_published,
            cache_salt=self.cache_salt,
            tpot_s=self.tpot_s,
        )


@dataclass(slots=True)
class Prompt:
    """Owner of a sequence that computes a prompt. Its last step samples the first tokens that are missing."""

    job: DecodeJob
    state: SequenceState
    guide: Guide | None  # of an output that begins
    error: InternalError | None = None  # its logits are of no use: the attempt ends when the step is booked
    spans: Spans = field(default_factory=Spans)  # its chunks

    def rows(self, _: Sequence, _ahead: int) -> list[SampleRow]:
        """Of the missing choices, which have nothing ahead."""
        job = self.job
        return [SampleRow(self.state, job.params, choice, 0, self.guide) for choice in job.to_sample]


@dataclass(slots=True)
class Choice:
    """Owner of a sequence that generates one choice."""

    job: DecodeJob
    state: SequenceState
    guide: Guide | None

    def append(self, token_id: int) -> None:
        """Note one generated token."""
        self.state.append(token_id)
        if self.guide is not None:
            self.guide.push(token_id)

    def rows(self, sequence: Sequence, ahead: int) -> list[SampleRow]:
        """Of the next token but `ahead`, where those between are noted."""
        return [SampleRow(self.state, sequence.params, sequence.choice, sequence.num_output + ahead, self.guide)]
