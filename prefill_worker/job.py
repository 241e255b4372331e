"""One attempt at one prompt, as the prefill worker's runner knows it."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtransfer.protocol.messages import AttemptKey
from prefill_worker.sending import HandoffStats
from tandem.core.errors import TandemError
from tandem.core.sampling import SampledToken
from tandem.rpc.v1 import prefill_pb2 as prefill_pb
from tandem.worker.sequence import Sequence


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
    receiver: str  # incarnation of the decode worker that its pages are for
    # By choice, sampled by this attempt or an earlier one here. Invariant: never sampled twice.
    first_tokens: dict[int, SampledToken] = field(default_factory=dict)
    error: TandemError | None = None  # a token could not be sampled: the attempt ends when the step is booked
    started_s: float | None = None
    computed_s: float | None = None  # when it was computed, and its first tokens given out, for the first time
    sealed_s: float | None = None  # when it was computed last: again after a preemption
    num_computed_tokens: int = 0  # all that was computed for it, again after a preemption too
    # Decode has pages for it: what is sealed goes to the desk, and nothing preempts it.
    attached: bool = False
    repeated: bool = False  # its start came again, perhaps when the desk was through: then it is open there again
    over: bool = False  # nobody waits for it; only the desk may hold pages still

    @property
    def compute_s(self) -> float:
        """From the first chunk to the first tokens, in seconds."""
        return self.computed_s - self.started_s if self.computed_s is not None and self.started_s is not None else 0.0

    @property
    def open_choices(self) -> list[int]:
        """Choices whose first token the client does not have."""
        return [c for c in range(self.num_choices) if c not in self.journal and c not in self.finished]

    @property
    def to_sample(self) -> list[int]:
        return [c for c in self.open_choices if c not in self.first_tokens]

    @property
    def computed(self) -> bool:
        """All its pages hold what they shall."""
        return self.sequence.num_computed == self.sequence.num_prompt

    def describe_handoff(self, stats: HandoffStats) -> prefill_pb.HandoffDone:
        return prefill_pb.HandoffDone(
            request_id=self.key.request_id,
            attempt=self.key.attempt,
            num_bytes=stats.num_bytes,
            num_extents=stats.num_extents,
            num_descriptors=stats.num_descriptors,
            handoff_s=stats.handoff_s,
            exposed_s=stats.exposed_s,
            compute_s=self.compute_s,
            num_computed_tokens=self.num_computed_tokens,
            num_cached_tokens=self.sequence.num_cached,
            answer_s=stats.answer_s,
        )

    def describe_end(self) -> prefill_pb.PrefillEnded:
        return prefill_pb.PrefillEnded(
            request_id=self.key.request_id,
            attempt=self.key.attempt,
            compute_s=self.compute_s,
            num_computed_tokens=self.num_computed_tokens,
            num_cached_tokens=self.sequence.num_cached,
        )


@dataclass(slots=True)
class StepPart:
    """The pages that one step fills, or ends a prompt in: `pages[0]` is page `first` of the prompt."""

    job: PromptJob
    first: int
    pages: tuple[int, ...]
    next_layer: int = 0  # the desk knows of the layers before it
