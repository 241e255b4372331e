"""Products of attention on vectors that multiply bfloat16 in pairs (AVX-512's BF16), for `attention_short`.

Of many rows the keys and values are arranged in tiles of `tiles.ROWS` rows first, in memory that stays in the
first-level cache. Those of few rows are read where they lie, in the order of memory, as `attention_kernel` does.

Either way a score is the sum of sixteen sums, over every sixteenth pair of numbers, added halves by halves; and a sum
of values goes on pair by pair of slots. So the queries of few rows get the same bits as they do among many.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from tandem.engine.cpu import vector_ir as vir
from tandem.engine.cpu.attention_kernel import NEAR_BYTES, tiles_by
from tandem.engine.cpu.tiles import ROW_BYTES, ROWS, TILE_BYTES
from tandem.engine.huge_pages import FLOAT_BYTES

#: Of where a lane's query and output lie.
OFFSET_BYTES = 8

_VEC = vir.Vectors(ROWS)
_PAIR_BYTES = 2 * vir.SHORT_BYTES
_SHORTS = ir.VectorType(ir.IntType(16), 2 * ROWS)
#: Of half a unit of slots.
_GROUPS = 2
# A loop's steps that are written out: their loads need no addresses of their own.
_STEPS = 4
# Keys whose scores are made together: sums, and what these are added to, just have registers.
_KEYS_ABREAST = 4


def interleaved(builder: Any, first: Any, second: Any) -> list[Any]:
    """Pairs of the numbers at the same place of two vectors of 32: those of the lower half of each, of the upper."""
    halves = [[place for n in range(begin, begin + ROWS) for place in (n, n + 2 * ROWS)] for begin in (0, ROWS)]
    return [vir.shuffled(builder, first, second, places) for places in halves]


def _load_pairs(builder: Any, address: Any) -> Any:
    return _VEC.load_integers(builder, address, alignment=vir.SHORT_BYTES)


def emit_copy_keys(
    builder: Any, first: Any, second: Any, stride: Any, num_tiles: Any, target: Any, first_ahead: Any,
    second_ahead: Any, ahead_stride: Any,
) -> None:  # fmt: skip
    """Twice sixteen keys, from `first` and from `second` on, become tiles of rows. As many that lie ahead are fetched.
    Strides are bytes from one to the next; `num_tiles`: of the numbers of each."""
    row_bytes = num_tiles.type(ROW_BYTES)
    with cgutils.for_range(builder, num_tiles) as loop:
        to = vir.advance(builder, target, num_tiles.type(_GROUPS * TILE_BYTES), loop.index)
        for group, (keys, ahead) in enumerate(((first, first_ahead), (second, second_ahead))):
            for slot in range(ROWS):
                start = vir.advance(builder, vir.advance(builder, ahead, ahead_stride, slot), row_bytes, loop.index)
                vir.prefetch(builder, start)
                start = vir.advance(builder, vir.advance(builder, keys, stride, slot), row_bytes, loop.index)
                place = vir.offset(builder, to, group * TILE_BYTES + slot * ROW_BYTES)
                vir.store_bits(builder, _load_pairs(builder, start), place)


def emit_scores(builder: Any, queries: Any, num_tiles: Any, keys: Any, scores: Any) -> None:
    """Scores of sixteen queries, which are tiles of columns, with twice sixteen keys that were copied.

    In the order of a row alone: there each lane of a vector has a sum, and these are added halves by halves.
    """
    half = ROWS // 2
    with cgutils.for_range_slice(
        builder, num_tiles.type(0), num_tiles.type(_GROUPS * ROWS), num_tiles.type(_KEYS_ABREAST)
    ) as (slot, _):
        own = vir.advance(builder, keys, num_tiles.type(ROW_BYTES), slot)

        def sums_from(first: int, step: int, own: Any = own) -> list[Any]:
            """Of each key, the sum of what the pairs `first`, `first + step` and so on of all tiles add up to."""
            if step < half:
                low, high = sums_from(first, 2 * step), sums_from(first + step, 2 * step)
                return [builder.fadd(*both) for both in zip(low, high, strict=True)]
            which = (first, first + half)
            sums = [
                [cgutils.alloca_once_value(builder, _VEC.constant(0.0)) for _ in range(_KEYS_ABREAST)] for _ in which
            ]
            with cgutils.for_range(builder, num_tiles) as loop:
                rows = vir.advance(builder, own, num_tiles.type(_GROUPS * TILE_BYTES), loop.index)
                columns = vir.advance(builder, queries, num_tiles.type(TILE_BYTES), loop.index)
                for pair, totals in zip(which, sums, strict=True):
                    column = _load_pairs(builder, vir.offset(builder, columns, pair * ROW_BYTES))
                    for key, total in enumerate(totals):
                        place = vir.offset(builder, rows, key * ROW_BYTES + pair * _PAIR_BYTES)
                        spread = _VEC.spread_bits(builder, place)
                        builder.store(_VEC.fma_by_two(builder, spread, column, builder.load(total)), total)
            return [builder.fadd(*map(builder.load, both)) for both in zip(*sums, strict=True)]

        to = vir.advance(builder, scores, num_tiles.type(ROW_BYTES), slot)
        for key, total in enumerate(sums_from(0, 1)):
            _VEC.store(builder, total, vir.offset(builder, to, key * ROW_BYTES))


def emit_turn_scores(builder: Any, alone: Any, stride: Any, num_tiles: Any, scores: Any) -> None:
    """Scores of sixteen queries, each behind one another, become rows of a slot each."""
    with cgutils.for_range(builder, num_tiles) as loop:
        start = vir.advance(builder, alone, num_tiles.type(ROW_BYTES), loop.index)
        rows = [_load_pairs(builder, vir.advance(builder, start, stride, lane)) for lane in range(ROWS)]
        to = vir.advance(builder, scores, num_tiles.type(TILE_BYTES), loop.index)
        for slot, row in enumerate(vir.transposed(builder, rows)):
            vir.store_bits(builder, row, vir.offset(builder, to, slot * ROW_BYTES))


def _multiply_tile(builder: Any, sums: list[Any], rows: Any, columns: Any) -> None:
    """Adds to each of `sums` the products of a row's pairs with the vectors of `columns`."""
    with cgutils.for_range_slice(builder, rows.type(0), rows.type(ROWS), rows.type(_STEPS)) as (pair, _):
        own = vir.advance(builder, rows, rows.type(_PAIR_BYTES), pair)
        across = vir.advance(builder, columns, rows.type(ROW_BYTES), pair)
        for step in range(_STEPS):
            column = _load_pairs(builder, vir.offset(builder, across, step * ROW_BYTES))
            for number, total in enumerate(sums):
                place = vir.offset(builder, own, number * ROW_BYTES + step * _PAIR_BYTES)
                spread = _VEC.spread_bits(builder, place)
                builder.store(_VEC.fma_by_two(builder, spread, column, builder.load(total)), total)


