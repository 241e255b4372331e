"""Notes in each prompt what a step was for it, and when."""

from __future__ import annotations

from collections.abc import Callable

from prefill_worker.job import PromptJob
from tandem.worker.batch import Batch


class StepSpans:
    """Of one step after the other.

    Args:
        now: the clock of the role.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._began_s = 0.0
        self._computed_s: float | None = None

    @property
    def elapsed_s(self) -> float:
        """Since the step began."""
        return self._now() - self._began_s

    def begin(self) -> None:
        self._began_s, self._computed_s = self._now(), None

    def computed(self) -> None:
        """The logits are there. Not called in a step that needs none."""
        self._computed_s = self._now()

    def end(self, batch: Batch) -> None:
        now_s = self._now()
        computed_s = self._computed_s or now_s
        for item in batch.items:
            job: PromptJob = item.sequence.owner
            job.spans.add("chunk", self._began_s, computed_s, item.num_tokens)
            if item.samples:
                job.spans.add("first token", computed_s, now_s, len(job.first_tokens))
