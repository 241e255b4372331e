"""Attention over pages of bfloat16 in tiles (`tiles`); queries and weights are rounded too, and sums are float32.

Keys are the rows of a tile and queries its columns, so sixteen queries have the lanes of a vector from scores to sums
of values, and softmax needs no sums across lanes. Values are turned, so that their numbers are rows too.

The queries of a row block are cut into slices of sixteen. Those of many rows are all of one KV head. Those of few rows,
as decode has, are of several KV heads, and each of these multiplies the slice's columns that are its own.

Softmax is online, `_UNIT` slots at a time from the sequence's first on. Whatever else is in the block, a query goes
through the same steps: what it does not see has a weight of zero, which changes no bit of its output.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from tandem.engine.cpu import vector_ir as vir
from tandem.engine.cpu.atomics import float32s, int32s, int64s, real, words
from tandem.engine.cpu.attention_lanes import Bounds
from tandem.engine.cpu.compiling import called, inlined
from tandem.engine.cpu.scratch import on_lines
from tandem.engine.cpu.threads import Kernel
from tandem.engine.cpu.tiles import (
    ROW_BYTES,
    ROWS,
    TILE_BYTES,
    emit_configure,
    emit_load,
    emit_multiply,
    emit_store,
    emit_zero,
    release,
)
from tandem.engine.huge_pages import FLOAT_BYTES
from tandem.engine.layout import KVLayout

_VEC = vir.Vectors(ROWS)
_SHORT_BYTES = vir.SHORT_BYTES
#: Numbers of a head, or slots, that one product of tiles takes.
_PAIRED = ROW_BYTES // _SHORT_BYTES
_PAIRED_BYTES = _PAIRED * FLOAT_BYTES  # in float32
#: Slots that softmax takes at a time: two products of weights and values.
_UNIT = 2 * _PAIRED
_UNIT_TILES = _UNIT // ROWS
_HALF_WEIGHTS = TILE_BYTES  # bytes of half a unit's
_OFFSET_BYTES = 8
# Registers: of scores or sums of values; of columns, which are queries or weights; of rows, which are keys or values.
_SUMS, _COLUMNS, _OF_ROWS = (0, 1), (2, 3), (4, 5)
# Less than any score, and finite: the difference of two is a number.
_LOWEST = -3e38
_LOG2_E = 1.44269504088896341
_SHORT, _INDEX = ir.IntType(16), ir.IntType(32)
_SHORTS = ir.VectorType(_SHORT, _PAIRED)
_PAIRS = ir.VectorType(_INDEX, ROWS)


# --- vectors ----------------------------------------------------------------------------------------------------------


def _shuffled(builder: Any, first: Any, second: Any, places: list[int]) -> Any:
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(_INDEX, len(places)), places))


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """The columns of sixteen vectors of sixteen numbers of 32 bits."""
    width = 1
    while width < ROWS:
        # Blocks of `width` by `width` at the far corners of blocks twice as wide change places.
        low = [i if not i & width else i - width + ROWS for i in range(ROWS)]
        high = [i + width if not i & width else i + ROWS for i in range(ROWS)]
        rows = [
            _shuffled(builder, rows[i], rows[i + width], low)
            if not i & width
            else _shuffled(builder, rows[i - width], rows[i], high)
            for i in range(ROWS)
        ]
        width *= 2
    return rows


def _power_of_two(builder: Any, x: Any) -> Any:
    """2 to the power of `x <= 0`, to 4e-6 relative; below -126 it is that of -126. NaN stays NaN."""
    x = builder.select(builder.fcmp_ordered("<", x, _VEC.constant(-126.0)), _VEC.constant(-126.0), x)
    whole = _VEC.nearest_whole(builder, x)
    rest = builder.fsub(x, whole)
    # Fitted to 2 ** r for |r| <= 1 / 2.
    series = _VEC.constant(9.60039533674717e-3)
    for coefficient in (5.591689422726631e-2, 0.24023719131946564, 0.6931219696998596, 1.0):
        series = _VEC.fma(builder, series, rest, _VEC.constant(coefficient))
    return _VEC.times_power_of_two(builder, series, whole)


# --- pieces -----------------------------------------------------------------------------------------------------------


def _emit_begin(builder: Any, width: Any) -> None:
    """Sums and columns are of so many queries."""
    row_bytes = builder.mul(width, width.type(FLOAT_BYTES))
    emit_configure(builder, {}, dict.fromkeys((*_SUMS, *_COLUMNS), row_bytes))


def _row_of(builder: Any, start: Any, offsets: Any, lane: int) -> Any:
    """Address of a lane's query or output."""
    place = builder.inttoptr(vir.offset(builder, offsets, lane * _OFFSET_BYTES), offsets.type.as_pointer())
    return builder.add(start, builder.load(place))


