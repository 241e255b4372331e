"""Attention on CUDA: the first paged kernel that computes a small batch right is chosen.

They are tried in this order: `flash_attn` (FlashAttention-2, which takes pages of multiples of 256 slots), torch's own
`varlen_attn` with block tables, and the Triton kernel of `attention_triton`. A signature proves little: torch's has
block tables from 2.12 on, but the FlashAttention-2 inside of torch refuses them. Only FlashAttention-3 behind it, a
package of its own for Hopper, serves. Attention sinks (gpt-oss) are computed by the Triton kernel alone.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tandem.core.errors import ConfigError, UnsupportedModelError
from tandem.engine.arena import KVArena
from tandem.engine.attention.interface import AttentionBackend
from tandem.engine.attention.reference import AttentionParams, ReferenceAttention
from tandem.engine.batch import PagedBatch, SequenceInput, build_batch
from tandem.engine.cuda.decode_step import DecodeBackend, DecodeStep
from tandem.engine.device import current, to_device
from tandem.engine.layout import KVLayout

_log = logging.getLogger(__name__)

#: FlashAttention-2's paged kernels take pages of multiples of this many slots.
FLASH_PAGE_MULTIPLE = 256
#: How far attention in 16 bits may be from the reference, on standard normal inputs.
_PROBE_TOLERANCE = 0.05


def select_cuda_backend(layout: KVLayout, device: torch.device, *, sinks: bool = False) -> AttentionBackend:
    """Return the kernel for `layout` on `device`. Raises `ConfigError` where no paged kernel takes it.

    Args:
        sinks: the model has attention sinks.
    """
    with current(device):
        return _select(layout, device, sinks)


def _select(layout: KVLayout, device: torch.device, sinks: bool) -> AttentionBackend:
    reasons: list[str] = []
    for name, offer in (("flash_attn", _flash), ("torch_varlen", _torch_varlen), ("triton", _triton)):
        backend = offer(layout, device, sinks)
        if not isinstance(backend, str):
            if reasons:
                _log.info("attention: %s serves; %s", name, "; ".join(reasons))
            return backend
        reasons.append(f"{name}: {backend}")
    if layout.dtype == "float32":
        _log.warning("attention: the slow reference serves; %s", "; ".join(reasons))
        return ReferenceAttention()
    raise ConfigError(f"no paged attention kernel for {layout.dtype} on {device}: {'; '.join(reasons)}", key="device")


def _flash(layout: KVLayout, device: torch.device, sinks: bool) -> AttentionBackend | str:
    if layout.dtype == "float32":
        return "takes no float32"
    if layout.page_size % FLASH_PAGE_MULTIPLE:
        return f"takes pages of multiples of {FLASH_PAGE_MULTIPLE} slots, page_size is {layout.page_size}"
    try:
        backend = FlashAttention()
    except ImportError as error:
        return f"cannot be imported ({error})"
    return refusal(backend, layout, device, sinks=sinks) or backend


def _torch_varlen(layout: KVLayout, device: torch.device, sinks: bool) -> AttentionBackend | str:
    if layout.dtype == "float32":
        return "takes no float32"
    try:
        backend = TorchVarlenAttention()
    except ImportError as error:
        return f"this torch has none ({error})"
    if (reason := refusal(backend, layout, device, sinks=sinks)) is None:
        return backend
    if importlib.util.find_spec("flash_attn_interface") is None:
        return f"{reason}; FlashAttention-3 is not installed"
    try:
        activate_flash_attention_3()
    except (ImportError, RuntimeError, ValueError) as error:
        return f"{reason}; FlashAttention-3 cannot be activated ({error})"
    return refusal(backend, layout, device, sinks=sinks) or backend


def _triton(layout: KVLayout, device: torch.device, sinks: bool) -> AttentionBackend | str:
    try:
        from tandem.engine.cuda.attention_triton import TritonAttention  # imports a compiler
    except ImportError as error:
        return f"cannot be imported ({error})"
    backend = TritonAttention()
    return refusal(backend, layout, device, sinks=sinks) or backend


def activate_flash_attention_3() -> None:
    """Put FlashAttention-3 behind torch's attention, for this process.

    Raises `ImportError` where this torch cannot, `RuntimeError` or `ValueError` where the package does not fit.
    """
    from torch.nn.attention import activate_flash_attention_impl

    activate_flash_attention_impl("FA3")


def refusal(backend: AttentionBackend, layout: KVLayout, device: torch.device, *, sinks: bool = False) -> str | None:
    """Say why `backend` does not serve pages of `layout` on `device`: it raises, or is wrong; `None` if it serves.

    A chunk over a prefix that ends inside a page, beside a single token; then a decode step, where it has such.
    """
    try:
        return _difference(backend, layout, device, sinks)
    except Exception as error:  # noqa: BLE001 - an older signature, what a kernel has not: each library has its own class
        _log.info("attention: %s raises in its trial", backend.name, exc_info=True)
        first_line = next(iter(str(error).splitlines()), "")
        return f"{type(error).__name__}: {first_line[:160]}"


def _difference(backend: AttentionBackend, layout: KVLayout, device: torch.device, sinks: bool) -> str | None:
    size = layout.page_size
    start, num_rows = size + 3, 8
    num_pages = layout.num_pages_for(start + num_rows)
    pages, page = tuple(range(num_pages, 0, -1)), (0,)
    chunk = [SequenceInput([0] * num_rows, start, pages), SequenceInput([0], size // 2, page)]
    decode = [SequenceInput([0], start, pages), SequenceInput([0], size // 2, page)]

    small = KVLayout(1, layout.num_kv_heads, layout.head_dim, size, layout.dtype)
    generator = torch.Generator().manual_seed(0)
    arena = KVArena(small, num_pages + 1, device)
    arena.tensor.copy_(torch.randn(arena.tensor.shape, generator=generator))
    query = torch.randn((num_rows + 1, 2 * layout.num_kv_heads, layout.head_dim), generator=generator)
    query = query.to(device, arena.tensor.dtype)
    of_heads = torch.linspace(-1.0, 2.0, query.shape[1], device=device)
    params = AttentionParams(layout.head_dim**-0.5, sinks=of_heads if sinks else None)

    batch = build_batch(chunk, size, device)
    reason = _compare(arena, batch, query, params, backend.attend(batch, arena, 0, query, params))
    if reason is None and isinstance(backend, DecodeBackend):
        batch, query = build_batch(decode, size, device), query[: len(decode)]
        found = backend.attend_decode(_step_of(batch, size, device), arena, 0, query, params)
        if (reason := _compare(arena, batch, query, params, found)) is not None:
            return f"a decode step {reason}"
    return reason


def _step_of(batch: PagedBatch, page_size: int, device: torch.device) -> DecodeStep:
    used = np.array([rows.end for rows in batch.sequences], dtype=np.int32)
    return DecodeStep(
        tables=_tables_in_order(batch, batch.block_tables.shape[1]),
        used=to_device(used, device),
        offsets=torch.arange(len(used) + 1, dtype=torch.int32, device=device),
        max_keys=batch.block_tables.shape[1] * page_size,
    )


def _tables_in_order(batch: PagedBatch, width: int) -> torch.Tensor:
    """The first pages of each sequence, `[N, width]`."""
    rows = to_device(np.array([rows.index for rows in batch.sequences]), batch.block_tables.device)
    return batch.block_tables[:, :width].index_select(0, rows)


def _compare(
    arena: KVArena, batch: PagedBatch, query: torch.Tensor, params: AttentionParams, found: torch.Tensor
) -> str | None:
    expected = ReferenceAttention().attend(batch, arena, 0, query, params)
    difference = float((found.float() - expected.float()).abs().max())
    return None if difference <= _PROBE_TOLERANCE else f"differs from the reference by {difference:.1e}"


class _Ragged:
    """The tensors that describe a ragged paged batch to a flash kernel; made once for all layers."""

    def __init__(self, batch: PagedBatch, page_size: int, device: torch.device) -> None:
        lengths = np.array([rows.num_rows for rows in batch.sequences], dtype=np.int32)
        used = np.array([rows.end for rows in batch.sequences], dtype=np.int32)
        self.query_offsets = to_device(_offsets(lengths), device)
        self.key_offsets = to_device(_offsets(used), device)
        self.used = to_device(used, device)
        self.max_queries = int(lengths.max())
        self.max_keys = int(used.max())
        self.tables = _tables_in_order(batch, -(-self.max_keys // page_size))

    @classmethod
    def of(cls, batch: PagedBatch, arena: KVArena, device: torch.device) -> _Ragged:
        if "ragged" not in batch.plan:
            batch.plan["ragged"] = cls(batch, arena.layout.page_size, device)
        ragged: _Ragged = batch.plan["ragged"]
        return ragged


def _offsets(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, dtype=np.int32), np.cumsum(counts, dtype=np.int32)])


def _refuse_sinks(params: AttentionParams) -> None:
    if params.sinks is not None:
        raise UnsupportedModelError("this model has attention sinks, which this kernel does not take")


def _window(params: AttentionParams) -> tuple[int, int]:
    # The kernels count the tokens to the left of the query; ours counts the query too.
    return (params.window - 1, 0) if params.window else (-1, 0)


class FlashAttention:
    """`flash_attn`'s variable-length kernel with a block table, and its decode kernel, which splits long contexts.

    Raises `ImportError` where it is not installed or does not fit this torch.
    """

    name = "flash_attn"

    def __init__(self) -> None:
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        self._ragged: Callable[..., torch.Tensor] = flash_attn_varlen_func
        self._decode: Callable[..., torch.Tensor] = flash_attn_with_kvcache

    def attend(
        self, batch: PagedBatch, arena: KVArena, layer: int, query: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Return the attention of all rows, `[T, heads, head_dim]`, like `query`."""
        _refuse_sinks(params)
        ragged = _Ragged.of(batch, arena, query.device)
        return self._ragged(
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

    def attend_decode(
        self, step: DecodeStep, arena: KVArena, layer: int, query: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Return the attention of one row for each sequence, `[B, heads, head_dim]`, like `query`."""
        _refuse_sinks(params)
        output = self._decode(
            query.unsqueeze(1).contiguous(),
            arena.keys(layer),
            arena.values(layer),
            cache_seqlens=step.used,
            block_table=step.tables,
            softmax_scale=params.scaling,
            causal=True,
            # Heads of a group are computed together only where no side is bounded; one row is its sequence's last.
            window_size=_window(params) if params.window else (-1, -1),
            softcap=params.softcap,
        )
        return output.squeeze(1)


class TorchVarlenAttention:
    """torch's variable-length kernel with a block table. Raises `ImportError` where this torch has no such kernel."""

    name = "torch_varlen"

    def __init__(self) -> None:
        from torch.nn.attention.varlen import varlen_attn

        self._kernel: Callable[..., Any] = varlen_attn

    def attend(
        self, batch: PagedBatch, arena: KVArena, layer: int, query: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Return the attention of all rows, `[T, heads, head_dim]`, like `query`."""
        ragged = _Ragged.of(batch, arena, query.device)
        return self._attend(
            arena, layer, query, params, ragged.query_offsets, ragged.used, ragged.tables, ragged.max_queries,
            ragged.max_keys,
        )  # fmt: skip

    def attend_decode(
        self, step: DecodeStep, arena: KVArena, layer: int, query: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Return the attention of one row for each sequence, `[B, heads, head_dim]`, like `query`."""
        return self._attend(arena, layer, query, params, step.offsets, step.used, step.tables, 1, step.max_keys)

    def _attend(
        self,
        arena: KVArena,
        layer: int,
        query: torch.Tensor,
        params: AttentionParams,
        offsets: torch.Tensor,
        used: torch.Tensor,
        tables: torch.Tensor,
        max_queries: int,
        max_keys: int,
    ) -> torch.Tensor:
        _refuse_sinks(params)
        if params.softcap:
            raise UnsupportedModelError("this model caps its attention scores, which torch's kernel does not do")
        output: torch.Tensor = self._kernel(
            query.contiguous(),
            arena.keys(layer),
            arena.values(layer),
            offsets,
            None,  # the lengths are in seqused_k
            max_queries,
            max_keys,
            scale=params.scaling,
            window_size=_window(params),
            enable_gqa=query.shape[1] != arena.layout.num_kv_heads,
            seqused_k=used,
            block_table=tables,
        )
        return output
