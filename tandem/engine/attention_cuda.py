"""Attention on CUDA: FlashAttention-2's paged kernel, from `flash_attn` or from torch itself."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tandem.core.errors import ConfigError, UnsupportedModelError
from tandem.engine.arena import KVArena
from tandem.engine.attention import AttentionBackend
from tandem.engine.attention_reference import AttentionParams, ReferenceAttention
from tandem.engine.batch import PagedBatch
from tandem.engine.layout import KVLayout

_log = logging.getLogger(__name__)

#: FlashAttention-2's paged kernels take pages of multiples of this many slots.
PAGE_MULTIPLE = 256


def select_cuda_backend(layout: KVLayout) -> AttentionBackend:
    """Return the kernel for `layout`. Raises `ConfigError` for a page size that the kernels do not take."""
    if layout.dtype == "float32":
        _log.warning("float32 on CUDA: no flash kernel takes it, the reference attention serves")
        return ReferenceAttention()
    if layout.page_size % PAGE_MULTIPLE:
        raise ConfigError(
            f"page_size {layout.page_size}: the CUDA kernels take multiples of {PAGE_MULTIPLE}", key="page_size"
        )
    if importlib.util.find_spec("flash_attn") is not None:
        return FlashAttention()
    return TorchVarlenAttention()


class _Ragged:
    """The tensors that describe a ragged paged batch to a flash kernel; made once for all layers."""

    def __init__(self, batch: PagedBatch, device: torch.device) -> None:
        lengths = np.array([rows.num_rows for rows in batch.sequences], dtype=np.int32)
        used = np.array([rows.end for rows in batch.sequences], dtype=np.int32)
        offsets = np.concatenate([np.zeros(1, dtype=np.int32), np.cumsum(lengths, dtype=np.int32)])
        key_offsets = np.concatenate([np.zeros(1, dtype=np.int32), np.cumsum(used, dtype=np.int32)])
        self.query_offsets = torch.from_numpy(offsets).to(device)
        self.key_offsets = torch.from_numpy(key_offsets).to(device)
        self.used = torch.from_numpy(used).to(device)
        self.tables = torch.from_numpy(batch.block_tables).to(device)
        self.max_queries = int(lengths.max())
        self.max_keys = int(used.max())

    @classmethod
    def of(cls, batch: PagedBatch, device: torch.device) -> _Ragged:
        if "ragged" not in batch.plan:
            batch.plan["ragged"] = cls(batch, device)
        ragged: _Ragged = batch.plan["ragged"]
        return ragged


def _window(params: AttentionParams) -> tuple[int, int]:
    # The kernels count the tokens to the left of the query; ours counts the query too.
    return (params.window - 1, 0) if params.window else (-1, 0)


class FlashAttention:
    """`flash_attn`'s variable-length kernel with a block table."""

    name = "flash_attn"

    def __init__(self) -> None:
        from flash_attn import flash_attn_varlen_func

        self._kernel: Callable[..., torch.Tensor] = flash_attn_varlen_func

    def attend(
        self, batch: PagedBatch, arena: KVArena, layer: int, query: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Return the attention of all rows, `[T, heads, head_dim]`, like `query`."""
        ragged = _Ragged.of(batch, query.device)
        return self._kernel(
            query.contiguous(),
            arena.keys(layer),
            arena.values(layer),
            cu_seqlens_q=ragged.query_offsets,
            cu_seqlens_k=ragged.key_offsets,
            max_seqlen_q=ragged.max_queries,
            max_seqlen_k=ragged.max_keys,
            softmax_scale=params.scaling,
            causal=True,
            window_size=_window(params),
            softcap=params.softcap,
            block_table=ragged.tables,
        )


class TorchVarlenAttention:
    """torch's own variable-length kernel with a block table (2.13 and later)."""

    name = "torch_varlen"

    def __init__(self) -> None:
        from torch.nn.attention.varlen import varlen_attn

        self._kernel: Callable[..., Any] = varlen_attn

    def attend(
        self, batch: PagedBatch, arena: KVArena, layer: int, query: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Return the attention of all rows, `[T, heads, head_dim]`, like `query`."""
        if params.softcap:
            raise UnsupportedModelError("this model caps its attention scores; on CUDA that needs flash_attn")
        ragged = _Ragged.of(batch, query.device)
        output: torch.Tensor = self._kernel(
            query.contiguous(),
            arena.keys(layer),
            arena.values(layer),
            ragged.query_offsets,
            None,  # the lengths are in seqused_k
            ragged.max_queries,
            ragged.max_keys,
            scale=params.scaling,
            window_size=_window(params),
            enable_gqa=query.shape[1] != arena.layout.num_kv_heads,
            seqused_k=ragged.used,
            block_table=ragged.tables,
        )
        return output