def emit_add_values(
    builder: Any, values: Any, half_bytes: Any, num_halves: Any, weights: Any, total: Any, num_tiles: Any
) -> None:
    """Adds values, tiles of rows of numbers, to the sums of sixteen queries. Arguments: values; bytes of half a unit of
    them; halves; weights; sums, a row for each number; how many tiles these are."""
    with cgutils.for_range(builder, num_tiles) as loop:
        start = vir.advance(builder, total, num_tiles.type(TILE_BYTES), loop.index)
        places = [vir.offset(builder, start, number * ROW_BYTES) for number in range(ROWS)]
        sums = [cgutils.alloca_once_value(builder, _VEC.load(builder, place)) for place in places]
        with cgutils.for_range(builder, num_halves) as half:
            rows = vir.advance(builder, values, num_tiles.type(TILE_BYTES), loop.index)
            rows = vir.advance(builder, rows, half_bytes, half.index)
            _multiply_tile(builder, sums, rows, vir.advance(builder, weights, num_halves.type(TILE_BYTES), half.index))
        for one, place in zip(sums, places, strict=True):
            _VEC.store(builder, builder.load(one), place)


def emit_begin_alone(
    builder: Any, total: Any, before: Any, rescale: Any, num_tiles: Any, num_queries: Any
) -> None:
    """Sums of so many queries, whose numbers lie behind one another, shrink by their lane of `rescale`; what they were
    is left at `before`."""
    with cgutils.for_range(builder, num_queries) as query:
        factor = vir.load_real(builder, vir.advance(builder, rescale, num_queries.type(FLOAT_BYTES), query.index))
        factors = _VEC.spread(builder, factor)
        with cgutils.for_range(builder, num_tiles) as loop:
            index = builder.add(builder.mul(query.index, num_tiles), loop.index)
            place, old = (vir.advance(builder, start, index.type(ROW_BYTES), index) for start in (total, before))
            row = _VEC.load(builder, place)
            _VEC.store(builder, row, old)
            _VEC.store(builder, builder.fmul(row, factors), place)


