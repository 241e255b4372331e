"""The product of a few rows with a packed matrix, on vector registers: the inner loop of every linear layer on the CPU.

Written against LLVM by way of Numba, so that it needs no compiler at the user's. A panel holds 32 outputs, `[K][32]`
float32: each step of `k` loads four vectors of weights once and multiplies them with one number of each row, which
keeps up to twelve sums in registers. Weights are read once, in order, at the speed of memory.

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
from tandem.engine.threads import Kernel

#: Outputs of one panel.
PANEL = 32
_NUM_VECTORS = PANEL // vir.LANES
# Of one row: Numba takes it for a constant.
_PANEL_BYTES = PANEL * vir.FLOAT_BYTES


def _make_tile(num_rows: int, *, ahead: bool = False) -> Callable[..., None]:
    """A kernel for `num_rows` rows and all outputs of a panel.

    Its arguments are addresses and counts: rows of x, their distance in bytes, the panel, its K, the outputs, their
    distance in bytes; where to prefetch from, and by how many bytes to go on with each step of k.
    """

    def emit(
        builder: Any, x: Any, x_stride: Any, panel: Any, k: Any, y: Any, y_stride: Any, fetch: Any, fetch_step: Any
    ) -> None:
        rows = [vir.advance(builder, x, x_stride, row) for row in range(num_rows)]
        # Stack slots that LLVM turns into registers.
        sums = [[cgutils.alloca_once_value(builder, vir.constant(0.0)) for _ in range(_NUM_VECTORS)] for _ in rows]
        one, step_bytes = k.type(vir.FLOAT_BYTES), k.type(PANEL * vir.FLOAT_BYTES)
        with cgutils.for_range(builder, k) as loop:
            step = vir.advance(builder, panel, step_bytes, loop.index)
            weights = [
                vir.load(builder, vir.offset(builder, step, n * vir.VECTOR_BYTES), alignment=vir.VECTOR_BYTES)
                for n in range(_NUM_VECTORS)
            ]
            if ahead:
                vir.prefetch(builder, vir.advance(builder, fetch, fetch_step, loop.index))
            for row, row_sums in zip(rows, sums, strict=True):
                number = vir.spread(builder, vir.load_real(builder, vir.advance(builder, row, one, loop.index)))
                for weight, slot in zip(weights, row_sums, strict=True):
                    builder.store(vir.fma(builder, number, weight, builder.load(slot)), slot)
        for row, row_sums in enumerate(sums):
            start = vir.advance(builder, y, y_stride, row)
            for n, slot in enumerate(row_sums):
                vir.store(builder, builder.load(slot), vir.offset(builder, start, n * vir.VECTOR_BYTES))

    return vir.kernel(8, 0, types.void, emit)


# Three rows keep twelve sums, all that sixteen registers allow.
_one_row, _two_rows, _three_rows = (_make_tile(rows) for rows in (1, 2, 3))
_one_row_ahead, _two_rows_ahead, _three_rows_ahead = (_make_tile(rows, ahead=True) for rows in (1, 2, 3))


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
    """Three rows a pass; two and two where four are left.

    A single pass runs at the speed of memory by itself. With more of them, memory would rest in all but the first: so
    each pass fetches its share of the next panel, evenly, one line at a time (faster fetching stalls the pass).
    """
    num_passes = (num_rows + 2) // 3
    step = _PANEL_BYTES // num_passes
    ahead = panel + k * _PANEL_BYTES
    row = 0
    while row < num_rows:
        left = num_rows - row
        x_row, y_row = x + row * x_stride, y + row * y_stride
        if num_passes == 1:
            if left == 3:
                _three_rows(x_row, x_stride, panel, k, y_row, y_stride, 0, 0)
            elif left == 2:
                _two_rows(x_row, x_stride, panel, k, y_row, y_stride, 0, 0)
            else:
                _one_row(x_row, x_stride, panel, k, y_row, y_stride, 0, 0)
            row += left
        elif left == 3 or left > 4:
            _three_rows_ahead(x_row, x_stride, panel, k, y_row, y_stride, ahead, step)
            row += 3
        elif left >= 2:
            _two_rows_ahead(x_row, x_stride, panel, k, y_row, y_stride, ahead, step)
            row += 2
        else:
            _one_row_ahead(x_row, x_stride, panel, k, y_row, y_stride, ahead, step)
            row += 1
        ahead += k * step
    if bias:
        for index in range(num_rows):
            _add(y + index * y_stride, bias)


def _multiply(x, x_stride, num_rows, k, panels, num_panels, bias, y):  # type: ignore[no-untyped-def] # pragma: no cover
    """`y[num_rows, 32 * num_panels] = x[num_rows, k] @ panels + bias`, all by address; `x_stride` in bytes.

    `bias` is 0 where there is none. `y` is without gaps.
    """
    y_stride = num_panels * _PANEL_BYTES
    for index in numba.prange(num_panels):
        shift = bias + index * _PANEL_BYTES if bias else 0
        panel = panels + index * k * _PANEL_BYTES
        _multiply_panel(x, x_stride, num_rows, k, panel, shift, y + index * _PANEL_BYTES, y_stride)


def _multiply_gated(x, x_stride, num_rows, k, panels, num_pairs, bias, both, y):  # type: ignore[no-untyped-def] # pragma: no cover
    """As `_multiply`, for pairs of panels: `y[num_rows, 32 * num_pairs] = silu(x @ first) * (x @ second)`.

    `both[num_rows, 64 * num_pairs]` takes the products in between.
    """
    both_stride, y_stride = 2 * num_pairs * _PANEL_BYTES, num_pairs * _PANEL_BYTES
    for index in numba.prange(num_pairs):
        for half in range(2):
            panel = 2 * index + half
            shift = bias + panel * _PANEL_BYTES if bias else 0
            place = both + panel * _PANEL_BYTES
            _multiply_panel(x, x_stride, num_rows, k, panels + panel * k * _PANEL_BYTES, shift, place, both_stride)
        for row in range(num_rows):
            _gate(both + row * both_stride + 2 * index * _PANEL_BYTES, y + row * y_stride + index * _PANEL_BYTES)


multiply = Kernel(_multiply)
multiply_gated = Kernel(_multiply_gated)
