"""Products in tiles with weights that are whole numbers of 8 or 4 bits.

A part of a panel becomes bfloat16, exactly, in memory that stays in the first-level cache, and is multiplied as such
weights are (`tiles_kernel`). The sums of a group are scaled when all of it is added up: those of 8 bits at the end.
A row's result depends neither on the other rows, nor on their number, nor on the threads.

Panels and scales are as `packed_kernel` has them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from tandem.engine.cpu import vector_ir as vir
from tandem.engine.cpu.atomics import words
from tandem.engine.cpu.compiling import inlined
from tandem.engine.cpu.packed_kernel import PANEL, Products, add_bias, gate
from tandem.engine.cpu.scratch import on_lines
from tandem.engine.cpu.threads import Kernel
from tandem.engine.cpu.tiles import ROW_BYTES, ROWS, release
from tandem.engine.cpu.tiles_kernel import PAIR, TILE_NUMBERS, begin_pass, multiply_rows, rows_at_once, rows_of_pass
from tandem.engine.huge_pages import FLOAT_BYTES

_VEC = vir.Vectors(ROWS)
_NUM_VECTORS = PANEL // ROWS
_OUTPUT_BYTES = PANEL * FLOAT_BYTES
# Of an unpacked panel, bytes of two numbers of K.
_PAIR_BYTES = 2 * PANEL * vir.SHORT_BYTES
_WORD = vir.INT4_PER_WORD
#: Numbers of K that are unpacked at a time, at most: 32 KiB of them.
_MOST_UNPACKED = 512
# How far on weights are fetched while others are unpacked; and for few rows, whose limit is memory, how many lines
# beyond that with each tile of K while these are multiplied.
_BYTES_AHEAD, _LINES_BESIDE = 8192, 4
_WORDS = ir.VectorType(ir.IntType(32), ROWS)
_HALVES = ir.VectorType(ir.IntType(16), 2 * ROWS)


def _emit_unpack_int8(builder: Any, panel: Any, numbers: Any, target: Any) -> None:
    """So many numbers of K of a panel `[K][32]`, as `[K / 2][32][2]`."""
    step = numbers.type(2 * PANEL)
    upper = _VEC.integers(0xFFFF0000 - (1 << 32))
    with cgutils.for_range(builder, builder.udiv(numbers, numbers.type(2))) as loop:
        start = vir.advance(builder, panel, step, loop.index)
        to = vir.advance(builder, target, numbers.type(_PAIR_BYTES), loop.index)
        vir.prefetch(builder, vir.offset(builder, start, _BYTES_AHEAD))
        for n in range(_NUM_VECTORS):
            places = (vir.offset(builder, start, row * PANEL + n * ROWS) for row in range(2))
            first, second = (
                builder.bitcast(_VEC.load_int8(builder, place, alignment=1), _WORDS) for place in places
            )
            pair = builder.or_(builder.lshr(first, _VEC.integers(16)), builder.and_(second, upper))
            vir.store_bits(builder, pair, vir.offset(builder, to, n * ROW_BYTES))


def _emit_unpack_int4(builder: Any, panel: Any, numbers: Any, target: Any) -> None:
    """So many numbers of K of a panel of words `[K / 8][32]`, as `[K / 2][32][2]`; they are looked up in a register."""
    table = ir.Constant(_HALVES, [_short_bits(value) for value in vir.INT4_VALUES] * 2)
    look_up = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_HALVES, [_HALVES, _HALVES]), "llvm.x86.avx512.permvar.hi.512"
    )
    low, high = _VEC.integers(0xFFFF), _VEC.integers(0xFFFF0000 - (1 << 32))
    with cgutils.for_range(builder, builder.udiv(numbers, numbers.type(_WORD))) as loop:
        start = vir.advance(builder, panel, numbers.type(_OUTPUT_BYTES), loop.index)
        to = vir.advance(builder, target, numbers.type(_WORD // 2 * _PAIR_BYTES), loop.index)
        for n in range(_NUM_VECTORS):
            place = vir.offset(builder, start, n * ROW_BYTES)
            vir.prefetch(builder, vir.offset(builder, place, _BYTES_AHEAD))
            packed = _VEC.load_integers(builder, place)
            for pair in range(_WORD // 2):
                # Bits of two numbers to the lowest of each half; what is above five bits does not count, and the table
                # has all values twice.
                both = builder.lshr(packed, _VEC.integers(8 * pair)) if pair else packed
                places = builder.or_(
                    builder.and_(both, low), builder.and_(builder.shl(both, _VEC.integers(12)), high)
                )  # fmt: skip
                found = builder.call(look_up, [table, builder.bitcast(places, _HALVES)])
                vir.store_bits(builder, found, vir.offset(builder, to, pair * _PAIR_BYTES + n * ROW_BYTES))


def _short_bits(value: float) -> int:
    """Of a number that bfloat16 has exactly."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return bits >> 16


def _scale_of(*, adds: bool) -> Callable[..., None]:
    """`y = scales * sums`, or `y += `, of a panel's outputs of so many rows. Arguments: rows, sums, scales, y, the
    distance of its rows in bytes."""

    def emit(builder: Any, num_rows: Any, sums: Any, scales: Any, y: Any, y_stride: Any) -> None:
        factors = [_VEC.load(builder, vir.offset(builder, scales, n * ROW_BYTES)) for n in range(_NUM_VECTORS)]
        with cgutils.for_range(builder, num_rows) as loop:
            source = vir.advance(builder, sums, num_rows.type(_OUTPUT_BYTES), loop.index)
            target = vir.advance(builder, y, y_stride, loop.index)
            for n, factor in enumerate(factors):
                total, place = (vir.offset(builder, start, n * ROW_BYTES) for start in (source, target))
                total = _VEC.load(builder, total)
                if adds:
                    _VEC.store(builder, _VEC.fma(builder, total, factor, _VEC.load(builder, place)), place)
                else:
                    _VEC.store(builder, builder.fmul(total, factor), place)

    return vir.kernel(5, 0, types.void, emit)


