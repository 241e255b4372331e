"""Parts of a decoder that compute as `transformers`' own do, in few passes over memory and few calls.

Each holds copies of its weights. `fused` decides where they may stand.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tandem.core.errors import UnsupportedModelError
from tandem.engine.attention import attend_written, begin_layer, current_forward
from tandem.engine.attention_reference import AttentionParams
from tandem.engine.fused_kernel import normalize_rows, place_heads
from tandem.engine.packed_kernel import PANEL, multiply_gated
from tandem.engine.packed_linear import PackedLinear, as_rows, pack_biases, pack_weights
from tandem.engine.threads import threads_now

#: Below this many rows norms and rotation go without threads: their start costs more than they save.
ROWS_FOR_THREADS = 64


class FusedRMSNorm(nn.Module):
    """`x / sqrt(mean(x ** 2) + eps) * weight` over the last dimension, a multiple of 8 long; float32."""

    def __init__(self, weight: torch.Tensor, eps: float, num_threads: int) -> None:
        super().__init__()
        self.weight = weight.detach().clone()
        self.eps = eps
        self._width = len(weight)
        self._weight_at = self.weight.data_ptr()
        self._num_threads = num_threads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        output = torch.empty_like(x)
        num_rows = x.numel() // self._width
        normalize_rows(
            _threads_for(num_rows, self._num_threads), num_rows, x.data_ptr(), self._width, self._weight_at, self.eps,
            output.data_ptr(),
        )  # fmt: skip
        return output


class FusedGatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`, gate and up as one product; float32."""

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear, num_threads: int) -> None:
        super().__init__()
        self._panels = pack_weights(gate.weight, up.weight)
        self._bias = pack_biases(gate.bias, up.bias)
        self._num_pairs = len(self._panels) // 2
        self._num_threads = num_threads
        self._inner_features = gate.out_features
        self.down = PackedLinear(down.weight, down.bias, num_threads)
        self._weight_at = self._panels.data_ptr()
        self._bias_at = 0 if self._bias is None else self._bias.data_ptr()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = as_rows(x)
        num_rows, width = rows.shape
        both = torch.empty(num_rows, 2 * self._num_pairs * PANEL, dtype=torch.float32)
        inner = torch.empty(num_rows, self._num_pairs * PANEL, dtype=torch.float32)
        multiply_gated(
            threads_now(self._num_threads), self._num_pairs, rows.data_ptr(), rows.stride(0) * 4, num_rows, width,
            self._weight_at, self._num_pairs, self._bias_at, both.data_ptr(), inner.data_ptr(),
        )  # fmt: skip
        output: torch.Tensor = self.down(inner[:, : self._inner_features])
        return output.view(x.shape)


class FusedAttention(nn.Module):
    """Rotary attention over the pages: queries, keys and values as one product, turned and written in one pass.

    Args:
        original: has `q_proj`, `k_proj`, `v_proj`, `o_proj` and `layer_idx`, and maybe `is_causal`.
        params: what the original asks of the attention.
        head_dim, rotary_dim: multiples of 8 and 16; the first `rotary_dim` numbers of a head are turned, in pairs
            half of them apart.
        norms: of a head's query and of its key, where there are any; of one epsilon.
    """

    def __init__(
        self,
        original: Any,
        params: AttentionParams,
        head_dim: int,
        rotary_dim: int,
        norms: tuple[FusedRMSNorm, FusedRMSNorm] | tuple[()],
        num_threads: int,
    ) -> None:
        super().__init__()
        projections = (original.q_proj, original.k_proj, original.v_proj)
        biases = [projection.bias for projection in projections if projection.bias is not None]
        if biases and len(biases) < len(projections):
            raise ValueError("either all projections have a bias or none")
        self._qkv = PackedLinear(
            torch.cat([projection.weight for projection in projections]),
            torch.cat(biases) if biases else None,
            num_threads,
        )
        self.o_proj = PackedLinear(original.o_proj.weight, original.o_proj.bias, num_threads)
        self.layer_idx = original.layer_idx
        self.is_causal = getattr(original, "is_causal", True)
        self._params = params
        self._head_dim, self._rotary_dim = head_dim, rotary_dim
        self._num_heads, self._kv_heads = (p.out_features // head_dim for p in projections[:2])
        self._norms = nn.ModuleList(norms)
        self._q_norm_at, self._k_norm_at = (norm.weight.data_ptr() for norm in norms) if norms else (0, 0)
        self._eps = norms[0].eps if norms else 0.0
        self._num_threads = num_threads

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        context = current_forward.get()
        layer = begin_layer(context, self, attention_mask, 0.0, None, kwargs)
        num_rows = context.batch.num_tokens
        cos, sin = position_embeddings
        if cos.shape != (1, num_rows, self._rotary_dim) or hidden_states.shape[:2] != (1, num_rows):
            raise UnsupportedModelError(
                f"rotary embedding of shape {tuple(cos.shape)} for {num_rows} tokens and {self._rotary_dim} dimensions"
            )
        cos, sin = cos.contiguous(), sin.contiguous()
        heads = self._qkv.padded(hidden_states)
        query = torch.empty(num_rows, self._num_heads, self._head_dim, dtype=torch.float32)
        place_heads(
            _threads_for(num_rows, self._num_threads), num_rows, heads.data_ptr(), heads.shape[-1] * 4,
            self._num_heads, self._kv_heads, self._head_dim, self._q_norm_at, self._k_norm_at, self._eps,
            cos.data_ptr(), sin.data_ptr(), self._rotary_dim, query.data_ptr(), context.arena.layer(layer).data_ptr(),
            context.arena.layout.page_size, context.batch.write_pages.data_ptr(), context.batch.write_slots.data_ptr(),
        )  # fmt: skip
        output = attend_written(context, layer, query, self._params)
        result: torch.Tensor = self.o_proj(output.view(1, num_rows, -1))
        return result, None


def _threads_for(num_rows: int, num_threads: int) -> int:
    return threads_now(num_threads) if num_rows >= ROWS_FOR_THREADS else 1
