"""The sampler of any device: the compiled one's tokens, whatever the batch, and nothing but them leaves the device.

What each rule does is tested for both samplers in `test_engine_sampler.py` and `test_sampler_grammar.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.core.sampling import SampledToken, SampleRow, SamplingParams, SequenceState
from tandem.engine import torch_draw
from tandem.engine.cpu.sampler import CompiledSampler
from tandem.engine.torch_draw import Draws, draw
from tandem.engine.torch_sampler import TorchSampler

EOS = (2,)
VOCAB = 5_003  # no whole number of blocks


class Guide:
    """Lets every third token follow."""

    def allowed(self) -> bytes:
        return np.packbits(np.arange(VOCAB) % 3 == 0, bitorder="little").tobytes()


WISHES: tuple[dict[str, Any], ...] = (
    {}, {"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 20}, {"top_k": 20, "top_p": 0.95}, {"min_p": 0.02},
    {"temperature": 2.0, "top_p": 0.999, "top_k": 3000}, {"repetition_penalty": 1.3, "presence_penalty": 0.4},
    {"frequency_penalty": 0.5, "logit_bias": ((7, 4.0), (9, -100.0))}, {"min_tokens": 9, "stop_token_ids": (4, 6)},
    {"allowed_token_ids": (3, 100, 4_000)}, {"bad_words": ((7,), (5, 8))}, {"temperature": 0.0, "num_logprobs": 5},
    {"grammar": "g"}, {"temperature": 0.0, "grammar": "g"}, {"num_logprobs": 0}, {"num_logprobs": 3, "top_p": 0.5},
)  # fmt: skip


def rows_of(count: int) -> list[SampleRow]:
    rows = []
    for index in range(count):
        params = SamplingParams(seed=index, max_tokens=16, **WISHES[index % len(WISHES)])
        guide = Guide() if params.grammar else None
        rows.append(SampleRow(SequenceState((1, 2, 3), (5, 5, 7)), params, index % 2, 3, guide))
    return rows


def logits_of(count: int, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(count)) * spread


@pytest.mark.parametrize("spread", [0.01, 3.0, 12.0])
def test_tokens_are_those_of_the_compiled_sampler(spread: float) -> None:
    count = 4 * len(WISHES)
    rows, logits = rows_of(count), logits_of(count, spread)
    found = TorchSampler(EOS).sample_rows(logits, rows)
    for index, (ours, theirs) in enumerate(zip(found, CompiledSampler(EOS).sample_rows(logits, rows), strict=True)):
        assert isinstance(ours, SampledToken)
        assert isinstance(theirs, SampledToken)
        assert ours == theirs, WISHES[index % len(WISHES)]


def test_a_row_has_the_same_weights_and_sums_whatever_its_company(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only the same token: the same bits, in any batch and in any turn."""
    cuts: list[torch.Tensor] = []
    find = torch_draw._find

    def noted(weights: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        sums = torch_draw._running_sums(torch_draw._block_sums(weights))
        cuts.extend(torch.cat([row, sum_]) for row, sum_ in zip(weights, sums, strict=True))
        return find(weights, number)

    monkeypatch.setattr(torch_draw, "_find", noted)
    logits = logits_of(6)
    params = [SamplingParams(top_p=0.8, top_k=50), SamplingParams(), SamplingParams(top_p=0.99)] * 2
    numbers = [0.1, 0.3, 0.5, 0.7, 0.9, 0.999]

    def drawn(*which: int) -> list[int]:
        chosen = logits[list(which)]
        draws = Draws.of([params[i] for i in which], [numbers[i] for i in which], logits.device)
        tokens: list[int] = draw(chosen, chosen.amax(dim=-1), draws).tolist()
        return tokens

    together, bits = drawn(*range(6)), list(cuts)
    monkeypatch.setattr(torch_draw, "_MOST_BYTES", 2 * VOCAB * 8)  # two rows at a time
    cuts.clear()
    assert drawn(*range(6)) == together
    assert all(map(torch.equal, cuts, bits))
    for index in range(6):
        cuts.clear()
        assert drawn(index) == [together[index]]
        assert torch.equal(cuts[0], bits[index])


class Waits(TorchDispatchMode):
    """Counts what would wait for the device: numbers that the host reads."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("wish", "most"), [(wish, int("top_p" in wish)) for wish in WISHES], ids=str)
def test_one_small_copy_leaves_the_device_and_nothing_else_waits_for_it(
    wish: dict[str, Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []
    own = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: (copied.append(self.numel()), own(self))[1])
    guide = Guide() if "grammar" in wish else None
    params = SamplingParams(max_tokens=16, **wish)
    rows = [SampleRow(SequenceState((1,), (5,)), dataclasses.replace(params, seed=n), guide=guide) for n in range(8)]
    with Waits() as waits:
        TorchSampler(EOS).sample_rows(logits_of(8), rows)
    assert waits.num <= most, "a guess where top_p cuts"
    assert copied == [8 * (3 + (1 + 2 * params.num_logprobs if params.num_logprobs >= 0 else 0))]
