"""Attention over pages of bfloat16 by products of bfloat16; queries and weights are rounded too, sums are float32.

Sixteen queries have the lanes of a vector from scores to sums of values, so softmax needs no sums across lanes. The
queries of a row block are cut into such slices. Those of many rows are all of one KV head. Those of few rows, as decode
has, are of several KV heads.

Where products are made in tiles (`attention_tiles`), keys are the rows of a tile and queries its columns. Of several KV
heads each multiplies the slice's columns that are its own.

Where they are made by two (`attention_by_two`), a pair of numbers of a key is multiplied with the pairs of all lanes.
Those of other KV heads would be wasted: so of few rows the pairs of a key, and the numbers of values, have the lanes of
a product, and scores are turned for softmax. Sums are added up in the same order for many rows and for few.

Softmax is online, `_UNIT` slots at a time from the sequence's first on. Whatever else is in the block, a query goes
through the same steps: what it does not see has a weight of zero, which changes no bit of its output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from tandem.engine.cpu import attention_by_two as by_two
from tandem.engine.cpu import attention_tiles as tiles
from tandem.engine.cpu import vector_ir as vir
from tandem.engine.cpu.atomics import float32s, int32s, int64s, real, words
from tandem.engine.cpu.attention_kernel import TILE_HEADS, walk_row
from tandem.engine.cpu.attention_lanes import Bounds
from tandem.engine.cpu.compiling import called, inlined
from tandem.engine.cpu.scratch import on_lines
from tandem.engine.cpu.threads import Kernel
from tandem.engine.cpu.tiles import ROW_BYTES, ROWS, TILE_BYTES, emit_release
from tandem.engine.cpu.vector_ir import PAIRS
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
_ALONE_BYTES = _UNIT * FLOAT_BYTES  # scores of a query
#: Slots whose values are added before those of the next KV head, by two.
_SLOTS_ABREAST = 8
# Less than any score, and finite: the difference of two is a number.
_LOWEST = -3e38
_LOG2_E = 1.44269504088896341
_SHORTS = ir.VectorType(ir.IntType(16), _PAIRED)
_PAIRS = ir.VectorType(ir.IntType(32), ROWS)
#: How products are made.
_BY_TWO, _IN_TILES = range(2)


# --- vectors ----------------------------------------------------------------------------------------------------------


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


def _row_of(builder: Any, start: Any, offsets: Any, lane: int) -> Any:
    """Address of a lane's query or output."""
    place = builder.inttoptr(vir.offset(builder, offsets, lane * by_two.OFFSET_BYTES), offsets.type.as_pointer())
    return builder.add(start, builder.load(place))


