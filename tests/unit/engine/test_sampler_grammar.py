"""Sampling among what a grammar allows: the order of rules, and what happens where they leave nothing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from tandem.core.errors import InvalidRequestError, TandemError
from tandem.core.sampling import Guide, SampledToken, SampleRow, SamplingParams, SequenceState, uniform
from tandem.engine.cpu.sampler import CompiledSampler
from tandem.engine.sampler import Sampler
from tandem.engine.torch_sampler import TorchSampler
from tandem.worker.sequence import FinishReason, finish_reason
from tests.support.plain_draw import plain_draw

VOCAB, EOS = 21, 2


class Mask:
    """Allows these tokens; `after` more bytes of zeros stand behind the vocabulary's."""

    def __init__(self, *allowed: int, after: int = 5) -> None:
        bits = np.zeros(8 * ((VOCAB + 7) // 8 + after), np.uint8)
        bits[list(allowed)] = 1
        self.mask = np.packbits(bits, bitorder="little").tobytes()

    def allowed(self) -> bytes:
        return self.mask


class Broken:
    def allowed(self) -> bytes:
        raise InvalidRequestError("too complex")


_CHOSEN: list[type[Sampler]] = []


@pytest.fixture(params=[CompiledSampler, TorchSampler], autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both samplers go through all of it."""
    monkeypatch.setattr(f"{__name__}._CHOSEN", [request.param])


def sample_rows(logits: torch.Tensor, rows: list[SampleRow], eos: list[int] = []) -> list[SampledToken | TandemError]:  # noqa: B006
    return _CHOSEN[0](eos).sample_rows(logits, rows)


def sample(logits: torch.Tensor, params: SamplingParams, guide: Guide, position: int = 0) -> SampledToken | TandemError:
    row = SampleRow(SequenceState((1, 2), (3, 3)), params, 0, position, guide)
    return sample_rows(logits[None], [row], [EOS])[0]


def token(logits: torch.Tensor, params: SamplingParams, guide: Guide, position: int = 0) -> int:
    found = sample(logits, params, guide, position)
    assert isinstance(found, SampledToken)
    return found.token_id


def logits_of(seed: int) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


GREEDY = SamplingParams(temperature=0, max_tokens=9, grammar="g")


@pytest.mark.parametrize("seed", range(20))
def test_greedy_takes_the_likeliest_that_is_allowed(seed: int) -> None:
    logits, allowed = logits_of(seed), (4, 7, 13, 20)
    assert token(logits, GREEDY, Mask(*allowed)) == max(allowed, key=lambda i: float(logits[i]))
    assert token(logits, GREEDY, Mask(*range(VOCAB))) == int(logits.argmax())
    # A mask may be shorter than the vocabulary of the model: what lies behind it may not come.
    assert token(logits, GREEDY, Mask(4, 7, after=-1)) in (4, 7)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_drawn_is_what_the_same_random_number_gives_among_what_is_allowed(seed: int) -> None:
    logits, allowed = logits_of(seed), [1, 3, 4, 9, 15]
    params = SamplingParams(
        temperature=0.8, top_k=3, top_p=0.9, seed=seed, max_tokens=9, grammar="g", logit_bias=((4, 1.0),),
        frequency_penalty=0.5,
    )  # fmt: skip
    values = np.full(VOCAB, -np.inf)
    values[allowed] = logits.double().numpy()[allowed]
    values[3] -= 2 * 0.5
    values[4] += 1.0
    assert token(logits, params, Mask(*allowed), position=6) == plain_draw(values, params, uniform(seed, 0, 6))


def test_a_bias_allows_nothing_that_the_grammar_does_not() -> None:
    params = dataclasses.replace(GREEDY, logit_bias=((5, 100.0), (6, -100.0)))
    assert token(logits_of(0), params, Mask(6)) == 6


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_keeps_the_end_out_as_long_as_anything_else_may_come(temperature: float) -> None:
    logits = torch.zeros(VOCAB)
    logits[EOS] = 50
    params = SamplingParams(temperature=temperature, max_tokens=9, min_tokens=5, stop_token_ids=(8,), grammar="g")
    assert token(logits, params, Mask(EOS, 7), position=4) == 7
    assert token(logits, params, Mask(EOS, 7), position=5) == EOS
    assert token(logits, params, Mask(EOS, 8), position=0) == EOS, "nothing but ends is left"
    assert token(logits, params, Mask(EOS), position=0) == EOS


def test_an_end_before_min_tokens_ends_the_choice_where_a_grammar_wanted_it() -> None:
    params = SamplingParams(max_tokens=9, min_tokens=5, grammar="g")
    assert finish_reason(params, EOS, 1, 10, frozenset({EOS}), 100) is FinishReason.STOP
    assert finish_reason(dataclasses.replace(params, grammar=""), EOS, 1, 10, frozenset({EOS}), 100) is None


def test_what_the_model_excludes_is_chosen_from_alike_where_the_grammar_leaves_nothing_else() -> None:
    logits = torch.zeros(VOCAB)
    logits[[5, 6]] = -torch.inf
    assert token(logits, GREEDY, Mask(5, 6)) == 5
    drawn = {
        token(logits, SamplingParams(seed=seed, max_tokens=9, grammar="g"), Mask(5, 6)) for seed in range(20)
    }
    assert drawn == {5, 6}


def test_log_probabilities_are_the_models_own() -> None:
    logits = logits_of(1)
    params = dataclasses.replace(GREEDY, num_logprobs=1)
    found = sample(logits, params, Mask(int(logits.argmin())))
    assert isinstance(found, SampledToken)
    own = torch.log_softmax(logits, 0)
    assert found.logprob == pytest.approx(float(own.min()), abs=1e-5)
    assert found.top_logprobs[0][0] == int(logits.argmax())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_that_cannot_tell_fails_its_own_row(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=9, grammar="g")
    rows = [SampleRow(SequenceState(()), params, 0, 0, guide) for guide in (Mask(4), Broken(), None)]
    first, broken, last = sample_rows(torch.zeros(3, VOCAB), rows)
    assert isinstance(first, SampledToken)
    assert isinstance(last, SampledToken)
    assert isinstance(broken, InvalidRequestError)
