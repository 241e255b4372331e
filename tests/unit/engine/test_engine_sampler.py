"""Sampling against a plain restatement of its rules, exactly: by sweeping the random number.

Both samplers go through all of it: the CPU's, which compiles its own kernel, and the one of other devices, which is
operations of torch.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.core.errors import InternalError, InvalidRequestError, TandemError
from tandem.core.sampling import SampledToken, SampleRow, SamplingParams, SequenceState, uniform
from tandem.engine import torch_sampler
from tandem.engine.cpu import sampler as cpu_sampler
from tandem.engine.cpu.draw_kernel import Draw, draw_rows
from tandem.engine.sampler import Sampler
from tandem.engine.torch_draw import Draws
from tandem.engine.torch_draw import draw as torch_draw
from tests.support.plain_draw import plain_draw

VOCAB = 23
PROMPT, OUTPUT = (1, 2, 2, 3), (3, 5, 5, 7)
GOLDEN = (0.8828817498738244, 0.9850990335514168, 0.4833998252842381)


@pytest.fixture(params=["compiled", "torch"], autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which sampler `sample_rows` is, and which kernel `draw_each`."""
    monkeypatch.setitem(_CHOSEN, "kind", request.param)
    return str(request.param)


_CHOSEN = {"kind": ""}
_SAMPLERS: dict[str, type[Sampler]] = {"compiled": cpu_sampler.CompiledSampler, "torch": torch_sampler.TorchSampler}


def sample_rows(
    logits: torch.Tensor, rows: Sequence[SampleRow], eos_token_ids: Sequence[int] = ()
) -> list[SampledToken | TandemError]:
    return _SAMPLERS[_CHOSEN["kind"]](eos_token_ids).sample_rows(logits, rows)


def set_uniform(monkeypatch: pytest.MonkeyPatch, uniform: Callable[..., float]) -> None:
    """What makes the random numbers of either sampler."""
    for module in (cpu_sampler, torch_sampler):
        monkeypatch.setattr(module, "uniform", uniform)


def draw_each(draws: Sequence[Draw], num_threads: int = 1) -> list[int]:
    """`draw_rows`, or the same in torch, of rows of one type at a time as its sampler has them."""
    if _CHOSEN["kind"] == "compiled":
        return draw_rows(draws, num_threads)
    tokens = [0] * len(draws)
    for dtype in (np.float32, np.float64):
        places = [place for place, each in enumerate(draws) if each.logits.dtype == dtype]
        if places:
            of_type = [draws[place] for place in places]
            logits = torch.from_numpy(np.stack([each.logits for each in of_type]))
            asked = Draws.of([each.params for each in of_type], [each.number for each in of_type], logits.device)
            for place, token in zip(places, torch_draw(logits, logits.amax(dim=-1), asked).tolist(), strict=True):
                tokens[place] = token
    return tokens


def sample(logits: torch.Tensor, rows: Sequence[SampleRow], eos_token_ids: Sequence[int] = ()) -> list[SampledToken]:
    """As `sample_rows`, of rows that are all to be sampled."""
    tokens = []
    for token in sample_rows(logits, rows, eos_token_ids):
        if isinstance(token, InternalError):
            raise token
        tokens.append(token)
    return tokens


def draw(logits: np.ndarray, params: SamplingParams, number: float) -> int:
    (token_id,) = draw_each([Draw(logits, params, number, float(logits.max()))], 1)
    return token_id


