"""Products of bfloat16 in tiles: matrices of 16 rows of 64 bytes, which some CPUs (AMX) multiply at once.

A panel is as for products by two, `[K / 2][32][2]`: sixteen of its steps are two tiles, of 16 outputs each. Rows lie
as they are, rounded to bfloat16; 32 of them and a panel are four tiles of sums, which stay in registers over all of K.

Of 32 numbers of K those at even and at odd places have sums of their own, which are added to the output's in one step.
That is another numerical type than by two. A row's result depends neither on the other rows, nor on their number, nor
on the threads.

Reference: Intel, "Architecture Instruction Set Extensions Programming Reference", chapter on AMX.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils

from tandem.engine.cpu import vector_ir as vir
from tandem.engine.cpu.atomics import words
from tandem.engine.cpu.packed_kernel import PANEL, Products, add_bias, gate
from tandem.engine.cpu.threads import Kernel
from tandem.engine.huge_pages import FLOAT_BYTES

# Of a tile: rows, and bytes of one.
_ROWS, _ROW_BYTES = 16, 64
#: Numbers of K that one product of two tiles takes.
TILE_NUMBERS = _ROW_BYTES // vir.SHORT_BYTES
_OUTPUT_BYTES, _STEP_BYTES = PANEL * FLOAT_BYTES, 2 * PANEL * vir.SHORT_BYTES
_STEPS = TILE_NUMBERS // 2
_CONFIG_BYTES, _ROW_LENGTHS_AT, _NUM_ROWS_AT = 64, 16, 48
# Of rows that are multiplied together: half of what second-level caches of CPUs with tiles hold.
_CACHED_BYTES = 1 << 20
# Rows for which weights are read once, at least: with fewer memory is the limit.
_FEWEST_AT_ONCE = 128
# Registers: of sums, for the first and the second 16 rows, each of 16 outputs and the next; of rows; of weights.
_SUMS, _OF_ROWS, _OF_WEIGHTS = ((0, 1), (2, 3)), (4, 5), (6, 7)

_BYTE, _WORD = ir.IntType(8), ir.IntType(64)
_POINTER = _BYTE.as_pointer()


def _call(builder: Any, name: str, *arguments: Any) -> None:
    function = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    builder.call(cgutils.get_or_insert_function(builder.module, function, f"llvm.x86.{name}"), arguments)


def _register(number: int) -> Any:
    return ir.Constant(_BYTE, number)


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _POINTER)


def _emit_configure(builder: Any, first_rows: Any, second_rows: Any) -> None:
    """So many rows have the first and the second tile of rows, and of sums."""
    config = cgutils.alloca_once(builder, ir.ArrayType(_BYTE, _CONFIG_BYTES))
    config.align = _CONFIG_BYTES
    start = builder.bitcast(config, _POINTER)

    def put(value: Any, at: int) -> None:
        builder.store(value, builder.gep(start, [ir.Constant(_WORD, at)]))

    for at in range(_CONFIG_BYTES):
        put(ir.Constant(_BYTE, 0), at)
    put(ir.Constant(_BYTE, 1), 0)  # the palette
    rows = {_SUMS[0][0]: first_rows, _SUMS[0][1]: first_rows, _OF_ROWS[0]: first_rows}
    rows |= {_SUMS[1][0]: second_rows, _SUMS[1][1]: second_rows, _OF_ROWS[1]: second_rows}
    for number in range(8):
        put(ir.Constant(_BYTE, _ROW_BYTES), _ROW_LENGTHS_AT + 2 * number)
        count = builder.trunc(rows[number], _BYTE) if number in rows else ir.Constant(_BYTE, _ROWS)
        put(count, _NUM_ROWS_AT + number)
    _call(builder, "ldtilecfg", start)


def _emit_release(builder: Any) -> None:
    _call(builder, "tilerelease")


def _make_pass(num_blocks: int) -> Any:
    """A kernel for so many tiles of rows and a panel. Its arguments: x, the distance of its rows in bytes, the panel,
    its tiles of K, the outputs, the distance of their rows in bytes."""

    def emit(builder: Any, x: Any, x_stride: Any, panel: Any, num_tiles: Any, y: Any, y_stride: Any) -> None:
        for block in range(num_blocks):
            for number in _SUMS[block]:
                _call(builder, "tilezero", _register(number))
        with cgutils.for_range(builder, num_tiles) as loop:
            numbers = vir.advance(builder, x, x.type(_ROW_BYTES), loop.index)
            weights = vir.advance(builder, panel, x.type(_STEPS * _STEP_BYTES), loop.index)
            for half, number in enumerate(_OF_WEIGHTS):
                place = _pointer(builder, vir.offset(builder, weights, half * _ROW_BYTES))
                _call(builder, "tileloadd64", _register(number), place, x.type(_STEP_BYTES))
            for block in range(num_blocks):
                place = _pointer(builder, vir.advance(builder, numbers, x_stride, block * _ROWS))
                _call(builder, "tileloadd64", _register(_OF_ROWS[block]), place, x_stride)
                for of_weights, sums in zip(_OF_WEIGHTS, _SUMS[block], strict=True):
                    registers = (sums, _OF_ROWS[block], of_weights)
                    _call(builder, "tdpbf16ps", *map(_register, registers))
        for block in range(num_blocks):
            start = vir.advance(builder, y, y_stride, block * _ROWS)
            for half, number in enumerate(_SUMS[block]):
                place = _pointer(builder, vir.offset(builder, start, half * _ROW_BYTES))
                _call(builder, "tilestored64", _register(number), place, y_stride)

    return vir.kernel(6, 0, types.void, emit)


_configure = vir.kernel(2, 0, types.void, _emit_configure)
_release = vir.kernel(0, 0, types.void, _emit_release)
_one_block, _two_blocks = _make_pass(1), _make_pass(2)


@numba.njit(nogil=True, inline="always")
def _rows_at_once(row_bytes):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """So many rows of so many bytes stay in a core's cache while panel after panel is multiplied with them."""
    pair = 2 * _ROWS
    return max(_FEWEST_AT_ONCE, _CACHED_BYTES // row_bytes // pair * pair)


@numba.njit(nogil=True, inline="always")
def _begin(num_rows):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Configure the registers for all passes, where they are alike: of two whole tiles, or a single one of fewer."""
    if num_rows >= 2 * _ROWS:
        _configure(_ROWS, _ROWS)
    else:
        _configure(min(num_rows, _ROWS), max(1, num_rows - _ROWS))


@numba.njit(nogil=True, inline="always")
def _multiply_panels(first, end, x, x_stride, num_rows, k, panels, bias, y, y_stride):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Panels `[first, end)` of all that there are, behind `_begin`; `k` in steps of a panel."""
    panel_bytes, num_tiles = k * _STEP_BYTES, k // _STEPS
    last = num_rows // (2 * _ROWS) * (2 * _ROWS)  # the first row behind whole pairs of tiles
    left = num_rows - last
    for index in range(first, end):
        panel, place = panels + index * panel_bytes, y + index * _OUTPUT_BYTES
        if last and left:
            _configure(_ROWS, _ROWS)
        for row in range(0, last, 2 * _ROWS):
            _two_blocks(x + row * x_stride, x_stride, panel, num_tiles, place + row * y_stride, y_stride)
        if left:
            if last:
                _configure(min(left, _ROWS), max(1, left - _ROWS))
            source, target = x + last * x_stride, place + last * y_stride
            if left > _ROWS:
                _two_blocks(source, x_stride, panel, num_tiles, target, y_stride)
            else:
                _one_block(source, x_stride, panel, num_tiles, target, y_stride)
        if bias:
            for row in range(num_rows):
                add_bias(place + row * y_stride, bias + index * _OUTPUT_BYTES)


def _multiply(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """As `packed_kernel`'s, of weights without scales."""
    x, x_stride, num_rows, k, panels, num_panels, bias, y, _scales, _group = _ten_words(arguments)
    y_stride, most = num_panels * _OUTPUT_BYTES, _rows_at_once(x_stride)
    for begin in range(0, num_rows, most):
        count = min(most, num_rows - begin)
        _begin(count)
        source, target = x + begin * x_stride, y + begin * y_stride
        _multiply_panels(first, end, source, x_stride, count, k, panels, bias, target, y_stride)
    _release()


def _multiply_gated(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """As `packed_kernel`'s, of weights without scales."""
    x, x_stride, num_rows, k, panels, num_pairs, bias, both, _scales, _group, y = _eleven_words(arguments)
    both_stride, y_stride, most = 2 * num_pairs * _OUTPUT_BYTES, num_pairs * _OUTPUT_BYTES, _rows_at_once(x_stride)
    for begin in range(0, num_rows, most):
        behind = min(begin + most, num_rows)
        _begin(behind - begin)
        source, between = x + begin * x_stride, both + begin * both_stride
        for pair in range(first, end):
            _multiply_panels(
                2 * pair, 2 * pair + 2, source, x_stride, behind - begin, k, panels, bias, between, both_stride
            )  # fmt: skip
            for row in range(begin, behind):
                gate(both + row * both_stride + 2 * pair * _OUTPUT_BYTES, y + row * y_stride + pair * _OUTPUT_BYTES)
    _release()


_ten_words, _eleven_words = words(10), words(11)
#: Of bfloat16 in tiles, where the CPU has them (`vector_ir.has_bfloat16_tiles`).
IN_TILES = Products(
    Kernel(_multiply, "i" * 10), Kernel(_multiply_gated, "i" * 11), per_step=2, rounds=True, in_rows=True
)
