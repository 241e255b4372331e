"""Checkpoints that come quantised compute what the same weights compute that are plain."""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine_helpers as helpers
import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.core.errors import ConfigError, ModelLoadError, UnsupportedModelError
from tandem.engine.cpu.modules import FusedGatedMLP
from tandem.engine.cpu.packed_linear import PackedLinear
from tandem.engine.cpu.panels import Panels
from tandem.engine.engine import Engine, SequenceInput
from tandem.engine.quantized.scheme import read_scheme
from tandem.engine.quantized.stored_linear import StoredLinear
from tandem.engine.quantized.unpack import unpacked
from tests.support import quantized_checkpoints as made

KINDS = {
    "gptq": made.gptq(),
    "gptq, version 2": made.gptq(version="gptq_v2"),
    "gptq, groups of 128": made.gptq(group=128),
    "gptq, zero points": made.gptq(symmetric=False),
    "gptq, ordered": made.gptq(ordered=True),
    "gptq, no groups": made.gptq(group=-1),
    "gptq, 8 bits": made.gptq(bits=8),
    "gptq, 2 bits": made.gptq(bits=2),
    "awq": made.awq(),
    "compressed": made.compressed(),
    "compressed, zero points": made.compressed(symmetric=False),
    "compressed, 8 bits": made.compressed(bits=8, group=-1),
    "int8": made.plain_numbers("int8"),
    "float8": made.plain_numbers("float8"),
    "float8, blocks": made.blocks(),
}
#: Whose numbers are kept as they are; others are rounded once more, to 8 bits.
EXACT = {"gptq", "gptq, version 2", "gptq, groups of 128", "compressed"}


@pytest.mark.parametrize("name", KINDS)
def test_logits_are_those_of_plain_weights(name: str, tmp_path: Path) -> None:
    plain = helpers.save_model("llama", tmp_path / "plain")
    made.write(plain, KINDS[name], tmp_path / "quantized", tmp_path / "same")
    engine, same = (helpers.load_engine(tmp_path / which) for which in ("quantized", "same"))
    assert engine.linear == ("packed int4" if name in EXACT else "packed int8")
    assert engine.fused == same.fused
    ours, theirs = (logits(one) for one in (engine, same))
    if name in EXACT:
        assert torch.allclose(ours, theirs, atol=helpers.LOGIT_TOLERANCE)
        return
    assert float(torch.corrcoef(torch.stack([ours.flatten(), theirs.flatten()]))[0, 1]) > 0.99
    engine, same = (helpers.load_engine(tmp_path / which, quantize="int8") for which in ("quantized", "same"))
    assert torch.allclose(logits(engine), logits(same), atol=helpers.LOGIT_TOLERANCE)


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "phi"])
def test_other_architectures_and_biases(arch: str, tmp_path: Path) -> None:
    plain = helpers.save_model(arch, tmp_path / "plain")
    made.write(plain, made.compressed(), tmp_path / "quantized", tmp_path / "same")
    engine, same = (helpers.load_engine(tmp_path / which) for which in ("quantized", "same"))
    assert torch.allclose(logits(engine), logits(same), atol=helpers.LOGIT_TOLERANCE)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gptq")
    made.write(helpers.save_model("llama", directory / "plain"), made.gptq(), directory / "it", directory / "same")
    return directory / "it"


def test_heads_and_what_else_is_plain_stay_as_they_are(quantized: Path) -> None:
    engine = helpers.load_engine(quantized)
    assert {str(panels.numbers.dtype) for panels in panels_of(engine)} == {"torch.uint8", "torch.float16"}
    assert not [module for module in engine._model.modules() if isinstance(module, StoredLinear)]


def test_workers_tell_it_from_the_same_numbers_that_mean_others(quantized: Path, tmp_path: Path) -> None:
    """Of version 2 the same tensors are other weights, and pages of the one are none of the other."""
    copy = shutil.copytree(quantized, tmp_path / "copy")
    assert helpers.load_engine(copy).weights_sha256 == helpers.load_engine(quantized).weights_sha256
    change(copy, checkpoint_format="gptq_v2")
    assert helpers.load_engine(copy).weights_sha256 != helpers.load_engine(quantized).weights_sha256


def test_on_its_way_no_more_than_one_layer_is_float32(quantized: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is unpacked is rounded before the next one is."""
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def counted(tensors: Any, scheme: Any) -> torch.Tensor:
        nonlocal most
        weight = unpacked(tensors, scheme)
        alive.append(weakref.ref(weight))
        most = max(most, sum(one() is not None for one in alive))
        return weight

    monkeypatch.setattr("tandem.engine.quantized.stored_linear.unpacked", counted)
    helpers.load_engine(quantized)
    assert len(alive) > 10
    assert most <= 3, "query, key and value become one product"


def test_a_layer_whose_tensors_are_missing_is_named(quantized: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(quantized, tmp_path / "copy")
    tensors = load_file(copy / "model.safetensors")
    missing = next(name for name in tensors if name.endswith("qzeros"))
    del tensors[missing]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=missing.removesuffix(".qzeros").replace(".", r"\.") + ".*qzeros"):
        helpers.load_engine(copy)


def test_a_config_that_no_tensor_bears_out_is_refused(quantized: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(quantized, tmp_path / "copy")
    save_file({"a": torch.zeros(1)}, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"no tensor \*\.qweight, though its config says gptq, 4 bits"):
        helpers.load_engine(copy)


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes.*gptq, awq"),
        ({}, "quant_method 'none'"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "bits 3.*2 or 4 or 8"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size 0"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "gemv"),
        ({"quant_method": "fp8"}, "weight_block_size None"),
        ({**made.compressed().said, "config_groups": {}}, "0 groups"),
        ({**made.compressed().said, "format": "marlin-24"}, "marlin-24"),
        ({**made.compressed().said, "sparsity_config": {"format": "dense"}}, "sparsity_config"),
        (made.compressed(bits=2).said, "num_bits 2"),
    ],
)
def test_what_is_not_served_is_named(said: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        read_scheme(said)


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"quantize": "int8", "dtype": "float16"}])
def test_other_arithmetic_than_float32_is_refused(quantized: Path, options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="fewer than 16 bits"):
        helpers.load_engine(quantized, **options)


def change(checkpoint: Path, **said: object) -> None:
    file = checkpoint / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= said
    file.write_text(json.dumps(config))


def panels_of(engine: Engine) -> Iterator[Panels]:
    for module in engine._model.modules():
        if isinstance(module, PackedLinear | FusedGatedMLP):
            yield module.panels


def logits(engine: Engine) -> torch.Tensor:
    """After each token of a prompt."""
    prompt = helpers.make_prompt(40, seed=5)
    pages = range(engine.layout.num_pages_for(len(prompt)))
    return engine.forward([SequenceInput(prompt, 0, pages, len(prompt))]).clone()