def _emit_pack_queries(builder: Any, start: Any, offsets: Any, num_tiles: Any, target: Any) -> None:
    """Tiles of columns from sixteen queries."""
    with cgutils.for_range(builder, num_tiles) as loop:
        rows = []
        for lane in range(ROWS):
            row = _row_of(builder, start, offsets, lane)
            row = vir.advance(builder, row, num_tiles.type(_PAIRED_BYTES), loop.index)
            parts = [_VEC.load(builder, vir.offset(builder, row, n * _VEC.num_bytes)) for n in range(2)]
            rows.append(builder.bitcast(_VEC.rounded(builder, *parts), _PAIRS))
        to = vir.advance(builder, target, loop.index.type(TILE_BYTES), loop.index)
        for number, row in enumerate(_transposed(builder, rows)):
            vir.store_bits(builder, row, vir.offset(builder, to, number * ROW_BYTES))


def _emit_scores(
    builder: Any, queries: Any, num_tiles: Any, first: Any, second: Any, stride: Any, scores: Any, first_ahead: Any,
    second_ahead: Any, ahead_stride: Any,
) -> None:  # fmt: skip
    """Products of a slice's queries with twice sixteen keys, from `first` and from `second` on. As many that lie ahead
    are fetched, where these are not 0."""
    for number in _SUMS:
        emit_zero(builder, number)
    row_bytes = num_tiles.type(ROW_BYTES)
    with cgutils.for_range(builder, num_tiles) as loop:
        columns = vir.advance(builder, queries, num_tiles.type(TILE_BYTES), loop.index)
        emit_load(builder, _COLUMNS[0], columns, row_bytes)
        tiles = zip((first, second), (first_ahead, second_ahead), _OF_ROWS, _SUMS, strict=True)
        for keys, ahead, of_rows, sums in tiles:
            emit_load(builder, of_rows, vir.advance(builder, keys, row_bytes, loop.index), stride)
            emit_multiply(builder, sums, of_rows, _COLUMNS[0])
            with builder.if_then(builder.icmp_signed("!=", ahead, ahead.type(0))):
                start = vir.advance(builder, ahead, row_bytes, loop.index)
                for slot in range(ROWS):
                    vir.prefetch(builder, vir.advance(builder, start, ahead_stride, slot))
    for half, number in enumerate(_SUMS):
        emit_store(builder, number, vir.offset(builder, scores, half * TILE_BYTES), row_bytes)


def _emit_cap(builder: Any, scores: Any, slots: Any, scale: Any, cap: Any) -> None:
    """`cap * tanh(score * scale / cap)` of the scores of so many slots, in place."""
    factor = _VEC.spread(builder, builder.fdiv(builder.fmul(scale, vir.REAL(-2.0 * _LOG2_E)), cap))
    one, caps = _VEC.constant(1.0), _VEC.spread(builder, cap)
    with cgutils.for_range(builder, slots) as loop:
        row = vir.advance(builder, scores, slots.type(ROW_BYTES), loop.index)
        score = _VEC.load(builder, row)
        power = _power_of_two(builder, builder.fmul(_VEC.absolute(builder, score), factor))
        tanh = builder.fdiv(builder.fsub(one, power), builder.fadd(one, power))
        is_negative = builder.fcmp_ordered("<", score, _VEC.constant(0.0))
        tanh = builder.select(is_negative, _VEC.negative(builder, tanh), tanh)
        _VEC.store(builder, builder.fmul(tanh, caps), row)


