"""Paged attention on the CPU, float32, without gathering: blocks of query rows walk the pages of their sequence.

Query heads that share a KV head go together, up to three at a time: each vector of K or V that is loaded serves all of
them. Softmax is online, page by page.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import numba
import numpy as np
from numba import types
from numba.core import cgutils

from tandem.engine import vector_ir as vir
from tandem.engine.attention_reference import AttentionParams
from tandem.engine.layout import KVLayout
from tandem.engine.shared_words import float32s, int32s, int64s, real, words
from tandem.engine.threads import Kernel

#: Rows of a chunk that go over a page together.
_BLOCK_ROWS = 8
#: Vectors of a cache line.
_LINE_VECTORS = 2


def _score_tile(num_heads: int, num_slots: int) -> Callable[..., None]:
    """Products of `num_heads` queries with the keys of `num_slots` slots.

    Arguments, in addresses, bytes and counts: queries, their stride, keys, their stride, vectors of a head, scores,
    their stride from head to head; how far ahead to prefetch; then the scale.
    """

    def emit(
        builder: Any, query: Any, query_stride: Any, key: Any, key_stride: Any, vectors: Any, scores: Any, stride: Any,
        ahead: Any, scale: Any,
    ) -> None:  # fmt: skip
        queries = [vir.advance(builder, query, query_stride, head) for head in range(num_heads)]
        keys = [vir.advance(builder, key, key_stride, slot) for slot in range(num_slots)]
        pairs = list(itertools.product(range(num_heads), range(num_slots)))
        sums = {pair: cgutils.alloca_once_value(builder, vir.constant(0.0)) for pair in pairs}
        vector_bytes = query.type(vir.VECTOR_BYTES)
        with cgutils.for_range(builder, vectors) as loop:
            at = builder.mul(loop.index, vector_bytes)
            key_parts = [vir.load(builder, builder.add(start, at)) for start in keys]
            query_parts = [vir.load(builder, builder.add(start, at)) for start in queries]
            for start in keys:
                vir.prefetch(builder, builder.add(builder.add(start, ahead), at))
            for head, slot in pairs:
                total = sums[head, slot]
                product = vir.fma(builder, query_parts[head], key_parts[slot], builder.load(total))
                builder.store(product, total)
        for head, slot in pairs:
            score = builder.fmul(vir.sum_of(builder, builder.load(sums[head, slot])), scale)
            row = vir.advance(builder, scores, stride, head)
            vir.store_real(builder, score, vir.offset(builder, row, slot * vir.FLOAT_BYTES))

    return vir.kernel(8, 1, types.void, emit)


def _value_tile(num_heads: int, num_vectors: int) -> Callable[..., None]:
    """Adds the weighted values of some slots to `num_vectors` vectors of `num_heads` sums.

    Arguments, in addresses, bytes and counts: weights, their stride from head to head, values, their stride, slots,
    sums, their stride; how far ahead to prefetch.
    """

    def emit(
        builder: Any,
        weights: Any,
        weight_stride: Any,
        value: Any,
        value_stride: Any,
        slots: Any,
        total: Any,
        stride: Any,
        ahead: Any,
    ) -> None:
        rows = [vir.advance(builder, weights, weight_stride, head) for head in range(num_heads)]
        places = [
            [
                vir.offset(builder, vir.advance(builder, total, stride, head), n * vir.VECTOR_BYTES)
                for n in range(num_vectors)
            ]
            for head in range(num_heads)
        ]
        sums = [[cgutils.alloca_once_value(builder, vir.load(builder, place)) for place in row] for row in places]
        one = slots.type(vir.FLOAT_BYTES)
        with cgutils.for_range(builder, slots) as loop:
            start = vir.advance(builder, value, value_stride, loop.index)
            parts = [vir.load(builder, vir.offset(builder, start, n * vir.VECTOR_BYTES)) for n in range(num_vectors)]
            for n in range(0, num_vectors, _LINE_VECTORS):
                vir.prefetch(builder, vir.offset(builder, builder.add(start, ahead), n * vir.VECTOR_BYTES))
            for row, row_sums in zip(rows, sums, strict=True):
                weight = vir.spread(builder, vir.load_real(builder, vir.advance(builder, row, one, loop.index)))
                for part, slot in zip(parts, row_sums, strict=True):
                    builder.store(vir.fma(builder, weight, part, builder.load(slot)), slot)
        for place_row, row_sums in zip(places, sums, strict=True):
            for place, slot in zip(place_row, row_sums, strict=True):
                vir.store(builder, builder.load(slot), place)

    return vir.kernel(8, 0, types.void, emit)


def _emit_greatest(builder: Any, scores: Any, vectors: Any, start: Any) -> Any:
    found = cgutils.alloca_once_value(builder, vir.spread(builder, start))
    stride = vectors.type(vir.VECTOR_BYTES)
    with cgutils.for_range(builder, vectors) as loop:
        part = vir.load(builder, vir.advance(builder, scores, stride, loop.index))
        builder.store(vir.greater(builder, part, builder.load(found)), found)
    return vir.greatest_of(builder, builder.load(found))


def _emit_exponentials(builder: Any, scores: Any, vectors: Any, greatest: Any) -> Any:
    """In place: `exp(score - greatest)`; returns their sum."""
    total = cgutils.alloca_once_value(builder, vir.constant(0.0))
    subtrahend = vir.spread(builder, greatest)
    stride = vectors.type(vir.VECTOR_BYTES)
    with cgutils.for_range(builder, vectors) as loop:
        place = vir.advance(builder, scores, stride, loop.index)
        weight = vir.exponential(builder, builder.fsub(vir.load(builder, place), subtrahend))
        vir.store(builder, weight, place)
        builder.store(builder.fadd(builder.load(total), weight), total)
    return vir.sum_of(builder, builder.load(total))


_greatest = vir.kernel(2, 1, types.float32, _emit_greatest)
_exponentials = vir.kernel(2, 1, types.float32, _emit_exponentials)
_scores_1x4, _scores_2x4, _scores_3x4 = (_score_tile(heads, 4) for heads in (1, 2, 3))
_scores_1x1, _scores_2x1, _scores_3x1 = (_score_tile(heads, 1) for heads in (1, 2, 3))
_values_1x4, _values_2x4, _values_3x4 = (_value_tile(heads, 4) for heads in (1, 2, 3))
_values_1x1, _values_2x1, _values_3x1 = (_value_tile(heads, 1) for heads in (1, 2, 3))


@numba.njit(nogil=True, inline="always")
def _score(heads, query, head_bytes, key, token_bytes, slots, scores, stride, ahead, scale):  # type: ignore[no-untyped-def] # pragma: no cover
    """Scores of `heads` queries (1 to 3) with `slots` keys."""
    vectors = head_bytes // 32
    slot = 0
    while slot < slots:
        four = slots - slot >= 4
        k, s = key + slot * token_bytes, scores + slot * 4
        if heads == 3:
            if four:
                _scores_3x4(query, head_bytes, k, token_bytes, vectors, s, stride, ahead, scale)
            else:
                _scores_3x1(query, head_bytes, k, token_bytes, vectors, s, stride, ahead, scale)
        elif heads == 2:
            if four:
                _scores_2x4(query, head_bytes, k, token_bytes, vectors, s, stride, ahead, scale)
            else:
                _scores_2x1(query, head_bytes, k, token_bytes, vectors, s, stride, ahead, scale)
        elif four:
            _scores_1x4(query, head_bytes, k, token_bytes, vectors, s, stride, ahead, scale)
        else:
            _scores_1x1(query, head_bytes, k, token_bytes, vectors, s, stride, ahead, scale)
        slot += 4 if four else 1


@numba.njit(nogil=True, inline="always")
def _add_values(heads, weights, stride, value, token_bytes, slots, total, head_bytes, ahead):  # type: ignore[no-untyped-def] # pragma: no cover
    """Adds the values of `slots` tokens, weighted, to `heads` sums (1 to 3)."""
    vectors = head_bytes // 32
    done = 0
    while done < vectors:
        four = vectors - done >= 4
        v, t = value + done * 32, total + done * 32
        if heads == 3:
            if four:
                _values_3x4(weights, stride, v, token_bytes, slots, t, head_bytes, ahead)
            else:
                _values_3x1(weights, stride, v, token_bytes, slots, t, head_bytes, ahead)
        elif heads == 2:
            if four:
                _values_2x4(weights, stride, v, token_bytes, slots, t, head_bytes, ahead)
            else:
                _values_2x1(weights, stride, v, token_bytes, slots, t, head_bytes, ahead)
        elif four:
            _values_1x4(weights, stride, v, token_bytes, slots, t, head_bytes, ahead)
        else:
            _values_1x1(weights, stride, v, token_bytes, slots, t, head_bytes, ahead)
        done += 4 if four else 1


def _attend(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Items `[first, end)`: a block's rows with one of `splits` parts of the KV heads."""
    (
        query, num_heads, head_dim, pages, tables_at, num_tables, table_width, blocks_at, num_blocks, kv_heads,
        splits, page_size, scaling_word, window, softcap_word, output_at,
    ) = _sixteen_words(arguments)  # fmt: skip
    scaling, softcap = real(scaling_word), real(softcap_word)
    group = num_heads // kv_heads
    own = kv_heads // splits
    num_own = own * group
    head_bytes = head_dim * 4
    token_bytes = kv_heads * head_bytes
    padded = (page_size + 7) // 8 * 8
    blocks = numba.carray(int64s(blocks_at), (num_blocks, 4))
    tables = numba.carray(int32s(tables_at), (num_tables, table_width))
    output = float32s(output_at)
    scores = np.empty((3, padded), dtype=np.float32)
    total = np.empty((_BLOCK_ROWS, num_own, head_dim), dtype=np.float32)
    weight_sum = np.empty((_BLOCK_ROWS, num_own), dtype=np.float32)
    greatest = np.empty((_BLOCK_ROWS, num_own), dtype=np.float32)
    at = scores.ctypes.data
    for item in range(first, end):
        table, first_row, num_rows, first_position = blocks[item // splits]
        first_head = (item % splits) * own
        total[:num_rows] = 0
        weight_sum[:num_rows] = 0
        greatest[:num_rows] = -np.inf
        first_seen = max(first_position - window + 1, 0) if window > 0 else 0
        for index in range(first_seen // page_size, (first_position + num_rows - 1) // page_size + 1):
            page = pages + tables[table, index] * 2 * page_size * token_bytes
            # Memory would rest while a page is computed: so each step of its first row fetches its like of the page
            # that comes next, in this block or the one behind it.
            if index < (first_position + num_rows - 1) // page_size:
                ahead = pages + tables[table, index + 1] * 2 * page_size * token_bytes - page
            elif item + 1 < num_blocks * splits:
                ahead = pages + tables[blocks[(item + 1) // splits, 0], 0] * 2 * page_size * token_bytes - page
            else:
                ahead = 0
            # All rows and heads of a page before the next page: its memory comes in one stream, and once.
            for row in range(num_rows):
                position = first_position + row
                low = max(position - window + 1 - index * page_size, 0) if window > 0 else 0
                slots = min(position + 1 - index * page_size, page_size) - low
                if slots < 1:
                    continue
                vectors = (slots + 7) // 8
                queries = query + ((first_row + row) * num_heads + first_head * group) * head_bytes
                member = 0
                while member < num_own:
                    kv_head = member // group
                    heads = min(3, (kv_head + 1) * group - member)
                    key = page + low * token_bytes + (first_head + kv_head) * head_bytes
                    value = key + page_size * token_bytes
                    query_at = queries + member * head_bytes
                    _score(heads, query_at, head_bytes, key, token_bytes, slots, at, padded * 4, ahead, scaling)
                    for offset in range(heads):
                        head = member + offset
                        if softcap > 0:
                            for slot in range(slots):
                                scores[offset, slot] = softcap * math.tanh(scores[offset, slot] / softcap)
                        for slot in range(slots, vectors * 8):
                            scores[offset, slot] = -np.inf
                        page_greatest = _greatest(at + offset * padded * 4, vectors, greatest[row, head])
                        # Online softmax: what was summed so far is rescaled when a greater score appears.
                        if page_greatest > greatest[row, head]:
                            rescale = np.float32(math.exp(greatest[row, head] - page_greatest))
                            greatest[row, head] = page_greatest
                            weight_sum[row, head] *= rescale
                            for dim in range(head_dim):
                                total[row, head, dim] *= rescale
                        weight_sum[row, head] += _exponentials(at + offset * padded * 4, vectors, greatest[row, head])
                    sums = total.ctypes.data + (row * num_own + member) * head_bytes
                    _add_values(heads, at, padded * 4, value, token_bytes, slots, sums, head_bytes, ahead)
                    member += heads
                ahead = 0
        for row in range(num_rows):
            for head in range(num_own):
                inverse = np.float32(1.0) / weight_sum[row, head]
                place = ((first_row + row) * num_heads + first_head * group + head) * head_dim
                for dim in range(head_dim):
                    output[place + dim] = total[row, head, dim] * inverse


_sixteen_words = words(16)
#: Its items are blocks, times the parts of their KV heads.
_attend_kernel = Kernel(_attend, "iii" + "iiii" + "iiiii" + "fif" + "i")


def can_attend(head_dim: int) -> bool:
    """Whether heads of this size fill whole vectors, and this CPU has them."""
    return head_dim % vir.LANES == 0 and vir.is_fast_here()


def row_blocks(spans: Iterable[tuple[int, int, int, int]]) -> np.ndarray:
    """Cut runs of rows into blocks that share the reading of their pages.

    Args:
        spans: for each sequence its row of the block table, its first query row, how many rows, the first's position.

    Returns:
        `[blocks, 4]` int64, the same four for each block.
    """
    blocks = [
        (table, row + done, min(_BLOCK_ROWS, num_rows - done), position + done)
        for table, row, num_rows, position in spans
        for done in range(0, num_rows, _BLOCK_ROWS)
    ]
    return np.array(blocks, dtype=np.int64)


class Reads:
    """What the rows of a batch read, made once for all its layers.

    Args:
        tables: block tables `[N, P]` int32.
        spans: as for `row_blocks`.
    """

    def __init__(self, tables: np.ndarray, spans: Iterable[tuple[int, int, int, int]]) -> None:
        self._tables, self._blocks = tables, row_blocks(spans)  # kept for their memory
        self.num_blocks = len(self._blocks)
        # Made once: asking an array for its address costs as much as a small kernel.
        self.words = (
            self._tables.ctypes.data, len(tables), tables.strides[0] // tables.itemsize, self._blocks.ctypes.data,
            self.num_blocks,
        )  # fmt: skip


def attend_call(
    reads: Reads,
    layout: KVLayout,
    pages: int,
    params: AttentionParams,
    num_heads: int,
    query: int,
    output: int,
    num_threads: int,
) -> bytes:
    """Attention of each query row over its sequence's tokens `[0, position]`, or the last of them; for `run`.

    Args:
        reads: each query row in exactly one of its spans.
        layout: of the pages, float32; `can_attend(layout.head_dim)`.
        pages: address of one layer of the arena, `[page][K|V][slot][kv_head][head_dim]` float32.
        query: address of `[rows, num_heads, head_dim]` float32, without gaps.
        output: address of memory like `query`. A row's result depends neither on the other rows nor on the threads: it
            is the same bits whether its token is decoded alone or is one of a long chunk.
        num_threads: how many threads the work is cut for.
    """
    kv_heads = layout.num_kv_heads
    # With few blocks the KV heads are shared out too, so that every thread has work.
    splits = kv_heads if num_threads > 1 and reads.num_blocks < 4 * num_threads else 1
    return _attend_kernel.call(
        reads.num_blocks * splits, query, num_heads, layout.head_dim, pages, *reads.words, kv_heads, splits,
        layout.page_size, params.scaling, params.window, params.softcap, output,
    )  # fmt: skip
