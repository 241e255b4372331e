"""Attention of many queries at once on the CPU: each query has a lane of a vector, and a page serves them all.

The queries of a KV head, those of all rows and of all heads that share it, are cut into slices of two registers.
Queries and sums of a slice lie transposed, number by number, so that a number of a key or of a value is multiplied with
all lanes, and softmax needs no sums across lanes. Pages are unpacked to float32 first, once for all slices.

A lane's result is the same bits as that of a row alone (`attention_kernel`). There a score is the sum of the partial
sums in the lanes of a vector, halves by halves; here these are made one after the other, and added in that order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from tandem.engine.cpu import vector_ir as vir
from tandem.engine.cpu.atomics import float32s
from tandem.engine.cpu.compiling import called, inlined
from tandem.engine.cpu.scratch import on_lines
from tandem.engine.cpu.vector_ir import BFLOAT16, INT8, KV_ITEM_BYTES, SCALE_BYTES
from tandem.engine.huge_pages import FLOAT_BYTES

_IS_WIDE = vir.has_wide_vectors()
#: What a row alone multiplies at once: the numbers of a register.
PARTS = vir.Vectors(16 if _IS_WIDE else 8)
# Queries of a slice: two registers of them. A number of a key or of a value, which is loaded for each product, then
# serves both. Of the last slice it may be half of them that are any.
_WHOLE, _PART = vir.Vectors(2 * PARTS.lanes), PARTS
_FORMS = _WHOLE, _PART
#: What the length of a head must be a multiple of: half a vector of sixteen may be left beyond whole ones.
HEAD_UNIT = 8
HALF = vir.Vectors(HEAD_UNIT) if PARTS.lanes > HEAD_UNIT else None
# Numba takes these for constants.
LANES, _PART_LANES, _ROW_BYTES, _PARTS = _WHOLE.lanes, _PART.lanes, _WHOLE.num_bytes, PARTS.lanes
#: Keys whose scores are made together, of a slice and of half of one: their sums, two vectors for each, and what these
#: are made of just have registers.
_TILE_KEYS = (4, 8) if _IS_WIDE else (3, 6)
#: Numbers of a head whose sums are made together.
_TILE_NUMBERS = 8 if _IS_WIDE else 4
#: Queries of a KV head that share unpacked pages, about.
BLOCK_LANES = 256


def kv_loader(vec: vir.Vectors, kind: int) -> Callable[[Any, Any], Any]:
    """Makes float32 of the numbers of pages at an address, in a register; pairs stay the bits that they are."""
    if kind == BFLOAT16:
        return lambda builder, address: vec.load_bfloat16(builder, address, alignment=vir.SHORT_BYTES)
    if kind == INT8:
        return lambda builder, address: vec.load_int8(builder, address, alignment=1)
    return vec.load


def weight_of(vec: vir.Vectors, builder: Any, difference: Any) -> Any:
    """`exp(difference)`, of numbers of at most zero; nothing where it would be less than the least normal number."""
    is_nothing = builder.fcmp_ordered("<", difference, vec.constant(-87.3))
    return builder.select(is_nothing, vec.constant(0.0), vec.exponential_above(builder, difference))


def _unpack_of(kind: int) -> Callable[..., None]:
    """Numbers of some slots of a head become float32 without gaps.

    Arguments: source, its stride, slots, numbers of each, destination, how far on to prefetch.
    """
    item_bytes = KV_ITEM_BYTES[kind]

    def emit(
        builder: Any, source: Any, stride: Any, slots: Any, numbers: Any, destination: Any, ahead: Any
    ) -> None:  # fmt: skip
        whole = builder.udiv(numbers, numbers.type(_PARTS))
        rest_at = builder.mul(whole, whole.type(_PARTS))
        has_rest = builder.icmp_unsigned("<", rest_at, numbers)
        part_bytes = _PARTS * item_bytes
        with cgutils.for_range(builder, slots) as loop:
            start = vir.advance(builder, source, stride, loop.index)
            to = vir.advance(builder, destination, builder.mul(numbers, numbers.type(FLOAT_BYTES)), loop.index)
            with cgutils.for_range(builder, whole) as part:
                place = vir.advance(builder, start, part.index.type(part_bytes), part.index)
                vir.prefetch(builder, builder.add(place, ahead))
                loaded = kv_loader(PARTS, kind)(builder, place)
                PARTS.store(builder, loaded, vir.advance(builder, to, part.index.type(PARTS.num_bytes), part.index))
            if HALF is not None:
                with builder.if_then(has_rest, likely=False):
                    place = vir.advance(builder, start, rest_at.type(item_bytes), rest_at)
                    loaded = kv_loader(HALF, kind)(builder, place)
                    HALF.store(builder, loaded, vir.advance(builder, to, rest_at.type(FLOAT_BYTES), rest_at))

    return emit


# Each number of the queries of a slice, the sums of each number, the scores or weights of each slot are a row: a number
# for each lane. Kernels are for vectors of all lanes, or of the first half of them.


def _row(builder: Any, rows: Any, index: Any) -> Any:
    """Address of a row."""
    return vir.advance(builder, rows, rows.type(_ROW_BYTES), index)


def _multiply(vec: vir.Vectors, builder: Any, row: Any, factors: Any) -> None:
    """In place."""
    vec.store(builder, builder.fmul(vec.load(builder, row), factors), row)


class Bounds:
    """Which lanes see a slot: those that begin at or before it, for so many."""

    def __init__(self, vec: vir.Vectors, builder: Any, lows: Any, lengths: Any) -> None:
        self._vec = vec
        self._lows, self._lengths = (vec.load_integers(builder, row) for row in (lows, lengths))

    def seen(self, builder: Any, slot: Any) -> Any:
        since = builder.sub(self._vec.spread_integer(builder, slot), self._lows)
        return builder.icmp_unsigned("<", since, self._lengths)


def _emit_scores(
    vec: vir.Vectors, tile_keys: int,
    builder: Any, query: Any, numbers: Any, keys: Any, first: Any, end: Any, scores: Any, scale: Any,
) -> None:  # fmt: skip
    """Scores of a slice with the keys `[first, end)` and up to `tile_keys - 1` more; tiles begin at `first`.

    The partial sums of a vector's lanes are made two and two, those that are added to each other first.
    Arguments: queries, numbers of one, keys, first, end, scores; then the scale.
    """
    half = _PARTS // 2
    pair_bytes = tile_keys * vec.num_bytes
    pair_sums = builder.ptrtoint(cgutils.alloca_once(builder, ir.ArrayType(vec.type, half * tile_keys)), first.type)
    key_bytes = builder.mul(numbers, numbers.type(FLOAT_BYTES))
    whole = builder.udiv(numbers, numbers.type(_PARTS))
    has_rest = builder.icmp_unsigned("!=", builder.urem(numbers, numbers.type(_PARTS)), numbers.type(0))
    numbers_each = builder.udiv(numbers, numbers.type(half))
    factor = vec.spread(builder, scale)
    with cgutils.for_range_slice(builder, first, end, first.type(tile_keys)) as (slot, _):
        start = vir.advance(builder, keys, key_bytes, slot)
        with cgutils.for_range(builder, first.type(half)) as pair:
            sums = [
                [cgutils.alloca_once_value(builder, vec.constant(0.0)) for _ in range(tile_keys)] for _ in range(2)
            ]
            own = _row(builder, query, builder.mul(numbers_each, pair.index))
            along = vir.advance(builder, start, first.type(FLOAT_BYTES), pair.index)

            def add(which: int, step: Any, own: Any = own, along: Any = along, sums: Any = sums) -> None:
                row = _row(builder, own, builder.add(builder.mul(step, step.type(2)), step.type(which)))
                part = vec.load(builder, row)
                place = vir.advance(builder, along, step.type(PARTS.num_bytes), step)
                place = vir.offset(builder, place, which * half * FLOAT_BYTES)
                for key, total in enumerate(sums[which]):
                    number = vir.load_real(builder, vir.advance(builder, place, key_bytes, key))
                    builder.store(vec.fma(builder, part, vec.spread(builder, number), builder.load(total)), total)

            with cgutils.for_range(builder, whole) as loop:
                add(0, loop.index)
                add(1, loop.index)
            with builder.if_then(has_rest, likely=False):
                add(0, whole)
            to = vir.advance(builder, pair_sums, first.type(pair_bytes), pair.index)
            for key, both in enumerate(zip(*sums, strict=True)):
                total = builder.fadd(*(builder.load(one) for one in both))
                vec.store(builder, total, vir.offset(builder, to, key * vec.num_bytes))
        to = _row(builder, scores, slot)
        for key in range(tile_keys):
            at = vir.offset(builder, pair_sums, key * vec.num_bytes)
            totals = [vec.load(builder, vir.offset(builder, at, pair_bytes * which)) for which in range(half)]
            while len(totals) > 1:
                middle = len(totals) // 2
                totals = [builder.fadd(*both) for both in zip(totals[:middle], totals[middle:], strict=True)]
            vec.store(builder, builder.fmul(totals[0], factor), vir.offset(builder, to, key * _ROW_BYTES))


def _weigh_slots(vec: vir.Vectors, *, masked: bool) -> Any:
    """Scores of a slice become weights, in place: online softmax. What was summed so far shrinks if a score is greater.

    Arguments: scores; slots, a multiple of the lanes of `PARTS`; the greatest score and the sum of weights so far; the
    sums of values so far, the numbers of each; lows and lengths of what lanes see, where `masked`.
    """

    def emit(
        builder: Any, scores: Any, slots: Any, greatest: Any, weight_sum: Any, total: Any, numbers: Any, lows: Any,
        lengths: Any,
    ) -> None:  # fmt: skip
        nothing = vec.constant(-math.inf)
        bounds = Bounds(vec, builder, lows, lengths) if masked else None
        before = vec.load(builder, greatest)
        found = cgutils.alloca_once_value(builder, before)
        with cgutils.for_range(builder, slots) as loop:
            row = _row(builder, scores, loop.index)
            value = vec.load(builder, row)
            if bounds is not None:
                value = builder.select(bounds.seen(builder, loop.index), value, nothing)
                vec.store(builder, value, row)
            builder.store(vec.greater(builder, value, builder.load(found)), found)
        now = builder.load(found)
        rises = builder.fcmp_ordered(">", now, before)
        with builder.if_then(vec.any_lane(builder, rises)):
            factors = builder.select(rises, weight_of(vec, builder, builder.fsub(before, now)), vec.constant(1.0))
            vec.store(builder, now, greatest)
            _multiply(vec, builder, weight_sum, factors)
            with cgutils.for_range(builder, numbers) as loop:
                _multiply(vec, builder, _row(builder, total, loop.index), factors)
        if masked:  # a lane may have seen nothing yet
            now = builder.select(builder.fcmp_ordered("==", now, nothing), vec.constant(0.0), now)
        with cgutils.for_range(builder, slots) as loop:
            row = _row(builder, scores, loop.index)
            vec.store(builder, weight_of(vec, builder, builder.fsub(vec.load(builder, row), now)), row)

        def sum_of(first: int, step: int) -> Any:
            """Added as `Vectors.sum_of` adds lanes."""
            if step < _PARTS:
                return builder.fadd(*(sum_of(begin, 2 * step) for begin in (first, first + step)))
            total = cgutils.alloca_once_value(builder, vec.constant(0.0))
            with cgutils.for_range_slice(builder, slots.type(first), slots, slots.type(step)) as (slot, _):
                weight = vec.load(builder, _row(builder, scores, slot))
                builder.store(builder.fadd(builder.load(total), weight), total)
            return builder.load(total)

        vec.store(builder, builder.fadd(vec.load(builder, weight_sum), sum_of(0, 1)), weight_sum)

    return vir.apart(f"lanes_weights_{vec.lanes}{'_masked' if masked else ''}", emit)


def _add_slots(vec: vir.Vectors, *, masked: bool) -> Any:
    """Adds the weighted values of the slots `[first, end)` to the sums of a slice.

    Arguments: weights, first, end, values, numbers of each, sums; lows and lengths of what lanes see, where `masked`:
    what a lane does not see may be anything.
    """

    def emit(
        builder: Any, weights: Any, first: Any, end: Any, values: Any, numbers: Any, total: Any, lows: Any, lengths: Any
    ) -> None:  # fmt: skip
        bounds = Bounds(vec, builder, lows, lengths) if masked else None
        value_bytes = builder.mul(numbers, numbers.type(FLOAT_BYTES))
        step = numbers.type(_TILE_NUMBERS)
        with cgutils.for_range_slice(builder, numbers.type(0), numbers, step) as (number, _):
            start = _row(builder, total, number)
            rows = [vir.offset(builder, start, n * _ROW_BYTES) for n in range(_TILE_NUMBERS)]
            sums = [cgutils.alloca_once_value(builder, vec.load(builder, row)) for row in rows]
            column = vir.advance(builder, values, number.type(FLOAT_BYTES), number)
            with cgutils.for_range_slice(builder, first, end, first.type(1)) as (slot, _):
                weight = vec.load(builder, _row(builder, weights, slot))
                seen = None if bounds is None else bounds.seen(builder, slot)
                place = vir.advance(builder, column, value_bytes, slot)
                for n, one in enumerate(sums):
                    value = vec.spread(builder, vir.load_real(builder, vir.offset(builder, place, n * FLOAT_BYTES)))
                    old = builder.load(one)
                    new = vec.fma(builder, weight, value, old)
                    builder.store(new if seen is None else builder.select(seen, new, old), one)
            for row, one in zip(rows, sums, strict=True):
                vec.store(builder, builder.load(one), row)

    return vir.apart(f"lanes_values_{vec.lanes}{'_masked' if masked else ''}", emit)


def _emit_scale(vec: vir.Vectors, builder: Any, rows: Any, first: Any, end: Any, scales: Any) -> None:
    """Multiplies the scores or the weights of the slots `[first, end)` with the scales of these."""
    with cgutils.for_range_slice(builder, first, end, first.type(1)) as (slot, _):
        scale = vir.load_real(builder, vir.advance(builder, scales, slot.type(FLOAT_BYTES), slot))
        _multiply(vec, builder, _row(builder, rows, slot), vec.spread(builder, scale))


_unpack = vir.kernel_by_kind(6, 0, types.void, _unpack_of)


def _by_form(num_addresses: int, num_floats: int, emits: Sequence[Callable[..., None]]) -> Callable[..., None]:
    """A kernel of which there is one for each form; its first argument says which."""
    return vir.kernel(
        1 + num_addresses, num_floats, types.void,
        partial(vir.emit_by_number, range(len(emits)), lambda form, *arguments: emits[form](*arguments)),
    )  # fmt: skip


# Of slices and of halves of one; weights and values of each first without and then with a mask.
_scores = _by_form(6, 1, [
    vir.apart(f"lanes_scores_{vec.lanes}", partial(_emit_scores, vec, tile_keys))
    for vec, tile_keys in zip(_FORMS, _TILE_KEYS, strict=True)
])  # fmt: skip
_weigh = _by_form(8, 0, [_weigh_slots(vec, masked=masked) for vec in _FORMS for masked in (False, True)])
_add = _by_form(8, 0, [_add_slots(vec, masked=masked) for vec in _FORMS for masked in (False, True)])
_scale = _by_form(4, 0, [partial(_emit_scale, vec) for vec in _FORMS])
_load_real = vir.kernel(1, 0, types.float32, vir.load_real)


@inlined
def _unpack_slots(kind, source, stride, slots, numbers, to, scales, ahead):  # type: ignore[no-untyped-def] # pragma: no cover
    _unpack(kind, source, stride, slots, numbers, to.ctypes.data, ahead)
    if SCALE_BYTES[kind]:
        for slot in range(slots):
            scales[slot] = _load_real(source + slot * stride + numbers)


@inlined
def _seen(position, begin, page_size, window):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """The slots `[first, end)` that the token at `position` sees of the page whose first token is at `begin`."""
    first = max(position - window + 1 - begin, 0) if window > 0 else 0
    return first, min(position + 1 - begin, page_size)


@called
def attend_lanes(  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    kind,
    query,
    num_heads,
    head_dim,
    pages,
    table,
    kv_heads,
    kv_head,
    page_size,
    first_row,
    num_rows,
    first_position,
    scaling,
    window,
    softcap,
    sinks_at,
    output,
    scratch,
):
    """All queries that share `kv_head`, of rows that follow one another in a sequence.

    `table` holds the sequence's pages; `scratch` is as `make_scratch` gives it.
    """
    numba.literally(kind)
    greatest, weight_sum, lows, lengths, queries, total, scores, keys, values, key_scales, value_scales = scratch
    group = num_heads // kv_heads
    lanes = num_rows * group
    slices = (lanes + LANES - 1) // LANES
    kv_bytes = head_dim * KV_ITEM_BYTES[kind] + SCALE_BYTES[kind]
    token_bytes = kv_heads * kv_bytes
    part_bytes = page_size * token_bytes
    padded = (page_size + _PARTS - 1) // _PARTS * _PARTS
    given, sinks, to = float32s(query), float32s(sinks_at), float32s(output)
    for piece in range(slices):
        for lane in range(LANES):
            # The lanes beyond the last query do the same as it; nobody reads them.
            which = min(piece * LANES + lane, lanes - 1)
            head = kv_head * group + which % group
            start = ((first_row + which // group) * num_heads + head) * head_dim
            place = lane
            for index in range(_PARTS // 2):  # in the order in which scores are made of them
                for number in range(index, head_dim, _PARTS // 2):
                    queries[piece, place] = given[start + number]
                    place += LANES
            greatest[piece, lane] = sinks[head] if sinks_at else -np.inf
    total[:slices] = 0
    weight_sum[:slices] = 1 if sinks_at else 0  # a sink is as a first score, whose value is zero
    last_position = first_position + num_rows - 1
    first_seen = max(first_position - window + 1, 0) if window > 0 else 0
    for index in range(first_seen // page_size, last_position // page_size + 1):
        page = pages + table[index] * 2 * part_bytes
        key = page + kv_head * kv_bytes
        begin = index * page_size
        slots = min(last_position + 1 - begin, page_size)
        ahead = 0
        if index < last_position // page_size:
            ahead = pages + table[index + 1] * 2 * part_bytes - page
        _unpack_slots(kind, key, token_bytes, slots, head_dim, keys, key_scales, ahead)
        _unpack_slots(kind, key + part_bytes, token_bytes, slots, head_dim, values, value_scales, ahead)
        for piece in range(slices):
            # Some row sees the slots `[seen, seen_end)`; all see all of the page where none is `masked`.
            low = first_position + piece * LANES // group
            high = first_position + (min((piece + 1) * LANES, lanes) - 1) // group
            seen, seen_end = _seen(low, begin, page_size, window)[0], min(high + 1 - begin, page_size)
            if seen >= seen_end:
                continue
            masked = low + 1 - begin < padded or page_size < padded or _seen(high, begin, page_size, window)[0] > 0
            if masked:
                for lane in range(LANES):
                    position = first_position + min(piece * LANES + lane, lanes - 1) // group
                    lows[lane], end = _seen(position, begin, page_size, window)
                    lengths[lane] = max(end - lows[lane], 0)
            of_greatest, of_sum = greatest[piece].ctypes.data, weight_sum[piece].ctypes.data
            of_total, rows = total[piece].ctypes.data, scores.ctypes.data
            bounds, bound_lengths = lows.ctypes.data, lengths.ctypes.data
            of_queries, of_keys, of_values = queries[piece].ctypes.data, keys.ctypes.data, values.ctypes.data
            form = 1 if lanes - piece * LANES <= _PART_LANES else 0
            masked_form = 2 * form + masked
            tile = seen // _TILE_KEYS[form] * _TILE_KEYS[form]
            _scores(form, of_queries, head_dim, of_keys, tile, seen_end, rows, scaling)
            if SCALE_BYTES[kind]:
                _scale(form, rows, seen, seen_end, key_scales.ctypes.data)
            if softcap > 0:
                for slot in range(seen, seen_end):
                    for place in range(slot * LANES, slot * LANES + (_PART_LANES if form else LANES)):
                        scores[place] = softcap * math.tanh(scores[place] / softcap)
            _weigh(masked_form, rows, padded, of_greatest, of_sum, of_total, head_dim, bounds, bound_lengths)
            if SCALE_BYTES[kind]:
                _scale(form, rows, seen, seen_end, value_scales.ctypes.data)
            _add(masked_form, rows, seen, seen_end, of_values, head_dim, of_total, bounds, bound_lengths)
    for which in range(lanes):
        piece, lane = which // LANES, which % LANES
        inverse = np.float32(1.0) / weight_sum[piece, lane]
        start = ((first_row + which // group) * num_heads + kv_head * group + which % group) * head_dim
        for number in range(head_dim):
            to[start + number] = total[piece, number * LANES + lane] * inverse


@inlined
def make_scratch(lanes, head_dim, page_size):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Memory for `attend_lanes` with up to so many queries of a KV head."""
    slices = (lanes + LANES - 1) // LANES
    padded = (page_size + _PARTS - 1) // _PARTS * _PARTS
    room = padded + max(_TILE_KEYS)
    keys = on_lines(room * head_dim)
    if lanes:  # of the last tile some may not be any; to multiply what lay there would take long if it is denormal
        keys[:] = 0
    return (
        on_lines(slices * LANES).reshape(slices, LANES),
        on_lines(slices * LANES).reshape(slices, LANES),
        np.empty(LANES, dtype=np.int32),
        np.empty(LANES, dtype=np.int32),
        on_lines(slices * head_dim * LANES).reshape(slices, head_dim * LANES),
        on_lines(slices * head_dim * LANES).reshape(slices, head_dim * LANES),
        on_lines(room * LANES),
        keys,
        on_lines(room * head_dim),
        np.empty(padded, dtype=np.float32),
        np.empty(padded, dtype=np.float32),
    )