def _weigh_of(*, masked: bool) -> Any:
    """Scores of a slice become weights, as tiles of columns. What was summed so far shrinks if a score is greater.

    Arguments: scores; slots, a multiple of `_PAIRED`; weights; the greatest score so far, times the factor, and the sum
    of weights so far; the sums of values so far, the numbers of each; lows and lengths of what lanes see, where
    `masked`; then the factor of scores that makes them powers of two.
    """

    def emit(
        builder: Any, scores: Any, slots: Any, weights: Any, greatest: Any, weight_sum: Any, total: Any, numbers: Any,
        lows: Any, lengths: Any, factor: Any,
    ) -> None:  # fmt: skip
        bounds = Bounds(builder, lows, lengths) if masked else None
        nothing = _VEC.constant(_LOWEST)
        row_bytes = slots.type(ROW_BYTES)
        found = [cgutils.alloca_once_value(builder, nothing) for _ in range(4)]
        with cgutils.for_range_slice(builder, slots.type(0), slots, slots.type(len(found))) as (slot, _):
            for n, one in enumerate(found):
                row = vir.advance(builder, scores, row_bytes, builder.add(slot, slot.type(n)))
                value = _VEC.load(builder, row)
                if bounds is not None:
                    value = builder.select(bounds.seen(builder, builder.add(slot, slot.type(n))), value, nothing)
                    _VEC.store(builder, value, row)
                builder.store(_VEC.greater(builder, value, builder.load(one)), one)
        first, second, third, fourth = (builder.load(one) for one in found)
        top = _VEC.greater(builder, _VEC.greater(builder, first, second), _VEC.greater(builder, third, fourth))
        factors = _VEC.spread(builder, factor)
        before = _VEC.load(builder, greatest)
        now = _VEC.greater(builder, builder.fmul(top, factors), before)
        rises = builder.fcmp_ordered(">", now, before)
        with builder.if_then(_VEC.any_lane(builder, rises)):
            shrunk = builder.select(rises, _power_of_two(builder, builder.fsub(before, now)), _VEC.constant(1.0))
            _VEC.store(builder, now, greatest)
            _VEC.store(builder, builder.fmul(_VEC.load(builder, weight_sum), shrunk), weight_sum)
            with cgutils.for_range(builder, numbers) as loop:
                row = vir.advance(builder, total, row_bytes, loop.index)
                _VEC.store(builder, builder.fmul(_VEC.load(builder, row), shrunk), row)
        minus = _VEC.negative(builder, now)
        sums = [cgutils.alloca_once_value(builder, _VEC.constant(0.0)) for _ in range(2)]
        two = slots.type(2)
        with cgutils.for_range(builder, builder.udiv(slots, two)) as loop:
            slot = builder.mul(loop.index, two)
            pair = []
            for n, total_of in enumerate(sums):
                value = _VEC.load(builder, vir.advance(builder, scores, row_bytes, builder.add(slot, slot.type(n))))
                weight = _power_of_two(builder, _VEC.fma(builder, value, factors, minus))
                if bounds is not None:
                    seen = bounds.seen(builder, builder.add(slot, slot.type(n)))
                    weight = builder.select(seen, weight, _VEC.constant(0.0))
                builder.store(builder.fadd(builder.load(total_of), weight), total_of)
                pair.append(weight)
            halves = _VEC.rounded(builder, *pair)
            places = [place for lane in range(ROWS) for place in (lane, lane + ROWS)]
            row = vir.advance(builder, weights, row_bytes, loop.index)
            vir.store_bits(builder, _shuffled(builder, halves, halves, places), row)
        added = builder.fadd(*(builder.load(one) for one in sums))
        _VEC.store(builder, builder.fadd(_VEC.load(builder, weight_sum), added), weight_sum)

    return vir.kernel(9, 1, types.void, vir.apart(f"tiles_weigh{'_masked' if masked else ''}", emit))