_unpack_int8 = vir.kernel(3, 0, types.void, vir.apart("tiles_unpack_int8", _emit_unpack_int8))
_unpack_int4 = vir.kernel(3, 0, types.void, vir.apart("tiles_unpack_int4", _emit_unpack_int4))
_scale, _add_scaled = _scale_of(adds=False), _scale_of(adds=True)


@inlined
def _multiply_panel(bits, x, x_stride, num_rows, k, panel, scales, group, unpacked, sums, y, y_stride):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Outputs of a panel; `k` and `group` in numbers of K."""
    begin = 0
    while begin < k:
        count = min(_MOST_UNPACKED, k - begin, group - begin % group)
        weights = panel + begin * PANEL * bits // 8
        if bits == 8:
            _unpack_int8(weights, count, unpacked)
        else:
            _unpack_int4(weights, count, unpacked)
        ahead = weights + count * PANEL * bits // 8 + _BYTES_AHEAD
        is_first, is_last = begin % group == 0, (begin + count) % group == 0 or begin + count == k
        for row in range(0, num_rows, PAIR):
            left = rows_of_pass(row, num_rows)
            place = sums + row * _OUTPUT_BYTES
            multiply_rows(
                x + row * x_stride + begin * vir.SHORT_BYTES, x_stride, left, unpacked, count // TILE_NUMBERS, place,
                _OUTPUT_BYTES, 0 if is_first else 1, ahead, _LINES_BESIDE if num_rows <= PAIR else 0,
            )  # fmt: skip
            if is_last:
                of_group = scales + begin // group * _OUTPUT_BYTES
                if begin < group:
                    _scale(left, place, of_group, y + row * y_stride, y_stride)
                else:
                    _add_scaled(left, place, of_group, y + row * y_stride, y_stride)
        begin += count


def _multiply_of(bits: int) -> Callable[[Any, Any, Any], None]:
    per_step = _WORD if bits == 4 else 1

    def multiply(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
        """As `packed_kernel`'s."""
        x, x_stride, num_rows, k, panels, num_panels, bias, y, scales, group = _ten_words(arguments)
        k, group = k * per_step, group * per_step
        y_stride, panel_bytes, scales_bytes = num_panels * _OUTPUT_BYTES, k * PANEL * bits // 8, _scales_bytes(k, group)
        most = rows_at_once(x_stride)
        unpacked, sums = on_lines(_MOST_UNPACKED * PANEL // 2), on_lines(min(num_rows, most) * PANEL)
        for row in range(0, num_rows, most):
            count = min(most, num_rows - row)
            begin_pass(min(count, PAIR))
            for index in range(first, end):
                outputs = y + row * y_stride + index * _OUTPUT_BYTES
                _multiply_panel(
                    bits, x + row * x_stride, x_stride, count, k, panels + index * panel_bytes,
                    scales + index * scales_bytes, group, unpacked.ctypes.data, sums.ctypes.data, outputs, y_stride,
                )  # fmt: skip
                if bias:
                    for member in range(count):
                        add_bias(outputs + member * y_stride, bias + index * _OUTPUT_BYTES)
        release()

    return multiply


def _multiply_gated_of(bits: int) -> Callable[[Any, Any, Any], None]:
    per_step = _WORD if bits == 4 else 1

    def multiply_gated(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
        """As `packed_kernel`'s; both products stay in the second-level cache until they are gated."""
        x, x_stride, num_rows, k, panels, num_pairs, bias, _both, scales, group, y = _eleven_words(arguments)
        k, group = k * per_step, group * per_step
        y_stride, panel_bytes, scales_bytes = num_pairs * _OUTPUT_BYTES, k * PANEL * bits // 8, _scales_bytes(k, group)
        both_stride, most = 2 * _OUTPUT_BYTES, rows_at_once(x_stride)
        unpacked, sums = on_lines(_MOST_UNPACKED * PANEL // 2), on_lines(min(num_rows, most) * PANEL)
        both = on_lines(2 * PANEL * min(num_rows, most))
        for row in range(0, num_rows, most):
            count = min(most, num_rows - row)
            begin_pass(min(count, PAIR))
            for pair in range(first, end):
                for half in range(2):
                    index, outputs = 2 * pair + half, both.ctypes.data + half * _OUTPUT_BYTES
                    _multiply_panel(
                        bits, x + row * x_stride, x_stride, count, k, panels + index * panel_bytes,
                        scales + index * scales_bytes, group, unpacked.ctypes.data, sums.ctypes.data, outputs,
                        both_stride,
                    )  # fmt: skip
                    if bias:
                        for member in range(count):
                            add_bias(outputs + member * both_stride, bias + index * _OUTPUT_BYTES)
                for member in range(count):
                    target = y + (row + member) * y_stride + pair * _OUTPUT_BYTES
                    gate(both.ctypes.data + member * both_stride, target)
        release()

    return multiply_gated


@inlined
def _scales_bytes(k, group):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Of a panel."""
    return (k + group - 1) // group * _OUTPUT_BYTES


_ten_words, _eleven_words = words(10), words(11)
#: By bits, of weights whose K and groups are made of whole tiles, where the CPU has them.
QUANTIZED_IN_TILES: Mapping[int, Products] = {
    bits: Products(
        Kernel(_multiply_of(bits), "i" * 10), Kernel(_multiply_gated_of(bits), "i" * 11),
        per_step=_WORD if bits == 4 else 1, rounds=True, in_rows=True,
    )
    for bits in (8, 4)
}  # fmt: skip