def emit_any_odd(builder: Any, rows: Any, num_rows: Any) -> Any:
    """Whether one of so many vectors has a number that is not finite."""
    zeros = _VEC.constant(0.0)
    found = cgutils.alloca_once_value(builder, zeros)
    with cgutils.for_range(builder, num_rows) as loop:
        row = _VEC.load(builder, vir.advance(builder, rows, num_rows.type(ROW_BYTES), loop.index))
        builder.store(_VEC.fma(builder, row, zeros, builder.load(found)), found)
    none = builder.load(found)
    return builder.zext(_VEC.any_lane(builder, builder.fcmp_unordered("uno", none, none)), num_rows.type)


def _value_tile(num_queries: int, num_loads: int, *, ahead: bool) -> Any:
    """Adds the weighted values of pairs of slots to `32 * num_loads` numbers of the sums of so many queries.

    Arguments, in addresses, bytes and counts: weights, a row for each pair; values, from one slot to the next; pairs;
    sums, from one query to the next; how far ahead to prefetch, where `ahead`.
    """
    def emit(
        builder: Any, weights: Any, values: Any, value_stride: Any, num_pairs: Any, total: Any, stride: Any,
        distance: Any,
    ) -> None:  # fmt: skip
        rows = [vir.advance(builder, total, stride, query) for query in range(num_queries)]
        places = [[vir.offset(builder, row, n * ROW_BYTES) for n in range(2 * num_loads)] for row in rows]
        sums = [[cgutils.alloca_once_value(builder, _VEC.load(builder, place)) for place in row] for row in places]
        with cgutils.for_range(builder, num_pairs) as loop:
            first = vir.advance(builder, values, builder.add(value_stride, value_stride), loop.index)
            second = builder.add(first, value_stride)
            parts = []
            for n in range(num_loads):
                both = []
                for slot in (first, second):
                    place = vir.offset(builder, slot, n * ROW_BYTES)
                    if ahead:
                        vir.prefetch(builder, builder.add(place, distance))
                        vir.prefetch(builder, vir.offset(builder, place, NEAR_BYTES))
                    both.append(builder.bitcast(_load_pairs(builder, place), _SHORTS))
                parts += interleaved(builder, both[0], both[1])
            own = vir.advance(builder, weights, num_pairs.type(ROW_BYTES), loop.index)
            for query, row in enumerate(sums):
                weight = _VEC.spread_bits(builder, vir.offset(builder, own, query * _PAIR_BYTES))
                for part, one in zip(parts, row, strict=True):
                    builder.store(_VEC.fma_by_two(builder, weight, part, builder.load(one)), one)
        for place_row, row in zip(places, sums, strict=True):
            for place, one in zip(place_row, row, strict=True):
                _VEC.store(builder, builder.load(one), place)

    return vir.apart(f"by_two_values_{num_queries}x{num_loads}{'_ahead' if ahead else ''}", emit)


#: `_value_tile` of 1 to `TILE_HEADS` queries, of 64 numbers or of 32. Arguments: queries, whether it is the large one,
#: and then its own.
emit_values_alone = tiles_by(
    lambda num_queries, large, ahead: _value_tile(num_queries, 2 if large else 1, ahead=ahead), 7
)


def emit_finish_alone(
    builder: Any, total: Any, num_tiles: Any, weight_sum: Any, start: Any, offsets: Any, num_queries: Any
) -> None:
    """Sums of values that lie behind one another over those of weights, to as many outputs."""
    with cgutils.for_range(builder, num_queries) as query:
        weight = vir.load_real(builder, vir.advance(builder, weight_sum, num_tiles.type(FLOAT_BYTES), query.index))
        inverse = _VEC.spread(builder, builder.fdiv(vir.REAL(1.0), weight))
        place = vir.advance(builder, offsets, num_tiles.type(OFFSET_BYTES), query.index)
        output = builder.add(start, builder.load(builder.inttoptr(place, start.type.as_pointer())))
        with cgutils.for_range(builder, num_tiles) as loop:
            index = builder.add(builder.mul(query.index, num_tiles), loop.index)
            row = _VEC.load(builder, vir.advance(builder, total, num_tiles.type(ROW_BYTES), index))
            # As for many: a sum of nothing but zeros may have either sign, by what else was computed with it.
            row = builder.fadd(builder.fmul(row, inverse), _VEC.constant(0.0))
            _VEC.store(builder, row, vir.advance(builder, output, num_tiles.type(ROW_BYTES), loop.index))
