"""Replaces parts of a model that is computed in float32 on the CPU by those of `modules`, and whole layers by those of
`layer`. Its weights may have 16 bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tandem.engine.attention.interface import AttentionBackend
from tandem.engine.attention.reference import AttentionParams
from tandem.engine.cpu.attention import CPUAttention
from tandem.engine.cpu.decoder import FusedDecoder
from tandem.engine.cpu.embedding import ShortEmbedding
from tandem.engine.cpu.experts import PackedExperts
from tandem.engine.cpu.layer import FusedDecoderLayer, Workspace
from tandem.engine.cpu.layer_kernels import LANES, PLACE_HEADS
from tandem.engine.cpu.modules import FusedAttention, FusedGatedMLP, FusedRMSNorm
from tandem.engine.cpu.packed_linear import PackedLinear, can_pack, rounding_of
from tandem.engine.cpu.panels import Panels, Rounding
from tandem.engine.cpu.shared_weights import Shared, Weight, WeightRegister
from tandem.engine.fuse.recognise import decoder_parts, fuse_parts, logits_of
from tandem.engine.layout import KVLayout

#: Of a layer, in the order in which they compute.
_LAYER_PARTS: dict[str, type[nn.Module]] = {
    "input_layernorm": FusedRMSNorm,
    "self_attn": FusedAttention,
    "post_attention_layernorm": FusedRMSNorm,
    "mlp": FusedGatedMLP,
}


class CPUKit:
    """The replacements for the CPU, of `num_threads` threads; layers of one kit share a workspace.

    Weights are rounded, see `rounding_of`, as soon as their part was proved without that.
    """

    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, num_threads: int, asked: Rounding | None = None) -> None:
        self._num_threads, self._workspace, self._asked = num_threads, Workspace(), asked
        self.layer_parts: Mapping[str, type[nn.Module]] = _LAYER_PARTS
        self.attention_backend: AttentionBackend = CPUAttention(num_threads)

    def takes_rows(self, num_features: int) -> bool:
        """Whether they fill whole vectors."""
        return num_features % LANES == 0

    def takes_heads(self, head_dim: int, rotary_dim: int) -> bool:
        """Whether they fill whole vectors, as does each half of what is turned."""
        return head_dim % LANES == 0 and rotary_dim % (2 * LANES) == 0

    def norm(self, scale: torch.Tensor, eps: float) -> FusedRMSNorm:
        return FusedRMSNorm(scale, eps, self._num_threads)

    def gated_mlp(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> FusedGatedMLP:
        return FusedGatedMLP(gate, up, down, self._num_threads)

    def attention(
        self, original: Any, params: AttentionParams, head_dim: int, rotary_dim: int, norms: Any
    ) -> FusedAttention:
        return FusedAttention(original, params, head_dim, rotary_dim, norms, self._num_threads)

    def layer(self, attention_norm: Any, attention: Any, mlp_norm: Any, mlp: Any) -> FusedDecoderLayer:
        return FusedDecoderLayer(attention_norm, attention, mlp_norm, mlp, self._workspace, self._num_threads)

    def settle(self, part: nn.Module, original: nn.Module) -> None:
        """Round its weights: so there are no more of them in float32 than those of one part."""
        if (rounding := rounding_of(original, self._asked)) is not None:
            for panels in _panels_of(part):
                panels.quantize(rounding)


def fuse(model: PreTrainedModel, layout: KVLayout, num_threads: int, asked: Rounding | None = None) -> str:
    """Replace all parts that can be replaced; return in words how many of each kind.

    Args:
        asked: see `rounding_of`.
    """
    if not can_pack(model) or layout.dtype not in PLACE_HEADS:
        return "none"
    # Over pages of the type that is computed in: what is rounded on its way to others is computed alike.
    return fuse_parts(model, replace(layout, dtype="float32"), CPUKit(num_threads, asked))


def multiply_short(model: PreTrainedModel, *, in_tiles: bool) -> None:
    """Have all packed linear layers multiply in bfloat16; see `packed_kernel` and `tiles_kernel`."""
    for panels in _panels_of(model):
        panels.multiply_short(in_tiles=in_tiles)
    _forget_plans(model)


def _panels_of(model: nn.Module) -> Iterator[Panels]:
    for module in model.modules():
        if isinstance(module, PackedLinear | FusedGatedMLP):
            yield module.panels
        elif isinstance(module, PackedExperts):
            yield from module.panels()


def share(model: PreTrainedModel, register: WeightRegister, name: str) -> Shared | None:
    """Have panels and embeddings in memory that other processes have too; see `WeightRegister.share`."""
    shared = register.share(name, list(_large_weights(model)))
    _forget_plans(model)
    return shared


def _large_weights(model: PreTrainedModel) -> Iterator[Weight]:
    for module in model.modules():
        if isinstance(module, PackedLinear | FusedGatedMLP):
            yield from _weights_of(module.panels)
        elif isinstance(module, PackedExperts):
            for panels in module.panels():
                yield from _weights_of(panels)
        elif isinstance(module, nn.Embedding | ShortEmbedding) and _is_only_read(module):
            yield Weight(partial(getattr, module.weight, "data"), partial(setattr, module.weight, "data"))


def _weights_of(panels: Panels) -> Iterator[Weight]:
    yield Weight(lambda: panels.numbers, lambda numbers: panels.place(numbers, panels.scales))
    if panels.scales is not None:
        yield Weight(lambda: _present(panels.scales), lambda scales: panels.place(panels.numbers, scales))


def _present(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor


def _is_only_read(embedding: nn.Embedding | ShortEmbedding) -> bool:
    """And has no gaps. Looking a row up in one with `max_norm` writes to it."""
    return embedding.weight.is_contiguous() and getattr(embedding, "max_norm", None) is None


def _forget_plans(model: PreTrainedModel) -> None:
    """They name panels as they were."""
    for module in model.modules():
        if isinstance(module, FusedDecoderLayer):
            module.forget_plan()


def fuse_decoder(model: PreTrainedModel, layout: KVLayout) -> FusedDecoder | None:
    """The model's way from token ids to logits, if all of its parts are fused or packed; `None` for anything else.

    It must give the same bits as the model's own way over the same parts.
    """
    parts = decoder_parts(model, (nn.Embedding, ShortEmbedding), FusedDecoderLayer, FusedRMSNorm, PackedLinear)
    if parts is None:
        return None
    fused = FusedDecoder(parts.embedding.weight, parts.rotary, parts.layers, parts.norm, parts.head)
    expected, found = (logits_of(model, layout, CPUAttention(1), decoder) for decoder in (None, fused))
    return fused if expected is not None and found is not None and torch.equal(expected, found) else None
