"""Whole layers and the whole decoder as programs of kernels, against the models that they stand for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import engine_helpers as helpers
import numpy as np
import pytest
import torch
from engine_helpers import small_model
from odd_models import (
    HalvedSum,
    NoFirstSum,
    NormsTheOtherWayRound,
    ParallelParts,
    Tuple,
    add_a_part,
    add_between_layers,
    bound_embedding,
    scale_embedding,
    scale_logits,
    use_fewer_layers,
)
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedModel

from tandem.core.errors import UnsupportedModelError
from tandem.engine import loader
from tandem.engine.arena import KVArena
from tandem.engine.attention.reference import ReferenceAttention
from tandem.engine.batch import SequenceInput
from tandem.engine.cpu import decoder, lending
from tandem.engine.cpu import layer as fused_layer
from tandem.engine.cpu.fusing import fuse, fuse_decoder
from tandem.engine.cpu.layer import FusedDecoderLayer
from tandem.engine.cpu.packed_linear import pack
from tandem.engine.layout import KVLayout
from tandem.engine.paged_model import PagedModel
from tandem.engine.select_kernels import kernels_for

CPU = torch.device("cpu")
NUM_LAYERS, VOCAB, NUM_PAGES = helpers.SMALL_LAYERS, helpers.SMALL_VOCAB, 24
LAYOUT = KVLayout(NUM_LAYERS, 2, 16, helpers.PAGE_SIZE, "float32")
FUSED_ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral")


def paged(model: PreTrainedModel, layout: KVLayout = LAYOUT, num_threads: int = 1, **options: Any) -> PagedModel:
    """Over an arena of its own, where a slot that nobody wrote shows."""
    arena = KVArena(layout, NUM_PAGES)
    arena.tensor.fill_(float("nan"))
    backend = options.pop("backend", None) or kernels_for(CPU, num_threads).attention(layout)
    return PagedModel(model, arena, backend, VOCAB, 512, **options)


def fused(model: PreTrainedModel, layout: KVLayout = LAYOUT, num_threads: int = 1) -> PagedModel:
    """As the engine does it."""
    assert fuse(model, layout, num_threads).endswith(f"{NUM_LAYERS} layer")
    pack(model, num_threads)
    decoder = fuse_decoder(model, layout)
    assert decoder is not None
    return paged(model, layout, num_threads, decoder=decoder)


def steps() -> list[list[SequenceInput]]:
    """A prompt in chunks of many rows and few, beside other prompts and decode rows; pages out of order."""
    long, middle, short = (helpers.make_prompt(length, 1) for length in (150, 40, 5))
    pages = (7, 1, 4, 0, 9, 3, 20, 15, 11, 2), (8, 22, 5), (6,)
    return [
        [SequenceInput(long[:70], 0, pages[0], 0)],
        [SequenceInput(long[70:140], 70, pages[0], 3), SequenceInput(middle[:30], 0, pages[1], 30)],
        [SequenceInput(short[:4], 0, pages[2], 2), SequenceInput(long[140:149], 140, pages[0], 9)],
        [
            SequenceInput(long[149:], 149, pages[0], 1),
            SequenceInput(middle[30:], 30, pages[1], 10),
            SequenceInput(short[4:], 4, pages[2], 1),
        ],
    ]


def run(model: PagedModel, on_layer: Callable[[int], None] | None = None) -> torch.Tensor:
    return torch.cat([model.forward(step, on_layer) for step in steps()])


@pytest.mark.long
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("arch", FUSED_ARCHITECTURES)
def test_logits_are_those_of_the_models_own_parts(arch: str, num_threads: int, tmp_path: Path) -> None:
    model_dir = helpers.save_model(arch, tmp_path / arch)
    config = loader.load_config(model_dir)
    layout = loader.derive_layout(config, helpers.PAGE_SIZE, "float32")
    own, one_by_one, whole = (loader.load_model(model_dir, config, "float32", CPU) for _ in range(3))
    fuse(one_by_one, layout, num_threads)
    assert {type(layer) for layer in one_by_one.model.layers} == {FusedDecoderLayer}
    expected = run(paged(own, layout, num_threads))
    by_layers = run(paged(one_by_one, layout, num_threads))
    torch.testing.assert_close(by_layers, expected, rtol=1e-4, atol=1e-4)
    decoder = fused(whole, layout, num_threads)
    found = run(decoder)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(run(decoder), found)
    seen: list[int] = []
    assert torch.equal(run(decoder, seen.append), found)
    assert seen == [0, 1, 2] * len(steps())


def test_each_row_has_the_bits_that_it_has_alone() -> None:
    alone, together = fused(small_model()), fused(small_model(), num_threads=2)
    found = iter(run(together))
    for step in steps():
        for sequence in step:
            for position, token in enumerate(sequence.token_ids, sequence.start):
                expected = alone.forward([SequenceInput([token], position, sequence.pages)])
                if position >= sequence.end - sequence.num_logits:
                    assert torch.equal(next(found), expected[0]), f"position {position}"
    assert next(found, None) is None


def test_behind_the_last_keys_and_values_only_rows_with_logits_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model, of_layers = fused(small_model()), list[int]()
    goes_on = FusedDecoderLayer.from_attended

    def from_attended(layer: FusedDecoderLayer, x: Any, output: Any, tail: Any) -> Any:
        of_layers.append(layer._plan.num_rows if tail is None else tail.plan.num_rows)
        return goes_on(layer, x, output, tail)

    monkeypatch.setattr(FusedDecoderLayer, "from_attended", from_attended)
    for step, expected in zip(steps(), [[70, 70], [100, 100, 33], [13, 13, 11], [12, 12, 12]], strict=True):
        of_layers.clear()
        model.forward(step)
        assert of_layers == expected


@pytest.mark.parametrize("num_rows", [5, 70])
def test_a_layer_is_told_of_when_it_is_written_and_the_next_is_not(num_rows: int) -> None:
    model = fused(small_model())
    written: list[list[bool]] = []

    def on_layer(_: int) -> None:
        keys_and_values = model.arena.tensor[:, :8].transpose(2, 3).flatten(1, 2)[:, :num_rows]
        written.append(keys_and_values.isfinite().all(dim=(1, 2, 3, 4)).tolist())

    # Pages are in order here: [page, slot] flattened is the position.
    model.forward([SequenceInput([1] * num_rows, 0, range(8))], on_layer)
    assert written == [[True, False, False], [True, True, False], [True, True, True]]


def test_the_workspace_grows_with_the_batch() -> None:
    model, first = fused(small_model()), [SequenceInput([3, 4], 0, (0,), 2)]
    before = model.forward(first)
    model.forward([SequenceInput([5] * 200, 0, range(1, 14))])
    assert torch.equal(model.forward(first), before)


def test_layers_of_different_shapes_share_a_workspace() -> None:
    """The last one needs the most: no address from before it grew may be used."""

    def make() -> LlamaForCausalLM:
        model, wide = small_model(), small_model(intermediate_size=1024)
        model.model.layers[2].mlp = wide.model.layers[2].mlp
        return model

    expected, found = run(paged(make())), run(fused(make()))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_rotary_table_grows_with_the_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(fused(small_model()))
    monkeypatch.setattr(decoder, "_LEAST_POSITIONS", 8)
    assert torch.equal(run(fused(small_model())), expected)


def test_another_attention_computes_between_the_kernels() -> None:
    model = fused(small_model())
    expected = run(model)
    model.backend = ReferenceAttention()
    torch.testing.assert_close(run(model), expected, rtol=1e-4, atol=1e-4)
    assert not torch.equal(run(model), expected)


def test_a_workspace_that_cannot_grow_leaves_no_stale_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fused(small_model())
    run(model)
    expected = model.forward(steps()[2])

    def refuse(_: int) -> torch.Tensor:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(fused_layer, "map_memory", refuse)
        many = [SequenceInput([1] * 300, 0, range(300 // helpers.PAGE_SIZE + 1))]
        with pytest.raises(OSError, match="Cannot allocate"):
            model.forward(many)
    assert torch.equal(model.forward(steps()[2]), expected)


class _Lender:
    def __init__(self) -> None:
        self._words = np.zeros(2, dtype=np.int64)
        self.wanted_back_at, self.offered_at = self._words.ctypes.data, self._words.ctypes.data + 8
        self.num_asked = 0

    def borrow(self) -> int:
        self.num_asked += 1
        return 1


def test_threads_are_borrowed_for_each_step_and_for_each_layer_of_a_prompt() -> None:
    model = fused(small_model())
    expected = run(model)
    lender = _Lender()
    lending.borrow_from(lender)
    try:
        assert torch.equal(run(model), expected)
        lender.num_asked = 0
        model.forward(steps()[2])
        for_step, lender.num_asked = lender.num_asked, 0
        model.forward(steps()[1])
        assert (for_step, lender.num_asked) == (2, NUM_LAYERS + 2)
    finally:
        lending.borrow_from(None)


@pytest.mark.parametrize("kind", [HalvedSum, NormsTheOtherWayRound, ParallelParts, NoFirstSum])
def test_a_layer_that_differs_is_left_alone(kind: type[nn.Module]) -> None:
    def make() -> LlamaForCausalLM:
        model = small_model()
        model.model.layers[1].__class__ = kind
        return model

    expected, model = run(paged(make())), make()
    assert fuse(model, LAYOUT, 1).endswith("7 norm, 2 layer")
    pack(model, 1)
    assert type(model.model.layers[1]) is kind
    assert fuse_decoder(model, LAYOUT) is None
    torch.testing.assert_close(run(paged(model)), expected, rtol=1e-4, atol=1e-4)


def test_a_layer_with_more_parts_or_another_output_is_left_alone() -> None:
    model = small_model()
    model.model.layers[0].extra_norm = nn.Identity()
    model.model.layers[2].__class__ = Tuple
    assert fuse(model, LAYOUT, 1).endswith("7 norm, 1 layer")
    assert type(model.model.layers[1]) is FusedDecoderLayer


def test_layers_refuse_what_their_attention_does_not_do() -> None:
    model = small_model()
    fuse(model, LAYOUT, 1)
    forward = model.forward
    model.forward = lambda **kwargs: forward(**kwargs, document_ids=torch.zeros(1))  # type: ignore[method-assign]
    with pytest.raises(UnsupportedModelError, match="document_ids"):
        run(paged(model))


@pytest.mark.parametrize(
    "change", [scale_logits, scale_embedding, bound_embedding, use_fewer_layers, add_a_part, add_between_layers]
)
def test_a_decoder_that_does_more_is_left_alone(change: Callable[[LlamaForCausalLM], None]) -> None:
    model = small_model()
    fuse(model, LAYOUT, 1)
    pack(model, 1)
    assert fuse_decoder(model, LAYOUT) is not None
    change(model)
    assert fuse_decoder(model, LAYOUT) is None


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_embeddings_of_a_whole_batch_are_no_table(kind: str) -> None:
    factors: Sequence[float] = [1.0 + index for index in range(8)]
    options = {"dynamic": {"factor": 2.0}, "longrope": {"short_factor": [1.0] * 8, "long_factor": factors}}[kind]
    rope = {"rope_type": kind, "rope_theta": 10_000.0, "original_max_position_embeddings": 4096, **options}
    # So long that neither the trial nor the first table goes beyond what the kinds take for short.
    model = small_model(rope_parameters=rope, max_position_embeddings=8192)
    fuse(model, LAYOUT, 1)
    pack(model, 1)
    assert {type(layer) for layer in model.model.layers} == {FusedDecoderLayer}
    assert fuse_decoder(model, LAYOUT) is None
