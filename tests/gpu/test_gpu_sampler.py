"""Sampling on a GPU: the tokens that the same logits give on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tandem.core.sampling import SampledToken, SampleRow, SamplingParams, SequenceState
from tandem.engine import torch_draw
from tandem.engine.torch_sampler import TorchSampler

VOCAB = 128_256
WISHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 20, "top_p": 0.95},
    "min_p": {"min_p": 0.02},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": ((7, 4.0),)},
    "bounds": {"allowed_token_ids": (3, 100, 4_000), "bad_words": ((3,),)},
    "logprobs": {"num_logprobs": 3},
}


def test_a_row_has_the_same_bits_whatever_its_company(gpu: torch.device) -> None:
    weights = torch.rand(64, VOCAB, dtype=torch.float64, device=gpu)
    together = torch_draw._running_sums(torch_draw._block_sums(weights))
    for row in (0, 63):
        alone = torch_draw._running_sums(torch_draw._block_sums(weights[row : row + 1]))
        assert torch.equal(alone[0], together[row])
    assert torch.equal(torch_draw._running_sums(torch_draw._block_sums(weights.cpu())), together.cpu())


@pytest.mark.parametrize("spread", [0.01, 3.0])
@pytest.mark.parametrize("wish", WISHES.values(), ids=WISHES)
def test_tokens_are_those_of_the_cpu(gpu: torch.device, wish: dict[str, Any], spread: float) -> None:
    logits = torch.randn(64, VOCAB, generator=torch.Generator().manual_seed(1)) * spread
    rows = [
        SampleRow(SequenceState((1, 2), (5, 5, 7)), SamplingParams(seed=seed, **wish), position=3) for seed in range(64)
    ]
    sampler = TorchSampler((2,))
    for ours, theirs in zip(sampler.sample_rows(logits.to(gpu), rows), sampler.sample_rows(logits, rows), strict=True):
        assert isinstance(ours, SampledToken)
        assert isinstance(theirs, SampledToken)
        assert ours.token_id == theirs.token_id
        assert [token for token, _ in ours.top_logprobs] == [token for token, _ in theirs.top_logprobs]