def _emit_pack_queries(
    builder: Any, start: Any, offsets: Any, num_tiles: Any, target: Any, *, turned: bool = True
) -> None:
    """Tiles of columns from sixteen queries; not `turned`, these behind one another."""
    with cgutils.for_range(builder, num_tiles) as loop:
        rows = []
        for lane in range(ROWS):
            row = _row_of(builder, start, offsets, lane)
            row = vir.advance(builder, row, num_tiles.type(_PAIRED_BYTES), loop.index)
            parts = [_VEC.load(builder, vir.offset(builder, row, n * _VEC.num_bytes)) for n in range(2)]
            rows.append(builder.bitcast(_VEC.rounded(builder, *parts), _PAIRS))
        if turned:
            rows = vir.transposed(builder, rows)
            to, stride = vir.advance(builder, target, num_tiles.type(TILE_BYTES), loop.index), num_tiles.type(ROW_BYTES)
        else:
            to = vir.advance(builder, target, num_tiles.type(ROW_BYTES), loop.index)
            stride = builder.mul(num_tiles, num_tiles.type(ROW_BYTES))
        for number, row in enumerate(rows):
            vir.store_bits(builder, row, vir.advance(builder, to, stride, number))


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
    of weights so far; the sums of values so far, how many numbers of each shrink here; where the factor is left by
    which they do; lows and lengths of what lanes see, where `masked`; then the factor of scores that makes them powers
    of two.
    """

    def emit(
        builder: Any, scores: Any, slots: Any, weights: Any, greatest: Any, weight_sum: Any, total: Any, numbers: Any,
        rescale_at: Any, lows: Any, lengths: Any, factor: Any,
    ) -> None:  # fmt: skip
        bounds = Bounds(_VEC, builder, lows, lengths) if masked else None
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
        _VEC.store(builder, _VEC.constant(1.0), rescale_at)
        with builder.if_then(_VEC.any_lane(builder, rises)):
            rescale = builder.select(rises, _power_of_two(builder, builder.fsub(before, now)), _VEC.constant(1.0))
            _VEC.store(builder, rescale, rescale_at)
            _VEC.store(builder, now, greatest)
            _VEC.store(builder, builder.fmul(_VEC.load(builder, weight_sum), rescale), weight_sum)
            with cgutils.for_range(builder, numbers) as loop:
                row = vir.advance(builder, total, row_bytes, loop.index)
                _VEC.store(builder, builder.fmul(_VEC.load(builder, row), rescale), row)
        minus = _VEC.negative(builder, now)
        sums = [cgutils.alloca_once_value(builder, _VEC.constant(0.0)) for _ in range(2)]
        two = slots.type(2)
        with cgutils.for_range(builder, builder.udiv(slots, two)) as loop:
            slot = builder.mul(loop.index, two)
            pair = []
            for n, total_of in enumerate(sums):
                value = _VEC.load(builder, vir.advance(builder, scores, row_bytes, builder.add(slot, slot.type(n))))
                # Rounded as the greatest is, which so has a weight of one, however large scores are.
                weight = _power_of_two(builder, builder.fadd(builder.fmul(value, factors), minus))
                if bounds is not None:
                    seen = bounds.seen(builder, builder.add(slot, slot.type(n)))
                    weight = builder.select(seen, weight, _VEC.constant(0.0))
                builder.store(builder.fadd(builder.load(total_of), weight), total_of)
                pair.append(weight)
            halves = _VEC.rounded(builder, *pair)
            places = [place for lane in range(ROWS) for place in (lane, lane + ROWS)]
            row = vir.advance(builder, weights, row_bytes, loop.index)
            vir.store_bits(builder, vir.shuffled(builder, halves, halves, places), row)
        added = builder.fadd(*(builder.load(one) for one in sums))
        _VEC.store(builder, builder.fadd(_VEC.load(builder, weight_sum), added), weight_sum)

    return vir.kernel(10, 1, types.void, vir.apart(f"short_weigh{'_masked' if masked else ''}", emit))


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
            for rows, row in zip((low, high), by_two.interleaved(builder, both[0], both[1]), strict=True):
                rows.append(builder.bitcast(row, _PAIRS))
        are_odd = builder.bitcast(builder.icmp_unsigned(">=", greatest, infinite), ir.IntType(_PAIRED))
        with builder.if_then(builder.icmp_unsigned("!=", are_odd, are_odd.type(0)), likely=False):
            builder.store(end.type(1), builder.inttoptr(odd, end.type.as_pointer()))
        to = vir.advance(builder, target, end.type(2 * TILE_BYTES), loop.index)
        for number, row in enumerate([*vir.transposed(builder, low), *vir.transposed(builder, high)]):
            vir.store_bits(builder, row, vir.offset(builder, to, number * ROW_BYTES))


def _emit_finish(builder: Any, total: Any, num_tiles: Any, weight_sum: Any, start: Any, offsets: Any) -> None:
    """Sums of values over those of weights, to sixteen outputs: one that several lanes have is the first's."""
    inverse = builder.fdiv(_VEC.constant(1.0), _VEC.load(builder, weight_sum))
    with cgutils.for_range(builder, num_tiles) as loop:
        tile = vir.advance(builder, total, num_tiles.type(TILE_BYTES), loop.index)
        rows = [_VEC.load(builder, vir.offset(builder, tile, number * ROW_BYTES)) for number in range(ROWS)]
        # A sum of nothing but zeros may have either sign, by what else was computed with it.
        rows = [builder.fadd(builder.fmul(row, inverse), _VEC.constant(0.0)) for row in rows]
        found = vir.transposed(builder, rows)
        for lane, row in reversed(list(enumerate(found))):
            output = _row_of(builder, start, offsets, lane)
            _VEC.store(builder, row, vir.advance(builder, output, num_tiles.type(ROW_BYTES), loop.index))


