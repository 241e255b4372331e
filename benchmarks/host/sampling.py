"""Sampling of a batch of random logits, as an engine's sampler does it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tandem.core.sampling import SampleRow, SamplingParams, SequenceState
from tandem.engine.cpu.sampler import CompiledSampler


@dataclass(frozen=True, slots=True)
class SamplingCase:
    """Logits of a normal distribution of this `spread`: 5 is about a model's, 0.01 makes all tokens alike."""

    name: str
    params: SamplingParams
    goal_ms: float
    spread: float = 5.0


CASES = (
    SamplingCase("temperature 1", SamplingParams(), 8.0),
    SamplingCase("top_p 0.95", SamplingParams(top_p=0.95), 8.0),
    SamplingCase("top_k 20, top_p 0.95", SamplingParams(top_k=20, top_p=0.95), 8.0),
    SamplingCase("top_p 0.95, flat logits", SamplingParams(top_p=0.95), 20.0, spread=0.01),
    SamplingCase("greedy", SamplingParams(temperature=0.0), 8.0),
)


def sampling(case: SamplingCase, batch: int, vocab_size: int) -> Callable[[], object]:
    """What samples one step's tokens; each row with a seed of its own."""
    logits = torch.randn(batch, vocab_size, generator=torch.Generator().manual_seed(1)) * case.spread
    rows = [[SampleRow(SequenceState((1, 2)), dataclasses.replace(case.params, seed=seed))] for seed in range(batch)]
    sampler = CompiledSampler((2,))
    return lambda: sampler(logits, rows)
