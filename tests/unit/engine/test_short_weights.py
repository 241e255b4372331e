"""Checkpoints of 16 bits stay so in memory on a CPU, and all results are those of float32 with the same weights."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import engine_helpers as helpers
import pytest
import torch
from torch import nn

from tandem.engine import loader
from tandem.engine.cpu.embedding import ShortEmbedding
from tandem.engine.cpu.modules import FusedGatedMLP
from tandem.engine.cpu.packed_linear import PackedLinear
from tandem.engine.engine import Engine
from tandem.engine.fuse import recognise

SHORT = ("bfloat16", "float16")
NUM_NEW = 6


def save(directory: Path, arch: str, dtype: str, **options: object) -> Path:
    return helpers.save_model(arch, directory / arch, dtype=dtype, **options)


def panels_of(engine: Engine) -> Iterator[torch.Tensor]:
    for module in engine._model.modules():
        if isinstance(module, PackedLinear | FusedGatedMLP):
            yield module._panels


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("arch", helpers.ARCHITECTURES)
def test_logits_are_the_bits_of_float32(arch: str, dtype: str, tmp_path: Path) -> None:
    model_dir = save(tmp_path, arch, dtype)
    short, wide = (helpers.load_engine(model_dir, dtype=asked) for asked in ("auto", "float32"))
    prompts = [helpers.make_prompt(length, seed=1) for length in (1, 17, 90)]
    for chunk in (1000, 7):
        found, expected = (helpers.drive(e, prompts, chunk=chunk, num_new=NUM_NEW) for e in (short, wide))
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.token_ids == theirs.token_ids
            assert torch.equal(ours.logits, theirs.logits)
    assert {panels.dtype for panels in panels_of(short)} == {getattr(torch, dtype)}
    assert {panels.dtype for panels in panels_of(wide)} == {torch.float32}
    assert short.fused == wide.fused, "the same parts are replaced"
    assert short.weights_sha256 == wide.weights_sha256, "their pages are the same, and may be shared"
    assert short.model_dtype == wide.model_dtype == "float32"


@pytest.mark.parametrize("tie", [False, True])
def test_all_large_tensors_stay_short(tie: bool, tmp_path: Path) -> None:
    engine = helpers.load_engine(save(tmp_path, "llama", "bfloat16", tie=tie))
    embedding = engine._model.get_input_embeddings()
    assert isinstance(embedding, ShortEmbedding)
    assert embedding.weight.dtype is torch.bfloat16
    held = [*engine._model.parameters(), *engine._model.buffers()]
    left = [tensor for tensor in held if tensor is not embedding.weight]
    assert not [tensor for tensor in left if tensor.dtype is not torch.float32]
    assert not [tensor for tensor in left if tensor.dim() > 1]
    assert "decoder" in engine.fused


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

    gc.collect()
    before = sum(o.nbytes for o in gc.get_objects() if type(o) is nn.Parameter and o.dtype is torch.float32)
    monkeypatch.setattr(recognise, "proved", proved)
    helpers.load_engine(model_dir)
    assert len(seen) >= 6 * 5
    assert max(seen) - before <= largest


def test_what_is_asked_for_is_taken_as_it_is(tmp_path: Path) -> None:
    config = loader.load_config(save(tmp_path, "llama", "bfloat16"))
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert loader.stored_dtype("auto", "float32", config, cpu) == "bfloat16"
    assert loader.stored_dtype("float32", "float32", config, cpu) == "float32"
    assert loader.stored_dtype("float16", "float16", config, cpu) == "float16"
    assert loader.stored_dtype("auto", "bfloat16", config, gpu) == "bfloat16"
    config.dtype = None
    assert loader.stored_dtype("auto", "float32", config, cpu) == "float32"


def test_an_embedding_of_another_kind_is_widened_whole(tmp_path: Path) -> None:
    """Gemma scales what it looks up: in 16 bits the products would be others."""
    engine = helpers.load_engine(save(tmp_path, "gemma2", "bfloat16"))
    embedding = engine._model.get_input_embeddings()
    assert not isinstance(embedding, ShortEmbedding)
    assert embedding.weight.dtype is torch.float32


def test_arithmetic_in_float16_is_torchs(tmp_path: Path) -> None:
    engine = helpers.load_engine(save(tmp_path, "llama", "float16"), dtype="float16")
    assert (engine.linear, engine.fused, engine.model_dtype) == ("torch", "none", "float16")
