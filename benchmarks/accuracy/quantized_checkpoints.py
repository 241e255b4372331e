"""Checkpoints as quantisers write them, number by number, and plain ones with the same weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

#: Of eight numbers in a word of AWQ, which output lies at each place, the lowest bits first.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Kind:
    """How `write` quantises; `encode` gives a layer's tensors and the weight that they mean."""

    said: dict[str, Any]
    encode: Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]


def write(plain: Path, kind: Kind, quantized: Path, same: Path, *, but: str = "lm_head") -> None:
    """Of the checkpoint `plain`: one that `kind` quantises, and a float32 one with those weights.

    Heads stay, and so do layers whose names have `but`.
    """
    for target in (quantized, same):
        shutil.copytree(plain, target)
    short: Tensors = {}
    wide: Tensors = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if tensor.dim() == 2 and ".layers." in name and but not in name:
            encoded, weight = kind.encode(tensor.float())
            layer = name.removesuffix(".weight")
            short |= {f"{layer}.{own}": part.contiguous() for own, part in encoded.items()}
            wide[name] = weight.contiguous()
        else:
            short[name] = tensor.to(torch.float16)
            wide[name] = short[name].float()
    for target, tensors, more in ((quantized, short, {"quantization_config": kind.said}), (same, wide, {})):
        for file in target.glob("*.safetensors"):
            file.unlink()
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((target / "config.json").read_text())
        dtype = "float16" if more else "float32"
        (target / "config.json").write_text(json.dumps(config | {"dtype": dtype} | more))


