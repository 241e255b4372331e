"""Parts of a decoder that compute as `transformers`' own do, on CUDA, in few kernels.

Matrix products stay torch's: weights that are multiplied with the same rows become one product. `fusing` decides where
the parts may stand. Linear layers that are not merged are the originals.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tandem.core.errors import UnsupportedModelError
from tandem.engine.attention.interface import attend_written, begin_layer, current_forward
from tandem.engine.attention.reference import AttentionParams
from tandem.engine.cuda.layer_kernels import (
    HeadShape,
    Rotary,
    add_and_normalize,
    gate,
    normalize,
    place_heads,
)


class CudaRMSNorm(nn.Module):
    """`x / sqrt(mean(x ** 2) + eps) * scale` over the last dimension; `scale` is kept in float32."""

    scale: torch.Tensor

    def __init__(self, scale: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.register_buffer("scale", scale.detach().float().clone(), persistent=False)
        self.eps = eps
        self.width = len(scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return normalize(x, self.scale, self.eps)

    def add(self, x: torch.Tensor, added: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """`x + added`, or `x` alone, and its norm."""
        return (x, self(x)) if added is None else add_and_normalize(x, added, self.scale, self.eps)


class CudaGatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`, gate and up as one product."""

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__()
        self.gate_up = merged(gate, up)
        self.down = down
        self.in_features = gate.in_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down(gate(self.gate_up(x)))
        return output


class CudaAttention(nn.Module):
    """Rotary attention over the pages: queries, keys and values as one product, turned and written by one kernel.

    Args:
        original: has `q_proj`, `k_proj`, `v_proj`, `o_proj` and `layer_idx`, and maybe `is_causal`.
        params: what the original asks of the attention.
        norms: of a head's query and of its key, where there are any; of one epsilon.
    """

    norms: torch.Tensor | None

    def __init__(
        self,
        original: Any,
        params: AttentionParams,
        head_dim: int,
        rotary_dim: int,
        norms: tuple[CudaRMSNorm, CudaRMSNorm] | tuple[()],
    ) -> None:
        super().__init__()
        self.qkv = merged(original.q_proj, original.k_proj, original.v_proj)
        self.o_proj: nn.Linear = original.o_proj
        self.layer_idx = original.layer_idx
        self.is_causal = getattr(original, "is_causal", True)
        self.params = params
        self.rotary_dim = rotary_dim
        num_heads, num_kv_heads = (part.out_features // head_dim for part in (original.q_proj, original.k_proj))
        self._shape = HeadShape(num_heads, num_kv_heads, head_dim, rotary_dim)
        scales = torch.stack([norm.scale for norm in norms]) if norms else None
        self.register_buffer("norms", scales, persistent=False)
        self._eps = norms[0].eps if norms else 0.0

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        cos, sin = (part.contiguous() for part in position_embeddings)
        num_rows = current_forward.get().batch.num_tokens
        if not cos.shape == sin.shape == (1, num_rows, self.rotary_dim) or hidden_states.shape[:2] != (1, num_rows):
            raise UnsupportedModelError(
                f"rotary embedding of shape {tuple(cos.shape)} for {num_rows} tokens and {self.rotary_dim} dimensions"
            )
        return self.attend(hidden_states, Rotary(cos, sin), attention_mask, **kwargs), None

    def attend(
        self,
        x: torch.Tensor,
        rotary: Rotary,
        attention_mask: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """`[1, T, hidden_size]` of the running forward to the same shape; of some rows, `[R]` int64, alone to
        `[1, R, hidden_size]`."""
        context = current_forward.get()
        layer = begin_layer(context, self, attention_mask, 0.0, None, kwargs)
        query = place_heads(
            self.qkv(x), self._shape, rotary, self.norms, self._eps, context.batch, context.arena, layer
        )
        attended = attend_written(context, layer, query, self.params)
        if rows is not None:
            attended = attended[rows]
        output: torch.Tensor = self.o_proj(attended.flatten(1)[None])
        return output


class CudaDecoderLayer(nn.Module):
    """`h = x + attention(attention_norm(x))`, then `h + mlp(mlp_norm(h))`."""

    def __init__(
        self, attention_norm: CudaRMSNorm, attention: CudaAttention, mlp_norm: CudaRMSNorm, mlp: CudaGatedMLP
    ) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = attention_norm, attention
        self.post_attention_layernorm, self.mlp = mlp_norm, mlp

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """`[1, T, hidden_size]` to memory of its own, of the same shape."""
        x = hidden_states.contiguous()
        attended, _ = self.self_attn(
            hidden_states=self.input_layernorm(x),
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            **kwargs,
        )
        return torch.add(*self._after_attention(x, attended))

    def advance(
        self, x: torch.Tensor, added: torch.Tensor | None, rotary: Rotary, rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """From `x + added` to what the layer gives, which again are two that are still to be added. Where `rows` is
        given, `[R]` int64, these alone go on behind K and V."""
        x, normed = self.input_layernorm.add(x, added)
        attended = self.self_attn.attend(normed, rotary, rows=rows)
        return self._after_attention(x if rows is None else x[:, rows], attended)

    def _after_attention(self, x: torch.Tensor, attended: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, normed = self.post_attention_layernorm.add(x, attended)
        return x, self.mlp(normed)


def merged(*layers: nn.Linear) -> nn.Linear:
    """One layer that gives what `layers` give, behind one another; either all have a bias or none."""
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    if biases and len(biases) < len(layers):
        raise ValueError("either all layers have a bias or none")
    weight = torch.cat([layer.weight.detach() for layer in layers])
    together = nn.Linear(weight.shape[1], weight.shape[0], bias=bool(biases), device="meta")
    together.weight = nn.Parameter(weight, requires_grad=False)
    if biases:
        together.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return together
