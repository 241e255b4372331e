"""Attention over pages, as plainly as it can be said: the other kernels are tested against this one."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tandem.engine.arena import KVArena
from tandem.engine.batch import PagedBatch, SequenceRows
from tandem.engine.kv_numbers import decode


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """What a layer asks of its attention, beside being causal."""

    scaling: float
    window: int = 0  # a query sees the last `window` tokens, itself included; 0: all
    softcap: float = 0.0  # scores become softcap * tanh(score / softcap); 0: off
    # [heads] float32 without gaps: a score of each head beside those of the tokens, of no value. Its weight is lost.
    sinks: torch.Tensor | None = field(default=None, compare=False)

    def first_visible(self, position: int) -> int:
        """Return the first token that the query at `position` sees."""
        return max(0, position - self.window + 1) if self.window else 0


def gather(pages: torch.Tensor, table: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Copy tokens `[begin, end)` of a sequence out of its pages.

    `pages` is `[page][slot][kv_head][head]`, `table` the page ids `[P]` of the sequence. Returns
    `[end - begin, kv_heads, head]`. Only these tokens are read: the rest of a page may be another's.
    """
    page_size = pages.shape[1]
    first_page = begin // page_size
    last_page = -(-end // page_size)
    tokens = pages.index_select(0, table[first_page:last_page]).flatten(0, 1)
    return tokens[begin - first_page * page_size : end - first_page * page_size]


def attend_math(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int, begin: int, params: AttentionParams
) -> torch.Tensor:
    """Attention of the queries at `start + i` over the tokens `begin + j`, in float32.

    `query` is `[T, heads, head_dim]`; `key` and `value` are `[L, kv_heads, head_dim]`. Returns
    `[T, heads, head_dim]` in float32.
    """
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    queries = query.float().transpose(0, 1).reshape(num_kv_heads, num_heads // num_kv_heads, *query.shape[::2])
    keys = key.float().permute(1, 2, 0).unsqueeze(1)
    values = value.float().transpose(0, 1).unsqueeze(1)
    scores = torch.matmul(queries, keys) * params.scaling
    if params.softcap:
        scores = torch.tanh(scores / params.softcap) * params.softcap
    visible = visibility(query.shape[0], key.shape[0], start, begin, params.window, query.device)
    scores = scores.masked_fill(~visible, float("-inf"))
    if params.sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        sinks = params.sinks.view(num_kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
    output = torch.matmul(weights, values)
    return output.flatten(0, 1).transpose(0, 1)


def visibility(
    num_queries: int, num_keys: int, start: int, begin: int, window: int, device: torch.device
) -> torch.Tensor:
    """Return `[num_queries, num_keys]`: whether the query at `start + i` sees the token `begin + j`."""
    distance = (start + torch.arange(num_queries, device=device))[:, None] - (
        begin + torch.arange(num_keys, device=device)
    )
    visible = distance >= 0
    return visible & (distance < window) if window else visible


class ReferenceAttention:
    """Gathers the KV of each sequence and computes in float32; any device, any dtype."""

    name = "reference"

    def attend(
        self, batch: PagedBatch, arena: KVArena, layer: int, query: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Return the attention of all rows, `[T, heads, head_dim]`, in the dtype of `query` (same shape)."""
        output = torch.empty_like(query)
        for rows in batch.sequences:
            self._attend_sequence(batch, arena, layer, query, params, rows, output)
        return output

    def _attend_sequence(
        self,
        batch: PagedBatch,
        arena: KVArena,
        layer: int,
        query: torch.Tensor,
        params: AttentionParams,
        rows: SequenceRows,
        output: torch.Tensor,
    ) -> None:
        begin = params.first_visible(rows.start)
        table = batch.block_tables[rows.index]
        key, value = (
            decode(gather(pages, table, begin, rows.end), arena.layout.dtype)
            for pages in (arena.keys(layer), arena.values(layer))
        )
        chunk = slice(rows.row, rows.row + rows.num_rows)
        output[chunk] = attend_math(query[chunk], key, value, rows.start, begin, params).to(query.dtype)