def _only(kind: int, num_addresses: int, name: str, emit: Any) -> Any:
    """A function of the code of one kind, which is its first argument; in that of the other it does nothing."""
    own = vir.apart(name, emit)
    return vir.kernel_by_kind(num_addresses, 0, types.void, lambda asked: own if asked == kind else lambda *_: None)


_begin = _only(_IN_TILES, 1, "tiles_begin", tiles.emit_begin)
_release = _only(_IN_TILES, 0, "tiles_release", emit_release)
_pack_queries = vir.kernel(4, 0, types.void, vir.apart("short_queries", _emit_pack_queries))
_round_queries = vir.kernel(
    4, 0, types.void, vir.apart("short_rounded", functools.partial(_emit_pack_queries, turned=False))
)
_scores = _only(_IN_TILES, 9, "tiles_scores", tiles.emit_scores)
_copy_keys = _only(_BY_TWO, 8, "by_two_copy_keys", by_two.emit_copy_keys)
_scores_by_two = _only(_BY_TWO, 4, "by_two_scores", by_two.emit_scores)
_turn_scores = vir.kernel(4, 0, types.void, vir.apart("by_two_turn_scores", by_two.emit_turn_scores))
_cap = vir.kernel(2, 2, types.void, vir.apart("short_cap", _emit_cap))
_weigh, _weigh_seen = (_weigh_of(masked=masked) for masked in (False, True))
_pack_values = vir.kernel(10, 0, types.void, vir.apart("short_values", _emit_pack_values))
_add_half, _add_unit = (_only(_IN_TILES, 5, f"tiles_add_{n}", tiles.add_values_of(n)) for n in (1, 2))
_add_by_two = _only(_BY_TWO, 6, "by_two_add", by_two.emit_add_values)
_begin_alone = vir.kernel(5, 0, types.void, vir.apart("by_two_begin_alone", by_two.emit_begin_alone))
_values_alone = vir.kernel(9, 0, types.void, by_two.emit_values_alone)
_any_odd = vir.kernel(2, 0, types.intp, by_two.emit_any_odd)
_finish = vir.kernel(5, 0, types.void, vir.apart("short_finish", _emit_finish))
_finish_alone = vir.kernel(6, 0, types.void, vir.apart("by_two_finish_alone", by_two.emit_finish_alone))


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


