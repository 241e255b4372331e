"""Checkpoints of 16 bits stay so in memory on a CPU, and all results are those of float32 with the same weights."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path

import engine_helpers as helpers
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from tandem.core.errors import ConfigError
from tandem.engine import loader
from tandem.engine.cpu.embedding import ShortEmbedding
from tandem.engine.cpu.modules import FusedGatedMLP
from tandem.engine.cpu.packed_linear import PackedLinear
from tandem.engine.cpu.panels import Rounding
from tandem.engine.cpu.vector_ir import has_bfloat16_products, has_bfloat16_tiles
from tandem.engine.engine import Engine, SequenceInput
from tandem.engine.fuse import recognise
from tandem.engine.loader import Types
from tandem.engine.random_model import ModelSpec, make_config

SHORT = ("bfloat16", "float16")
NUM_NEW = 6


def save(directory: Path, arch: str, dtype: str, **options: object) -> Path:
    return helpers.save_model(arch, directory / arch, dtype=dtype, **options)


def prompts() -> list[list[int]]:
    return [helpers.make_prompt(length, seed=1) for length in (1, 17, 90)]


def assert_the_same_bits_however_the_work_is_cut(engine: Engine, threaded: Engine) -> None:
    """In chunks of any size, alone and together, on one thread and on the threads of the other engine."""
    together = helpers.drive(engine, prompts(), chunk=50, num_new=NUM_NEW)
    for prompt, expected in zip(prompts(), together, strict=True):
        for other, chunk in ((engine, 7), (engine, 1000), (threaded, 33)):
            (found,) = helpers.drive(other, [prompt], chunk=chunk, num_new=NUM_NEW)
            assert found.token_ids == expected.token_ids
            assert torch.equal(found.logits, expected.logits), f"chunks of {chunk}"


def logits_of_a_prompt(engine: Engine) -> torch.Tensor:
    """After each of its tokens."""
    prompt = prompts()[-1]
    pages = range(engine.layout.num_pages_for(len(prompt)))
    return engine.forward([SequenceInput(prompt, 0, pages, len(prompt))]).clone()


def panels_of(engine: Engine) -> Iterator[torch.Tensor]:
    for module in engine._model.modules():
        if isinstance(module, PackedLinear | FusedGatedMLP):
            yield module.panels.numbers


@pytest.mark.long
@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("arch", helpers.ARCHITECTURES)
def test_logits_are_the_bits_of_float32(
    arch: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = save(tmp_path, arch, dtype)
    short = helpers.load_engine(model_dir, dtype="float32")
    monkeypatch.setattr(loader, "choose_types", lambda *_, **__: Types.all_of("float32"))
    wide = helpers.load_engine(model_dir)
    monkeypatch.undo()
    for chunk in (1000, 7):
        found, expected = (helpers.drive(e, prompts(), chunk=chunk, num_new=NUM_NEW) for e in (short, wide))
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.token_ids == theirs.token_ids
            assert torch.equal(ours.logits, theirs.logits)
    assert {panels.dtype for panels in panels_of(short)} == {getattr(torch, dtype)}
    assert {panels.dtype for panels in panels_of(wide)} == {torch.float32}
    assert short.fused == wide.fused, "the same parts are replaced"
    assert short.weights_sha256 == wide.weights_sha256, "their pages are the same, and may be shared"
    assert short.layout.dtype == wide.layout.dtype == "float32"


@pytest.mark.parametrize("tie", [False, True])
def test_all_large_tensors_stay_short(tie: bool, tmp_path: Path) -> None:
    engine = helpers.load_engine(save(tmp_path, "llama", "bfloat16", tie=tie), dtype="float32")
    embedding = engine._model.get_input_embeddings()
    assert isinstance(embedding, ShortEmbedding)
    assert embedding.weight.dtype is torch.bfloat16
    held = [*engine._model.parameters(), *engine._model.buffers()]
    left = [tensor for tensor in held if tensor is not embedding.weight]
    assert not [tensor for tensor in left if tensor.dtype is not torch.float32]
    assert not [tensor for tensor in left if tensor.dim() > 1]
    assert "decoder" in engine.fused


@pytest.mark.long
def test_no_float32_copy_of_the_model_is_made_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one part at a time is in memory as float32: when it is tried."""
    model_dir = save(tmp_path, "llama", "bfloat16", layers=6, hidden=128, intermediate=256)
    largest = 3 * 128 * 256 * 4  # an MLP
    seen: list[int] = []
    replace = recognise.proved

    def proved(*arguments: object) -> object:
        gc.collect()
        matrices = [o for o in gc.get_objects() if type(o) is nn.Parameter and o.dim() > 1]
        seen.append(sum(matrix.nbytes for matrix in matrices if matrix.dtype is torch.float32))
        return replace(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(recognise, "proved", proved)
    gc.freeze()  # what was there before counts for nothing, and costs no time
    try:
        helpers.load_engine(model_dir)
    finally:
        gc.unfreeze()
        gc.collect()
        gc.freeze()  # as tests find it
    assert len(seen) >= 6 * 5
    assert max(seen) <= largest


@pytest.mark.parametrize(
    ("asked", "own", "can_widen", "short_products", "computed", "stored", "multiplied"),
    [
        ("auto", "bfloat16", True, "bfloat16", "float32", "bfloat16", "bfloat16"),
        ("auto", "bfloat16", True, "bfloat16 in tiles", "float32", "bfloat16", "bfloat16 in tiles"),
        ("auto", "bfloat16", True, "", "float32", "bfloat16", "float32"),
        ("auto", "bfloat16", False, "", "float32", "float32", "float32"),
        ("auto", "float16", True, "bfloat16", "float32", "float16", "float32"),
        ("auto", "float32", True, "bfloat16", "float32", "float32", "float32"),
        ("auto", "float64", True, "bfloat16", "float32", "float32", "float32"),
        ("float32", "bfloat16", True, "bfloat16 in tiles", "float32", "bfloat16", "float32"),
        ("bfloat16", "float32", True, "bfloat16", "float32", "bfloat16", "bfloat16"),
        ("bfloat16", "bfloat16", True, "", "bfloat16", "bfloat16", "bfloat16"),
        ("float16", "float16", True, "bfloat16", "float16", "float16", "float16"),
    ],
)
def test_what_a_dtype_means_on_a_cpu(
    asked: str, own: str, can_widen: bool, short_products: str, computed: str, stored: str, multiplied: str
) -> None:
    config = make_config(ModelSpec())
    config.dtype = getattr(torch, own)
    found = loader.choose_types(
        asked, config, torch.device("cpu"), tensors=own, can_widen=can_widen,
        short_products=lambda: short_products,
    )  # fmt: skip
    assert found == Types(computed, stored, multiplied)
    assert found.widens is (computed == multiplied == "float32" and stored != "float32")


@pytest.mark.parametrize(("asked", "own"), [("auto", "float32"), ("auto", "float16"), ("float32", "bfloat16")])
def test_who_does_not_multiply_bfloat16_asks_for_no_products_of_it(asked: str, own: str) -> None:
    """A process that asks for tiles needs greater stacks for signals from then on."""
    config = make_config(ModelSpec())
    config.dtype = getattr(torch, own)

    def short_products() -> str:
        raise AssertionError

    loader.choose_types(
        asked, config, torch.device("cpu"), tensors=own, can_widen=True, short_products=short_products
    )


@pytest.mark.parametrize(("said", "tensors"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_what_is_computed_is_what_the_config_says_as_far_as_tensors_allow(said: str, tensors: str) -> None:
    config = make_config(ModelSpec())
    config.dtype = getattr(torch, said)
    cpu = torch.device("cpu")
    found = loader.choose_types(
        "auto", config, cpu, tensors=tensors, can_widen=True, short_products=lambda: loader.SHORT
    )
    assert found == Types("float32", tensors, "float32")


def test_a_gpu_computes_in_the_type_of_the_weights() -> None:
    config = make_config(ModelSpec())
    config.dtype = torch.bfloat16
    for asked, dtype in (("auto", "bfloat16"), ("float16", "float16")):
        found = loader.choose_types(
            asked, config, torch.device("cuda"), tensors="float32", can_widen=True, short_products=lambda: loader.SHORT
        )
        assert found == Types.all_of(dtype)


@pytest.mark.long
def test_what_tensors_hold_stays_whatever_the_config_says(tmp_path: Path) -> None:
    """A checkpoint that says bfloat16 and holds float32 is not rounded."""
    model_dir = save(tmp_path, "llama", "float32")
    exact = helpers.load_engine(model_dir)
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    found = helpers.load_engine(model_dir)
    assert found.types == exact.types == Types.all_of("float32")
    assert found.weights_sha256 == exact.weights_sha256
    tensors = load_file(model_dir / "model.safetensors")
    first, *others = tensors
    mixed = {first: tensors[first], **{name: tensors[name].bfloat16() for name in others}}
    save_file(mixed, model_dir / "model.safetensors", metadata={"format": "pt"})
    assert helpers.load_engine(model_dir).types == Types.all_of("float32")
    save_file({**mixed, first: mixed[first].bfloat16()}, model_dir / "model.safetensors", metadata={"format": "pt"})
    assert helpers.load_engine(model_dir).types.stored == "bfloat16"


class Scaling(LlamaForCausalLM):
    """It makes a table by itself, in no checkpoint, as Gemma 3 does."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.register_buffer("scale", torch.tensor(50.596), persistent=False)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Scaling):
            nn.init.constant_(module.scale, 50.596)


def test_tables_that_a_model_makes_are_made_as_it_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loader._AUTO_MODELS, None, Scaling)
    model_dir = save(tmp_path, "llama", "bfloat16")
    config, types = loader.load_config(model_dir), Types("float32", "bfloat16", "float32")
    model = loader.load_stored(model_dir, config, types, torch.device("cpu"))
    assert float(model.scale) == float(torch.tensor(50.596))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_an_embedding_of_another_kind_is_widened_whole(tmp_path: Path) -> None:
    """Gemma scales what it looks up: in 16 bits the products would be others."""
    engine = helpers.load_engine(save(tmp_path, "gemma2", "bfloat16"), dtype="float32")
    embedding = engine._model.get_input_embeddings()
    assert not isinstance(embedding, ShortEmbedding)
    assert embedding.weight.dtype is torch.float32


def test_arithmetic_in_float16_is_torchs(tmp_path: Path) -> None:
    engine = helpers.load_engine(save(tmp_path, "llama", "float16"), dtype="float16")
    assert (engine.linear, engine.fused, engine.layout.dtype) == ("torch", "none", "float16")


# --- multiplied as they are ---------------------------------------------------------------------------------------

by_two = pytest.mark.skipif(not has_bfloat16_products(), reason="this CPU does not multiply bfloat16")
in_tiles = pytest.mark.skipif(not has_bfloat16_tiles(), reason="this CPU has no tiles of bfloat16")


@pytest.mark.long
@pytest.mark.parametrize("arch", helpers.ARCHITECTURES)
@pytest.mark.parametrize(
    ("kernels", "linear", "multiplied"),
    [
        pytest.param("vectors", "packed by two", loader.SHORT, marks=by_two),
        pytest.param("auto", "packed in tiles", loader.SHORT_IN_TILES, marks=in_tiles),
    ],
    ids=["vectors", "tiles"],
)
def test_products_of_bfloat16_are_near_and_the_same_bits_however_the_work_is_cut(
    arch: str, kernels: str, linear: str, multiplied: str, tmp_path: Path
) -> None:
    # Heads that fill tiles, where they may have any size.
    wide = {} if arch in ("gpt2", "phi") else {"head_dim": 32}
    model_dir = save(tmp_path, arch, "bfloat16", **wide)
    engine, threaded = (helpers.load_engine(model_dir, num_threads=n, kernels=kernels) for n in (1, 2))
    exact = helpers.load_engine(model_dir, dtype="float32")
    assert (engine.linear, engine.types) == (linear, Types("float32", "bfloat16", multiplied))
    assert engine.fused == exact.fused
    fits = engine.layout.head_dim % 32 == 0
    assert engine.attention == (f"cpu, {engine.types.products}" if fits else "cpu")
    assert_the_same_bits_however_the_work_is_cut(engine, threaded)
    ours, theirs = (logits_of_a_prompt(one) for one in (engine, exact))
    assert not torch.equal(ours, theirs), "it is a type of its own"
    assert float(torch.corrcoef(torch.stack([ours.flatten(), theirs.flatten()]))[0, 1]) > 0.99


@pytest.mark.long
def test_a_first_batch_of_any_size_is_computed_as_converted(tmp_path: Path) -> None:
    """Trials of parts leave plans behind that name the weights as they were."""
    model_dir = save(tmp_path, "llama", "bfloat16")
    for options in ({"dtype": "auto"}, {"quantize": "int8"}):
        for num_rows in range(4, 9):
            engine = helpers.load_engine(model_dir, **options)
            found = engine.forward([SequenceInput([5] * num_rows, 0, (0, 1), num_rows)])[-1].clone()
            for end in range(1, num_rows + 1):
                alone = engine.forward([SequenceInput([5], end - 1, (2, 3), 1)])
            assert torch.equal(found, alone[0]), f"{num_rows} rows, {options}"


@pytest.mark.long
@by_two
def test_only_workers_that_multiply_alike_share_pages(tmp_path: Path) -> None:
    model_dir = save(tmp_path, "llama", "bfloat16")
    auto, asked, exact = (helpers.load_engine(model_dir, dtype=dtype) for dtype in ("auto", "bfloat16", "float32"))
    assert auto.weights_sha256 == asked.weights_sha256
    assert auto.weights_sha256 != exact.weights_sha256
    assert (auto.layout.dtype, exact.layout.dtype) == ("bfloat16", "float32")
    wide = helpers.load_engine(model_dir, cache_dtype="float32")
    assert (wide.layout, wide.types, wide.attention) == (exact.layout, auto.types, "cpu")
    vectors = helpers.load_engine(model_dir, kernels="vectors")
    assert (vectors.weights_sha256 == auto.weights_sha256) is not has_bfloat16_tiles()


# --- rounded to whole numbers -------------------------------------------------------------------------------------


def save_rounded(model_dir: Path, bits: int, target: Path) -> Path:
    """The same checkpoint in float32, its linear layers rounded."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    for module in model.modules():
        if isinstance(module, nn.Linear | Conv1D):
            weight = module.weight if isinstance(module, nn.Linear) else module.weight.T
            packed = PackedLinear(weight, None, 1)
            packed.panels.quantize(Rounding(bits))
            rounded = packed(torch.eye(packed.in_features)).T
            with torch.no_grad():
                module.weight.copy_(rounded if isinstance(module, nn.Linear) else rounded.T)
    model.save_pretrained(target)
    return target


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "kernels", "multiplied"),
    [
        pytest.param("float32", "auto", "float32", id="widened"),
        pytest.param("auto", "vectors", loader.SHORT, marks=by_two, id="by two"),
        pytest.param("auto", "auto", loader.SHORT_IN_TILES, marks=in_tiles, id="in tiles"),
    ],
)
@pytest.mark.parametrize(
    ("arch", "quantize"),
    [
        pytest.param(arch, bits, marks=[] if bits == "int8" or arch in ("llama", "gpt2") else pytest.mark.faults)
        for arch in helpers.ARCHITECTURES
        for bits in ("int8", "int4")
    ],
)
def test_rounded_weights_are_those_of_linear_layers_and_bits_stay_however_the_work_is_cut(
    arch: str, quantize: str, dtype: str, kernels: str, multiplied: str, tmp_path: Path
) -> None:
    model_dir = save(tmp_path, arch, "bfloat16")
    engine, threaded = (
        helpers.load_engine(model_dir, dtype=dtype, quantize=quantize, num_threads=n, kernels=kernels) for n in (1, 2)
    )
    exact = helpers.load_engine(save_rounded(model_dir, int(quantize[3:]), tmp_path / "rounded"))
    assert engine.types == Types("float32", "bfloat16", multiplied, quantize)
    is_short = engine.types.multiplies_short
    assert engine.linear == f"packed {quantize} {engine.types.products}".rstrip()
    assert {numbers.dtype for numbers in panels_of(engine)} == {torch.int8 if quantize == "int8" else torch.int32}
    assert engine.fused == exact.fused
    assert engine.weights_sha256 != exact.weights_sha256
    assert_the_same_bits_however_the_work_is_cut(engine, threaded)
    ours, theirs = (logits_of_a_prompt(one) for one in (engine, exact))
    if is_short:
        assert not torch.equal(ours, theirs), "it is a type of its own"
        assert float(torch.corrcoef(torch.stack([ours.flatten(), theirs.flatten()]))[0, 1]) > 0.99
    else:
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.std()))


