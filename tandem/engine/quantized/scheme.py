"""What the `quantization_config` of a checkpoint says, for the kinds that are served; all else is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tandem.core.errors import UnsupportedModelError

#: Weights of a group have a scale in common; 0: all of an output do.
_WHOLE = 0


class Packing(Enum):
    """How the numbers lie in a checkpoint's tensors."""

    GPTQ = "gptq"
    AWQ = "awq"
    COMPRESSED = "compressed-tensors, packed"
    PLAIN = "a number an element"
    BLOCKS = "fp8 with a scale a block"


#: The tensors that a layer must have; by the first of them it shows that it is quantised.
_TENSORS = {
    Packing.GPTQ: ("qweight", "qzeros", "scales"),
    Packing.AWQ: ("qweight", "qzeros", "scales"),
    Packing.COMPRESSED: ("weight_packed", "weight_scale", "weight_shape"),
    Packing.PLAIN: ("weight_scale", "weight"),
    Packing.BLOCKS: ("weight_scale_inv", "weight"),
}


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the linear layers of one checkpoint are quantised.

    Attributes:
        bits: of a weight.
        group_size: inputs that have a scale in common; 0: all. Of `BLOCKS`, also the outputs that do.
        symmetric: zero is the middle of the numbers: no layer has zero points.
        offset: what is added to a zero point as it is stored.
        ordered: groups are not of neighbours, as a table says (`g_idx`).
        is_float: numbers are float8, not whole.
    """

    packing: Packing
    bits: int
    group_size: int = _WHOLE
    symmetric: bool = True
    offset: int = 0
    ordered: bool = False
    is_float: bool = False

    @property
    def kept_as(self) -> str:
        """What weights are rounded to when they are packed: `int4` where that holds the same numbers, or `int8`."""
        has_fours = self.bits == 4 and self.symmetric and not self.ordered
        return "int4" if has_fours and self.group_size and self.group_size % 2 == 0 else "int8"

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of those that a layer must have, the one that shows it first."""
        more = ("weight_zero_point",) if self.packing is Packing.COMPRESSED and not self.symmetric else ()
        order = ("weight_g_idx",) if self.packing is Packing.COMPRESSED and self.ordered else ()
        table = ("g_idx",) if self.packing is Packing.GPTQ and self.ordered else ()
        return _TENSORS[self.packing] + more + order + table

    def describe(self) -> str:
        group = f", groups of {self.group_size}" if self.group_size else ""
        return f"{self.packing.value}, {self.bits} bits{group}"


def read_scheme(config: Mapping[str, Any]) -> Scheme:
    """Of a `quantization_config`. Raises `UnsupportedModelError`, which names what is not served."""
    method = str(config.get("quant_method", "")).lower()
    read = _READERS.get(method)
    if read is None:
        raise _refused(f"quant_method {method or 'none'!r}", "gptq, awq, compressed-tensors or fp8")
    return read(config)


def _gptq(config: Mapping[str, Any]) -> Scheme:
    bits = _bits(config, "bits", (2, 4, 8))
    version = _one_of(config, ("checkpoint_format", "format"), "gptq")
    if config.get("pack_dtype", "int32") != "int32":
        raise _refused(f"pack_dtype {config['pack_dtype']!r} of GPTQ", "int32")
    if others := [rule for rule in config.get("dynamic") or {} if not rule.startswith("-:")]:
        raise _refused(f"layers that are quantised in other ways (dynamic: {', '.join(others[:3])})", "one way for all")
    if version not in ("gptq", "gptq_v2"):
        raise _refused(f"checkpoint_format {version!r} of GPTQ", "gptq or gptq_v2")
    return Scheme(
        Packing.GPTQ,
        bits,
        _group_size(config),
        symmetric=bool(config.get("sym", True)),
        offset=0 if version == "gptq_v2" else 1,
        ordered=bool(config.get("desc_act", False)),
    )


def _awq(config: Mapping[str, Any]) -> Scheme:
    version = _one_of(config, ("version", "format"), "gemm")
    if version != "gemm":
        raise _refused(f"version {version!r} of AWQ", "gemm")
    bits = _bits(config, "bits" if "bits" in config else "w_bit", (4,))
    size = _group_size(config, "group_size" if "group_size" in config else "q_group_size")
    return Scheme(Packing.AWQ, bits, size, symmetric=False)


def _fp8(config: Mapping[str, Any]) -> Scheme:
    block = config.get("weight_block_size")
    if not isinstance(block, list | tuple) or len(block) != 2 or block[0] != block[1]:
        raise _refused(f"weight_block_size {block!r} of fp8", "a square, as [128, 128]")
    return Scheme(Packing.BLOCKS, 8, int(block[0]), is_float=True)


def _compressed(config: Mapping[str, Any]) -> Scheme:
    groups = list((config.get("config_groups") or {}).values())
    if len(groups) != 1:
        raise _refused(f"{len(groups)} groups of layers, each quantised its own way,", "one")
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise _refused(f"sparsity_config {config['sparsity_config']['format']!r}", "dense weights")
    if config.get("transform_config"):
        raise _refused("transform_config", "layers that compute their weight and nothing else")
    weights = groups[0].get("weights") or {}
    form = str(groups[0].get("format") or config.get("format"))
    kind, strategy = str(weights.get("type", "int")), str(weights.get("strategy"))
    if strategy not in ("group", "channel", "tensor"):
        raise _refused(f"strategy {strategy!r} of compressed-tensors", "group, channel or tensor")
    size = _group_size(weights) if strategy == "group" else _WHOLE
    symmetric = bool(weights.get("symmetric", True))
    ordered = weights.get("actorder") not in (None, False, "weight", "static")
    if form == "pack-quantized":
        if strategy == "tensor":
            raise _refused("pack-quantized with one scale a layer", "group or channel")
        bits = _bits(weights, "num_bits", (4, 8))
        return Scheme(Packing.COMPRESSED, bits, size, symmetric=symmetric, ordered=ordered)
    if form in ("int-quantized", "float-quantized", "naive-quantized"):
        if not symmetric or ordered or size:
            raise _refused(f"{form} with zero points or groups", "symmetric weights with a scale an output")
        _bits(weights, "num_bits", (8,))
        return Scheme(Packing.PLAIN, 8, is_float=kind == "float")
    raise _refused(f"format {form!r} of compressed-tensors", "pack-quantized, int-quantized or float-quantized")


_READERS = {"gptq": _gptq, "awq": _awq, "fp8": _fp8, "compressed-tensors": _compressed}


def _one_of(config: Mapping[str, Any], keys: tuple[str, ...], default: str) -> str:
    """What the keys say that there are. Raises where they contradict each other."""
    said = {str(config[key]).lower() for key in keys if config.get(key) is not None}
    if len(said) > 1:
        raise _refused(f"{' and '.join(keys)} that differ", "one format")
    return said.pop() if said else default


def _bits(config: Mapping[str, Any], key: str, known: tuple[int, ...]) -> int:
    bits = config.get(key)
    if bits not in known:
        raise _refused(f"{key} {bits!r}", " or ".join(map(str, known)))
    return int(bits)


def _group_size(config: Mapping[str, Any], key: str = "group_size") -> int:
    size = config.get(key)
    if size is None or size == -1:
        return _WHOLE
    if not isinstance(size, int) or size < 1:
        raise _refused(f"{key} {size!r}", "-1 or a number from 1 on")
    return size


def _refused(what: str, known: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"a checkpoint with {what} is not served, only {known}; take another one of this model, or its plain weights "
        "with model.quantize"
    )