@inlined
def _find_lanes(  # type: ignore[no-untyped-def] # pragma: no cover
    offsets, greatest, piece, first_row, columns, group, num_heads, first_head, num_together, head_bytes, sinks_at
):
    """Where the queries and outputs of a slice's lanes lie, and the scores that these begin with."""
    sinks, width = float32s(sinks_at), min(columns, ROWS)
    for lane in range(ROWS):
        column = _column(piece, lane, columns)
        of_slice = 0 if columns > ROWS else min(piece * (ROWS // width) + lane // width, num_together - 1)
        head = (first_head + of_slice) * group + column % group
        offsets[piece, lane] = ((first_row + column // group) * num_heads + head) * head_bytes
        greatest[piece, lane] = sinks[head] * np.float32(_LOG2_E) if sinks_at else _LOWEST


@inlined
def _meet_odd(weight_sum, piece, lane, lows, lengths, odd_slots):  # type: ignore[no-untyped-def] # pragma: no cover
    """A lane that sees values that are not finite gets no number."""
    for slot in range(lows[lane], lows[lane] + lengths[lane]):
        if odd_slots[slot]:
            weight_sum[piece, lane] = np.nan


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
def _copy_finite(places, across, token_bytes, slots, numbers, values, odd_slots):  # type: ignore[no-untyped-def] # pragma: no cover
    """Values of a head, `across` bytes into tokens, slot behind slot; with zeros for what is not finite. Says of which
    slots there was some."""
    odd_slots[:] = 0
    copied = values.view(np.uint16)
    for slot in range(slots):
        start = places[slot // ROWS] + slot % ROWS * token_bytes + across
        words_of = numba.carray(int32s(start), numbers // 2).view(np.uint16)
        for number in range(numbers):
            bits = words_of[number]
            if bits & 0x7F80 == 0x7F80:
                odd_slots[slot] = 1
                bits = np.uint16(0)
            copied[slot * numbers + number] = bits


@inlined
def _walk_values(  # type: ignore[no-untyped-def] # pragma: no cover
    total, head_bytes, kv_heads, width, values, kv_bytes, token_bytes, slots, weights, ahead
):
    """Adds `slots` values of each of `kv_heads`, weighted, to the sums of `width` queries of each, in the order of
    memory. The weights of two slots are a row, which has those of all queries."""
    for slot in range(0, slots, _SLOTS_ABREAST):
        count = min(_SLOTS_ABREAST, slots - slot)
        for kv_head in range(kv_heads):
            value = values + slot * token_bytes + kv_head * kv_bytes
            fetch = ahead
            for member in range(0, width, TILE_HEADS):
                queries, first = min(TILE_HEADS, width - member), kv_head * width + member
                weight = weights + first * FLOAT_BYTES + slot // 2 * ROW_BYTES
                own, done = total + first * head_bytes, 0
                while done < head_bytes:
                    is_large = head_bytes - done >= 2 * _PAIRED_BYTES
                    at = value + done // 2
                    if count > 1:
                        _values_alone(
                            queries, is_large, weight, at, token_bytes, count // 2, own + done, head_bytes, fetch
                        )
                    if count % 2:  # beside the last one it stands itself, with a weight of zero
                        at += (count - 1) * token_bytes
                        last = weight + count // 2 * ROW_BYTES
                        _values_alone(queries, is_large, last, at, 0, 1, own + done, head_bytes, fetch)
                    done += 2 * _PAIRED_BYTES if is_large else _PAIRED_BYTES
                fetch = 0


@called
def _attend_heads(kind, job, scratch):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """The queries of `num_together` KV heads: of one, or of several where those of one do not fill a slice.

    `table` holds the sequence's pages. Of those of `next_table` the slots from `next_begin` to `next_position` will be
    read next, from `next_head` on.
    """
    numba.literally(kind)
    (
        query, num_heads, head_dim, pages, table, next_table, next_begin, next_position, next_head, kv_heads,
        first_head, num_together, page_size, first_row, num_rows, first_position, scaling, window, softcap, sinks_at,
        output,
    ) = job  # fmt: skip
    (
        greatest, weight_sum, offsets, queries, total, values, scores, weights, lows, lengths, odd_slots, keys, _, _,
        rescale,
    ) = scratch  # fmt: skip
    factor = np.float32(_LOG2_E) * (scaling if softcap <= 0 else np.float32(1.0))
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
    keys_at, rescale_at = keys.ctypes.data, rescale.ctypes.data
    places, next_places = np.empty(_UNIT_TILES, dtype=np.int64), np.empty(_UNIT_TILES, dtype=np.int64)
    odd = np.zeros(1, dtype=np.int64)
    for piece in range(slices):
        _find_lanes(
            offsets, greatest, piece, first_row, columns, group, num_heads, first_head, num_together, head_bytes,
            sinks_at,
        )  # fmt: skip
        _pack_queries(query, offsets[piece].ctypes.data, query_tiles, queries[piece].ctypes.data)
    total[:slices] = 0
    weight_sum[:slices] = 1 if sinks_at else 0  # a sink is as a first score, whose value is zero
    begin = _first_unit(first_position, window)
    _find_unit(places, pages, table, begin, last_position, page_size, 2 * of_values)
    for unit in range(begin, last_position + 1, _UNIT):
        # Memory would rest while a unit is computed: each part of it fetches that of the next.
        is_last = unit + _UNIT > last_position
        if is_last:
            _find_unit(next_places, pages, next_table, next_begin, next_position, page_size, 2 * of_values)
        else:
            _find_unit(next_places, pages, table, unit + _UNIT, last_position, page_size, 2 * of_values)
        to_next_head = next_head - first_head if is_last else 0
        packed_head, has_keys = -1, False
        unit_tiles = (min(last_position + 1 - unit, _UNIT) + _PAIRED - 1) // _PAIRED * 2
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
                fetched = (head + to_next_head) * fetch_bytes
                if kind == _BY_TWO:
                    for half in range(0 if has_keys else unit_tiles // 2):
                        tile = 2 * half
                        _copy_keys(
                            kind, places[tile] + head * kv_bytes, places[tile + 1] + head * kv_bytes, token_bytes,
                            query_tiles, keys_at + half * half_bytes, next_places[tile] + fetched,
                            next_places[tile + 1] + fetched, fetch_stride,
                        )  # fmt: skip
                    has_keys = True
                    for half in range(halves):
                        arranged = keys_at + half * half_bytes
                        _scores_by_two(kind, of_queries, query_tiles, arranged, scores_at + half * 2 * TILE_BYTES)
                    continue
                for tile in range(0, 2 * halves, 2):
                    ahead, next_ahead = next_places[tile] + fetched, next_places[tile + 1] + fetched
                    _scores(
                        kind, of_queries + across, query_tiles, places[tile] + head * kv_bytes,
                        places[tile + 1] + head * kv_bytes, token_bytes, scores_at + tile * TILE_BYTES + across,
                        ahead if fetches else 0, next_ahead if fetches else 0, fetch_stride,
                    )  # fmt: skip
            if softcap > 0:
                _cap(scores_at, slots, scaling, softcap)
            if low + 1 - unit < slots or (window > 0 and high - window + 1 > unit):  # some lane does not see all
                _see(lows, lengths, unit, piece, columns, group, first_position, window)
                _weigh_seen(
                    scores_at, slots, weights_at, of_greatest, of_sum, of_total, head_dim, rescale_at, lows.ctypes.data,
                    lengths.ctypes.data, factor,
                )  # fmt: skip
            else:
                _weigh(
                    scores_at, slots, weights_at, of_greatest, of_sum, of_total, head_dim, rescale_at, 0, 0, factor
                )
            for part in range(filled):
                head = first_head + piece * parts + part if not is_many else first_head
                across = part * width * FLOAT_BYTES
                if head != packed_head:
                    packed_head = head
                    odd[0] = 0
                    for tile in range(0, unit_tiles, 2):
                        of_head = of_values + head * kv_bytes
                        fetched = of_values + (head + to_next_head) * fetch_bytes
                        first, second = places[tile] + of_head, places[tile + 1] + of_head
                        end, target = last_position + 1 - unit - tile * ROWS, values_at + tile // 2 * half_bytes
                        ahead, next_ahead = next_places[tile] + fetched, next_places[tile + 1] + fetched
                        _pack_values(
                            first, second, token_bytes, end, head_dim, target, ahead, next_ahead, fetch_stride,
                            odd.ctypes.data,
                        )  # fmt: skip
                    if odd[0]:
                        _set_apart(values, head_dim, odd_slots)
                if odd[0]:  # who sees them gets no number
                    _see(lows, lengths, unit, piece, columns, group, first_position, window)
                    for lane in range(part * width, part * width + width):
                        _meet_odd(weight_sum, piece, lane, lows, lengths, odd_slots)
                if kind == _BY_TWO:
                    _add_by_two(kind, values_at, half_bytes, halves, weights_at, of_total, total_tiles)
                elif halves == 1:
                    _add_half(kind, values_at, half_bytes, weights_at + across, of_total + across, total_tiles)
                else:
                    _add_unit(kind, values_at, half_bytes, weights_at + across, of_total + across, total_tiles)
        places[:] = next_places
    for piece in range(slices):
        of_total, of_sum = total[piece].ctypes.data, weight_sum[piece].ctypes.data
        _finish(of_total, total_tiles, of_sum, output, offsets[piece].ctypes.data)


@called
def _attend_alone(job, scratch):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """As `_attend_heads`, by two, of KV heads whose queries have no more than a vector's lanes."""
    (
        query, num_heads, head_dim, pages, table, next_table, next_begin, next_position, next_head, kv_heads,
        first_head, num_together, page_size, first_row, num_rows, first_position, scaling, window, softcap, sinks_at,
        output,
    ) = job  # fmt: skip
    (
        greatest, weight_sum, offsets, queries, total, _, scores, weights, lows, lengths, odd_slots, keys, alone,
        before, rescale,
    ) = scratch  # fmt: skip
    factor = np.float32(_LOG2_E) * (scaling if softcap <= 0 else np.float32(1.0))
    group = num_heads // kv_heads
    kv_bytes, head_bytes = head_dim * _SHORT_BYTES, head_dim * FLOAT_BYTES
    token_bytes = kv_heads * kv_bytes
    of_values = page_size * token_bytes  # from a key to its value
    total_tiles = head_dim // ROWS
    last_position = first_position + num_rows - 1
    width = num_rows * group  # of a KV head
    parts = ROWS // width  # KV heads of a slice
    slices = (num_together + parts - 1) // parts
    scores_at, weights_at, alone_at = scores.ctypes.data, weights.ctypes.data, alone.ctypes.data
    places, next_places = np.empty(_UNIT_TILES, dtype=np.int64), np.empty(_UNIT_TILES, dtype=np.int64)
    for piece in range(slices):
        _find_lanes(
            offsets, greatest, piece, first_row, width, group, num_heads, first_head, num_together, head_bytes, sinks_at
        )
        _round_queries(query, offsets[piece].ctypes.data, head_dim // _PAIRED, queries[piece].ctypes.data)
    total[:slices] = 0
    weight_sum[:slices] = 1 if sinks_at else 0
    begin = _first_unit(first_position, window)
    _find_unit(places, pages, table, begin, last_position, page_size, 2 * of_values)
    for unit in range(begin, last_position + 1, _UNIT):
        is_last = unit + _UNIT > last_position
        if is_last:
            _find_unit(next_places, pages, next_table, next_begin, next_position, page_size, 2 * of_values)
        else:
            _find_unit(next_places, pages, table, unit + _UNIT, last_position, page_size, 2 * of_values)
        to_next_head = next_head - first_head if is_last else 0
        num_seen = min(last_position + 1 - unit, _UNIT)
        num_tiles = (num_seen + ROWS - 1) // ROWS
        halves = (num_seen + _PAIRED - 1) // _PAIRED
        slots = halves * _PAIRED
        for piece in range(slices):
            filled = min(parts, num_together - piece * parts)
            of_total, num_queries = total[piece].ctypes.data, filled * width
            across = (first_head + piece * parts) * kv_bytes
            for tile in range(num_tiles):
                walk_row(
                    PAIRS, False, queries[piece].ctypes.data, kv_bytes, filled, width, places[tile] + across, kv_bytes,
                    token_bytes, min(num_seen - tile * ROWS, ROWS), alone_at + tile * ROW_BYTES, _ALONE_BYTES,
                    next_places[tile] + to_next_head * kv_bytes - places[tile], np.float32(1.0),
                )  # fmt: skip
            _turn_scores(alone_at, _ALONE_BYTES, 2 * halves, scores_at)
            if softcap > 0:
                _cap(scores_at, slots, scaling, softcap)
            _see(lows, lengths, unit, piece, width, group, first_position, window)
            _weigh_seen(  # the sums shrink below
                scores_at, slots, weights_at, greatest[piece].ctypes.data, weight_sum[piece].ctypes.data, of_total, 0,
                rescale.ctypes.data, lows.ctypes.data, lengths.ctypes.data, factor,
            )  # fmt: skip
            _begin_alone(of_total, before.ctypes.data, rescale.ctypes.data, total_tiles, num_queries)
            for tile in range(num_tiles):
                _walk_values(
                    of_total, head_bytes, filled, width, places[tile] + of_values + across, kv_bytes, token_bytes,
                    min(num_seen - tile * ROWS, ROWS), weights_at + tile * ROWS // 2 * ROW_BYTES,
                    next_places[tile] + to_next_head * kv_bytes - places[tile],
                )  # fmt: skip
            is_odd = False
            for lane in range(num_queries):  # but for those that have no number any more
                has_number = not np.isnan(weight_sum[piece, lane])
                is_odd |= has_number and _any_odd(of_total + lane * head_bytes, total_tiles) != 0
            if not is_odd:
                continue
            # Once more, without the values that are not finite: who does not see them is to have its number.
            sums = total[piece].reshape(ROWS, head_dim)
            for part in range(filled):
                of_head = of_values + across + part * kv_bytes
                _copy_finite(places, of_head, token_bytes, num_seen, head_dim, keys, odd_slots)
                for lane in range(part * width, part * width + width):
                    sums[lane] = before[lane] * rescale[lane]
                    _meet_odd(weight_sum, piece, lane, lows, lengths, odd_slots)
                _walk_values(
                    of_total + part * width * head_bytes, head_bytes, 1, width, keys.ctypes.data, 0, kv_bytes,
                    num_seen, weights_at + part * width * FLOAT_BYTES, 0,
                )  # fmt: skip
        places[:] = next_places
    for piece in range(slices):
        num_queries = min(parts, num_together - piece * parts) * width
        _finish_alone(
            total[piece].ctypes.data, total_tiles, weight_sum[piece].ctypes.data, output, offsets[piece].ctypes.data,
            num_queries,
        )  # fmt: skip


@inlined
def _make_scratch(slices, head_dim):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Memory for `_attend_heads` and `_attend_alone` with up to so many slices."""
    tile = TILE_BYTES // FLOAT_BYTES
    scores = on_lines(_UNIT * ROWS)
    alone = on_lines(ROWS * _UNIT)
    scores[:] = alone[:] = 0  # of lanes that have no query
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
        on_lines(2 * (head_dim // ROWS) * tile),
        alone,
        on_lines(ROWS * head_dim).reshape(ROWS, head_dim),
        on_lines(ROWS),
    )


def _attend_of(kind: int) -> Callable[[Any, Any, Any], None]:
    """As `attention_kernel` has it, by products of this kind."""

    def attend(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
        (
            query, num_heads, head_dim, pages, tables_at, num_tables, table_width, blocks_at, num_blocks, kv_heads,
            splits, page_size, scaling, window, softcap, sinks_at, output,
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
            _begin(kind, min(columns, ROWS))
            first_head = item % splits * own
            for head in range(first_head, first_head + own, together):
                is_last = head + together == first_head + own
                next_table, next_position = (after[0], after[3]) if is_last else (table, first_position)
                next_head = next_item % splits * own if is_last else head + together
                job = (
                    query, num_heads, head_dim, pages, tables[table], tables[next_table],
                    _first_unit(next_position, window), next_position, next_head, kv_heads, head, together, page_size,
                    first_row, num_rows, first_position, real(scaling), window, real(softcap), sinks_at, output,
                )  # fmt: skip
                if kind == _BY_TWO and columns <= ROWS:
                    _attend_alone(job, scratch)
                else:
                    _attend_heads(kind, job, scratch)
        _release(kind)

    return attend


_seventeen_words = words(17)
#: As `attention_kernel.ATTEND` has them, for pages of bfloat16.
ATTEND_BY_TWO, ATTEND_IN_TILES = (
    Kernel(_attend_of(kind), "iii" + "iiii" + "iiiii" + "fif" + "ii") for kind in (_BY_TWO, _IN_TILES)
)


def can_attend_short(layout: KVLayout) -> bool:
    """Whether heads and pages fill vectors of pairs, and tiles."""
    return layout.dtype == "bfloat16" and layout.head_dim % _PAIRED == 0 and layout.page_size % ROWS == 0
