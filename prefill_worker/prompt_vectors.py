"""What a step's hidden states say of its prompts: their vectors, part by part."""

from __future__ import annotations

from typing import Any

from prefill_worker.job import PromptJob
from tandem.core.errors import InternalError
from tandem.worker.batch import Batch
from tandem.worker.prompt_pooling import MeanOf, SumRows


class PromptVectors:
    """Reads them after each step, where a model that generates has logits (`prefill_worker.prompt_logits`)."""

    def __init__(self, sum_rows: SumRows, mean_of: MeanOf) -> None:
        self._sum_rows = sum_rows
        self._mean_of = mean_of

    def score(self, _: Batch, hidden: Any) -> Any:
        """Nothing has log-probabilities."""
        return hidden

    def sample(self, batch: Batch, hidden: Any) -> list[list[int]]:
        """Nothing is sampled. `hidden`: float32 `[sum of num_logits, N]`."""
        first_row = 0
        for item in batch.items:
            job: PromptJob = item.sequence.owner
            pooling, num_prompt = item.sequence.pooling, item.sequence.num_prompt
            assert pooling is not None
            end = item.start + item.num_tokens
            pooling.take(hidden[first_row : first_row + len(item.pooled)], end, num_prompt, self._sum_rows)
            first_row += item.num_logits
            if end == num_prompt:
                values = pooling.values(num_prompt, self._mean_of)
                if isinstance(values, InternalError):
                    job.error = values
                else:
                    job.vector = tuple(values)
        return []