@pytest.mark.parametrize(
    ("asked", "own", "short_products", "multiplied"),
    [
        ("auto", "bfloat16", loader.SHORT_IN_TILES, loader.SHORT_IN_TILES),
        ("auto", "bfloat16", loader.SHORT, loader.SHORT),
        ("auto", "bfloat16", "", "float32"),
        ("auto", "float16", loader.SHORT_IN_TILES, "float32"),
        ("auto", "float32", loader.SHORT_IN_TILES, "float32"),
        ("float32", "bfloat16", loader.SHORT_IN_TILES, "float32"),
        ("bfloat16", "float16", loader.SHORT_IN_TILES, loader.SHORT_IN_TILES),
    ],
)
@pytest.mark.parametrize("how", [{"quantize": "int8"}, {"kept_as": "int4"}], ids=str)
def test_rounded_weights_of_bfloat16_are_multiplied_as_it(
    asked: str, own: str, short_products: str, multiplied: str, how: dict[str, str]
) -> None:
    config = make_config(ModelSpec())
    config.dtype = getattr(torch, own)
    found = loader.choose_types(
        asked, config, torch.device("cpu"), tensors=own, can_widen=True, short_products=lambda: short_products, **how
    )
    assert (found.computed, found.multiplied) == ("float32", multiplied)
    assert found.widens is not found.in_tiles
    assert found.stored == (own if multiplied == "float32" else "bfloat16")


@pytest.mark.parametrize(
    ("quantize", "dtype", "device", "can_widen", "key"),
    [
        ("int2", "auto", "cpu", True, "model.quantize"),
        ("int8", "auto", "cuda", True, "model.quantize"),
        ("int8", "auto", "cpu", False, "model.quantize"),
        ("int8", "bfloat16", "cpu", True, "model.dtype"),
    ],
)
def test_what_cannot_be_rounded_is_refused(quantize: str, dtype: str, device: str, can_widen: bool, key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        loader.choose_types(
            dtype, make_config(ModelSpec()), torch.device(device), tensors="float32", quantize=quantize,
            can_widen=can_widen, short_products=str,
        )  # fmt: skip
    assert refused.value.key == key