def logits_of(seed: int, rows: int = 1, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def plain_distribution(
    logits: np.ndarray, params: SamplingParams, position: int = 0, eos: tuple[int, ...] = ()
) -> np.ndarray:
    """Return the probability of each token, one rule after the other, with loops and full sorts."""
    values = logits.astype(np.float64).copy()
    for token in set(PROMPT) | set(OUTPUT):
        values[token] = (
            values[token] / params.repetition_penalty
            if values[token] > 0
            else values[token] * params.repetition_penalty
        )
    for token in OUTPUT:
        values[token] -= params.frequency_penalty
    for token in set(OUTPUT):
        values[token] -= params.presence_penalty
    for token, bias in params.logit_bias:
        values[token] += bias
    if position < params.min_tokens:
        for token in (*params.stop_token_ids, *(() if params.ignore_eos else eos)):
            values[token] = -np.inf
    values /= params.temperature
    probabilities = np.exp(values - values.max())
    probabilities[probabilities < params.min_p * probabilities.max()] = 0
    if params.top_k:
        probabilities[probabilities < np.sort(probabilities)[::-1][min(params.top_k, len(values)) - 1]] = 0
    probabilities /= probabilities.sum()
    before = 0.0
    for token in sorted(range(len(values)), key=lambda token: (-probabilities[token], token)):
        own = probabilities[token]
        if before >= params.top_p:
            probabilities[token] = 0
        before += own
    return probabilities / probabilities.sum()


def swept_distribution(
    row: SampleRow, logits: torch.Tensor, monkeypatch: pytest.MonkeyPatch, eos: tuple[int, ...] = ()
) -> np.ndarray:
    """Return how often each token comes as the random number runs evenly over [0, 1)."""
    count = 4000
    numbers = iter((index + 0.5) / count for index in range(count))
    set_uniform(monkeypatch, lambda *_: next(numbers))
    tokens = [token.token_id for token in sample(logits.expand(count, -1), [row] * count, eos)]
    return np.bincount(tokens, minlength=logits.shape[1]) / count


CASES = {
    "plain": SamplingParams(),
    "cool": SamplingParams(temperature=0.5),
    "hot": SamplingParams(temperature=3.0),
    "top_k": SamplingParams(top_k=4),
    "top_k of one": SamplingParams(top_k=1),
    "top_k beyond the vocabulary": SamplingParams(top_k=1000),
    "top_p": SamplingParams(top_p=0.6),
    "tiny top_p": SamplingParams(top_p=1e-9),
    "min_p": SamplingParams(min_p=0.2),
    "top_k, then top_p": SamplingParams(top_k=5, top_p=0.7),
    "min_p, top_k, top_p": SamplingParams(min_p=0.05, top_k=6, top_p=0.8, temperature=1.7),
    "repetition": SamplingParams(repetition_penalty=1.8),
    "encouraged repetition": SamplingParams(repetition_penalty=0.5),
    "presence": SamplingParams(presence_penalty=1.5),
    "frequency": SamplingParams(frequency_penalty=0.9),
    "negative penalties": SamplingParams(presence_penalty=-1.0, frequency_penalty=-0.5),
    "bias": SamplingParams(logit_bias=((4, 3.0), (5, -100.0))),
    "min_tokens": SamplingParams(min_tokens=9, stop_token_ids=(4, 6)),
    "min_tokens, end of text ignored": SamplingParams(min_tokens=9, stop_token_ids=(4,), ignore_eos=True),
    "all": SamplingParams(
        temperature=0.8, top_k=9, top_p=0.9, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.3,
        frequency_penalty=0.2, logit_bias=((0, 1.0),), min_tokens=9, stop_token_ids=(2,),
    ),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.faults)])
def test_distribution(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    params = CASES[name]
    params = dataclasses.replace(params, max_tokens=16)
    logits = logits_of(seed)
    row = SampleRow(SequenceState(PROMPT, OUTPUT), params, position=4)
    expected = plain_distribution(logits[0].numpy(), params, position=4, eos=(8, 9))
    found = swept_distribution(row, logits, monkeypatch, eos=(8, 9))
    # An even sweep hits an interval of length p within one step of p.
    assert np.abs(found - expected).max() <= 1 / 4000 + 1e-9
    assert (found[expected == 0] == 0).all()


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("plain", "cool", "hot")])
def test_greedy_takes_the_best_of_what_the_rules_leave(name: str) -> None:
    params = dataclasses.replace(CASES[name], temperature=0.0)
    logits = logits_of(3)
    row = SampleRow(SequenceState(PROMPT, OUTPUT), params, position=4)
    warm = dataclasses.replace(params, temperature=1.0)
    expected = int(plain_distribution(logits[0].numpy(), warm, position=4, eos=(8,)).argmax())
    assert sample(logits, [row], (8,))[0].token_id == expected


def test_each_rule_matters() -> None:
    """The cases above would prove little if the rules changed nothing."""
    logits = logits_of(0)[0].numpy()
    plain = plain_distribution(logits, SamplingParams())
    for name, params in CASES.items():
        if name not in ("plain", "top_k beyond the vocabulary"):
            changed = plain_distribution(logits, params, position=4, eos=(8, 9))
            assert np.abs(changed - plain).max() > 0.01, name


def test_min_tokens_ends() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=3)
    logits = torch.zeros(1, VOCAB)
    logits[0, 8] = 5.0
    tokens = [sample(logits, [SampleRow(SequenceState(()), params, 0, position)], (8,))[0] for position in range(5)]
    assert [token.token_id == 8 for token in tokens] == [False, False, False, True, True]


