"""Paged attention in Triton, for CUDA machines without a FlashAttention library that reads block tables.

Rows of a chunk and the query heads that share a KV head form one block of rows, so each key that is loaded serves all
of them; softmax is online (Milakov and Gimelshein, 2018). A decode step has too few blocks to fill a GPU, so there each
context is cut into parts, which a second kernel combines (Flash-Decoding: Dao et al., 2023).

Takes float16, bfloat16 and float32 (in full precision, not TF32), any page size, windows, soft caps and sinks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from tandem.engine.arena import KVArena
from tandem.engine.attention.reference import AttentionParams
from tandem.engine.batch import PagedBatch
from tandem.engine.cuda.decode_step import DecodeStep
from tandem.engine.device import to_device

#: Rows (tokens times heads of a group) of a block of a chunk, and the least that a matrix unit takes.
_CHUNK_ROWS = 64
_LEAST_ROWS = 16
#: Tokens of the context that a block goes over at once, by bytes of an element.
_TILE_TOKENS = {2: 64, 4: 32}
#: A decode step is cut into parts until this many programs run for each multiprocessor, but not into more parts.
_PROGRAMS_PER_PROCESSOR = 2
_MAX_PARTS = 32


# Triton compiles a variant for integers that are 1 or multiples of 16: batches and tables change from step to step.
@triton.jit(do_not_specialize=("table_stride", "num_rows_total"))  # type: ignore[untyped-decorator]
def _attend_kernel(  # type: ignore[no-untyped-def]  # Triton would look the types up
    query, keys, values, output, tables, blocks, used,
    partial_sums, partial_stats, sinks, scale, softcap,
    query_row_stride, query_head_stride, output_row_stride, output_head_stride,
    page_stride, slot_stride, head_stride, table_stride, num_rows_total, num_heads,
    WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, TILE: tl.constexpr,
    IS_DECODE: tl.constexpr, NUM_PARTS: tl.constexpr,
):  # fmt: skip
    """One block of rows over one part of its context, for the heads of one KV head."""
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    if IS_DECODE:
        sequence = block
        first_row = block
        num_tokens = 1
        start = tl.load(used + block) - 1
    else:
        sequence = tl.load(blocks + block * 4)
        first_row = tl.load(blocks + block * 4 + 1)
        num_tokens = tl.load(blocks + block * 4 + 2)
        start = tl.load(blocks + block * 4 + 3)

    member = tl.arange(0, BLOCK_ROWS)
    token = member // GROUP  # of the block
    head = kv_head * GROUP + member % GROUP
    is_row = token < num_tokens
    position = start + token
    dim = tl.arange(0, BLOCK_DIM)
    is_dim = dim < HEAD_DIM
    row = (first_row + token).to(tl.int64)
    at = row[:, None] * query_row_stride + head[:, None] * query_head_stride + dim[None, :]
    queries = tl.load(query + at, mask=is_row[:, None] & is_dim[None, :], other=0.0)

    # The part [low, high) of what the block sees, [begin, end).
    end = start + num_tokens
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(start - WINDOW + 1, 0)
    share = tl.cdiv(tl.cdiv(end - begin, NUM_PARTS), TILE) * TILE
    low = begin + part * share
    high = tl.minimum(end, low + share)

    peak = tl.full([BLOCK_ROWS], float("-inf"), dtype=tl.float32)
    weight_sum = tl.zeros([BLOCK_ROWS], dtype=tl.float32)
    sums = tl.zeros([BLOCK_ROWS, BLOCK_DIM], dtype=tl.float32)
    if HAS_SINKS and part == 0:  # as a first score, whose value is zero
        peak = tl.load(sinks + head)
        weight_sum = tl.full([BLOCK_ROWS], 1.0, dtype=tl.float32)
    for tile in range(low, high, TILE):
        place = tile + tl.arange(0, TILE)
        is_place = place < high
        page = tl.load(tables + sequence * table_stride + place // PAGE_SIZE, mask=is_place, other=0).to(tl.int64)
        slot = page * page_stride + (place % PAGE_SIZE) * slot_stride + kv_head * head_stride
        key = tl.load(keys + slot[None, :] + dim[:, None], mask=is_place[None, :] & is_dim[:, None], other=0.0)
        scores = tl.dot(queries, key, input_precision="ieee") * scale
        if HAS_SOFTCAP:  # tanh, which Triton has only in a library of its own
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))
        is_seen = is_place[None, :] & (place[None, :] <= position[:, None])
        if WINDOW > 0:
            is_seen = is_seen & (position[:, None] - place[None, :] < WINDOW)
        scores = tl.where(is_seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # a row may have seen nothing yet
        weights = tl.exp(scores - shift[:, None])
        decay = tl.exp(peak - shift)
        weight_sum = weight_sum * decay + tl.sum(weights, 1)
        value = tl.load(values + slot[:, None] + dim[None, :], mask=is_place[:, None] & is_dim[None, :], other=0.0)
        sums = sums * decay[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        peak = new_peak

    if NUM_PARTS == 1:
        result = (sums / weight_sum[:, None]).to(output.dtype.element_ty)
        at = row[:, None] * output_row_stride + head[:, None] * output_head_stride + dim[None, :]
        tl.store(output + at, result, mask=is_row[:, None] & is_dim[None, :])
    else:
        line = (part * num_rows_total + row) * num_heads + head
        tl.store(partial_sums + line[:, None] * HEAD_DIM + dim[None, :], sums, mask=is_row[:, None] & is_dim[None, :])
        tl.store(partial_stats + line * 2, peak, mask=is_row)
        tl.store(partial_stats + line * 2 + 1, weight_sum, mask=is_row)


@triton.jit(do_not_specialize=("num_rows_total",))  # type: ignore[untyped-decorator]
def _combine_kernel(  # type: ignore[no-untyped-def]
    output, partial_sums, partial_stats, output_row_stride, output_head_stride,
    num_rows_total, num_heads,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, NUM_PARTS: tl.constexpr,
):  # fmt: skip
    """The parts of one head of one row."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dim = tl.arange(0, BLOCK_DIM)
    is_dim = dim < HEAD_DIM
    line = (tl.arange(0, NUM_PARTS) * num_rows_total + row) * num_heads + head
    peaks = tl.load(partial_stats + line * 2)  # -inf where a part was empty; the first never is
    factors = tl.exp(peaks - tl.max(peaks, 0))
    weight_sum = tl.sum(tl.load(partial_stats + line * 2 + 1) * factors, 0)
    sums = tl.load(partial_sums + line[:, None] * HEAD_DIM + dim[None, :], mask=is_dim[None, :], other=0.0)
    result = tl.sum(sums * factors[:, None], 0) / weight_sum
    at = row * output_row_stride + head * output_head_stride + dim
    tl.store(output + at, result.to(output.dtype.element_ty), mask=is_dim)


