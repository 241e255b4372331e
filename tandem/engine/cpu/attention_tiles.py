"""Products of attention in tiles (`tiles`), for `attention_short`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.core import cgutils

from tandem.engine.cpu import vector_ir as vir
from tandem.engine.cpu.tiles import (
    ROW_BYTES,
    ROWS,
    TILE_BYTES,
    emit_configure,
    emit_load,
    emit_multiply,
    emit_store,
    emit_zero,
)
from tandem.engine.huge_pages import FLOAT_BYTES

# Registers: of scores or sums of values; of columns, which are queries or weights; of rows, which are keys or values.
_SUMS, _COLUMNS, _OF_ROWS = (0, 1), (2, 3), (4, 5)


def emit_begin(builder: Any, width: Any) -> None:
    """Sums and columns are of so many queries."""
    row_bytes = builder.mul(width, width.type(FLOAT_BYTES))
    emit_configure(builder, {}, dict.fromkeys((*_SUMS, *_COLUMNS), row_bytes))


def emit_scores(
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


def add_values_of(num_halves: int) -> Callable[..., None]:
    """Adds values to sums, with weights of half a unit or a whole one. Arguments: values; bytes of half a unit of them;
    weights; sums; how many tiles these are."""

    def emit(builder: Any, values: Any, half_bytes: Any, weights: Any, total: Any, num_tiles: Any) -> None:
        row_bytes = num_tiles.type(ROW_BYTES)
        for half in range(num_halves):
            emit_load(builder, _COLUMNS[half], vir.offset(builder, weights, half * TILE_BYTES), row_bytes)
        with cgutils.for_range(builder, num_tiles) as loop:
            sums = vir.advance(builder, total, num_tiles.type(TILE_BYTES), loop.index)
            rows = vir.advance(builder, values, num_tiles.type(TILE_BYTES), loop.index)
            emit_load(builder, _SUMS[0], sums, row_bytes)
            for half in range(num_halves):
                emit_load(builder, _OF_ROWS[half], vir.advance(builder, rows, half_bytes, half), row_bytes)
                emit_multiply(builder, _SUMS[0], _OF_ROWS[half], _COLUMNS[half])
            emit_store(builder, _SUMS[0], sums, row_bytes)

    return emit
