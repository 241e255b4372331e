"""Replaces parts of a model on CUDA by those of `modules`, and the way through all of them by that of `decoder`.

Importing this takes Triton.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tandem.engine.attention.interface import AttentionBackend
from tandem.engine.attention.reference import AttentionParams, ReferenceAttention
from tandem.engine.batch import SequenceInput, build_batch
from tandem.engine.cuda.decoder import CudaDecoder
from tandem.engine.cuda.layer_kernels import WIDEST_NORM
from tandem.engine.cuda.modules import CudaAttention, CudaDecoderLayer, CudaGatedMLP, CudaRMSNorm
from tandem.engine.device import current
from tandem.engine.fuse.recognise import DecoderParts, decoder_parts, fuse_parts, has_type_of, logits_of
from tandem.engine.fuse.small_config import shrink_config
from tandem.engine.fuse.small_model import draw_twins
from tandem.engine.fuse.trial import NUM_PAGES, PAGE_SIZE, attempted
from tandem.engine.layout import KVLayout
from tandem.engine.loader import derive_layout

_log = logging.getLogger(__name__)

#: Greatest difference between the logits of two ways through the same layers, as a share of the greatest of a row. In
#: 16 bits it hides small mistakes, so there a small copy in float32 must have a decoder too.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
#: Heads lie in registers, a few at once.
_WIDEST_HEAD = 512
#: The trial's positions are below it.
TRIAL_CONTEXT = PAGE_SIZE * NUM_PAGES
#: Of the trial of a model's ends.
_NUM_TOKENS = 5
#: Of a layer, in the order in which they compute.
_LAYER_PARTS: dict[str, type[nn.Module]] = {
    "input_layernorm": CudaRMSNorm,
    "self_attn": CudaAttention,
    "post_attention_layernorm": CudaRMSNorm,
    "mlp": CudaGatedMLP,
}


class CudaKit:
    """The replacements for CUDA."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.layer_parts: Mapping[str, type[nn.Module]] = _LAYER_PARTS
        self.attention_backend: AttentionBackend = ReferenceAttention()

    def takes_rows(self, num_features: int) -> bool:
        """What one program can hold."""
        return num_features <= WIDEST_NORM

    def takes_heads(self, head_dim: int, rotary_dim: int) -> bool:
        """What one program can hold, turned in pairs."""
        return head_dim <= _WIDEST_HEAD and rotary_dim % 2 == 0

    def norm(self, scale: torch.Tensor, eps: float) -> CudaRMSNorm:
        return CudaRMSNorm(scale, eps)

    def gated_mlp(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> CudaGatedMLP:
        return CudaGatedMLP(gate, up, down)

    def attention(
        self, original: Any, params: AttentionParams, head_dim: int, rotary_dim: int, norms: Any
    ) -> CudaAttention:
        return CudaAttention(original, params, head_dim, rotary_dim, norms)

    def layer(self, attention_norm: Any, attention: Any, mlp_norm: Any, mlp: Any) -> CudaDecoderLayer:
        return CudaDecoderLayer(attention_norm, attention, mlp_norm, mlp)

    def settle(self, part: nn.Module, original: nn.Module) -> None:
        """All weights stay."""


def fuse(model: PreTrainedModel, layout: KVLayout) -> str:
    """Replace all parts that can be replaced; return in words how many of each kind."""
    if not has_type_of(model, layout):
        return "none"
    with current(model.device):
        fused = fuse_parts(model, layout, CudaKit(model.dtype, model.device))
        if model.device.type == "cuda":
            torch.cuda.empty_cache()  # of originals and trials, so that others can have it
    return fused


def fuse_decoder(model: PreTrainedModel, layout: KVLayout, max_context: int) -> CudaDecoder | None:
    """The model's way from token ids to logits, if all of its layers are fused; `None` for anything else.

    It must give the logits that the model's own way gives over the same parts; and without any layers the same bits,
    which shows what else the model does to embeddings or logits. In 16 bits all that must hold of a small copy in
    float32 as well.
    """
    parts = decoder_parts(model, (nn.Embedding,), CudaDecoderLayer, CudaRMSNorm, nn.Linear)
    if parts is None:
        return None
    with current(model.device):
        if model.dtype is not torch.float32 and not attempted(model, lambda: _small_copy_has_one(model)):
            _log.info("%s has no fused decoder: its small copy in float32 has none", type(model).__name__)
            return None
        fused = attempted(model, lambda: _make(parts, parts.layers, max(max_context, TRIAL_CONTEXT)))
        if fused is None or not _agree(model, layout, fused) or not attempted(model, lambda: _same_ends(model, parts)):
            _log.info("%s has no fused decoder: the logits of both ways differ", type(model).__name__)
            return None
    return fused


def _small_copy_has_one(model: PreTrainedModel) -> bool:
    config = shrink_config(model.config)
    small = draw_twins(config)[1].to(model.device)
    layout = derive_layout(config, PAGE_SIZE, "float32")
    fuse_parts(small, layout, CudaKit(torch.float32, model.device))
    return fuse_decoder(small, layout, TRIAL_CONTEXT) is not None


def _make(parts: DecoderParts, layers: list[CudaDecoderLayer], max_context: int) -> CudaDecoder:
    return CudaDecoder(parts.embedding, parts.rotary, layers, parts.norm, parts.head, max_context)


def _agree(model: PreTrainedModel, layout: KVLayout, fused: CudaDecoder) -> bool:
    expected, found = (logits_of(model, layout, ReferenceAttention(), decoder) for decoder in (None, fused))
    if expected is None or found is None:
        return False
    allowed = _TOLERANCES[model.dtype] * expected.abs().amax(dim=-1, keepdim=True)
    return bool(((found - expected).abs() <= allowed).all())


def _same_ends(model: PreTrainedModel, parts: DecoderParts) -> bool:
    """Whether the model and a decoder of the same ends, both without layers, give the same bits."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(parts.embedding.num_embeddings, (_NUM_TOKENS,), generator=generator).tolist()
    batch = build_batch([SequenceInput(tokens, 0, (0,), len(tokens))], len(tokens), model.device)
    base: Any = model.base_model
    layers, base.layers = base.layers, nn.ModuleList()
    try:
        with torch.inference_mode():
            output = model(input_ids=batch.token_ids, position_ids=batch.positions, use_cache=False)
            return torch.equal(output.logits[0], _make(parts, [], len(tokens)).logits(batch))
    finally:
        base.layers = layers
