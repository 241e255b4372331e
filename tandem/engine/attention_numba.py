"""Paged attention on the CPU, float32, without gathering: each query row walks its pages."""

from __future__ import annotations

import math

import numba
import numpy as np

from tandem.engine.threads import compile_kernel, launch


@compile_kernel(parallel=True)
def _attend_rows(query, pages, tables, row_tables, row_positions, scaling, window, softcap, output):  # type: ignore[no-untyped-def] # pragma: no cover
    num_rows, num_heads, head_dim = query.shape
    page_size = pages.shape[2]
    num_kv_heads = pages.shape[3]
    group = num_heads // num_kv_heads
    for item in numba.prange(num_rows * num_kv_heads):
        row = item // num_kv_heads
        kv_head = item % num_kv_heads
        position = row_positions[row]
        table = row_tables[row]
        first = 0
        if window > 0 and position - window + 1 > 0:
            first = position - window + 1
        total = np.zeros((group, head_dim), dtype=np.float32)
        weight_sum = np.zeros(group, dtype=np.float32)
        greatest = np.full(group, -np.inf, dtype=np.float32)
        scores = np.empty(page_size, dtype=np.float32)
        for index in range(first // page_size, position // page_size + 1):
            page = tables[table, index]
            low = max(first - index * page_size, 0)
            high = min(position + 1 - index * page_size, page_size)
            for member in range(group):
                head = kv_head * group + member
                page_greatest = np.float32(-np.inf)
                for slot in range(low, high):
                    score = np.float32(0.0)
                    for dim in range(head_dim):
                        score += query[row, head, dim] * pages[page, 0, slot, kv_head, dim]
                    score *= scaling
                    if softcap > 0:
                        score = softcap * math.tanh(score / softcap)
                    scores[slot] = score
                    page_greatest = max(page_greatest, score)
                # Online softmax: what was summed so far is rescaled when a greater score appears.
                if page_greatest > greatest[member]:
                    rescale = np.float32(math.exp(greatest[member] - page_greatest))
                    greatest[member] = page_greatest
                    weight_sum[member] *= rescale
                    for dim in range(head_dim):
                        total[member, dim] *= rescale
                for slot in range(low, high):
                    weight = np.float32(math.exp(scores[slot] - greatest[member]))
                    weight_sum[member] += weight
                    for dim in range(head_dim):
                        total[member, dim] += weight * pages[page, 1, slot, kv_head, dim]
        for member in range(group):
            inverse = np.float32(1.0) / weight_sum[member]
            for dim in range(head_dim):
                output[row, kv_head * group + member, dim] = total[member, dim] * inverse


def attend_rows(
    query: np.ndarray,
    pages: np.ndarray,
    tables: np.ndarray,
    row_tables: np.ndarray,
    row_positions: np.ndarray,
    scaling: float,
    window: int,
    softcap: float,
    num_threads: int,
) -> np.ndarray:
    """Attention of each query row over its own pages, tokens `[0, position]` or the last `window` of them.

    Args:
        query: `[rows, heads, head_dim]` float32, contiguous.
        pages: one layer of the arena, `[page][K|V][slot][kv_head][head_dim]` float32, contiguous.
        tables: block tables `[N, P]` int32.
        row_tables: `[rows]` int64, the row of `tables` that a query reads.
        row_positions: `[rows]` int64, the position of a query in its sequence.
        scaling, window, softcap: as in `AttentionParams`.
        num_threads: threads to use, at most the machine's.

    Returns:
        `[rows, heads, head_dim]` float32. A row's result does not depend on the other rows or on the threads.
    """
    output = np.empty_like(query)
    launch(
        num_threads,
        _attend_rows,
        query,
        pages,
        tables,
        row_tables,
        row_positions,
        np.float32(scaling),
        window,
        np.float32(softcap),
        output,
    )
    return output
