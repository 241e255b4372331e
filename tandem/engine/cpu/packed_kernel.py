"""Products with a packed matrix, on vector registers: the inner loop of every linear layer on the CPU.

The code is LLVM's by way of Numba, so users need no compiler. A panel holds 32 outputs as `[K][32]` float32. Each step
of `k` loads its vectors of weights once and multiplies them with one number of each row. One pass takes as many rows as
have their sums in registers: twelve with AVX-512; six with AVX2, where a pass computes half a panel. Weights are read
once, in order, at the speed of memory.

More rows than one pass takes are copied first, so that the numbers that a pass reads in one step lie together: rows
that are a power of two apart share few lines of the L1 cache.

Each output is one chain of fused multiply-adds over ascending `k`, whatever else is computed beside it: a row's result
does not depend on the other rows, on their number, on the threads or on the vectors' length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from numba import types
from numba.core import cgutils

from tandem.engine.cpu import vector_ir as vir
from tandem.engine.cpu.atomics import float32s, words
from tandem.engine.cpu.threads import Kernel
from tandem.engine.huge_pages import FLOAT_BYTES, LINE_BYTES

#: Outputs of one panel.
PANEL = 32
_IS_WIDE = vir.has_wide_vectors()
_vec = vir.Vectors(16 if _IS_WIDE else 8)
_NUM_VECTORS = PANEL // _vec.lanes
# Of one step of k. Numba takes this for a constant.
_PANEL_BYTES = PANEL * FLOAT_BYTES

_LINE_FLOATS = LINE_BYTES // FLOAT_BYTES

#: Rows of one pass, at most, and into how many parts it cuts a panel: 24 sums in 32 registers, 12 in 16.
MAX_ROWS, _NUM_PARTS = (12, 1) if _IS_WIDE else (6, 2)
_PART_BYTES = _PANEL_BYTES // _NUM_PARTS
#: Up to so many rows, whose sums of a whole panel have registers, a pass goes at the speed of memory by itself.
_MAX_ROWS_ALONE = 6 if _IS_WIDE else 3
# How far a single pass over whole panels fetches ahead: 64 of its steps.
_AHEAD_BYTES = 64 * _PANEL_BYTES


def _make_tile(rows: range, num_vectors: int, *, together: bool, ahead: bool) -> Callable[..., None]:
    """A kernel for a number of rows out of `rows` (of any other it computes nothing), and a panel's first vectors.

    Its arguments are counts and addresses: how many rows; x, the distance of its rows in bytes, the panel, its K, the
    outputs, the distance of their rows in bytes; where to prefetch from, and by how many bytes to go on with each step
    of k.

    Args:
        together: whether x is `[K][rows]`, and not rows some distance apart.
    """

    def emit(builder: Any, num_rows: Any, *arguments: Any) -> None:
        end = builder.append_basic_block("end")
        choice = builder.switch(num_rows, end)
        for count in rows:
            block = builder.append_basic_block(f"rows_{count}")
            choice.add_case(num_rows.type(count), block)
            builder.position_at_end(block)
            _emit_pass(builder, count, num_vectors, together, ahead, *arguments)
            builder.branch(end)
        builder.position_at_end(end)

    return vir.kernel(9, 0, types.void, emit)


def _emit_pass(
    builder: Any, num_rows: int, num_vectors: int, together: bool, ahead: bool,
    x: Any, x_stride: Any, panel: Any, k: Any, y: Any, y_stride: Any, fetch: Any, fetch_step: Any,
) -> None:  # fmt: skip
    if together:
        rows = [vir.offset(builder, x, row * FLOAT_BYTES) for row in range(num_rows)]
        x_step = k.type(num_rows * FLOAT_BYTES)
    else:
        rows = [vir.advance(builder, x, x_stride, row) for row in range(num_rows)]
        x_step = k.type(FLOAT_BYTES)
    # Stack slots that LLVM turns into registers.
    sums = [[cgutils.alloca_once_value(builder, _vec.constant(0.0)) for _ in range(num_vectors)] for _ in rows]
    step_bytes = k.type(_PANEL_BYTES)
    with cgutils.for_range(builder, k) as loop:
        step = vir.advance(builder, panel, step_bytes, loop.index)
        weights = [
            _vec.load(builder, vir.offset(builder, step, n * _vec.num_bytes), alignment=_vec.num_bytes)
            for n in range(num_vectors)
        ]
        if ahead:
            line = vir.advance(builder, fetch, fetch_step, loop.index)
            # As many as the step reads where this may be the only pass; of several each fetches a share.
            for n in range(0, LINE_BYTES if together else num_vectors * _vec.num_bytes, LINE_BYTES):
                vir.prefetch(builder, vir.offset(builder, line, n))
        for row, row_sums in zip(rows, sums, strict=True):
            number = _vec.spread(builder, vir.load_real(builder, vir.advance(builder, row, x_step, loop.index)))
            for weight, slot in zip(weights, row_sums, strict=True):
                builder.store(_vec.fma(builder, number, weight, builder.load(slot)), slot)
    for row, row_sums in enumerate(sums):
        start = vir.advance(builder, y, y_stride, row)
        for n, slot in enumerate(row_sums):
            _vec.store(builder, builder.load(slot), vir.offset(builder, start, n * _vec.num_bytes))


_tile = _make_tile(range(1, _MAX_ROWS_ALONE + 1), _NUM_VECTORS, together=False, ahead=False)
_tile_ahead = _make_tile(
    range(_MAX_ROWS_ALONE + 1, MAX_ROWS + 1), _NUM_VECTORS // _NUM_PARTS, together=False, ahead=True
)
# No even share of more rows than `MAX_ROWS` is less than half of the most.
_tile_together = _make_tile(range(MAX_ROWS // 2, MAX_ROWS + 1), _NUM_VECTORS // _NUM_PARTS, together=True, ahead=True)


def _emit_add(builder: Any, y: Any, bias: Any) -> None:
    for n in range(_NUM_VECTORS):
        place, other = (vir.offset(builder, address, n * _vec.num_bytes) for address in (y, bias))
        _vec.store(builder, builder.fadd(_vec.load(builder, place), _vec.load(builder, other)), place)


def _emit_gate(builder: Any, pair: Any, y: Any) -> None:
    for n in range(_NUM_VECTORS):
        gate = _vec.load(builder, vir.offset(builder, pair, n * _vec.num_bytes))
        up = _vec.load(builder, vir.offset(builder, pair, (_NUM_VECTORS + n) * _vec.num_bytes))
        gated = builder.fmul(_vec.silu(builder, gate), up)
        _vec.store(builder, gated, vir.offset(builder, y, n * _vec.num_bytes))


#: Adds the bias of a panel (second address) to a row's outputs.
_add = vir.kernel(2, 0, types.void, _emit_add)
#: SiLU of a row's outputs of one panel times those of the panel behind it.
_gate = vir.kernel(2, 0, types.void, _emit_gate)


@numba.njit(nogil=True, inline="always")
def _num_passes(num_rows):  # type: ignore[no-untyped-def]
    """As few passes as there can be."""
    return (num_rows + MAX_ROWS - 1) // MAX_ROWS


@numba.njit(nogil=True, inline="always")
def _first_row(index, num_passes, num_rows):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Where pass `index` of as even ones as there can be begins: the first `num_rows % num_passes` have a row more."""
    return index * (num_rows // num_passes) + min(index, num_rows % num_passes)


@numba.njit(nogil=True, inline="always")
def _multiply_panel(x, x_stride, num_rows, k, panel, bias, y, y_stride):  # type: ignore[no-untyped-def] # pragma: no cover
    """A panel's product, in one pass or several.

    With few rows a single pass runs at the speed of memory by itself. With more of them memory would rest while a pass
    computes: so each pass fetches its share of the next panel, evenly (faster fetching stalls the pass), or a single
    pass what it reads next.
    """
    if num_rows <= _MAX_ROWS_ALONE:
        _tile(num_rows, x, x_stride, panel, k, y, y_stride, 0, 0)
    else:
        num_passes = _num_passes(num_rows)  # of each part
        step = _PANEL_BYTES // (num_passes * _NUM_PARTS)
        ahead = panel + (_AHEAD_BYTES if num_passes * _NUM_PARTS == 1 else k * _PANEL_BYTES)
        for part in range(_NUM_PARTS):
            w = panel + part * _PART_BYTES
            for index in range(num_passes):
                row = _first_row(index, num_passes, num_rows)
                count = _first_row(index + 1, num_passes, num_rows) - row
                y_row = y + row * y_stride + part * _PART_BYTES
                if num_passes == 1:
                    _tile_ahead(count, x, x_stride, w, k, y_row, y_stride, ahead, step)
                else:
                    _tile_together(count, x + row * k * FLOAT_BYTES, 0, w, k, y_row, y_stride, ahead, step)
                ahead += k * step
    if bias:
        for index in range(num_rows):
            _add(y + index * y_stride, bias)


def _put_together(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Passes `[first, end)` over `x[num_rows, k]`: their rows as `[k][rows of the pass]`, one behind the other."""
    x, x_stride, num_rows, k, y = _five_words(arguments)
    num_passes = _num_passes(num_rows)
    for index in range(first, end):
        row = _first_row(index, num_passes, num_rows)
        count = _first_row(index + 1, num_passes, num_rows) - row
        # A cache line of each row at a time: what is written lies close together then.
        for begin in range(0, k, _LINE_FLOATS):
            for member in range(count):
                source = float32s(x + (row + member) * x_stride + begin * FLOAT_BYTES)
                target = float32s(y + (row * k + begin * count + member) * FLOAT_BYTES)
                for step in range(min(_LINE_FLOATS, k - begin)):
                    target[step * count] = source[step]


def _multiply(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Panels `[first, end)` of `y[num_rows, 32 * num_panels] = x[num_rows, k] @ panels + bias`.

    All by address; `x_stride` in bytes, `bias` 0 where there is none, `y` without gaps. More than `MAX_ROWS` rows of x
    are as `put_together` leaves them.
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


_five_words, _eight_words, _nine_words = words(5), words(8), words(9)
#: Its items are passes.
put_together = Kernel(_put_together, "i" * 5)
#: Its items are panels.
multiply = Kernel(_multiply, "i" * 8)
#: Its items are pairs of panels.
multiply_gated = Kernel(_multiply_gated, "i" * 9)


def arranged_features(num_rows: int, k: int) -> int:
    """How many float32 of each row `arrange_rows` needs."""
    return k if num_rows > MAX_ROWS else 0


def arrange_rows(x: int, x_stride: int, num_rows: int, k: int, arranged: int) -> tuple[tuple[bytes, ...], int, int]:
    """Rows as the products take them: calls to run before the product, and its `x` and `x_stride`.

    Args:
        x: address of `[num_rows, k]`, rows `x_stride` bytes apart.
        arranged: address of memory for `[num_rows, arranged_features]`.
    """
    if num_rows <= MAX_ROWS:
        return (), x, x_stride
    return (put_together.call(_num_passes.py_func(num_rows), x, x_stride, num_rows, k, arranged),), arranged, 0
