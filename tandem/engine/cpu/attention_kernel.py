"""Paged attention on the CPU, float32, without gathering: blocks of query rows walk the pages of their sequence.

Pages hold float32, or numbers of fewer bits, which become float32 exactly. The scale of a head's whole numbers is
applied to its score, and to the weight of its values.

Blocks of many rows go KV head by KV head, with a lane for each query (`attention_lanes`). The few rows of a small
block, and all query heads that share a KV head, use a page together while it is in the L1 cache. Up to three heads
share each vector that is loaded of V, and of K where the row is alone. A row that is alone reads a page in the order of
memory, for all KV heads; several rows read it KV head by KV head. All give the same bits. Softmax is online, page by
page.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from tandem.engine.attention.reference import AttentionParams
from tandem.engine.cpu import vector_ir as vir
from tandem.engine.cpu.atomics import float32s, int32s, int64s, real, words
from tandem.engine.cpu.attention_lanes import (
    BLOCK_LANES,
    HALF,
    HEAD_UNIT,
    PARTS,
    attend_lanes,
    kv_loader,
    make_scratch,
    weight_of,
)
from tandem.engine.cpu.compiling import inlined
from tandem.engine.cpu.threads import Kernel
from tandem.engine.cpu.vector_ir import BFLOAT16, FLOAT32, INT8, KV_ITEM_BYTES, PAIRS, SCALE_BYTES
from tandem.engine.huge_pages import FLOAT_BYTES, LINE_BYTES
from tandem.engine.layout import KVLayout

_vec, _half = PARTS, HALF
# Numba takes these for constants.
_PARTS, _VECTOR_BYTES = _vec.lanes, _vec.num_bytes
#: Heads that share a load, at most: their sums have registers.
TILE_HEADS = 3
#: Slots of a tile. A row alone takes one of each KV head before the next slots.
_TILE_SLOTS = 4
#: Rows that go over a page together without lanes, at most; and how many lanes a block must fill to have them: below,
#: lanes that rest and the unpacking of pages cost more than they save.
_FEW_ROWS, _FEWEST_LANES = 8, 2 * _PARTS
#: No more lanes than these in a last vector are worth that vector.
_TAIL_LANES = _PARTS * 3 // 8
# Keys, and by two values, are prefetched twice, because a CPU with too many outstanding prefetches drops some: once
# with the next page, and once so many bytes ahead, which is still early enough.
NEAR_BYTES = 8192


def _score_tile(kind: int, num_heads: int, num_slots: int, *, ahead: bool, unrolled: int = 1) -> Callable[..., None]:
    """Products of `num_heads` queries with the keys of `num_slots` slots, `unrolled` vectors of them at a time. With
    keys of pairs the queries are pairs, too.

    Arguments, in addresses, bytes and counts: queries, the bytes of one, keys, their stride, scores, their stride from
    head to head; how far on to prefetch, where `ahead`, beside `NEAR_BYTES`; then the scale.
    """
    item_bytes, multiply_add = KV_ITEM_BYTES[kind], _vec.fma_by_two if kind == PAIRS else _vec.fma

    def emit(
        builder: Any, query: Any, num_bytes: Any, key: Any, key_stride: Any, scores: Any, stride: Any, distance: Any,
        scale: Any,
    ) -> None:  # fmt: skip
        queries = [vir.advance(builder, query, num_bytes, head) for head in range(num_heads)]
        sums = [
            [cgutils.alloca_once_value(builder, _vec.constant(0.0)) for _ in range(num_slots)] for _ in range(num_heads)
        ]

        def add(index: Any, vec: vir.Vectors = _vec, num_vectors: int = 1) -> None:
            """`index` counts whole vectors."""

            def load(load_part: Callable[[Any, Any], Any], start: Any, size: int, n: int) -> Any:
                part = load_part(builder, vir.offset(builder, start, n * vec.lanes * size))
                return part if vec is _vec else _vec.widen(builder, part)

            at, key_at = (builder.mul(index, index.type(_PARTS * size)) for size in (FLOAT_BYTES, item_bytes))
            parts = [
                [load(vec.load, builder.add(start, at), FLOAT_BYTES, n) for n in range(num_vectors)]
                for start in queries
            ]
            start = builder.add(key, key_at)
            for slot in range(num_slots):
                for n in range(num_vectors):
                    key_part = load(kv_loader(vec, kind), start, item_bytes, n)
                    if ahead and n * vec.lanes * item_bytes % LINE_BYTES == 0:
                        place = vir.offset(builder, start, n * vec.lanes * item_bytes)
                        vir.prefetch(builder, builder.add(place, distance))
                        vir.prefetch(builder, vir.offset(builder, place, NEAR_BYTES))
                    for head_parts, head_sums in zip(parts, sums, strict=True):
                        total = multiply_add(builder, head_parts[n], key_part, builder.load(head_sums[slot]))
                        builder.store(total, head_sums[slot])
                start = builder.add(start, key_stride)

        unroll = num_bytes.type(unrolled)
        whole = builder.udiv(num_bytes, num_bytes.type(_VECTOR_BYTES))
        num_steps = builder.udiv(whole, unroll)
        with cgutils.for_range(builder, num_steps) as loop:
            add(builder.mul(loop.index, unroll), num_vectors=unrolled)
        if unrolled > 1:
            with cgutils.for_range_slice(builder, builder.mul(num_steps, unroll), whole, whole.type(1)) as (index, _):
                add(index)
        if _half is not None:
            rest = builder.mul(whole, whole.type(_VECTOR_BYTES))
            with builder.if_then(builder.icmp_unsigned("<", rest, num_bytes), likely=False):
                add(whole, _half)
        totals = [builder.load(total) for head_sums in sums for total in head_sums]
        scales = []
        if SCALE_BYTES[kind]:
            behind = builder.add(key, builder.udiv(num_bytes, num_bytes.type(FLOAT_BYTES // item_bytes)))
            scales = [vir.load_real(builder, vir.advance(builder, behind, key_stride, n)) for n in range(num_slots)]
        for first in range(0, len(totals), _PARTS):
            some = totals[first : first + _PARTS]
            scaled = builder.fmul(_vec.sums_of(builder, some), _vec.spread(builder, scale))
            if scales:
                by_lane = [scales[(first + lane) % num_slots] for lane in range(len(some))]
                scaled = builder.fmul(scaled, _vec.gather(builder, by_lane))
            for begin in range(0, len(some), num_slots):
                row = vir.advance(builder, scores, stride, (first + begin) // num_slots)
                _vec.store_part(builder, scaled, begin, num_slots, row)

    name = f"scores_{kind}_{num_heads}x{num_slots}_by_{unrolled}{'_ahead' if ahead else ''}"
    return vir.apart(name, emit)


def _value_tile(
    kind: int, num_heads: int, num_vectors: int, *, ahead: bool, vec: vir.Vectors = _vec
) -> Callable[..., None]:
    """Adds the weighted values of some slots to `num_vectors` vectors of `num_heads` sums.

    Arguments, in addresses, bytes and counts: weights, their stride from head to head, values, their stride, slots,
    sums, their stride; how far ahead to prefetch, where `ahead`.
    """
    part_bytes = vec.lanes * KV_ITEM_BYTES[kind]

    def emit(
        builder: Any,
        weights: Any,
        weight_stride: Any,
        value: Any,
        value_stride: Any,
        slots: Any,
        total: Any,
        stride: Any,
        distance: Any,
    ) -> None:
        rows = [vir.advance(builder, weights, weight_stride, head) for head in range(num_heads)]
        places = [
            [
                vir.offset(builder, vir.advance(builder, total, stride, head), n * vec.num_bytes)
                for n in range(num_vectors)
            ]
            for head in range(num_heads)
        ]
        sums = [[cgutils.alloca_once_value(builder, vec.load(builder, place)) for place in row] for row in places]
        one = slots.type(FLOAT_BYTES)
        load = kv_loader(vec, kind)
        with cgutils.for_range(builder, slots) as loop:
            start = vir.advance(builder, value, value_stride, loop.index)
            parts = [load(builder, vir.offset(builder, start, n * part_bytes)) for n in range(num_vectors)]
            if ahead:
                for n in range(0, num_vectors * part_bytes, LINE_BYTES):
                    vir.prefetch(builder, vir.offset(builder, builder.add(start, distance), n))
            for row, row_sums in zip(rows, sums, strict=True):
                weight = vec.spread(builder, vir.load_real(builder, vir.advance(builder, row, one, loop.index)))
                for part, slot in zip(parts, row_sums, strict=True):
                    builder.store(vec.fma(builder, weight, part, builder.load(slot)), slot)
        for place_row, row_sums in zip(places, sums, strict=True):
            for place, slot in zip(place_row, row_sums, strict=True):
                vec.store(builder, builder.load(slot), place)

    return vir.apart(f"values_{kind}_{num_heads}x{num_vectors}_of_{vec.lanes}{'_ahead' if ahead else ''}", emit)


def _choose(builder: Any, is_so: Any, then: Callable[[], None], otherwise: Callable[[], None]) -> None:
    with builder.if_else(is_so) as (yes, no):
        with yes:
            then()
        with no:
            otherwise()


def tiles_by(make: Callable[[int, bool, bool], Callable[..., None]], num_addresses: int) -> Callable[..., None]:
    """Calls one of several tiles.

    Its arguments are how many heads (1 to `TILE_HEADS`), whether it is the large tile, and then those of a tile, of
    whose addresses the last is how far ahead to prefetch: at 0 it is a tile that does not.

    Args:
        make: a tile by number of heads, whether it is large, and whether it prefetches.
        num_addresses: of a tile's arguments.
    """

    def emit(builder: Any, heads: Any, is_large: Any, *arguments: Any) -> None:
        ahead = arguments[num_addresses - 1]

        def call(num_heads: int) -> None:
            def either(large: bool) -> None:
                _choose(
                    builder,
                    builder.icmp_signed("!=", ahead, ahead.type(0)),
                    lambda: make(num_heads, large, True)(builder, *arguments),
                    lambda: make(num_heads, large, False)(builder, *arguments),
                )

            _choose(
                builder,
                builder.icmp_signed("!=", is_large, is_large.type(0)),
                lambda: either(True),
                lambda: either(False),
            )

        def at_least(num_heads: int) -> None:
            if num_heads == 1:
                call(1)
            else:
                is_it = builder.icmp_signed("==", heads, heads.type(num_heads))
                _choose(builder, is_it, lambda: call(num_heads), lambda: at_least(num_heads - 1))

        at_least(TILE_HEADS)

    return emit


def _emit_greatest(builder: Any, scores: Any, vectors: Any, start: Any) -> Any:
    found = cgutils.alloca_once_value(builder, _vec.spread(builder, start))
    stride = vectors.type(_vec.num_bytes)
    with cgutils.for_range(builder, vectors) as loop:
        part = _vec.load(builder, vir.advance(builder, scores, stride, loop.index))
        builder.store(_vec.greater(builder, part, builder.load(found)), found)
    return _vec.greatest_of(builder, builder.load(found))


def _emit_exponentials(builder: Any, scores: Any, vectors: Any, greatest: Any) -> Any:
    """In place: `exp(score - greatest)`; returns their sum."""
    total = cgutils.alloca_once_value(builder, _vec.constant(0.0))
    subtrahend = _vec.spread(builder, greatest)
    stride = vectors.type(_vec.num_bytes)
    with cgutils.for_range(builder, vectors) as loop:
        place = vir.advance(builder, scores, stride, loop.index)
        weight = weight_of(_vec, builder, builder.fsub(_vec.load(builder, place), subtrahend))
        _vec.store(builder, weight, place)
        builder.store(builder.fadd(builder.load(total), weight), total)
    return _vec.sum_of(builder, builder.load(total))


def _emit_weight(builder: Any, difference: Any) -> Any:
    weight = weight_of(_vec, builder, _vec.spread(builder, difference))
    return builder.extract_element(weight, ir.Constant(ir.IntType(32), 0))


_greatest = vir.kernel(2, 1, types.float32, _emit_greatest)
_weight = vir.kernel(0, 1, types.float32, _emit_weight)
_exponentials = vir.kernel(2, 1, types.float32, _emit_exponentials)
# A row alone waits for memory: each key serves several heads, and what comes next is fetched evenly, in the order in
# which it lies there. Some rows find the page in the cache, where sums of whole vectors of slots cost the least. The
# scores are the same bits.


def _scores_of(kind: int) -> Callable[..., None]:
    # A line is fetched once: where it holds several vectors, these are of one step.
    per_line = max(1, LINE_BYTES // (_PARTS * KV_ITEM_BYTES[kind])) if kind != FLOAT32 else 1
    return tiles_by(
        lambda heads, large, ahead: _score_tile(
            kind, heads, _TILE_SLOTS if large else 1, ahead=ahead, unrolled=per_line if ahead else 1
        ),
        7,
    )


def _scores_of_many(kind: int) -> Callable[..., None]:
    return tiles_by(lambda _, __, ahead: _score_tile(kind, 1, _PARTS, ahead=ahead, unrolled=4), 7)


def _values_of(kind: int) -> Callable[..., None]:
    return tiles_by(lambda heads, large, ahead: _value_tile(kind, heads, 4 if large else 1, ahead=ahead), 8)


def _values_of_half(kind: int) -> Callable[..., None]:
    return _value_tile(kind, 1, 1, ahead=False, vec=_vec if _half is None else _half)


_scores = vir.kernel_by_kind(9, 1, types.void, _scores_of)
_many = vir.kernel_by_kind(9, 1, types.void, _scores_of_many)
_values = vir.kernel_by_kind(10, 0, types.void, _values_of)
_values_half = vir.kernel_by_kind(8, 0, types.void, _values_of_half)


def _emit_scale(builder: Any, weights: Any, scales: Any, stride: Any, slots: Any) -> None:
    """Multiplies the weights of some slots with the scales of their values, which are `stride` bytes apart."""
    one = slots.type(FLOAT_BYTES)
    with cgutils.for_range(builder, slots) as loop:
        place = vir.advance(builder, weights, one, loop.index)
        scale = vir.load_real(builder, vir.advance(builder, scales, stride, loop.index))
        vir.store_real(builder, builder.fmul(vir.load_real(builder, place), scale), place)


_scale = vir.kernel(4, 0, types.void, _emit_scale)


@inlined
def _score(kind, heads, query, head_bytes, key, token_bytes, slots, scores, stride, ahead, scale):  # type: ignore[no-untyped-def] # pragma: no cover
    """Scores of `heads` queries (1 to 3) with `slots` keys; prefetches so far on, and where that is 0 nothing."""
    slot = 0
    while slot < slots:
        four = slots - slot >= _TILE_SLOTS
        k, s = key + slot * token_bytes, scores + slot * FLOAT_BYTES
        _scores(kind, heads, four, query, head_bytes, k, token_bytes, s, stride, ahead, scale)
        slot += _TILE_SLOTS if four else 1


@inlined
def _score_many(kind, query, head_bytes, key, token_bytes, slots, room, scores, ahead, scale):  # type: ignore[no-untyped-def] # pragma: no cover
    """As `_score`, of one query, and with some more keys that are worth nothing: there are `room` of them."""
    slot = 0
    while slot + _PARTS <= room and slot < slots:
        k, s = key + slot * token_bytes, scores + slot * FLOAT_BYTES
        _many(kind, 1, True, query, head_bytes, k, token_bytes, s, 0, ahead, scale)
        slot += _PARTS
    if slot < slots:
        k, s = key + slot * token_bytes, scores + slot * FLOAT_BYTES
        _score(kind, 1, query, head_bytes, k, token_bytes, slots - slot, s, 0, ahead, scale)


@inlined
def _add_values(kind, heads, weights, stride, value, token_bytes, slots, total, head_bytes, ahead):  # type: ignore[no-untyped-def] # pragma: no cover
    """Adds the values of `slots` tokens, weighted, to `heads` sums (1 to 3), which have `head_bytes`."""
    vectors = head_bytes // _VECTOR_BYTES
    part_bytes = _PARTS * KV_ITEM_BYTES[kind]
    done = 0
    while done < vectors:
        four = vectors - done >= 4
        v, t = value + done * part_bytes, total + done * _VECTOR_BYTES
        _values(kind, heads, four, weights, stride, v, token_bytes, slots, t, head_bytes, ahead)
        done += 4 if four else 1
    if vectors * _VECTOR_BYTES < head_bytes:
        v = value + vectors * part_bytes
        for head in range(heads):
            t, w = total + head * head_bytes + vectors * _VECTOR_BYTES, weights + head * stride
            _values_half(kind, w, stride, v, token_bytes, slots, t, head_bytes, ahead)


@inlined
def walk_row(  # type: ignore[no-untyped-def] # pragma: no cover
    kind,
    adds,
    vectors,
    head_bytes,
    kv_heads,
    group,
    kv,
    kv_bytes,
    token_bytes,
    slots,
    scores,
    stride,
    ahead,
    scale,
):
    """One row's heads over `slots` keys or values of each of `kv_heads`, tile by tile in the order of memory.

    Scores of the queries `vectors` with keys or, where it `adds`, values weighted by `scores` and added to `vectors`.
    """
    for slot in range(0, slots, _TILE_SLOTS):
        count = min(_TILE_SLOTS, slots - slot)
        for kv_head in range(kv_heads):
            at = kv + slot * token_bytes + kv_head * kv_bytes
            fetch = ahead
            for member in range(0, group, TILE_HEADS):
                heads, first = min(TILE_HEADS, group - member), kv_head * group + member
                vector, score = vectors + first * head_bytes, scores + first * stride + slot * FLOAT_BYTES
                if adds:
                    _add_values(kind, heads, score, stride, at, token_bytes, count, vector, head_bytes, fetch)
                else:
                    _score(kind, heads, vector, head_bytes, at, token_bytes, count, score, stride, fetch, scale)
                fetch = 0


@inlined
def _weigh(scores, at, place, low, slots, softcap, total, weight_sum, greatest, row, head):  # type: ignore[no-untyped-def] # pragma: no cover
    """Scores of a head with `slots` slots from `low` on, the row `place` of `scores` at address `at`, become weights.

    Online softmax: what was summed so far of the head (`total`, `weight_sum`) is rescaled where a score is greater.
    """
    vectors = (low + slots + _PARTS - 1) // _PARTS
    if softcap > 0:
        for slot in range(low, low + slots):
            scores[place, slot] = softcap * math.tanh(scores[place, slot] / softcap)
    for slot in range(low):
        scores[place, slot] = -np.inf
    for slot in range(low + slots, vectors * _PARTS):
        scores[place, slot] = -np.inf
    page_greatest = _greatest(at, vectors, greatest[row, head])
    if page_greatest > greatest[row, head]:
        rescale = _weight(greatest[row, head] - page_greatest)
        greatest[row, head] = page_greatest
        weight_sum[row, head] *= rescale
        for dim in range(total.shape[2]):
            total[row, head, dim] *= rescale
    weight_sum[row, head] += _exponentials(at, vectors, page_greatest)


@inlined
def _seen(position, page_size, window):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """What a row sees of a page that begins `position` tokens before its own: the first slot, and how many."""
    low = max(position - window + 1, 0) if window > 0 else 0
    return low, min(position + 1, page_size) - low


@inlined
def _has_lanes(num_rows, group):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Whether a block of so many rows goes with a lane for each query."""
    return num_rows > _FEW_ROWS or (num_rows > 1 and num_rows * group >= _FEWEST_LANES)


