"""One attempt at one request at a decode worker, and its sequences in the batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from decode_worker.reservations import Local
from kvtransfer.protocol.messages import AttemptKey
from tandem.core.sampling import SampleRow, SamplingParams, SequenceState
from tandem.rpc.v1 import decode_pb2 as decode_pb
from tandem.worker.sequence import Sequence


@dataclass(slots=True)
class Generation:
    """One attempt at one request."""

    key: AttemptKey
    session: int
    turn: float
    arrival: int
    prompt_ids: list[int]
    params: SamplingParams
    num_choices: int
    journal: dict[int, list[int]]  # tokens that the client has, by choice; they are replayed, not sampled again
    finished: frozenset[int]  # choices that have ended already
    max_local_tokens: int
    queued: bool = False  # the protocol took it for a new attempt
    is_new: bool = False  # handed off, and no step has computed anything of it yet
    local: decode_pb.ComputesHere | None = None  # set from when its prompt is computed here
    sequences: list[Sequence] = field(default_factory=list)  # in the batch, or preempted

    @property
    def going_on(self) -> list[int]:
        """The choices that have not ended."""
        return [c for c in range(self.num_choices) if c not in self.finished]

    @property
    def to_sample(self) -> list[int]:
        """The choices whose first token nobody has sampled yet."""
        return [c for c in self.going_on if c not in self.journal]

    def begin_prompt(self, taken: Local, page_size: int) -> Sequence:
        """The prompt, computed here once for all choices; see `Prompt`."""
        num_cached = len(taken.cached)
        sequence = self._make_sequence(0, [], [*taken.cached, *taken.pages], num_cached * page_size, num_cached)
        sequence.keys = list(taken.reservation.keys)
        sequence.samples = bool(self.to_sample)
        # What a lost prefill worker left behind has waited long enough, and prefill has no time for it.
        sequence.paced = self.key.attempt == 1
        sequence.owner = Prompt(self, SequenceState(self.prompt_ids))
        self.sequences.append(sequence)
        return sequence

    def begin_choice(self, choice: int, output: list[int], pages: Iterable[int], num_published: int) -> Sequence:
        """A choice whose prompt lies in `pages`, of which the cache knows `num_published`; `output` is replayed."""
        sequence = self._make_sequence(choice, output, list(pages), len(self.prompt_ids), num_published)
        sequence.owner = Choice(self, SequenceState(self.prompt_ids, output))
        self.sequences.append(sequence)
        return sequence

    def _make_sequence(
        self, choice: int, output: list[int], pages: list[int], num_computed: int, num_published: int
    ) -> Sequence:
        return Sequence(
            request_id=self.key.request_id,
            attempt=self.key.attempt,
            choice=choice,
            turn=self.turn,
            arrival=self.arrival,
            token_ids=self.prompt_ids + output,
            num_prompt=len(self.prompt_ids),
            params=self.params,
            num_computed=num_computed,
            pages=pages,
            num_published=num_published,
        )


@dataclass(slots=True)
class Prompt:
    """Owner of a sequence that computes a prompt: its last step samples the first token of each choice to sample."""

    generation: Generation
    state: SequenceState

    def rows(self, _: Sequence) -> list[SampleRow]:
        job = self.generation
        return [SampleRow(self.state, job.params, choice, 0) for choice in job.to_sample]


@dataclass(slots=True)
class Choice:
    """Owner of a sequence that generates one choice."""

    generation: Generation
    state: SequenceState

    def rows(self, sequence: Sequence) -> list[SampleRow]:
        return [SampleRow(self.state, sequence.params, sequence.choice, sequence.num_output)]