def _emit_pack_values(
    builder: Any, first: Any, second: Any, stride: Any, end: Any, numbers: Any, target: Any, first_ahead: Any,
    second_ahead: Any, ahead_stride: Any, odd: Any,
) -> None:  # fmt: skip
    """Tiles of rows from the values of twice sixteen slots, from `first` and from `second` on: a row for each of
    `numbers`. From the slot `end` on there are none, and zeros stand for them. As many that lie ahead are fetched.
    The word at `odd` is no longer 0 where some value is not finite.
    """
    amount, infinite = (ir.Constant(_SHORTS, [bits] * _PAIRED) for bits in (0x7FFF, 0x7F80))
    zeros = cgutils.alloca_once_value(builder, ir.Constant(_SHORTS, [0] * _PAIRED))
    nothing = builder.ptrtoint(zeros, end.type)
    # Of two vectors: what lies in the lower, and in the upper half of each.
    halves = [[place for n in range(begin, begin + ROWS) for place in (n, n + _PAIRED)] for begin in (0, ROWS)]
    along = end.type(ROW_BYTES)
    with cgutils.for_range(builder, builder.udiv(numbers, numbers.type(_PAIRED))) as loop:
        low: list[Any] = []
        high: list[Any] = []
        greatest = ir.Constant(_SHORTS, [0] * _PAIRED)
        for pair in range(_PAIRED // 2):
            both = []
            for slot in (2 * pair, 2 * pair + 1):
                own, ahead = (first, first_ahead) if slot < ROWS else (second, second_ahead)
                place, next_place = (
                    vir.advance(builder, vir.advance(builder, start, distance, slot % ROWS), along, loop.index)
                    for start, distance in ((own, stride), (ahead, ahead_stride))
                )
                vir.prefetch(builder, next_place)
                place = builder.select(builder.icmp_signed("<", end.type(slot), end), place, nothing)
                loaded = builder.load(builder.inttoptr(place, _SHORTS.as_pointer()))
                loaded.align = _SHORT_BYTES
                both.append(loaded)
                bits = builder.and_(loaded, amount)
                greatest = builder.select(builder.icmp_unsigned(">", bits, greatest), bits, greatest)
            for rows, places in zip((low, high), halves, strict=True):
                rows.append(builder.bitcast(_shuffled(builder, both[0], both[1], places), _PAIRS))
        are_odd = builder.bitcast(builder.icmp_unsigned(">=", greatest, infinite), ir.IntType(_PAIRED))
        with builder.if_then(builder.icmp_unsigned("!=", are_odd, are_odd.type(0)), likely=False):
            builder.store(end.type(1), builder.inttoptr(odd, end.type.as_pointer()))
        to = vir.advance(builder, target, end.type(2 * TILE_BYTES), loop.index)
        for tile, rows in enumerate((low, high)):
            for number, row in enumerate(_transposed(builder, rows)):
                vir.store_bits(builder, row, vir.offset(builder, to, tile * TILE_BYTES + number * ROW_BYTES))


def _add_values_of(num_halves: int) -> Any:
    """Adds values to sums, with weights of half a unit or a whole one. Arguments: values; bytes of half a unit of them;
    weights; sums; how many tiles these are."""

    def emit(builder: Any, values: Any, half_bytes: Any, weights: Any, total: Any, num_tiles: Any) -> None:
        row_bytes = num_tiles.type(ROW_BYTES)
        for half in range(num_halves):
            emit_load(builder, _COLUMNS[half], vir.offset(builder, weights, half * _HALF_WEIGHTS), row_bytes)
        with cgutils.for_range(builder, num_tiles) as loop:
            sums = vir.advance(builder, total, num_tiles.type(TILE_BYTES), loop.index)
            rows = vir.advance(builder, values, num_tiles.type(TILE_BYTES), loop.index)
            emit_load(builder, _SUMS[0], sums, row_bytes)
            for half in range(num_halves):
                emit_load(builder, _OF_ROWS[half], vir.advance(builder, rows, half_bytes, half), row_bytes)
                emit_multiply(builder, _SUMS[0], _OF_ROWS[half], _COLUMNS[half])
            emit_store(builder, _SUMS[0], sums, row_bytes)

    return vir.kernel(5, 0, types.void, emit)


def _emit_finish(builder: Any, total: Any, num_tiles: Any, weight_sum: Any, start: Any, offsets: Any) -> None:
    """Sums of values over those of weights, to sixteen outputs: one that several lanes have is the first's."""
    inverse = builder.fdiv(_VEC.constant(1.0), _VEC.load(builder, weight_sum))
    with cgutils.for_range(builder, num_tiles) as loop:
        tile = vir.advance(builder, total, num_tiles.type(TILE_BYTES), loop.index)
        rows = [_VEC.load(builder, vir.offset(builder, tile, number * ROW_BYTES)) for number in range(ROWS)]
        # A sum of nothing but zeros may have either sign, by what else was computed with it.
        rows = [builder.fadd(builder.fmul(row, inverse), _VEC.constant(0.0)) for row in rows]
        found = _transposed(builder, rows)
        for lane, row in reversed(list(enumerate(found))):
            output = _row_of(builder, start, offsets, lane)
            _VEC.store(builder, row, vir.advance(builder, output, num_tiles.type(ROW_BYTES), loop.index))


_begin = vir.kernel(1, 0, types.void, _emit_begin)
_pack_queries = vir.kernel(4, 0, types.void, vir.apart("tiles_queries", _emit_pack_queries))
_scores = vir.kernel(9, 0, types.void, vir.apart("tiles_scores", _emit_scores))
_cap = vir.kernel(2, 2, types.void, vir.apart("tiles_cap", _emit_cap))
_weigh, _weigh_seen = (_weigh_of(masked=masked) for masked in (False, True))
_pack_values = vir.kernel(10, 0, types.void, vir.apart("tiles_values", _emit_pack_values))
_add_half, _add_unit = _add_values_of(1), _add_values_of(2)
_finish = vir.kernel(5, 0, types.void, vir.apart("tiles_finish", _emit_finish))


# --- blocks -----------------------------------------------------------------------------------------------------------


@inlined
def _find_unit(places, pages, table, begin, last, page_size, page_bytes):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Where the keys of a unit from the slot `begin` on lie, in tiles; those behind the slot `last` as that one's."""
    for tile in range(_UNIT_TILES):
        slot = min(begin + tile * ROWS, last // ROWS * ROWS)
        places[tile] = pages + table[slot // page_size] * page_bytes + slot % page_size * (page_bytes // 2 // page_size)


@inlined
def _first_unit(position, window):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """The first slot of the first unit of which the token at `position` sees something."""
    return max(position - window + 1, 0) // _UNIT * _UNIT if window > 0 else 0


@inlined
def _column(piece, lane, columns):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Which query of its KV head a lane of a slice has. Lanes beyond the last one have that one too."""
    return min(piece * ROWS + lane, columns - 1) if columns > ROWS else lane % columns


@inlined
def _see(lows, lengths, unit, piece, columns, group, first_position, window):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """What the lanes of a slice see of a unit: from which slot on, and how many."""
    for lane in range(ROWS):
        position = first_position + _column(piece, lane, columns) // group
        lows[lane] = max(position - window + 1 - unit, 0) if window > 0 else 0
        lengths[lane] = max(min(position + 1 - unit, _UNIT) - lows[lane], 0)


@called
def _set_apart(values, numbers, odd_slots):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Values that are not finite become zeros, of a unit as `_pack_values` leaves it: a weight of zero would make NaN
    of them, for queries that do not see them. Says of which slots there are some."""
    odd_slots[:] = 0
    bits = values.view(np.uint16)
    for place in range(2 * numbers * _PAIRED):
        if bits[place] & 0x7F80 == 0x7F80:
            bits[place] = 0
            odd_slots[place // (numbers * _PAIRED) * _PAIRED + place % _PAIRED] = 1


@called
def _attend_heads(  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    query,
    num_heads,
    head_dim,
    pages,
    table,
    next_table,
    next_begin,
    next_position,
    next_head,
    kv_heads,
    first_head,
    num_together,
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
    """The queries of `num_together` KV heads: of one, or of several where those of one do not fill a slice.

    `table` holds the sequence's pages. Of those of `next_table` the slots from `next_begin` to `next_position` will be
    read next, from `next_head` on.
    """
    greatest, weight_sum, offsets, queries, total, values, scores, weights, lows, lengths, odd_slots = scratch
    factor = np.float32(_LOG2_E) * (scaling if softcap <= 0 else np.float32(1.0))
    sinks = float32s(sinks_at)
    group = num_heads // kv_heads
    kv_bytes, head_bytes = head_dim * _SHORT_BYTES, head_dim * FLOAT_BYTES
    token_bytes = kv_heads * kv_bytes
    of_values = page_size * token_bytes  # from a key to its value
    query_tiles, total_tiles = head_dim // _PAIRED, head_dim // ROWS
    half_bytes = total_tiles * TILE_BYTES
    last_position = first_position + num_rows - 1
    columns = num_rows * group  # of a KV head
    is_many = columns > ROWS
    width = min(columns, ROWS)
    parts = ROWS // width  # KV heads of a slice
    slices = (columns + ROWS - 1) // ROWS if is_many else (num_together + parts - 1) // parts
    # Of what comes next the heads of a few slots are fetched one after the other, where all are read together.
    fetch_bytes, fetch_stride = (ROWS * kv_bytes, kv_bytes) if num_together == kv_heads else (kv_bytes, token_bytes)
    scores_at, weights_at, values_at = scores.ctypes.data, weights.ctypes.data, values.ctypes.data
    places, next_places = np.empty(_UNIT_TILES, dtype=np.int64), np.empty(_UNIT_TILES, dtype=np.int64)
    odd = np.zeros(1, dtype=np.int64)
    for piece in range(slices):
        for lane in range(ROWS):
            column = _column(piece, lane, columns)
            kv_head = first_head if is_many else first_head + min(piece * parts + lane // width, num_together - 1)
            head = kv_head * group + column % group
            offsets[piece, lane] = ((first_row + column // group) * num_heads + head) * head_bytes
            greatest[piece, lane] = sinks[head] * np.float32(_LOG2_E) if sinks_at else _LOWEST
        _pack_queries(query, offsets[piece].ctypes.data, query_tiles, queries[piece].ctypes.data)
    total[:slices] = 0
    weight_sum[:slices] = 1 if sinks_at else 0  # a sink is as a first score, whose value is zero
    begin = _first_unit(first_position, window)
    _find_unit(places, pages, table, begin, last_position, page_size, 2 * of_values)
    for unit in range(begin, last_position + 1, _UNIT):
        # Memory would rest while a unit is computed: each part of it fetches that of the next.
        to_next_head = 0
        if unit + _UNIT <= last_position:
            _find_unit(next_places, pages, table, unit + _UNIT, last_position, page_size, 2 * of_values)
        else:
            _find_unit(next_places, pages, next_table, next_begin, next_position, page_size, 2 * of_values)
            to_next_head = next_head - first_head
        packed_head = -1
        for piece in range(slices):
            low, high = first_position, last_position
            if is_many:
                low += piece * ROWS // group
                high = first_position + (min((piece + 1) * ROWS, columns) - 1) // group
            seen_end = min(high + 1 - unit, _UNIT)
            if seen_end <= (max(low - window + 1 - unit, 0) if window > 0 else 0):
                continue
            halves = (seen_end + _PAIRED - 1) // _PAIRED
            slots = halves * _PAIRED
            filled = 1 if is_many else min(parts, num_together - piece * parts)
            of_queries, of_total = queries[piece].ctypes.data, total[piece].ctypes.data
            of_greatest, of_sum = greatest[piece].ctypes.data, weight_sum[piece].ctypes.data
            fetches = packed_head < 0 or not is_many
            for part in range(filled):
                head = first_head + piece * parts + part if not is_many else first_head
                across = part * width * FLOAT_BYTES
                for tile in range(0, 2 * halves, 2):
                    fetched = (head + to_next_head) * fetch_bytes
                    ahead, next_ahead = next_places[tile] + fetched, next_places[tile + 1] + fetched
                    _scores(
                        of_queries + across, query_tiles, places[tile] + head * kv_bytes,
                        places[tile + 1] + head * kv_bytes, token_bytes, scores_at + tile * TILE_BYTES + across,
                        ahead if fetches else 0, next_ahead if fetches else 0, fetch_stride,
                    )  # fmt: skip
            if softcap > 0:
                _cap(scores_at, slots, scaling, softcap)
            if low + 1 - unit < slots or (window > 0 and high - window + 1 > unit):  # some lane does not see all
                _see(lows, lengths, unit, piece, columns, group, first_position, window)
                _weigh_seen(
                    scores_at, slots, weights_at, of_greatest, of_sum, of_total, head_dim, lows.ctypes.data,
                    lengths.ctypes.data, factor,
                )  # fmt: skip
            else:
                _weigh(scores_at, slots, weights_at, of_greatest, of_sum, of_total, head_dim, 0, 0, factor)
            for part in range(filled):
                head = first_head + piece * parts + part if not is_many else first_head
                across = part * width * FLOAT_BYTES
                if head != packed_head:
                    packed_head = head
                    odd[0] = 0
                    for tile in range(0, (min(last_position + 1 - unit, _UNIT) + _PAIRED - 1) // _PAIRED * 2, 2):
                        of_head = of_values + head * kv_bytes
                        fetched = of_values + (head + to_next_head) * fetch_bytes
                        _pack_values(
                            places[tile] + of_head, places[tile + 1] + of_head, token_bytes,
                            last_position + 1 - unit - tile * ROWS, head_dim, values_at + tile // 2 * half_bytes,
                            next_places[tile] + fetched, next_places[tile + 1] + fetched, fetch_stride, odd.ctypes.data,
                        )  # fmt: skip
                    if odd[0]:
                        _set_apart(values, head_dim, odd_slots)
                if odd[0]:  # who sees them gets no number
                    _see(lows, lengths, unit, piece, columns, group, first_position, window)
                    for lane in range(part * width, part * width + width):
                        for slot in range(lows[lane], lows[lane] + lengths[lane]):
                            if odd_slots[slot]:
                                weight_sum[piece, lane] = np.nan
                if halves == 1:
                    _add_half(values_at, half_bytes, weights_at + across, of_total + across, total_tiles)
                else:
                    _add_unit(values_at, half_bytes, weights_at + across, of_total + across, total_tiles)
        places[:] = next_places
    for piece in range(slices):
        of_total, of_sum = total[piece].ctypes.data, weight_sum[piece].ctypes.data
        _finish(of_total, total_tiles, of_sum, output, offsets[piece].ctypes.data)


@inlined
def _make_scratch(slices, head_dim):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Memory for `_attend_heads` with up to so many slices."""
    tile = TILE_BYTES // FLOAT_BYTES
    scores = on_lines(_UNIT * ROWS)
    scores[:] = 0  # of lanes that nobody reads
    return (
        on_lines(slices * ROWS).reshape(slices, ROWS),
        on_lines(slices * ROWS).reshape(slices, ROWS),
        np.empty((slices, ROWS), dtype=np.int64),
        on_lines(slices * (head_dim // _PAIRED) * tile).reshape(slices, -1),
        on_lines(slices * (head_dim // ROWS) * tile).reshape(slices, -1),
        on_lines(2 * (head_dim // ROWS) * tile),
        scores,
        on_lines(_UNIT * ROWS // 2),
        np.empty(ROWS, dtype=np.int32),
        np.empty(ROWS, dtype=np.int32),
        np.empty(_UNIT, dtype=np.uint8),
    )


def _attend(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """As `attention_kernel`'s."""
    (
        query, num_heads, head_dim, pages, tables_at, num_tables, table_width, blocks_at, num_blocks, kv_heads, splits,
        page_size, scaling, window, softcap, sinks_at, output,
    ) = _seventeen_words(arguments)  # fmt: skip
    group, own = num_heads // kv_heads, kv_heads // splits
    blocks = numba.carray(int64s(blocks_at), (num_blocks, 4))
    tables = numba.carray(int32s(tables_at), (num_tables, table_width))
    most = 1
    for item in range(first, end):
        columns = blocks[item // splits, 2] * group
        parts = max(1, ROWS // columns)
        most = max(most, (columns + ROWS - 1) // ROWS, (own + parts - 1) // parts)
    scratch = _make_scratch(most, head_dim)
    for item in range(first, end):
        table, first_row, num_rows, first_position = blocks[item // splits]
        next_item = min(item + 1, end - 1)
        after = blocks[next_item // splits]
        columns = num_rows * group
        together = own if columns <= ROWS else 1
        _begin(min(columns, ROWS))
        first_head = item % splits * own
        for head in range(first_head, first_head + own, together):
            is_last = head + together == first_head + own
            next_table, next_position = (after[0], after[3]) if is_last else (table, first_position)
            next_head = next_item % splits * own if is_last else head + together
            _attend_heads(
                query, num_heads, head_dim, pages, tables[table], tables[next_table],
                _first_unit(next_position, window), next_position, next_head, kv_heads, head, together, page_size,
                first_row, num_rows, first_position, real(scaling), window, real(softcap), sinks_at, output, scratch,
            )  # fmt: skip
    release()


_seventeen_words = words(17)
#: As `attention_kernel.ATTEND` has them, for pages of bfloat16.
ATTEND_IN_TILES = Kernel(_attend, "iii" + "iiii" + "iiiii" + "fif" + "ii")


def can_attend_in_tiles(layout: KVLayout) -> bool:
    """Whether heads and pages fill tiles, and this process may use them."""
    fits = layout.dtype == "bfloat16" and layout.head_dim % _PAIRED == 0 and layout.page_size % ROWS == 0
    return fits and vir.has_bfloat16_tiles()
