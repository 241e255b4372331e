"""Products in tiles with weights that are whole numbers of 8 or 4 bits.

A part of a panel becomes bfloat16, exactly, in memory that stays in the first-level cache, and is multiplied as such
weights are (`tiles_kernel`). The sums of a group are scaled when all of it is added up: those of 8 bits at the end.
A row's result depends neither on the other rows, nor on their number, nor on the threads.

Panels and scales are as `packed_kernel` has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

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
from tandem.engine.cpu.unpacking import BYTES_AHEAD, MOST_UNPACKED, emit_int4_pairs, emit_int8_pairs
from tandem.engine.huge_pages import FLOAT_BYTES

_VEC = vir.Vectors(ROWS)
_NUM_VECTORS = PANEL // ROWS
_OUTPUT_BYTES = PANEL * FLOAT_BYTES
_WORD = vir.INT4_PER_WORD
# For few rows, whose limit is memory: how many lines beyond those that unpacking fetches are fetched with each tile of
# K while others are multiplied.
_LINES_BESIDE = 4


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


_unpack_int8 = vir.kernel(3, 0, types.void, emit_int8_pairs)
_unpack_int4 = vir.kernel(3, 0, types.void, emit_int4_pairs)
_scale, _add_scaled = _scale_of(adds=False), _scale_of(adds=True)


@inlined
def _multiply_panel(bits, x, x_stride, num_rows, k, panel, scales, group, unpacked, sums, y, y_stride):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Outputs of a panel; `k` and `group` in numbers of K."""
    begin = 0
    while begin < k:
        count = min(MOST_UNPACKED, k - begin, group - begin % group)
        weights = panel + begin * PANEL * bits // 8
        if bits == 8:
            _unpack_int8(weights, count, unpacked)
        else:
            _unpack_int4(weights, count, unpacked)
        ahead = weights + count * PANEL * bits // 8 + BYTES_AHEAD
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
        unpacked, sums = on_lines(MOST_UNPACKED * PANEL // 2), on_lines(min(num_rows, most) * PANEL)
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
        unpacked, sums = on_lines(MOST_UNPACKED * PANEL // 2), on_lines(min(num_rows, most) * PANEL)
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
