"""Has `transformers` load a quantised checkpoint as it is: its own ways need more libraries, and most of them a GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from tandem.core.errors import ModelLoadError, UnsupportedModelError
from tandem.core.model_path import TensorHead, read_heads
from tandem.engine.quantized.scheme import Scheme, read_scheme
from tandem.engine.quantized.stored_linear import StoredLinear

#: What `transformers` calls this way of loading.
_METHOD = "tandem"
_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def scheme_of(config: PreTrainedConfig) -> Scheme | None:
    """How the checkpoint is quantised; `None`: it is not. Raises `UnsupportedModelError`."""
    said = getattr(config, "quantization_config", None)
    return None if said is None else read_scheme(_as_dict(said))


def plain(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy that says nothing of how weights are stored: what the model computes."""
    copied = type(config).from_dict(config.to_dict())
    if hasattr(copied, "quantization_config"):
        del copied.quantization_config
    return copied


def to_be_loaded(config: PreTrainedConfig, model_dir: Path) -> PreTrainedConfig:
    """A copy with which `from_pretrained` makes `StoredLinear` of what is quantised in this directory."""
    copied = plain(config)
    copied.quantization_config = {
        "quant_method": _METHOD,
        "said": _as_dict(config.quantization_config),
        "model_dir": str(model_dir),
    }
    return copied


def _as_dict(said: Any) -> dict[str, Any]:
    return dict(said) if isinstance(said, Mapping) else dict(said.to_dict())


@register_quantization_config(_METHOD)
class _StoredConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """What a checkpoint says of itself, and where its files are."""

    def __init__(self, said: dict[str, Any], model_dir: str, quant_method: str = _METHOD, **_others: Any) -> None:
        self.quant_method = quant_method
        self.said, self.model_dir = said, model_dir

    def to_dict(self) -> dict[str, Any]:
        """Without the directory: two copies of a checkpoint are one model."""
        return {"quant_method": self.quant_method, "said": self.said}


@register_quantizer(_METHOD)
class _StoredQuantizer(HfQuantizer):  # type: ignore[misc]
    """Puts `StoredLinear` where the checkpoint holds something else than a plain weight."""

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_options: Any) -> None:
        config: _StoredConfig = self.quantization_config
        scheme = read_scheme(config.said)
        tensors: dict[str, dict[str, TensorHead]] = defaultdict(dict)
        for name, head in read_heads(Path(config.model_dir)).items():
            layer, _, own = name.rpartition(".")
            tensors[layer][own] = head
        mark = scheme.tensors[0]
        layers = [layer for layer, of_layer in tensors.items() if mark in of_layer]
        if not layers:
            said = scheme.describe()
            raise ModelLoadError(f"{config.model_dir} has no tensor *.{mark}, though its config says {said}")
        modules = dict(model.named_modules())
        for layer in layers:
            module = modules.get(layer)
            if type(module) is not nn.Linear:
                kind = "no part of the model" if module is None else f"a {type(module).__name__}"
                raise UnsupportedModelError(f"{config.model_dir}: {layer} is quantised, and {kind}, not a linear layer")
            if missing := [name for name in scheme.tensors if name not in tensors[layer]]:
                raise ModelLoadError(f"{config.model_dir}: {layer} lacks {', '.join(missing)} ({scheme.describe()})")
            empty = {own: _empty(name=f"{layer}.{own}", head=head) for own, head in tensors[layer].items()}
            stored = StoredLinear(scheme, module.in_features, module.out_features, empty)
            model.set_submodule(layer, stored)

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def _empty(name: str, head: TensorHead) -> torch.Tensor:
    if head.dtype not in _TYPES:
        raise ModelLoadError(f"{name} is of the type {head.dtype}, which is not known here")
    return torch.empty(head.shape, dtype=_TYPES[head.dtype], device="meta")