def _attend_of(kind: int) -> Callable[[Any, Any, Any], None]:
    """For pages that hold numbers of this kind."""

    def attend(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
        """Items `[first, end)`: a block's rows with one of `splits` parts of the KV heads."""
        (
            query, num_heads, head_dim, pages, tables_at, num_tables, table_width, blocks_at, num_blocks, kv_heads,
            splits, page_size, scaling_word, window, softcap_word, sinks_at, output_at,
        ) = _seventeen_words(arguments)  # fmt: skip
        scaling, softcap = real(scaling_word), real(softcap_word)
        group = num_heads // kv_heads
        own = kv_heads // splits
        num_own = own * group
        head_bytes = head_dim * FLOAT_BYTES
        kv_bytes = head_dim * KV_ITEM_BYTES[kind] + SCALE_BYTES[kind]
        token_bytes = kv_heads * kv_bytes
        padded = (page_size + _PARTS - 1) // _PARTS * _PARTS
        blocks = numba.carray(int64s(blocks_at), (num_blocks, 4))
        tables = numba.carray(int32s(tables_at), (num_tables, table_width))
        output, sinks = float32s(output_at), float32s(sinks_at)
        scores = np.empty((max(_FEW_ROWS, own) * group, padded), dtype=np.float32)
        total = np.empty((_FEW_ROWS, num_own, head_dim), dtype=np.float32)
        weight_sum = np.empty((_FEW_ROWS, num_own), dtype=np.float32)
        greatest = np.empty((_FEW_ROWS, num_own), dtype=np.float32)
        at, stride = scores.ctypes.data, padded * FLOAT_BYTES
        most_lanes = 0
        for item in range(first, end):
            if _has_lanes(blocks[item // splits, 2], group):
                most_lanes = max(most_lanes, blocks[item // splits, 2] * group)
        scratch = make_scratch(most_lanes, head_dim, page_size)
        for item in range(first, end):
            table, first_row, num_rows, first_position = blocks[item // splits]
            first_head = (item % splits) * own
            if _has_lanes(num_rows, group):
                for kv_head in range(first_head, first_head + own):
                    attend_lanes(
                        kind, query, num_heads, head_dim, pages, tables[table], kv_heads, kv_head, page_size, first_row,
                        num_rows, first_position, scaling, window, softcap, sinks_at, output_at, scratch,
                    )  # fmt: skip
                continue
            total[:num_rows] = 0
            weight_sum[:num_rows] = 0
            greatest[:num_rows] = -np.inf
            if sinks_at:  # as a first score, whose value is zero
                weight_sum[:num_rows] = 1
                for head in range(num_own):
                    greatest[:num_rows, head] = sinks[first_head * group + head]
            first_seen = max(first_position - window + 1, 0) if window > 0 else 0
            for index in range(first_seen // page_size, (first_position + num_rows - 1) // page_size + 1):
                page = pages + tables[table, index] * 2 * page_size * token_bytes
                # Memory would rest while a page is computed. So each step of its first row fetches the same part of the
                # page that comes next, in this block or in the next one.
                if index < (first_position + num_rows - 1) // page_size:
                    ahead = pages + tables[table, index + 1] * 2 * page_size * token_bytes - page
                elif item + 1 < num_blocks * splits:
                    ahead = pages + tables[blocks[(item + 1) // splits, 0], 0] * 2 * page_size * token_bytes - page
                else:
                    ahead = 0
                # All heads and rows of a page before the next page: its memory comes once.
                if num_rows == 1:  # it sees something of each of its pages
                    low, slots = _seen(first_position - index * page_size, page_size, window)
                    key = page + first_head * kv_bytes + low * token_bytes
                    seen = at + low * FLOAT_BYTES
                    queries = query + (first_row * num_heads + first_head * group) * head_bytes
                    walk_row(
                        kind, False, queries, head_bytes, own, group, key, kv_bytes, token_bytes, slots, seen, stride,
                        ahead, scaling,
                    )  # fmt: skip
                    value = key + page_size * token_bytes
                    for head in range(num_own):
                        _weigh(
                            scores, at + head * stride, head, low, slots, softcap, total, weight_sum, greatest, 0, head
                        )
                        if SCALE_BYTES[kind]:
                            scales = value + head // group * kv_bytes + head_dim
                            _scale(seen + head * stride, scales, token_bytes, slots)
                    sums = total.ctypes.data
                    walk_row(
                        kind, True, sums, head_bytes, own, group, value, kv_bytes, token_bytes, slots, seen, stride,
                        ahead, scaling,
                    )  # fmt: skip
                    continue
                for kv_head in range(own):
                    fetch = ahead
                    keys = page + (first_head + kv_head) * kv_bytes
                    # Each of the three parts for all rows: within a part no row waits for another.
                    for row in range(num_rows):
                        low, slots = _seen(first_position + row - index * page_size, page_size, window)
                        if slots < 1:
                            continue
                        head = (first_row + row) * num_heads + (first_head + kv_head) * group
                        for member in range(group):
                            _score_many(
                                kind, query + (head + member) * head_bytes, head_bytes, keys + low * token_bytes,
                                token_bytes, slots, page_size - low,
                                at + (row * group + member) * stride + low * FLOAT_BYTES, fetch, scaling,
                            )  # fmt: skip
                            fetch = 0
                    for row in range(num_rows):
                        low, slots = _seen(first_position + row - index * page_size, page_size, window)
                        if slots < 1:
                            continue
                        value = keys + (page_size + low) * token_bytes
                        for member in range(group):
                            head, place = kv_head * group + member, row * group + member
                            _weigh(
                                scores, at + place * stride, place, low, slots, softcap, total, weight_sum, greatest,
                                row, head,
                            )  # fmt: skip
                            if SCALE_BYTES[kind]:
                                _scale(at + place * stride + low * FLOAT_BYTES, value + head_dim, token_bytes, slots)
                    fetch = ahead
                    for row in range(num_rows):
                        low, slots = _seen(first_position + row - index * page_size, page_size, window)
                        if slots < 1:
                            continue
                        value = keys + (page_size + low) * token_bytes
                        for member in range(0, group, TILE_HEADS):
                            heads = min(TILE_HEADS, group - member)
                            weights = at + (row * group + member) * stride + low * FLOAT_BYTES
                            sums = total.ctypes.data + (row * num_own + kv_head * group + member) * head_bytes
                            _add_values(
                                kind, heads, weights, stride, value, token_bytes, slots, sums, head_bytes, fetch
                            )  # fmt: skip
                            fetch = 0
            for row in range(num_rows):
                for head in range(num_own):
                    inverse = np.float32(1.0) / weight_sum[row, head]
                    place = ((first_row + row) * num_heads + first_head * group + head) * head_dim
                    for dim in range(head_dim):
                        output[place + dim] = total[row, head, dim] * inverse

    return attend


_seventeen_words = words(17)
#: By the type of K and V in the pages. Their items are blocks, times the parts of their KV heads.
ATTEND: Mapping[str, Kernel] = {
    name: Kernel(_attend_of(kind), "iii" + "iiii" + "iiiii" + "fif" + "ii")
    for name, kind in (("float32", FLOAT32), ("bfloat16", BFLOAT16), ("int8", INT8))
}


def can_attend(layout: KVLayout) -> bool:
    """Whether there is a kernel for such pages, their heads fill vectors of eight, and this CPU has these."""
    return layout.dtype in ATTEND and layout.head_dim % HEAD_UNIT == 0 and vir.is_fast_here()


def row_blocks(spans: Iterable[tuple[int, int, int, int]], group: int) -> np.ndarray:
    """Cut runs of rows into blocks that share the reading of their pages.

    Args:
        spans: for each sequence its row of the block table, its first query row, how many rows, the first's position.
        group: query heads that share a KV head.

    Returns:
        `[blocks, 4]` int64, the same four for each block.
    """
    blocks = []
    for table, row, num_rows, position in spans:
        done = 0
        while done < num_rows:
            count = _rows_of_block(num_rows - done, group)
            blocks.append((table, row + done, count, position + done))
            done += count
    return np.array(blocks, dtype=np.int64)


def _rows_of_block(num_rows: int, group: int) -> int:
    """How many of these rows the first block has."""
    count = min(max(BLOCK_LANES // group, 2), num_rows)
    if count * group < _FEWEST_LANES:
        return min(count, _FEW_ROWS)
    tail = count * group % _PARTS
    return max(count - -(-tail // group), 1) if 0 < tail <= _TAIL_LANES else count


class Reads:
    """What the rows of a batch read, made once for all its layers.

    Args:
        tables: block tables `[N, P]` int32.
        blocks: as `row_blocks` gives them. Both may be written anew between two forwards.
    """

    def __init__(self, tables: np.ndarray, blocks: np.ndarray) -> None:
        self._tables, self._blocks = tables, blocks  # kept for their memory
        self.num_blocks = len(self._blocks)
        self.has_chunks = bool((self._blocks[:, 2] > 1).any())
        # Made once: asking an array for its address costs as much as a small kernel.
        self.words = (
            self._tables.ctypes.data, len(tables), tables.strides[0] // tables.itemsize, self._blocks.ctypes.data,
            self.num_blocks,
        )  # fmt: skip


@functools.cache
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(n for n in range(1, number + 1) if number % n == 0)


def attend_call(
    kernel: Kernel,
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
        kernel: of such pages: one of `ATTEND`, or another that takes the same.
        reads: each query row in exactly one of its spans.
        layout: of the pages; `can_attend(layout)`.
        params: its sinks must stay where they are until then.
        pages: address of one layer of the arena, `[page][K|V][slot][kv_head][head_dim]`.
        query: address of `[rows, num_heads, head_dim]` float32, without gaps.
        output: address of memory like `query`. A row's result depends neither on the other rows nor on the threads: it
            is the same bits whether its token is decoded alone or is one of a long chunk.
        num_threads: how many threads the work is cut for.
    """
    kv_heads = layout.num_kv_heads
    # With few blocks the KV heads are shared out too, so that every thread has work, and as much as the others where a
    # block is much of it. For rows alone the order of memory is worth more.
    enough = (16 if reads.has_chunks else 4) * num_threads if num_threads > 1 else 1
    splits = next((n for n in _divisors(kv_heads) if n * reads.num_blocks >= enough), kv_heads)
    sinks = 0 if params.sinks is None else params.sinks.data_ptr()
    return kernel.call(
        reads.num_blocks * splits, query, num_heads, layout.head_dim, pages, *reads.words, kv_heads, splits,
        layout.page_size, params.scaling, params.window, params.softcap, sinks, output,
    )  # fmt: skip
