"""What a worker has counted since it started; its status reports it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tandem.core.step_times import NO_PROMPTS, PromptSteps
from tandem.worker.guesses import Source


@dataclass(slots=True)
class WorkerCounters:
    """Counts of one worker. Each has one thread that writes it; any thread may read them for the status."""

    num_prompt_tokens_computed: int = 0
    num_prompt_tokens_cached: int = 0
    num_decode_tokens: int = 0
    num_transfer_bytes: int = 0
    num_preemptions: int = 0
    num_masks: int = 0  # of grammars, one for each token that was chosen by one
    mask_s: float = 0.0  # that making them took, beside the forwards
    num_late_masks: int = 0  # how often a step went on without an output whose mask was not there
    num_slow_grammars: int = 0  # how often a grammar took too much computation
    num_guesses: int = 0  # of tokens that may come next, from lookup, computed beside those that do
    num_right_guesses: int = 0
    num_drafts: int = 0  # the same, from a draft model
    num_right_drafts: int = 0
    num_steps: int = 0  # of the model
    busy_s: float = 0.0  # that these took
    num_mixed_steps: int = 0  # of decode, in which it computed prompts beside its batch
    mixed_s: float = 0.0  # that these took
    num_chunk_tokens: int = 0  # of prompts that decode computed in chunks of full size
    chunk_s: float = 0.0  # that the steps took which had these
    num_unfilled_slots: int = 0  # in the last pages of the batch's sequences, as of the last report
    #: What new prompts would take now, of a decode worker that computes some; replaced as a whole.
    prompt_steps: PromptSteps = NO_PROMPTS
    #: Refused calls of other workers about handoffs, by reason; replaced as a whole.
    num_refused: Mapping[str, int] = field(default_factory=dict)

    def note_guesses(self, source: Source, num: int, num_right: int) -> None:
        """So many were made in a step, and so many were what came."""
        match source:
            case Source.LOOKUP:
                self.num_guesses += num
                self.num_right_guesses += num_right
            case Source.DRAFT:
                self.num_drafts += num
                self.num_right_drafts += num_right
