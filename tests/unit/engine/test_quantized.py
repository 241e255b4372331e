"""Checkpoints that come quantised compute what the same weights compute that are plain."""

from __future__ import annotations

import json
import re
import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engine_helpers as helpers
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.accuracy import quantized_checkpoints as made
from tandem.core.errors import ConfigError, ModelLoadError, UnsupportedModelError
from tandem.engine.cpu.modules import FusedGatedMLP
from tandem.engine.cpu.packed_linear import PackedLinear
from tandem.engine.cpu.panels import Panels
from tandem.engine.cpu.vector_ir import has_bfloat16_products
from tandem.engine.engine import Engine, SequenceInput
from tandem.engine.quantized.scheme import read_scheme
from tandem.engine.quantized.stored_linear import StoredLinear

KINDS = {
    "gptq": made.gptq(),
    "gptq, version 2": made.gptq(version="gptq_v2"),
    "gptq, groups of 128": made.gptq(group=128),
    "gptq, zero points": made.gptq(symmetric=False),
    "gptq, ordered": made.gptq(ordered=True),
    "gptq, no groups": made.gptq(group=-1),
    "gptq, 8 bits": made.gptq(bits=8),
    "gptq, 2 bits": made.gptq(bits=2),
    "gptq, 2 bits, zero points": made.gptq(bits=2, group=16, symmetric=False),
    "gptq, negative scales": made.gptq(negative=True),
    "gptq, groups that do not divide the inputs": made.gptq(group=40),
    "awq": made.awq(),
    "compressed": made.compressed(),
    "compressed, zero points": made.compressed(symmetric=False),
    "compressed, ordered": made.compressed(ordered=True),
    "compressed, 8 bits": made.compressed(bits=8, group=-1),
    "int8": made.plain_numbers("int8"),
    "float8, one scale": made.plain_numbers("float8", whole=True),
    "float8": made.plain_numbers("float8"),
    "float8, blocks": made.blocks(),
}
#: Whose numbers are kept as they are; others are rounded once more, to 8 bits.
EXACT = {
    "gptq", "gptq, version 2", "gptq, groups of 128", "gptq, negative scales", "compressed",
    "gptq, groups that do not divide the inputs",
}  # fmt: skip


@pytest.mark.long
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


@pytest.mark.long
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
    assert {str(panels.numbers.dtype) for panels in panels_of(engine)} == {"torch.int32", "torch.float16"}
    assert not [module for module in engine._model.modules() if isinstance(module, StoredLinear)]


@pytest.mark.long
def test_workers_tell_it_from_the_same_numbers_that_mean_others(tmp_path: Path) -> None:
    """Of version 2 the same tensors are other weights, and pages of the one are none of the other."""
    plain, quantized = helpers.save_model("llama", tmp_path / "plain"), tmp_path / "quantized"
    made.write(plain, made.gptq(symmetric=False), quantized, tmp_path / "same")
    copy = shutil.copytree(quantized, tmp_path / "copy")
    assert helpers.load_engine(copy).weights_sha256 == helpers.load_engine(quantized).weights_sha256
    asked = helpers.load_engine(copy, quantize="int8")
    assert asked.types.quantized == helpers.load_engine(copy).types.quantized
    assert asked.weights_sha256 != helpers.load_engine(copy).weights_sha256, "plain layers are rounded, too"
    change(copy, checkpoint_format="gptq_v2")
    assert helpers.load_engine(copy).weights_sha256 != helpers.load_engine(quantized).weights_sha256


