"""Has `transformers` load a quantised checkpoint as it is: its own ways need more libraries, and most of them a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from tandem.core.errors import ModelLoadError, UnsupportedModelError
from tandem.core.model_path import MXFP4, read_heads
from tandem.engine.quantized.scheme import Scheme, read_scheme
from tandem.engine.quantized.shapes import WITHOUT_MEANING, by_layer, check
from tandem.engine.quantized.stored_linear import StoredLinear

#: What `transformers` calls this way of loading.
_METHOD = "tandem"
_TYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64, "I32": torch.int32, "I8": torch.int8,
}  # fmt: skip
#: Of numbers that are no weights by themselves.
_QUANTIZED_TYPES = {"F8_E4M3", "F8_E5M2", "I8", "U8", "I32"}
#: Names of tensors without which the weights beside them are other ones.
_MEANINGFUL = {
    "scale", "scales", "qscale", "qscale_weight", "scale_inv", "weight_scale", "weight_scale_inv", "qweight", "qzeros",
    "zero_point", "weight_zero_point", "weight_packed", "g_idx", "weight_g_idx",
}  # fmt: skip


def scheme_of(config: PreTrainedConfig) -> Scheme | None:
    """How the checkpoint is quantised; `None`: it is not. Raises `UnsupportedModelError`."""
    said = getattr(config, "quantization_config", None)
    return read_scheme(_as_dict(said)) if said and not is_unpacked(config) else None


def is_unpacked(config: PreTrainedConfig) -> bool:
    """Whether the checkpoint's experts come as MXFP4: `transformers` makes bfloat16 of that, which holds it exactly."""
    said = getattr(config, "quantization_config", None)
    return bool(said) and _as_dict(said).get("quant_method") == MXFP4


def plain(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy that says nothing of how weights are stored: what the model computes."""
    copied = type(config).from_dict(config.to_dict())
    if hasattr(copied, "quantization_config"):
        del copied.quantization_config
    return copied


def to_be_unpacked(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy with which `from_pretrained` makes plain weights of MXFP4."""
    copied = plain(config)
    copied.quantization_config = {"quant_method": MXFP4, "dequantize": True}
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
        tensors, mark = by_layer(read_heads(Path(config.model_dir))), scheme.tensors[0]
        layers = [layer for layer, of_layer in tensors.items() if mark in of_layer]
        if not layers:
            said = scheme.describe()
            raise ModelLoadError(f"{config.model_dir} has no tensor *.{mark}, though its config says {said}")
        modules = dict(model.named_modules())
        for layer in layers:
            place = _place(layer, modules, model.base_model_prefix)
            module, of_layer = modules.get(place), tensors[layer]
            if type(module) is not nn.Linear:
                kind = "no part of the model" if module is None else f"a {type(module).__name__}"
                raise UnsupportedModelError(f"{config.model_dir}: {layer} is quantised, and {kind}, not a linear layer")
            if module is model.get_output_embeddings() and model.config.get_text_config().tie_word_embeddings:
                raise UnsupportedModelError(f"{config.model_dir}: {layer} is quantised, and tied to the embedding")
            if module.bias is not None and "bias" not in of_layer:
                raise ModelLoadError(f"{config.model_dir}: {layer} lacks its bias")
            check(layer, of_layer, scheme, module.in_features, module.out_features)
            empty = {
                own: torch.empty(head.shape, dtype=_TYPES[head.dtype], device="meta")
                for own, head in of_layer.items()
                if own not in WITHOUT_MEANING
            }
            model.set_submodule(place, StoredLinear(layer, scheme, module.in_features, module.out_features, empty))

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def _place(layer: str, modules: Mapping[str, nn.Module], prefix: str) -> str:
    """The name in the model: with or without the prefix of a model within another, as `transformers` has it too."""
    names = layer, layer.removeprefix(f"{prefix}."), f"{prefix}.{layer}"
    return next((name for name in names if name in modules), layer)


def check_all_is_understood(model_dir: Path, model: nn.Module, unexpected: Iterable[str]) -> None:
    """Raises `UnsupportedModelError` where a checkpoint holds numbers that mean something else than they would be taken
    for: whole ones and float8 of layers that nothing says to be quantised, and scales that nobody reads."""
    layers = [module for module in model.modules() if isinstance(module, StoredLinear)]
    stored = {f"{layer.name}.{own}" for layer in layers for own in layer.state_dict()}
    for name, head in read_heads(model_dir).items():
        if name not in stored and head.dtype in _QUANTIZED_TYPES and name.endswith("weight"):
            raise UnsupportedModelError(
                f"{model_dir}: {name} is {head.dtype}, and quantization_config in config.json does not say what that "
                "means; take a checkpoint that does"
            )
    modules = {name for name, _ in model.named_modules()}
    for name in sorted(unexpected):
        layer, _, own = name.rpartition(".")
        if own in _MEANINGFUL and layer in modules:
            raise UnsupportedModelError(f"{model_dir}: nothing here knows what {name} is for; it is not served so")