class TritonAttention:
    """The kernels above, over chunks and over decode steps."""

    name = "triton"

    def attend(
        self, batch: PagedBatch, arena: KVArena, layer: int, query: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Return the attention of all rows, `[T, heads, head_dim]`, like `query`."""
        group = query.shape[1] // arena.layout.num_kv_heads
        block_rows = max(_CHUNK_ROWS, triton.next_power_of_2(group))
        key = ("triton", group)
        if key not in batch.plan:
            batch.plan[key] = to_device(_row_blocks(batch, block_rows // group), query.device)
        blocks = batch.plan[key]
        return _launch(arena, layer, query, params, batch.block_tables, blocks=blocks, block_rows=block_rows)

    def attend_decode(
        self, step: DecodeStep, arena: KVArena, layer: int, query: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Return the attention of one row for each sequence, `[B, heads, head_dim]`, like `query`."""
        group = query.shape[1] // arena.layout.num_kv_heads
        block_rows = max(_LEAST_ROWS, triton.next_power_of_2(group))
        return _launch(arena, layer, query, params, step.tables, used=step.used, block_rows=block_rows)


def _row_blocks(batch: PagedBatch, num_tokens: int) -> np.ndarray:
    """Cut the rows of each sequence into blocks: `[blocks, 4]` int32 of its row in the tables, first row, tokens, first
    position."""
    blocks = [
        (rows.index, rows.row + first, min(num_tokens, rows.num_rows - first), rows.start + first)
        for rows in batch.sequences
        for first in range(0, rows.num_rows, num_tokens)
    ]
    return np.asarray(blocks, dtype=np.int32)


def _launch(
    arena: KVArena,
    layer: int,
    query: torch.Tensor,
    params: AttentionParams,
    tables: torch.Tensor,
    *,
    block_rows: int,
    blocks: torch.Tensor | None = None,
    used: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run over `blocks` of chunks, or, where `used` is given, over single rows in parts."""
    num_rows, num_heads, head_dim = query.shape
    query = query if query.stride(-1) == 1 else query.contiguous()
    keys, values = arena.keys(layer), arena.values(layer)
    num_kv_heads = arena.layout.num_kv_heads
    block_dim = max(_LEAST_ROWS, triton.next_power_of_2(head_dim))
    num_blocks = num_rows if blocks is None else blocks.shape[0]
    num_parts = 1 if used is None else _count_parts(num_rows * num_kv_heads, query.device)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    sums, stats = output, output  # not touched where there is one part
    if num_parts > 1:
        sums = torch.empty((num_parts, num_rows, num_heads, head_dim), dtype=torch.float32, device=query.device)
        stats = torch.empty((num_parts, num_rows, num_heads, 2), dtype=torch.float32, device=query.device)
    unused = tables  # what does not apply, as one of the two descriptions of rows, is never read
    _attend_kernel[(num_blocks, num_kv_heads, num_parts)](
        query, keys, values, output, tables, unused if blocks is None else blocks, unused if used is None else used,
        sums, stats, unused if params.sinks is None else params.sinks, params.scaling, params.softcap,
        query.stride(0), query.stride(1), output.stride(0), output.stride(1),
        keys.stride(0), keys.stride(1), keys.stride(2), tables.stride(0), num_rows, num_heads,
        WINDOW=params.window, HAS_SOFTCAP=bool(params.softcap), HAS_SINKS=params.sinks is not None,
        GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim, BLOCK_DIM=block_dim, PAGE_SIZE=arena.layout.page_size,
        BLOCK_ROWS=block_rows, TILE=_TILE_TOKENS[query.element_size()], IS_DECODE=used is not None, NUM_PARTS=num_parts,
    )  # fmt: skip
    if num_parts > 1:
        _combine_kernel[(num_rows, num_heads)](
            output, sums, stats, output.stride(0), output.stride(1), num_rows, num_heads,
            HEAD_DIM=head_dim, BLOCK_DIM=block_dim, NUM_PARTS=num_parts,
        )  # fmt: skip
    return output


def _count_parts(num_programs: int, device: torch.device) -> int:
    """Into how many parts each context is cut: a power of two, by what the device can run at once."""
    wanted = _PROGRAMS_PER_PROCESSOR * _num_processors(device) // num_programs
    return min(_MAX_PARTS, 1 << max(0, wanted.bit_length() - 1)) if wanted > 1 else 1


def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":  # Triton's interpreter
        return 16
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count)