def test_on_its_way_no_more_than_one_part_is_float32(quantized: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is unpacked is packed and rounded before the next part is."""
    panels: list[weakref.ref[Panels]] = []
    most = 0

    def noted(one: Panels, *weights: torch.Tensor) -> None:
        nonlocal most
        most = max(most, sum(other.numbers.dtype is torch.float32 for ref in panels if (other := ref()) is not None))
        make(one, *weights)
        panels.append(weakref.ref(one))

    make = Panels.__init__
    monkeypatch.setattr(Panels, "__init__", noted)
    helpers.load_engine(quantized)
    assert len(panels) > 10
    assert most == 1, "of an attention the second product is packed beside the first, of an MLP too"


@pytest.mark.long
@pytest.mark.parametrize("but", ["down_proj", "v_proj", "layers.0."])
def test_layers_that_are_plain_in_a_part_stay_plain(but: str, tmp_path: Path) -> None:
    plain = helpers.save_model("llama", tmp_path / "plain")
    made.write(plain, made.gptq(), tmp_path / "quantized", tmp_path / "same", but=but)
    engine, same = (helpers.load_engine(tmp_path / which) for which in ("quantized", "same"))
    assert torch.allclose(logits(engine), logits(same), atol=helpers.LOGIT_TOLERANCE)


def edited(checkpoint: Path, target: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy with other tensors."""
    shutil.copytree(checkpoint, target)
    tensors = load_file(target / "model.safetensors")
    edit(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


Q = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda tensors: tensors.pop(f"{Q}.qzeros"), "lacks qzeros"),
        (lambda tensors: tensors.update({f"{Q}.scales": tensors[f"{Q}.scales"][:1].clone()}), "scales is F16"),
        (lambda tensors: tensors.update({f"{Q}.qweight": tensors[f"{Q}.qweight"].long()}), "qweight is I64"),
        (lambda tensors: tensors.update({f"{Q}.lora": torch.zeros(1)}), "a tensor lora"),
        (lambda tensors: tensors[f"{Q}.qzeros"].add_(1), "zero points.*sym: true"),
        (lambda tensors: tensors[f"{Q}.g_idx"].add_(1), "names others than its"),
        (lambda tensors: tensors.update({f"{Q}.bias": torch.zeros(3, dtype=torch.float16)}), r"bias is F16 \[3\]"),
        (lambda tensors: tensors[f"{Q}.g_idx"].copy_(tensors[f"{Q}.g_idx"].flip(0)), "desc_act: false"),
    ],
)
def test_tensors_that_are_not_what_the_config_says_are_named(
    quantized: Path, tmp_path: Path, edit: Callable[[dict[str, torch.Tensor]], None], named: str
) -> None:
    with pytest.raises(ModelLoadError, match=rf"{re.escape(Q)}.*{named}"):
        helpers.load_engine(edited(quantized, tmp_path / "copy", edit))


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        # AutoAWQ's scales of activations, and a layer whose scale has another name.
        (lambda tensors: tensors.update({"model.layers.0.mlp.act_fn.scales": torch.ones(8)}), "act_fn.scales"),
        (lambda tensors: tensors.update({"lm_head.qscale": torch.ones(8)}), "lm_head.qscale"),
        (lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.float8_e4m3fn)}), "lm_head.weight is F8"),
    ],
)
def test_tensors_that_nobody_reads_are_not_left_out(
    quantized: Path, tmp_path: Path, edit: Callable[[dict[str, torch.Tensor]], None], named: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        helpers.load_engine(edited(quantized, tmp_path / "copy", edit))


@pytest.mark.long
def test_scales_of_inputs_and_of_kv_are_left_out(quantized: Path, tmp_path: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{Q}.input_scale"] = torch.ones(1)
        tensors[f"{Q}.input_zero_point"] = torch.zeros(1, dtype=torch.uint8)
        tensors["model.layers.1.self_attn.k_scale"] = torch.ones(1)
        tensors["vision_tower.patch.scale"] = torch.ones(1)

    engine = helpers.load_engine(edited(quantized, tmp_path / "copy", add))
    assert torch.equal(logits(engine), logits(helpers.load_engine(quantized)))


@pytest.mark.parametrize("shape", [[64, 32], [32, 64], [64, 96]])
def test_a_weight_that_says_another_shape_of_itself_is_named(tmp_path: Path, shape: list[int]) -> None:
    plain = helpers.save_model("llama", tmp_path / "plain")
    made.write(plain, made.compressed(), tmp_path / "quantized", tmp_path / "same")

    def change_shape(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{Q}.weight_shape"] = torch.tensor(shape)

    with pytest.raises(ModelLoadError, match=rf"{re.escape(Q)}.*(weight_shape|makes a weight)"):
        helpers.load_engine(edited(tmp_path / "quantized", tmp_path / "copy", change_shape))


def test_float8_that_no_config_tells_of_is_refused(tmp_path: Path) -> None:
    plain = helpers.save_model("llama", tmp_path / "plain")
    made.write(plain, made.plain_numbers("float8"), tmp_path / "quantized", tmp_path / "same")
    file = tmp_path / "quantized" / "config.json"
    config = json.loads(file.read_text())
    del config["quantization_config"]
    file.write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="is F8_E4M3, and quantization_config"):
        helpers.load_engine(tmp_path / "quantized")


def test_a_bias_that_is_missing_is_missed(tmp_path: Path) -> None:
    plain = helpers.save_model("qwen2", tmp_path / "plain")
    made.write(plain, made.gptq(), tmp_path / "quantized", tmp_path / "same")
    copy = edited(tmp_path / "quantized", tmp_path / "copy", lambda tensors: tensors.pop(f"{Q}.bias"))
    with pytest.raises(ModelLoadError, match=rf"{re.escape(Q)} lacks its bias"):
        helpers.load_engine(copy)


def test_a_quantised_part_that_is_no_linear_layer_is_refused(quantized: Path, tmp_path: Path) -> None:
    def move(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(Q)]:
            tensors[name.replace("q_proj", "experts")] = tensors.pop(name)

    with pytest.raises(UnsupportedModelError, match="experts is quantised, and no part of the model"):
        helpers.load_engine(edited(quantized, tmp_path / "copy", move))


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
        ({**made.compressed().said, "sparsity_config": {"format": "sparse-24"}}, "sparsity_config 'sparse-24'"),
        ({**made.compressed().said, "transform_config": {"config_groups": {}}}, "transform_config"),
        ({**made.gptq().said, "dynamic": {"-:lm_head": {}, "+:.*down.*": {"bits": 8}}}, r"dynamic: \+:\.\*down"),
        ({**made.gptq().said, "pack_dtype": "int16"}, "pack_dtype 'int16'"),
        ({**made.gptq().said, "format": "gptq_v2"}, "checkpoint_format and format that differ"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "format": "gemv_fast"}, "gemv_fast"),
        (made.compressed(bits=2).said, "num_bits 2"),
    ],
)
def test_what_is_not_served_is_named(said: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        read_scheme(said)


@pytest.mark.skipif(not has_bfloat16_products(), reason="this CPU does not multiply bfloat16")
def test_it_is_multiplied_in_bfloat16_where_that_is_asked_for(quantized: Path) -> None:
    """Layers that are plain are rounded to it."""
    engine, exact = helpers.load_engine(quantized, dtype="bfloat16"), helpers.load_engine(quantized)
    assert (engine.linear, engine.layout.dtype) == (f"packed int4 {engine.types.products}", "bfloat16")
    assert {str(panels.numbers.dtype) for panels in panels_of(engine)} == {"torch.int32", "torch.bfloat16"}
    assert engine.weights_sha256 != exact.weights_sha256
    ours, theirs = logits(engine), logits(exact)
    assert not torch.equal(ours, theirs)
    assert float(torch.corrcoef(torch.stack([ours.flatten(), theirs.flatten()]))[0, 1]) > 0.99


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"quantize": "int8", "dtype": "float16"}])
def test_other_arithmetic_is_refused(
    quantized: Path, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.engine.cpu.kernels.has_bfloat16_products", lambda: False)
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
