"""What a step's logits say of its prompts: the scores of their tokens, and the first tokens behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prefill_worker.events import Event
from prefill_worker.job import PromptJob
from tandem.core.errors import InternalError
from tandem.core.prompt_scores import TokenScore
from tandem.core.sampling import SampledToken
from tandem.worker.batch import Batch, ScheduledSequence
from tandem.worker.prompt_scoring import ScoreTokens, take_scores
from tandem.worker.request import PromptScored
from tandem.worker.step import SampleTokens


class PromptLogits:
    """Reads them after each step.

    Args:
        send: takes an event for a router, by its session.
    """

    def __init__(self, sample: SampleTokens, score: ScoreTokens, send: Callable[[int, Event], None]) -> None:
        self._sample = sample
        self._score = score
        self._send = send

    def score(self, batch: Batch, logits: Any) -> Any:
        return take_scores(batch.items, logits, self._score, self._scored)

    def _scored(self, item: ScheduledSequence, first: int, tokens: list[TokenScore] | InternalError) -> None:
        job: PromptJob = item.sequence.owner
        if isinstance(tokens, InternalError):
            job.error = tokens
        elif job.sequence.scoring is not None and not job.over:
            job.sequence.scoring.num_known = first + len(tokens)
            self._send(job.session, PromptScored(job.key, first, tuple(tokens)))

    def sample(self, batch: Batch, logits: Any) -> list[list[int]]:
        jobs: list[PromptJob] = [item.sequence.owner for item in batch.items if item.samples]
        rows = [job.sample_rows() for job in jobs]
        for job, row, tokens in zip(jobs, rows, self._sample(logits, rows), strict=True):
            for asked, token in zip(row, tokens, strict=True):
                if isinstance(token, SampledToken):
                    job.first_tokens[asked.choice] = token
                else:
                    job.error = token
        # The scheduler adds a token to each prompt. It goes with the prompt, which is never decoded here.
        return [[0] for _ in jobs]
