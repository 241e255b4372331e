"""The engine gives what `transformers` gives, whatever the chunks and the company; and these tests can fail."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable

import engine_helpers as helpers
import pytest
import torch
from engine_helpers import Case

from tandem.engine.arena import KVArena
from tandem.engine.attention.interface import AttentionBackend
from tandem.engine.attention.reference import AttentionParams, ReferenceAttention
from tandem.engine.batch import PagedBatch
from tandem.engine.engine import Engine, SequenceInput
from tandem.engine.loader import Types

pytestmark = pytest.mark.long

MUTATION_NEW = 16


def test_models_are_worth_testing(case: Case) -> None:
    """A model that repeats itself, or that has near ties, would prove nothing."""
    for continuation in case.expected:
        assert len(set(continuation.token_ids)) >= 16
        best_two = continuation.logits.topk(2).values
        assert float((best_two[:, 0] - best_two[:, 1]).min()) > helpers.LOGIT_TOLERANCE


@pytest.mark.parametrize("chunk", [1, 7, helpers.PAGE_SIZE, 50, 1000])
def test_mixed_ragged_batches_match_generate(case: Case, chunk: int) -> None:
    # One token at a time is slow and adds nothing after the prompt: the continuation may be short.
    num_new = 8 if chunk == 1 else helpers.NUM_NEW
    found = helpers.drive(case.engine, case.prompts, chunk=chunk, num_new=num_new)
    helpers.assert_identical(found, case.expected)


def test_each_prompt_alone_matches_generate(case: Case) -> None:
    for prompt, expected in zip(case.prompts, case.expected, strict=True):
        found = helpers.drive(case.engine, [prompt], chunk=1000, num_new=MUTATION_NEW)
        helpers.assert_identical(found, [expected])


def test_logits_are_the_same_bits_however_the_work_is_cut(case: Case) -> None:
    """Neither chunks nor company nor threads change a row: seeded samples survive a move, a replay, a preemption."""
    together = helpers.drive(case.engine, case.prompts, chunk=50, num_new=MUTATION_NEW)
    threaded = helpers.load_engine(case.model_dir, num_threads=2)
    for prompt, expected in zip(case.prompts, together, strict=True):
        for engine, chunk in [(case.engine, 7), (case.engine, 1000), (threaded, 33)]:
            (found,) = helpers.drive(engine, [prompt], chunk=chunk, num_new=MUTATION_NEW)
            assert found.token_ids == expected.token_ids
            assert torch.equal(found.logits, expected.logits), f"chunks of {chunk}"


@pytest.mark.parametrize("chunk", [helpers.PAGE_SIZE, 1000])
def test_identity_is_red_when_attention_is_zeroed(case: Case, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _mutate(monkeypatch, case, lambda output, _: torch.zeros_like(output), None)
    _assert_red(case, chunk)


@pytest.mark.parametrize("chunk", [helpers.PAGE_SIZE, 1000])
def test_identity_is_red_when_the_window_is_off_by_one(case: Case, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    windowed = case.arch in ("mistral", "qwen3", "gemma2")

    def shift(params: AttentionParams, by: int) -> AttentionParams:
        if windowed and not params.window:
            return params  # a full layer of a model that has windows in others
        # Where there is no window, one that hides the oldest token of the long prompt alone.
        window = params.window + by if windowed else helpers.LONG_PROMPT + by
        return dataclasses.replace(params, window=window)

    for by in (-1, 1) if windowed else (-1,):  # what is full cannot be wider
        with monkeypatch.context() as patch:
            _mutate(patch, case, None, functools.partial(shift, by=by))
            _assert_red(case, chunk)


def test_identity_is_red_when_a_page_holds_another_requests_bytes(case: Case) -> None:
    done = False

    def corrupt(_: int, requests: list[helpers.Request]) -> None:
        nonlocal done
        short, long = requests[-2], requests[-1]
        if not done and short.prefilled and long.prefilled:
            last_full = long.computed // helpers.PAGE_SIZE - 1
            case.engine.arena.copy_page(short.pages[0], long.pages[last_full])
            done = True

    _assert_red(case, 1000, before_step=corrupt)
    assert done


def test_stories_model_tells_its_story() -> None:
    model_dir = helpers.REPOSITORY.parent / "shared" / "data" / "stories260K"
    if not model_dir.is_dir():
        pytest.skip("the stories260K checkpoint is not beside the repository")
    engine = Engine.load(model_dir, page_size=32, num_pages=16, num_threads=2)
    story = json.loads((model_dir / "greedy_reference.json").read_text())["greedy_ids"]
    assert engine.eos_token_ids == (2,)
    found = helpers.drive(engine, [[1]], chunk=32, num_new=len(story))
    assert found[0].token_ids == story


def test_reference_attention_matches_generate_too(case: Case) -> None:
    engine = helpers.load_engine(case.model_dir)
    engine._paged.backend = ReferenceAttention()
    found = helpers.drive(engine, case.prompts, chunk=50, num_new=MUTATION_NEW)
    helpers.assert_identical(found, case.expected)


def test_bfloat16_follows_its_own_eager_forward(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch computes it: on a CPU that does not multiply bfloat16, or in the other type of 16 bits."""
    monkeypatch.setattr("tandem.engine.cpu.kernels.has_bfloat16_products", lambda: False)
    engine = helpers.load_engine(case.model_dir, dtype="bfloat16")
    assert engine.types == Types.all_of("bfloat16")
    assert engine.attention == "reference"
    prompt = case.prompts[-1]
    pages = range(engine.layout.num_pages_for(len(prompt)))
    first = engine.forward([SequenceInput(prompt[:100], 0, pages, 100)])
    second = engine.forward([SequenceInput(prompt[100:], 100, pages, len(prompt) - 100)])
    found = torch.cat([first, second])
    expected = _eager_logits(case, prompt)
    # bfloat16 keeps 8 bits: near by the measure of what one rounding more or less does, not equal.
    correlation = torch.corrcoef(torch.stack([found.flatten(), expected.flatten()]))[0, 1]
    assert float(correlation) > 0.99


def _eager_logits(case: Case, prompt: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(case.model_dir, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([prompt]), use_cache=False).logits[0]
    return logits


class _Mutated:
    """The engine's attention, with other parameters or another output."""

    name = "mutated"

    def __init__(
        self,
        own: AttentionBackend,
        change_output: Callable[[torch.Tensor, AttentionParams], torch.Tensor] | None,
        change_params: Callable[[AttentionParams], AttentionParams] | None,
    ) -> None:
        self._own, self._change_output, self._change_params = own, change_output, change_params

    def attend(
        self, batch: PagedBatch, arena: KVArena, layer: int, query: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        params = self._change_params(params) if self._change_params else params
        output = self._own.attend(batch, arena, layer, query, params)
        return self._change_output(output, params) if self._change_output else output


def _mutate(
    monkeypatch: pytest.MonkeyPatch,
    case: Case,
    change_output: Callable[[torch.Tensor, AttentionParams], torch.Tensor] | None,
    change_params: Callable[[AttentionParams], AttentionParams] | None,
) -> None:
    paged = case.engine._paged
    monkeypatch.setattr(paged, "backend", _Mutated(paged.backend, change_output, change_params))


def _assert_red(case: Case, chunk: int, before_step: helpers.Hook | None = None) -> None:
    found = helpers.drive(case.engine, case.prompts, chunk=chunk, num_new=MUTATION_NEW, before_step=before_step)
    with pytest.raises(AssertionError, match=r"tokens differ|logits differ"):
        helpers.assert_identical(found, case.expected)
