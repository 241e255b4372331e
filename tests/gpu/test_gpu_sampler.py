"""Sampling on a GPU: the tokens that the same logits give on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tandem.core.sampling import SampledToken, SampleRow, SamplingParams, SequenceState
from tandem.engine import torch_draw
from tandem.engine.select_kernels import kernels_for
from tandem.engine.torch_draw import Draws
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab_size", [1, 255, 256, 5_003])
def test_the_kernels_draw_what_torch_draws(triton_device: torch.device, vocab_size: int, dtype: torch.dtype) -> None:
    """Rows with and without a distribution, views among them; numbers at the ends, where rounding decides."""
    from tandem.engine.cuda.draw import draw

    wide = torch.randn(12, vocab_size + 3, dtype=dtype, generator=torch.Generator().manual_seed(vocab_size)) * 4
    logits = wide.to(triton_device)[:, 2 : 2 + vocab_size]
    logits[3, : vocab_size // 2] = -torch.inf
    logits[4] = 0.0
    logits[5] = -torch.inf
    logits[6, vocab_size // 2] = 1e4
    greatest = logits.amax(dim=-1)
    params = [SamplingParams(temperature=0.2 + index) for index in range(12)]
    for number in (0.0, 0.3, 0.999, 1.0 - 2**-53):
        draws = Draws.of(params, [number] * 12, triton_device)
        together = draw(logits, greatest, draws)
        has_one = greatest.isfinite()
        if number < 1.0 - 2**-53:  # there the order of a sum may decide
            assert torch.equal(together[has_one], torch_draw.draw(logits, greatest, draws)[has_one])
        assert bool((logits.gather(1, together[:, None])[has_one, 0] > -torch.inf).all())
        assert bool(((together >= 0) & (together < vocab_size)).all())
        for row in (0, 4, 11):
            alone = Draws.of(params[row : row + 1], [number], triton_device)
            assert torch.equal(draw(logits[row : row + 1], greatest[row : row + 1], alone), together[row : row + 1])


def test_what_cuts_is_drawn_by_torch(triton_device: torch.device) -> None:
    from tandem.engine.cuda.draw import draw

    logits = torch.randn(3, 5_003, generator=torch.Generator().manual_seed(1)).to(triton_device)
    for cut in ({"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.3}):
        draws = Draws.of([SamplingParams(**cut)] * 3, [0.1, 0.6, 0.99], triton_device)
        greatest = logits.amax(dim=-1)
        assert torch.equal(draw(logits, greatest, draws), torch_draw.draw(logits, greatest, draws))


@pytest.mark.parametrize("spread", [0.01, 3.0])
@pytest.mark.parametrize("wish", WISHES.values(), ids=WISHES)
def test_tokens_are_those_of_the_cpu(gpu: torch.device, wish: dict[str, Any], spread: float) -> None:
    logits = torch.randn(64, VOCAB, generator=torch.Generator().manual_seed(1)) * spread
    rows = [
        SampleRow(SequenceState((1, 2), (5, 5, 7)), SamplingParams(seed=seed, **wish), position=3) for seed in range(64)
    ]
    ours_of, theirs_of = kernels_for(gpu).sampler((2,)), TorchSampler((2,))
    both = zip(ours_of.sample_rows(logits.to(gpu), rows), theirs_of.sample_rows(logits, rows), strict=True)
    for ours, theirs in both:
        assert isinstance(ours, SampledToken)
        assert isinstance(theirs, SampledToken)
        assert ours.token_id == theirs.token_id
        assert [token for token, _ in ours.top_logprobs] == [token for token, _ in theirs.top_logprobs]