def gptq(
    bits: int = 4,
    group: int = 32,
    *,
    symmetric: bool = True,
    ordered: bool = False,
    version: str = "gptq",
    negative: bool = False,
) -> Kind:
    """`qweight` is packed along the inputs, zeros along the outputs, and stored less one but for version 2.

    Args:
        negative: every other group has a negative scale, as AutoRound writes them.
    """

    def encode(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        num_in = weight.shape[1]
        size = num_in if group == -1 else group
        groups = torch.arange(num_in) // size
        if ordered:
            groups = groups[torch.randperm(num_in, generator=torch.Generator().manual_seed(1))]
        numbers, zeros, scales = _rounded(weight, groups, bits, symmetric)
        if negative:
            numbers[:, groups % 2 == 1] = (2**bits - numbers[:, groups % 2 == 1]).clamp(max=2**bits - 1)
            scales[:, 1::2] *= -1
        off = 0 if version == "gptq_v2" else 1
        tensors = {
            "qweight": _packed(numbers.T, bits, along=0),
            # A zero point of 0 becomes the greatest number.
            "qzeros": _packed(((zeros - off) % 2**bits).T, bits, along=1),
            "scales": scales.T.half(),
            "g_idx": groups.int(),
        }
        return tensors, (numbers - zeros[:, groups]) * scales[:, groups]

    said = {
        "quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": ordered,
        "checkpoint_format": version,
    }  # fmt: skip
    return Kind(said, encode)


def awq(group: int = 32) -> Kind:
    """All is packed along the outputs, which are dealt out to lanes."""

    def encode(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        groups = torch.arange(weight.shape[1]) // group
        numbers, zeros, scales = _rounded(weight, groups, 4, symmetric=False)
        tensors = {
            "qweight": _packed(_dealt(numbers.T), 4, along=1),
            "qzeros": _packed(_dealt(zeros.T), 4, along=1),
            "scales": scales.T.half(),
        }
        return tensors, (numbers - zeros[:, groups]) * scales[:, groups]

    return Kind({"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}, encode)


def compressed(bits: int = 4, group: int = 32, *, symmetric: bool = True, ordered: bool = False) -> Kind:
    """Packed along the inputs, less half of the range; zero points along the outputs."""

    def encode(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        size = weight.shape[1] if group == -1 else group
        groups = torch.arange(weight.shape[1]) // size
        if ordered:
            groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(1))]
        numbers, zeros, scales = _rounded(weight, groups, bits, symmetric)
        tensors = {
            "weight_packed": _packed(numbers, bits, along=1),
            "weight_scale": scales.half(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if ordered:
            tensors["weight_g_idx"] = groups.int()
        if not symmetric:
            tensors["weight_zero_point"] = _packed(zeros, bits, along=0)
        return tensors, (numbers - zeros[:, groups]) * scales[:, groups]

    weights = {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "channel" if group == -1 else "group",
        "group_size": None if group == -1 else group, "actorder": "group" if ordered else None,
    }  # fmt: skip
    return Kind(_compressed_said("pack-quantized", weights), encode)


def plain_numbers(kind: str, *, whole: bool = False) -> Kind:
    """`int8` or `float8`, a number an element and a scale an output, or one for all."""

    def encode(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        most = 127.0 if kind == "int8" else 448.0
        greatest = weight.abs().max().view(1) if whole else weight.abs().amax(dim=1, keepdim=True)
        scales = (greatest / most).half().float()
        scaled = weight / scales
        stored = scaled.round().clamp(-128, 127).to(torch.int8) if kind == "int8" else scaled.to(torch.float8_e4m3fn)
        return {"weight": stored, "weight_scale": scales.half()}, stored.float() * scales

    weights = {
        "num_bits": 8, "type": kind.removesuffix("8"), "symmetric": True, "group_size": None,
        "strategy": "tensor" if whole else "channel",
    }  # fmt: skip
    return Kind(_compressed_said("int-quantized" if kind == "int8" else "float-quantized", weights), encode)


def blocks(size: int = 48) -> Kind:
    """float8 with a scale for each block of outputs and inputs."""

    def encode(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        stored, wide = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
        rows, columns = (range(0, length, size) for length in weight.shape)
        scales = torch.empty(len(rows), len(columns))
        for i, row in enumerate(rows):
            for j, column in enumerate(columns):
                part = slice(row, row + size), slice(column, column + size)
                scales[i, j] = weight[part].abs().max() / 448
                stored[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
                wide[part] = stored[part].float() * scales[i, j]
        return {"weight": stored, "weight_scale_inv": scales}, wide

    said = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [size, size]}
    return Kind(said, encode)


def _compressed_said(form: str, weights: dict[str, Any]) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
    }  # fmt: skip


def _rounded(
    weight: torch.Tensor, groups: torch.Tensor, bits: int, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers `[N, K]` from 0 on, zeros and scales `[N, groups]`, the scales of 16 bits."""
    num_groups, most = int(groups.max()) + 1, 2**bits - 1
    zeros, scales = torch.empty(2, len(weight), num_groups)
    for group in range(num_groups):
        part = weight[:, groups == group]
        low, high = part.amin(dim=1).clamp(max=0), part.amax(dim=1).clamp(min=0)
        if symmetric:
            scales[:, group], zeros[:, group] = part.abs().amax(dim=1) / (most / 2), (most + 1) // 2
        else:
            scales[:, group] = (high - low) / most
            zeros[:, group] = (-low / scales[:, group]).round().clamp(0, most)
    scales = scales.half().float()
    numbers = (weight / scales[:, groups] + zeros[:, groups]).round().clamp(0, most)
    return numbers, zeros, scales


def _dealt(numbers: torch.Tensor) -> torch.Tensor:
    words = numbers.reshape(len(numbers), -1, len(_AWQ_ORDER))
    return torch.stack([words[..., place] for place in _AWQ_ORDER], dim=-1).reshape(len(numbers), -1)


def _packed(numbers: torch.Tensor, bits: int, *, along: int) -> torch.Tensor:
    """int32 words, the first number in the lowest bits; the last word is filled with zeros."""
    columns = (numbers.T if along == 0 else numbers).long()
    per_word = 32 // bits
    columns = torch.nn.functional.pad(columns, (0, -columns.shape[1] % per_word))
    shifts = bits * torch.arange(per_word)
    words = (columns.reshape(len(columns), -1, per_word) << shifts).sum(dim=-1)
    packed = torch.where(words >= 2**31, words - 2**32, words).int()
    return packed.T if along == 0 else packed
