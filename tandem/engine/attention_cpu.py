"""Attention on the CPU in float32: the paged kernel for few rows, torch's for long chunks and odd head sizes."""

from __future__ import annotations

import numpy as np
import torch

from tandem.engine.arena import KVArena
from tandem.engine.attention_numba import attend_rows, can_attend
from tandem.engine.attention_reference import AttentionParams, attend_math, gather, visibility
from tandem.engine.batch import PagedBatch, SequenceRows

#: Chunks with more rows than this are gathered and given to torch, whose products reuse each key for many queries.
#: Measured with 12 heads over 4 KV heads of 64: 2 rows over 2,048 tokens 0.66 ms paged, 0.91 gathered; 4 rows 1.24
#: and 0.82; over 256 tokens they cross at the same place.
MAX_PAGED_ROWS = 2

#: Rows at a time where scores are materialised (softcap), to bound memory.
_MATH_ROWS = 256


class CPUAttention:
    """Reads the pages in place for decode rows and short chunks; gathers for long chunks."""

    name = "cpu"

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads

    def attend(
        self, batch: PagedBatch, arena: KVArena, layer: int, query: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Return the attention of all rows, `[T, heads, head_dim]` float32; `query` has the same shape."""
        few, many = _split(batch, query.shape[2])
        if not many:
            return self._attend_paged(batch, arena, layer, query, params)
        output = torch.empty_like(query)
        if few:
            rows = batch.plan["paged_rows"]
            output[rows] = self._attend_paged(batch, arena, layer, query[rows], params)
        for sequence in many:
            chunk = slice(sequence.row, sequence.row + sequence.num_rows)
            output[chunk] = _attend_gathered(batch, arena, layer, query[chunk], params, sequence)
        return output

    def _attend_paged(
        self, batch: PagedBatch, arena: KVArena, layer: int, query: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        row_tables, row_positions = batch.plan["paged_arrays"]
        output = attend_rows(
            query.contiguous().numpy(),
            arena.numpy_layer(layer),
            batch.block_tables,
            row_tables,
            row_positions,
            params.scaling,
            params.window,
            params.softcap,
            self.num_threads,
        )
        return torch.from_numpy(output)


def _split(batch: PagedBatch, head_dim: int) -> tuple[list[SequenceRows], list[SequenceRows]]:
    """Return the sequences for the paged kernel and those to gather; the same for all layers of a forward."""
    if "split" not in batch.plan:
        most = MAX_PAGED_ROWS if can_attend(head_dim) else 0
        few = [sequence for sequence in batch.sequences if sequence.num_rows <= most]
        many = [sequence for sequence in batch.sequences if sequence.num_rows > most]
        rows = [sequence.row + offset for sequence in few for offset in range(sequence.num_rows)]
        tables = [sequence.index for sequence in few for _ in range(sequence.num_rows)]
        positions = [sequence.start + offset for sequence in few for offset in range(sequence.num_rows)]
        batch.plan["paged_rows"] = torch.tensor(rows, dtype=torch.int64)
        batch.plan["paged_arrays"] = (np.array(tables, dtype=np.int64), np.array(positions, dtype=np.int64))
        batch.plan["split"] = (few, many)
    few, many = batch.plan["split"]
    return few, many


def _attend_gathered(
    batch: PagedBatch,
    arena: KVArena,
    layer: int,
    query: torch.Tensor,
    params: AttentionParams,
    sequence: SequenceRows,
) -> torch.Tensor:
    begin = params.first_visible(sequence.start)
    table = torch.from_numpy(batch.block_tables[sequence.index])
    key = gather(arena.keys(layer), table, begin, sequence.end)
    value = gather(arena.values(layer), table, begin, sequence.end)
    if params.softcap:
        return _attend_in_blocks(query, key, value, sequence.start, begin, params)
    # Without a prefix and with a window that hides nothing, torch knows the mask: it skips the upper half.
    is_causal = sequence.start == 0 and (params.window == 0 or params.window >= sequence.end)
    mask = None if is_causal else _mask(batch, sequence, begin, params.window)
    output = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=is_causal,
        scale=params.scaling,
        enable_gqa=key.shape[1] != query.shape[1],
    )
    return output[0].transpose(0, 1)


def _attend_in_blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int, begin: int, params: AttentionParams
) -> torch.Tensor:
    blocks = []
    for row in range(0, query.shape[0], _MATH_ROWS):
        rows = query[row : row + _MATH_ROWS]
        low = params.first_visible(start + row) - begin
        high = start + row + rows.shape[0] - begin
        blocks.append(attend_math(rows, key[low:high], value[low:high], start + row, begin + low, params))
    return torch.cat(blocks)


def _mask(batch: PagedBatch, sequence: SequenceRows, begin: int, window: int) -> torch.Tensor:
    key = ("mask", sequence.index, begin, window)
    if key not in batch.plan:
        num_keys = sequence.end - begin
        batch.plan[key] = visibility(sequence.num_rows, num_keys, sequence.start, begin, window, batch.token_ids.device)
    mask: torch.Tensor = batch.plan[key]
    return mask
