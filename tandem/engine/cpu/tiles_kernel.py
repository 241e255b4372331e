"""Products of bfloat16 in tiles (`tiles`), with weights.

A panel is as for products by two, `[K / 2][32][2]`: sixteen of its steps are two tiles, of 16 outputs each. Rows lie
as they are, rounded to bfloat16; 32 of them and a panel are four tiles of sums, which stay in registers over all of K.

Of 32 numbers of K those at even and at odd places have sums of their own, which are added to the output's in one step.
That is another numerical type than by two. A row's result depends neither on the other rows, nor on their number, nor
on the threads.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils

from tandem.engine.cpu import vector_ir as vir
from tandem.engine.cpu.atomics import words
from tandem.engine.cpu.compiling import inlined
from tandem.engine.cpu.packed_kernel import PANEL, Products, add_bias, gate
from tandem.engine.cpu.scratch import on_lines
from tandem.engine.cpu.threads import Kernel
from tandem.engine.cpu.tiles import (
    ROW_BYTES,
    ROWS,
    emit_configure,
    emit_load,
    emit_multiply,
    emit_store,
    emit_zero,
    release,
)
from tandem.engine.huge_pages import FLOAT_BYTES, LINE_BYTES

#: Numbers of K that one product of two tiles takes.
TILE_NUMBERS = ROW_BYTES // vir.SHORT_BYTES
_OUTPUT_BYTES, _STEP_BYTES = PANEL * FLOAT_BYTES, 2 * PANEL * vir.SHORT_BYTES
_STEPS = TILE_NUMBERS // 2
# Of rows that are multiplied together: half of what second-level caches of CPUs with tiles hold.
_CACHED_BYTES = 1 << 20
# Rows for which weights are read once, at least: with fewer memory is the limit.
_FEWEST_AT_ONCE = 128
#: Rows of a pass, at most.
PAIR = 2 * ROWS
# Tiles of K of so many rows that stay in the cache.
_MOST_TILES = _CACHED_BYTES // _FEWEST_AT_ONCE // ROW_BYTES
# Of a panel, lines for each tile of K; passes of which each fetches a share of the next panel, at least.
_PANEL_LINES, _LEAST_PASSES = _STEPS * _STEP_BYTES // LINE_BYTES, 2
# Registers: of sums, for the first and the second 16 rows, each of 16 outputs and the next; of rows; of weights.
_SUMS, _OF_ROWS, _OF_WEIGHTS = ((0, 1), (2, 3)), (4, 5), (6, 7)


def _emit_configure(builder: Any, first_rows: Any, second_rows: Any) -> None:
    """So many rows have the first and the second tile of rows, and of sums."""
    rows = {_SUMS[0][0]: first_rows, _SUMS[0][1]: first_rows, _OF_ROWS[0]: first_rows}
    rows |= {_SUMS[1][0]: second_rows, _SUMS[1][1]: second_rows, _OF_ROWS[1]: second_rows}
    emit_configure(builder, rows, {})


def _make_pass(num_blocks: int) -> Any:
    """A kernel for so many tiles of rows and a panel. Its arguments: x, the distance of its rows in bytes, the panel,
    its tiles of K, the outputs, the distance of their rows in bytes; whether it adds to what is there; where weights
    lie that come later, and how many lines of them are fetched for each tile of K."""

    def emit(
        builder: Any, x: Any, x_stride: Any, panel: Any, num_tiles: Any, y: Any, y_stride: Any, adds: Any, ahead: Any,
        lines: Any,
    ) -> None:  # fmt: skip
        outputs = [
            (number, vir.offset(builder, vir.advance(builder, y, y_stride, block * ROWS), half * ROW_BYTES))
            for block in range(num_blocks)
            for half, number in enumerate(_SUMS[block])
        ]
        with builder.if_else(builder.icmp_signed("!=", adds, adds.type(0)), likely=False) as (further, first):
            with further:
                for number, place in outputs:
                    emit_load(builder, number, place, y_stride)
            with first:
                for number, _ in outputs:
                    emit_zero(builder, number)
        with cgutils.for_range(builder, num_tiles) as loop:
            numbers = vir.advance(builder, x, x.type(ROW_BYTES), loop.index)
            weights = vir.advance(builder, panel, x.type(_STEPS * _STEP_BYTES), loop.index)
            for half, number in enumerate(_OF_WEIGHTS):
                emit_load(builder, number, vir.offset(builder, weights, half * ROW_BYTES), x.type(_STEP_BYTES))
            for block in range(num_blocks):
                emit_load(builder, _OF_ROWS[block], vir.advance(builder, numbers, x_stride, block * ROWS), x_stride)
                for of_weights, sums in zip(_OF_WEIGHTS, _SUMS[block], strict=True):
                    emit_multiply(builder, sums, _OF_ROWS[block], of_weights)
            fetched = vir.advance(builder, ahead, builder.mul(lines, x.type(LINE_BYTES)), loop.index)
            with cgutils.for_range(builder, lines) as line:
                vir.prefetch(builder, vir.advance(builder, fetched, x.type(LINE_BYTES), line.index))
        for number, place in outputs:
            emit_store(builder, number, place, y_stride)

    return vir.kernel(9, 0, types.void, emit)


_configure = vir.kernel(2, 0, types.void, _emit_configure)
_one_block, _two_blocks = _make_pass(1), _make_pass(2)


@inlined
def rows_at_once(row_bytes):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """So many rows of so many bytes stay in a core's cache while panel after panel is multiplied with them."""
    return max(_FEWEST_AT_ONCE, _CACHED_BYTES // row_bytes // PAIR * PAIR)


@inlined
def _lines_ahead(num_rows):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """How many lines of the next panel a pass fetches for each tile of K, where all passes of one together fetch it.

    Few rows run at the speed of memory by themselves.
    """
    num_passes = (num_rows + PAIR - 1) // PAIR
    return (_PANEL_LINES + num_passes - 1) // num_passes if num_passes >= _LEAST_PASSES else 0


@inlined
def begin_pass(num_rows):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Configure the registers for a pass of so many rows: of two whole tiles, or of fewer."""
    _configure(min(num_rows, ROWS), max(1, min(num_rows - ROWS, ROWS)))


@inlined
def rows_of_pass(row, num_rows):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """How many of `num_rows` the pass from `row` on takes, behind `begin_pass` of the first one's: the registers are
    configured anew only where passes are not alike."""
    count = min(num_rows - row, PAIR)
    if num_rows > PAIR and num_rows % PAIR and (row == 0 or count < PAIR):
        begin_pass(count)
    return count


@inlined
def multiply_rows(x, x_stride, num_rows, panel, num_tiles, y, y_stride, adds, ahead, lines):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """A panel and up to a pair of tiles of rows, behind `begin_pass`."""
    if num_rows > ROWS:
        _two_blocks(x, x_stride, panel, num_tiles, y, y_stride, adds, ahead, lines)
    else:
        _one_block(x, x_stride, panel, num_tiles, y, y_stride, adds, ahead, lines)


def _multiply(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """As `packed_kernel`'s, of weights without scales."""
    x, x_stride, num_rows, k, panels, num_panels, bias, y, _scales, _group = _ten_words(arguments)
    y_stride, panel_bytes = num_panels * _OUTPUT_BYTES, k * _STEP_BYTES
    # Of long rows a part at a time.
    num_tiles = k // _STEPS
    most_tiles = min(num_tiles, _MOST_TILES)
    most = rows_at_once(most_tiles * ROW_BYTES)
    for begin in range(0, num_rows, most):
        behind = min(begin + most, num_rows)
        for tile in range(0, num_tiles, most_tiles):
            of_x, of_panels = x + tile * ROW_BYTES, panels + tile * _STEPS * _STEP_BYTES
            count = min(most_tiles, num_tiles - tile)
            lines = _lines_ahead(behind - begin)
            begin_pass(min(behind - begin, PAIR))
            for index in range(first, end):
                panel, outputs = of_panels + index * panel_bytes, y + index * _OUTPUT_BYTES
                for row in range(begin, behind, PAIR):
                    left = rows_of_pass(row - begin, behind - begin)
                    place = outputs + row * y_stride
                    ahead = panel + panel_bytes + (row - begin) // PAIR * lines * count * LINE_BYTES
                    multiply_rows(
                        of_x + row * x_stride, x_stride, left, panel, count, place, y_stride, tile, ahead, lines
                    )  # fmt: skip
                    if bias and tile + count == num_tiles:
                        for member in range(left):
                            add_bias(place + member * y_stride, bias + index * _OUTPUT_BYTES)
    release()


def _multiply_gated(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """As `packed_kernel`'s, of weights without scales; both products stay in the first-level cache until they are
    gated."""
    x, x_stride, num_rows, k, panels, num_pairs, bias, _both, _scales, _group, y = _eleven_words(arguments)
    y_stride, panel_bytes, num_tiles = num_pairs * _OUTPUT_BYTES, k * _STEP_BYTES, k // _STEPS
    most = rows_at_once(x_stride)
    both, both_stride = on_lines(2 * PANEL * PAIR), 2 * _OUTPUT_BYTES
    for begin in range(0, num_rows, most):
        behind = min(begin + most, num_rows)
        begin_pass(min(behind - begin, PAIR))
        lines = _lines_ahead(behind - begin)
        for pair in range(first, end):
            for row in range(begin, behind, PAIR):
                left = rows_of_pass(row - begin, behind - begin)
                for half in range(2):
                    # Memory is freed behind the last use of its name, whoever has the address.
                    index, place = 2 * pair + half, both.ctypes.data + half * _OUTPUT_BYTES
                    panel = panels + index * panel_bytes
                    ahead = panel + 2 * panel_bytes + (row - begin) // PAIR * lines * num_tiles * LINE_BYTES
                    multiply_rows(
                        x + row * x_stride, x_stride, left, panel, num_tiles, place, both_stride, 0, ahead, lines
                    )  # fmt: skip
                    if bias:
                        for member in range(left):
                            add_bias(place + member * both_stride, bias + index * _OUTPUT_BYTES)
                for member in range(left):
                    gate(both.ctypes.data + member * both_stride, y + (row + member) * y_stride + pair * _OUTPUT_BYTES)
    release()


_ten_words, _eleven_words = words(10), words(11)
#: Of bfloat16 in tiles, where the CPU has them (`vector_ir.has_bfloat16_tiles`).
IN_TILES = Products(
    Kernel(_multiply, "i" * 10), Kernel(_multiply_gated, "i" * 11), per_step=2, rounds=True, in_rows=True
)
