"""The product of a few rows with a packed matrix, on vector registers: the inner loop of every linear layer on the CPU.

Written against LLVM by way of Numba, so that it needs no compiler at the user's. A panel holds 32 outputs, `[K][32]`
float32: each step of `k` loads four vectors of weights once and multiplies them with one number of each row. One pass
takes up to six rows, with all of their sums in registers. Weights are read once, in order, at the speed of memory.

Each output is one chain of fused multiply-adds over ascending `k`, whatever else is computed beside it: a row's result
does not depend on the other rows, on their number or on the threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from numba import types
from numba.core import cgutils

from tandem.engine import vector_ir as vir
from tandem.engine.shared_words import words
from tandem.engine.threads import Kernel

#: Outputs of one panel.
PANEL = 32
_NUM_VECTORS = PANEL // vir.LANES
# Of one row: Numba takes it for a constant.
_PANEL_BYTES = PANEL * vir.FLOAT_BYTES

#: Rows of one pass, at most. Their sums of a whole panel are 24 vectors, those of half a panel 12.
_MAX_ROWS = 6
_NUM_PARTS = 1 if vir.num_registers() >= 32 else 2
_PART_BYTES = _PANEL_BYTES // _NUM_PARTS
#: Up to so many rows whole panels go at the speed of memory by themselves: with 16 registers, twelve sums.
_MAX_ROWS_ALONE = 5 if _NUM_PARTS == 1 else 3


def _make_tile(rows: range, num_vectors: int, *, ahead: bool) -> Callable[..., None]:
    """A kernel for a number of rows out of `rows` (of any other it computes nothing), and a panel's first vectors.

    Its arguments are counts and addresses: how many rows; x, the distance of its rows in bytes, the panel, its K, the
    outputs, the distance of their rows in bytes; where to prefetch from, and by how many bytes to go on with each step
    of k.
    """

    def emit(builder: Any, num_rows: Any, *arguments: Any) -> None:
        end = builder.append_basic_block("end")
        choice = builder.switch(num_rows, end)
        for count in rows:
            block = builder.append_basic_block(f"rows_{count}")
            choice.add_case(num_rows.type(count), block)
            builder.position_at_end(block)
            _emit_pass(builder, count, num_vectors, ahead, *arguments)
            builder.branch(end)
        builder.position_at_end(end)

    return vir.kernel(9, 0, types.void, emit)


def _emit_pass(
    builder: Any, num_rows: int, num_vectors: int, ahead: bool,
    x: Any, x_stride: Any, panel: Any, k: Any, y: Any, y_stride: Any, fetch: Any, fetch_step: Any,
) -> None:  # fmt: skip
    rows = [vir.advance(builder, x, x_stride, row) for row in range(num_rows)]
    # Stack slots that LLVM turns into registers.
    sums = [[cgutils.alloca_once_value(builder, vir.constant(0.0)) for _ in range(num_vectors)] for _ in rows]
    one, step_bytes = k.type(vir.FLOAT_BYTES), k.type(_PANEL_BYTES)
    with cgutils.for_range(builder, k) as loop:
        step = vir.advance(builder, panel, step_bytes, loop.index)
        weights = [
            vir.load(builder, vir.offset(builder, step, n * vir.VECTOR_BYTES), alignment=vir.VECTOR_BYTES)
            for n in range(num_vectors)
        ]
        if ahead:
            line = vir.advance(builder, fetch, fetch_step, loop.index)
            # As many as the step reads: a pass over whole panels may be the only one.
            for n in range(0, num_vectors * vir.VECTOR_BYTES, vir.LINE_BYTES):
                vir.prefetch(builder, vir.offset(builder, line, n))
        for row, row_sums in zip(rows, sums, strict=True):
            number = vir.spread(builder, vir.load_real(builder, vir.advance(builder, row, one, loop.index)))
            for weight, slot in zip(weights, row_sums, strict=True):
                builder.store(vir.fma(builder, number, weight, builder.load(slot)), slot)
    for row, row_sums in enumerate(sums):
        start = vir.advance(builder, y, y_stride, row)
        for n, slot in enumerate(row_sums):
            vir.store(builder, builder.load(slot), vir.offset(builder, start, n * vir.VECTOR_BYTES))


_tile = _make_tile(range(1, _MAX_ROWS_ALONE + 1), _NUM_VECTORS, ahead=False)
# No even share of more rows than `_MAX_ROWS_ALONE` is less than half of the most.
_tile_ahead = _make_tile(range(_MAX_ROWS // 2, _MAX_ROWS + 1), _NUM_VECTORS // _NUM_PARTS, ahead=True)


def _emit_add(builder: Any, y: Any, bias: Any) -> None:
    for n in range(_NUM_VECTORS):
        place, other = (vir.offset(builder, address, n * vir.VECTOR_BYTES) for address in (y, bias))
        vir.store(builder, builder.fadd(vir.load(builder, place), vir.load(builder, other)), place)


def _emit_gate(builder: Any, pair: Any, y: Any) -> None:
    for n in range(_NUM_VECTORS):
        gate = vir.load(builder, vir.offset(builder, pair, n * vir.VECTOR_BYTES))
        up = vir.load(builder, vir.offset(builder, pair, (_NUM_VECTORS + n) * vir.VECTOR_BYTES))
        gated = builder.fmul(vir.silu(builder, gate), up)
        vir.store(builder, gated, vir.offset(builder, y, n * vir.VECTOR_BYTES))


#: Adds the bias of a panel (second address) to a row's outputs.
_add = vir.kernel(2, 0, types.void, _emit_add)
#: SiLU of a row's outputs of one panel times those of the panel behind it.
_gate = vir.kernel(2, 0, types.void, _emit_gate)


@numba.njit(nogil=True, inline="always")
def _multiply_panel(x, x_stride, num_rows, k, panel, bias, y, y_stride):  # type: ignore[no-untyped-def] # pragma: no cover
    """As few passes as there can be, of as even numbers of rows as there can be.

    With few rows a single pass runs at the speed of memory by itself. With more of them memory would rest while a pass
    computes: so each pass fetches its share of the next panel, evenly (faster fetching stalls the pass).
    """
    if num_rows <= _MAX_ROWS_ALONE:
        _tile(num_rows, x, x_stride, panel, k, y, y_stride, 0, 0)
    else:
        num_passes = (num_rows + _MAX_ROWS - 1) // _MAX_ROWS  # of each part
        step = _PANEL_BYTES // (num_passes * _NUM_PARTS)
        ahead = panel + k * _PANEL_BYTES
        for part in range(_NUM_PARTS):
            row = 0
            for left in range(num_passes, 0, -1):
                count = (num_rows - row + left - 1) // left
                x_row, y_row = x + row * x_stride, y + row * y_stride + part * _PART_BYTES
                _tile_ahead(count, x_row, x_stride, panel + part * _PART_BYTES, k, y_row, y_stride, ahead, step)
                row += count
                ahead += k * step
    if bias:
        for index in range(num_rows):
            _add(y + index * y_stride, bias)


def _multiply(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Panels `[first, end)` of `y[num_rows, 32 * num_panels] = x[num_rows, k] @ panels + bias`.

    All by address; `x_stride` in bytes, `bias` 0 where there is none, `y` without gaps.
    """
    x, x_stride, num_rows, k, panels, num_panels, bias, y = _eight_words(arguments)
    y_stride = num_panels * _PANEL_BYTES
    for index in range(first, end):
        shift = bias + index * _PANEL_BYTES if bias else 0
        panel = panels + index * k * _PANEL_BYTES
        _multiply_panel(x, x_stride, num_rows, k, panel, shift, y + index * _PANEL_BYTES, y_stride)


def _multiply_gated(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """As `_multiply`, for pairs of panels: `y[num_rows, 32 * num_pairs] = silu(x @ first) * (x @ second)`.

    `both[num_rows, 64 * num_pairs]` takes the products in between.
    """
    x, x_stride, num_rows, k, panels, num_pairs, bias, both, y = _nine_words(arguments)
    both_stride, y_stride = 2 * num_pairs * _PANEL_BYTES, num_pairs * _PANEL_BYTES
    for index in range(first, end):
        for half in range(2):
            panel = 2 * index + half
            shift = bias + panel * _PANEL_BYTES if bias else 0
            place = both + panel * _PANEL_BYTES
            _multiply_panel(x, x_stride, num_rows, k, panels + panel * k * _PANEL_BYTES, shift, place, both_stride)
        for row in range(num_rows):
            _gate(both + row * both_stride + 2 * index * _PANEL_BYTES, y + row * y_stride + index * _PANEL_BYTES)


_eight_words, _nine_words = words(8), words(9)
#: Its items are panels.
multiply = Kernel(_multiply, "i" * 8)
#: Its items are pairs of panels.
multiply_gated = Kernel(_multiply_gated, "i" * 9)
