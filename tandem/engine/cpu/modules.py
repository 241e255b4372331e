"""Parts of a decoder that compute as `transformers`' own do, in few passes over memory and few calls.

Each holds copies of its weights. `fusing` decides where they may stand.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tandem.core.errors import UnsupportedModelError
from tandem.engine.attention.interface import ForwardContext, attend_written, begin_layer, current_forward
from tandem.engine.attention.reference import AttentionParams
from tandem.engine.batch import PagedBatch
from tandem.engine.cpu.layer_kernels import PLACE_HEADS, normalize_rows
from tandem.engine.cpu.packed_kernel import PANEL, arranged_features
from tandem.engine.cpu.packed_linear import PackedLinear, as_rows, pack_biases
from tandem.engine.cpu.panels import Panels
from tandem.engine.cpu.threads import run
from tandem.engine.huge_pages import FLOAT_BYTES


class FusedRMSNorm(nn.Module):
    """`x / sqrt(mean(x ** 2) + eps) * weight` over the last dimension, a multiple of 8 long; float32."""

    def __init__(self, weight: torch.Tensor, eps: float, num_threads: int) -> None:
        super().__init__()
        self.weight = weight.detach().clone()
        self.eps = eps
        self.width = len(weight)
        self._weight_at = self.weight.data_ptr()
        self._num_threads = num_threads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        output = torch.empty_like(x)
        call = self.call(x.data_ptr(), x.numel() // self.width, output.data_ptr())
        run(self._num_threads, call)
        return output

    def call(self, x: int, num_rows: int, output: int) -> bytes:
        """`forward` by address, of rows without gaps; for `run`."""
        return normalize_rows.call(num_rows, x, self.width, self._weight_at, self.eps, output)


class FusedGatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`, gate and up as one product; float32."""

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear, num_threads: int) -> None:
        super().__init__()
        self.panels = Panels(gate.weight, up.weight)
        self._bias = pack_biases(gate.bias, up.bias)
        self._num_pairs = self.panels.num // 2
        self._num_threads = num_threads
        self.in_features = gate.in_features
        #: Of one row, padded: what `call` needs for both products, and what it gives.
        self.both_features, self.inner_features = 2 * self._num_pairs * PANEL, self._num_pairs * PANEL
        self.down = PackedLinear(down.weight, down.bias, num_threads)
        self._bias_at = 0 if self._bias is None else self._bias.data_ptr()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = as_rows(x)
        num_rows = len(rows)
        both = torch.empty(num_rows, self.both_features, dtype=torch.float32)
        inner = torch.empty(num_rows, self.inner_features, dtype=torch.float32)
        stride = rows.stride(0) * FLOAT_BYTES
        arranged = torch.empty(num_rows, arranged_features(num_rows, self.in_features), dtype=torch.float32)
        addresses = both.data_ptr(), inner.data_ptr(), arranged.data_ptr()
        run(self._num_threads, *self.calls(rows.data_ptr(), stride, num_rows, *addresses))
        output: torch.Tensor = self.down(inner[:, : self.down.in_features])
        return output.view(x.shape)

    def calls(self, x: int, x_stride: int, num_rows: int, both: int, inner: int, arranged: int) -> tuple[bytes, ...]:
        """`silu(gate(x)) * up(x)` by address, for `run`; `x_stride` in bytes.

        `both` is memory for `[num_rows, both_features]`, `arranged` as for `Products.arrange`; the output is
        `inner[num_rows, inner_features]`.
        """
        panels, products = self.panels, self.panels.products
        before, x, x_stride = products.arrange(x, x_stride, num_rows, self.in_features, arranged)
        product = products.multiply_gated.call(
            self._num_pairs, x, x_stride, num_rows, panels.num_steps, panels.address, self._num_pairs, self._bias_at,
            both, panels.scales_at, panels.group, inner,
        )  # fmt: skip
        return *before, product


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
        self.qkv = PackedLinear(
            torch.cat([projection.weight for projection in projections]),
            torch.cat(biases) if biases else None,
            num_threads,
        )
        self.o_proj = PackedLinear(original.o_proj.weight, original.o_proj.bias, num_threads)
        self.layer_idx = original.layer_idx
        self.is_causal = getattr(original, "is_causal", True)
        self.params = params
        self._head_dim, self.rotary_dim = head_dim, rotary_dim
        self._heads_stride = self.qkv.padded_features * FLOAT_BYTES
        self.num_heads, self._kv_heads = (p.out_features // head_dim for p in projections[:2])
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
        self.check_shapes(context.batch, hidden_states, position_embeddings)
        num_rows = context.batch.num_tokens
        cos, sin = (part.contiguous() for part in position_embeddings)
        heads = self.qkv.padded(hidden_states)
        query = torch.empty(num_rows, self.num_heads, self._head_dim, dtype=torch.float32)
        call = self.call(context, layer, heads.data_ptr(), cos.data_ptr(), sin.data_ptr(), query.data_ptr())
        run(self._num_threads, call)
        output = attend_written(context, layer, query, self.params)
        result: torch.Tensor = self.o_proj(output.view(1, num_rows, -1))
        return result, None

    def check_shapes(
        self, batch: PagedBatch, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Raise `UnsupportedModelError` if the tensors are not those of this batch."""
        cos, sin = position_embeddings
        num_rows = batch.num_tokens
        if not cos.shape == sin.shape == (1, num_rows, self.rotary_dim) or hidden_states.shape[:2] != (1, num_rows):
            raise UnsupportedModelError(
                f"rotary embedding of shape {tuple(cos.shape)} for {num_rows} tokens and {self.rotary_dim} dimensions"
            )

    def call(self, context: ForwardContext, layer: int, heads: int, cos: int, sin: int, query: int) -> bytes:
        """Write K and V of `heads`, what `qkv` gives, to the pages, and queries to `query`; by address, for `run`."""
        (batch, in_arena), arena = context.at(layer, self.params), context.arena
        return PLACE_HEADS[arena.layout.dtype].call(
            batch.num_tokens, heads, self._heads_stride, self.num_heads, self._kv_heads, self._head_dim,
            self._q_norm_at, self._k_norm_at, self._eps, cos, sin, self.rotary_dim, query,
            arena.layer(in_arena).data_ptr(), arena.layout.page_size, batch.write_pages.data_ptr(),
            batch.write_slots.data_ptr(),
        )  # fmt: skip