def test_ends_are_not_masked_without_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 8] = 50.0
    for ignore_eos in (False, True):
        row = SampleRow(SequenceState(()), SamplingParams(ignore_eos=ignore_eos))
        assert sample(logits, [row], (8,))[0].token_id == 8


def test_the_random_number_is_keyed(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    set_uniform(monkeypatch, lambda *key: keys.append(key) or 0.5)
    row = SampleRow(SequenceState(()), SamplingParams(seed=11), choice=2, position=7)
    sample(logits_of(0), [row])
    sample(logits_of(0), [SampleRow(SequenceState(()), SamplingParams(temperature=0.0))])
    assert keys == [(11, 2, 7)]  # and greedy needs none


def test_uniform_is_the_same_everywhere_and_for_ever() -> None:
    """These values are on the wire, so to say: a worker of another version must agree."""
    assert uniform(0, 0, 0) == GOLDEN[0]
    assert uniform(1, 2, 3) == GOLDEN[1]
    assert uniform(-5, 0, 1) == uniform((1 << 64) - 5, 0, 1) == GOLDEN[2]


def test_uniform_is_uniform_and_uncorrelated() -> None:
    numbers = np.array([[uniform(seed, choice, 0) for choice in range(40)] for seed in range(250)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
    assert ((counts - 500) ** 2 / 500).sum() < 45  # chi squared, 19 degrees: 0.1 %
    assert np.abs(np.corrcoef(numbers.T) - np.eye(40)).max() < 0.3
    assert len(np.unique(numbers)) == numbers.size


def test_rows_do_not_depend_on_their_company() -> None:
    logits = logits_of(5, rows=len(CASES))
    rows = [
        SampleRow(SequenceState(PROMPT, OUTPUT), dataclasses.replace(params, seed=index, num_logprobs=2), index, 4)
        for index, params in enumerate(CASES.values())
    ]
    together = sample(logits, rows, (8,))
    assert together == [sample(logits[index : index + 1], [row], (8,))[0] for index, row in enumerate(rows)]
    backwards = sample(logits.flip(0), rows[::-1], (8,))
    assert together == backwards[::-1]


def test_sampling_changes_neither_logits_nor_state() -> None:
    logits = logits_of(6)
    before = logits.clone()
    state = SequenceState(PROMPT, OUTPUT)
    sample(logits, [SampleRow(state, CASES["all"], position=4)], (8,))
    assert torch.equal(logits, before)
    assert state.output_counts == {3: 1, 5: 2, 7: 1}


def test_logprobs_are_of_the_raw_model() -> None:
    logits = logits_of(7, rows=3)
    raw = torch.log_softmax(logits, dim=-1)
    rows = [
        SampleRow(SequenceState(PROMPT, OUTPUT), dataclasses.replace(CASES["all"], num_logprobs=count), position=4)
        for count in (-1, 0, 3)
    ]
    none, own, three = sample(logits, rows, (8,))
    assert none == SampledToken(none.token_id, None, ())
    assert own.top_logprobs == ()
    assert own.logprob == pytest.approx(float(raw[1, own.token_id]), abs=1e-6)
    assert three.logprob == pytest.approx(float(raw[2, three.token_id]), abs=1e-6)
    expected = raw[2].topk(3)
    assert [token for token, _ in three.top_logprobs] == expected.indices.tolist()
    assert [value for _, value in three.top_logprobs] == pytest.approx(expected.values.tolist(), abs=1e-6)


def test_more_logprobs_than_tokens_gives_all() -> None:
    row = SampleRow(SequenceState(()), SamplingParams(num_logprobs=1000))
    assert len(sample(logits_of(8), [row])[0].top_logprobs) == VOCAB


def test_nan_is_an_error_and_masked_rows_are_not() -> None:
    logits = logits_of(9, rows=2)
    logits[1, 3] = float("nan")
    rows = [SampleRow(SequenceState(()), SamplingParams())] * 2
    with pytest.raises(InternalError, match="NaN"):
        sample(logits, rows)
    stop_all = SamplingParams(min_tokens=1, stop_token_ids=tuple(range(VOCAB)))
    assert 0 <= sample(logits_of(9), [SampleRow(SequenceState(()), stop_all)])[0].token_id < VOCAB


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF])
@pytest.mark.parametrize("place", [0, 11, VOCAB - 1])
def test_nan_of_any_kind_and_place_is_found(temperature: float, bits: int, place: int) -> None:
    logits = logits_of(9).numpy()
    logits.view(np.uint32)[0, place] = bits
    with pytest.raises(InternalError, match="NaN"):
        sample(torch.from_numpy(logits), [SampleRow(SequenceState(()), SamplingParams(temperature=temperature))])


@pytest.mark.parametrize("greatest", [float("inf"), -float("inf"), -3.4e38, -0.0, 3.4e38])
def test_logits_at_the_ends_of_their_range_give_a_token(greatest: float) -> None:
    logits = torch.full((1, VOCAB), -float("inf"))
    logits[0, 7] = greatest
    (token,) = sample(logits, [SampleRow(SequenceState(()), SamplingParams(seed=3))])
    assert token.token_id == (0 if greatest == -float("inf") else 7)


def test_a_row_that_fails_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of NaN, one whose sampling raises: the rows around them get what they get alone."""
    logits = logits_of(9, rows=4)
    logits[1] = float("nan")
    params = SamplingParams(temperature=1.0, num_logprobs=2)
    rows = [SampleRow(SequenceState(()), dataclasses.replace(params, seed=seed)) for seed in range(4)]
    alone = [sample(logits[n : n + 1], rows[n : n + 1])[0] for n in (0, 3)]

    def number_or_raise(seed: int, choice: int, position: int) -> float:
        if seed == 2:
            raise ZeroDivisionError("a test wanted it")
        return uniform(seed, choice, position)

    set_uniform(monkeypatch, number_or_raise)
    first, nan, raised, last = sample_rows(logits, rows)
    assert [first, last] == alone
    assert isinstance(nan, InternalError)
    assert "NaN" in str(nan)
    assert isinstance(raised, InternalError)
    assert "a test wanted it" in str(raised)


def test_shapes_are_checked() -> None:
    assert sample(torch.zeros(0, VOCAB), []) == []
    with pytest.raises(ValueError, match="rows"):
        sample(torch.zeros(2, VOCAB), [SampleRow(SequenceState(()), SamplingParams())])


@pytest.mark.parametrize("number", [0.0, 1 - 2.0**-53])
def test_the_ends_of_the_interval_are_tokens_that_may_be(number: float) -> None:
    logits = np.array([-np.inf, 0.0, -800.0, 1.0, -np.inf])
    assert draw(logits, SamplingParams(), number) in (1, 3)


#: Whole numbers tie.
values = st.lists(st.one_of(st.floats(-8, 8, width=32), st.integers(-3, 3).map(float)), min_size=1, max_size=60)


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(values, st.floats(0.01, 1.0), st.integers(0, 70), st.floats(0.0, 1.0), st.floats(0, 1, exclude_max=True))
def test_what_is_drawn_is_what_full_sorts_give(
    logits: list[float], top_p: float, top_k: int, min_p: float, number: float
) -> None:
    array = np.array(logits, np.float32)
    for params in (
        SamplingParams(top_p=top_p),
        SamplingParams(top_k=top_k),
        SamplingParams(min_p=min_p),
        SamplingParams(temperature=0.5, top_p=top_p, top_k=top_k, min_p=min_p),
    ):
        assert draw(array, params, number) in near(array, params, number)


@pytest.mark.long
@pytest.mark.parametrize(
    ("vocab", "spread"),
    [
        *itertools.product([300, 5_000], [0.0, 0.01, 1.0, 5.0, 30.0]),
        *((4096, 1.0), (32_000, 0.01), (32_000, 5.0), (128_256, 1.0)),
    ],
)
def test_large_vocabularies_are_cut_at_the_same_token(vocab: int, spread: float) -> None:
    rng = np.random.default_rng(vocab)
    cuts: list[dict[str, Any]] = [
        {}, {"top_p": 0.95}, {"top_p": 0.3}, {"top_p": 1e-9}, {"top_p": 0.9999999}, {"min_p": 0.1}, {"top_k": 1},
        {"top_k": 20}, {"top_k": 20, "top_p": 0.5}, {"top_k": 3000, "top_p": 0.9}, {"top_k": 40_000},
        {"min_p": 0.05, "top_k": 5, "top_p": 0.9}, {"temperature": 0.2, "top_p": 0.99}, {"temperature": 3.0},
    ]  # fmt: skip
    draws, expected = [], []
    for number, cut in enumerate(cuts):
        array = (rng.standard_normal(vocab) * spread).astype(np.float64 if number % 2 else np.float32)
        if number % 3 == 0:
            array = np.round(array)
        if number % 4 == 0:
            array[rng.random(vocab) < 0.5] = -np.inf
        params = SamplingParams(**cut)
        for at in (0.0, rng.random(), rng.random(), 1 - 1e-9):
            draws.append(Draw(array, params, at, float(array.max())))
            expected.append(near(array, params, at))
    for found, tokens, asked in zip(draw_each(draws), expected, draws, strict=True):
        assert found in tokens, (asked.params, asked.number)


def near(logits: np.ndarray, params: SamplingParams, number: float) -> set[int]:
    """The token that full sorts give, and those beside it that rounding may give at the edge between two."""
    slack = 1e-12
    return {plain_draw(logits, params, min(max(number + off, 0.0), 1 - 2.0**-53)) for off in (-slack, 0.0, slack)}


def test_rows_of_one_call_are_drawn_each_by_itself() -> None:
    rng = np.random.default_rng(3)
    draws = []
    for row in range(40):
        logits = (rng.standard_normal(9000) * 4).astype(np.float64 if row % 3 == 0 else np.float32)
        cut = [{}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.02}][row % 4]
        draws.append(Draw(logits, SamplingParams(temperature=0.7, **cut), rng.random(), float(logits.max())))
    alone = [draw_each([one])[0] for one in draws]
    for num_threads in (1, 2, 4):
        assert draw_each(draws, num_threads) == alone


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", float("nan")), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.1),
        ("min_p", -0.1), ("min_p", 1.1), ("repetition_penalty", 0.0), ("presence_penalty", float("inf")),
        ("max_tokens", 0), ("min_tokens", -1), ("min_tokens", 17), ("num_logprobs", -2), ("logit_bias", ((-1, 0.0),)),
    ],
)  # fmt: skip
def test_values_out_of_range_are_named(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=field) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field


def test_greedy_is_temperature_zero() -> None:
    assert SamplingParams(temperature=0.0).is_greedy
    assert SamplingParams(temperature=1e-7).is_greedy
    assert not SamplingParams(temperature=0.01).is_greedy
    assert not SamplingParams(top_k=1).is_greedy


# -- what must not be chosen


def only(values: list[float], **fields: Any) -> SampledToken | InternalError:
    row = SampleRow(SequenceState([5], fields.pop("output", [])), SamplingParams(**fields))
    (token,) = sample_rows(torch.tensor([values]), [row])
    return token


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_but_the_allowed_tokens_is_chosen(temperature: float) -> None:
    token = only([9.0, 1.0, 8.0, -30.0], temperature=temperature, allowed_token_ids=(3, 100))
    assert isinstance(token, SampledToken)
    assert token.token_id == 3, "an id beyond the vocabulary allows nothing"


def test_the_last_token_of_a_bad_word_is_not_chosen_behind_its_others() -> None:
    words = {"temperature": 0.0, "bad_words": ((0,), (7, 8, 1))}
    for output, chosen in (([], 1), ([8], 1), ([7, 8], 2), ([7, 8, 7], 1), ([6, 7, 8], 2)):
        token = only([9.0, 8.0, 7.0], output=output, **words)
        assert isinstance(token, SampledToken)
        assert token.token_id == chosen, output


def test_where_nothing_is_left_to_choose_there_is_an_error_and_no_token() -> None:
    error = only([1.0, 2.0], temperature=0.0, allowed_token_ids=(1,), bad_words=((1,),))
    assert isinstance(error, InvalidRequestError)
    assert "leave no token" in error.message


class Walked(tuple[Any, ...]):
    """Counts how often somebody goes through it."""

    def __new__(cls, values: Iterable[Any]) -> Walked:
        made = super().__new__(cls, values)
        made.times = 0
        return made

    times: int

    def __iter__(self) -> Iterator[Any]:
        self.times += 1
        return super().__iter__()


def test_long_lists_are_gone_through_once_for_a_choice_and_not_for_each_token() -> None:
    lists = {
        "allowed_token_ids": Walked(range(VOCAB)),
        "bad_words": Walked((word, 1, word) for word in range(2, VOCAB)),
        "stop_token_ids": Walked(range(1, VOCAB)),
        "logit_bias": Walked((word, 0.5) for word in range(VOCAB)),
    }
    params, state = SamplingParams(temperature=0.0, max_tokens=9, min_tokens=9, **lists), SequenceState((1, 2))
    before = {name: walked.times for name, walked in lists.items()}
    for position in range(5):
        (token,) = sample_rows(logits_of(3), [SampleRow(state, params, position=position)])
        assert isinstance(token, SampledToken)
        state.append(token.token_id)
    assert all(walked.times - before[name] <= 1 for name, walked in lists.items())
