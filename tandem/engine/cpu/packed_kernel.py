"""Products with a packed matrix, on vector registers: the inner loop of every linear layer on the CPU.

The code is LLVM's by way of Numba, so users need no compiler. A panel holds the outputs of two vectors as `[K][PANEL]`:
32 with AVX-512, 16 with AVX2. Each step of `k` loads its weights once and multiplies them with one number of each row.
One pass takes as many rows as have their sums in registers: twelve with AVX-512, six with AVX2. Weights are read once,
in order, at the speed of memory.

Weights of 16 bits are half as much to read. They become float32, exactly, so products are the same bits as those of
float32 weights with these values: in registers, or once for many rows.

**By two.** Some CPUs also multiply bfloat16 with bfloat16, two numbers in each lane, and add both products to a
float32. That is a numerical type of its own: rows are rounded to bfloat16 first. A panel is `[K / 2][PANEL][2]` then,
and all else is as above, with two numbers for one.

**Whole numbers.** Weights of 8 or 4 bits become float32, too, and have scales: one for each output, or one
for each output and `group` of k. Some hundred numbers of k are added up at a time, of a group at most, and scaled as
they are added to those before. Of 4 bits eight lie in a word, the first one lowest: `[K / 8][PANEL]`, and a step takes
eight numbers of a row. AVX-512 looks their values up in a register. By two (`INT4_BY_TWO` has their order in a word
then) they become bfloat16, exactly.

**Blocks.** More rows than one pass takes are copied first, so that the numbers that a pass reads in one step lie
together: rows that are a power of two apart share few lines of the L1 cache. All passes then go through some hundred
numbers of k of a few panels, and only then on: what each of them reads stays in the nearest caches. Weights become what
is multiplied, float32 or pairs of bfloat16, once for all of a block's passes, since in registers that takes a sixth of
the multiply-adds of AVX-512 on CPUs whose vectors are as wide as its registers.

One row or two would wait for their sums, of which a panel has too few: they take several panels at once.

Each output is one chain of fused multiply-adds over ascending `k`, or one for each group or part that is scaled,
whatever else is computed beside it: a row's result does not depend on the other rows, on their number, on the threads
or on the vectors' length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numba
import torch
from numba import types
from numba.core import cgutils

from tandem.engine.cpu import vector_ir as vir
from tandem.engine.cpu.atomics import words
from tandem.engine.cpu.compiling import called
from tandem.engine.cpu.scratch import on_lines
from tandem.engine.cpu.threads import Kernel
from tandem.engine.cpu.unpacking import BYTES_AHEAD, MOST_UNPACKED, emit_int4_pairs, emit_int8_pairs
from tandem.engine.huge_pages import FLOAT_BYTES, LINE_BYTES

_IS_WIDE = vir.has_wide_vectors()
_vec = vir.Vectors(16 if _IS_WIDE else 8)
_NUM_VECTORS = 2
#: Outputs of one panel.
PANEL = _NUM_VECTORS * _vec.lanes
# How weights are stored; Numba takes these, and what else is of capitals here, for constants.
_FLOAT32, _BFLOAT16, _FLOAT16, _BY_TWO, _INT8, _INT4, _INT8_BY_TWO, _INT4_BY_TWO = range(8)
# As what a block multiplies them: products are added to the outputs, of whole numbers when they have been scaled.
_GOES_ON, _GOES_ON_BY_TWO, _SCALED, _SCALED_BY_TWO = range(8, 12)
_IN_BLOCK = (_GOES_ON, _GOES_ON, _GOES_ON, _GOES_ON_BY_TWO, _SCALED, _SCALED, _SCALED_BY_TWO, _SCALED_BY_TWO)
_KINDS_BY_TWO = (_BY_TWO, _INT8_BY_TWO, _INT4_BY_TWO, _GOES_ON_BY_TWO, _SCALED_BY_TWO)
# They need not be unpacked for it.
_READY = (_FLOAT32, _BY_TWO)
_KINDS_WITH_SCALES = (_INT8, _INT4, _INT8_BY_TWO, _INT4_BY_TWO, _SCALED, _SCALED_BY_TWO)
_LOADS: Mapping[int, Callable[..., Any]] = {
    _FLOAT32: _vec.load,
    _BFLOAT16: _vec.load_bfloat16,
    _FLOAT16: _vec.load_float16,
    _BY_TWO: _vec.load,
    _INT8: _vec.load_int8,
    _INT4: _vec.load_integers,
    _INT8_BY_TWO: partial(_vec.load_int8_pairs, apart=PANEL),
    _INT4_BY_TWO: _vec.load_integers,
    **dict.fromkeys(_IN_BLOCK, _vec.load),
}
# By kind: bytes of a weight, or of those that go together; numbers of a row that a step takes, or pairs of them, each
# by itself in memory.
_ITEM_BYTES = (FLOAT_BYTES, vir.SHORT_BYTES, vir.SHORT_BYTES, FLOAT_BYTES, 1, FLOAT_BYTES, 2, *[FLOAT_BYTES] * 5)
_NUMBERS_PER_STEP = (1, 1, 1, 1, 1, vir.INT4_PER_WORD, 1, vir.INT4_PER_WORD // 2, *[1] * 4)
# Steps that are multiplied at a time before they are scaled, at most.
_ANY, _MOST_WORDS = 1 << 62, MOST_UNPACKED // vir.INT4_PER_WORD
_MOST_STEPS = (_ANY, _ANY, _ANY, _ANY, MOST_UNPACKED, _MOST_WORDS, MOST_UNPACKED // 2, _MOST_WORDS)
# Of a row's outputs of one panel.
_OUTPUT_BYTES = PANEL * FLOAT_BYTES

_LANES, _SHORT_BYTES = _vec.lanes, vir.SHORT_BYTES
# Fewer rows are rounded by one thread: the start of others costs more than it saves.
_ROWS_TO_SHARE = 64

#: Rows of one pass, at most: 24 sums in 32 registers, 12 in 16.
MAX_ROWS = 12 if _IS_WIDE else 6
#: Of so few rows a pass takes several panels at once, where there are as many: the sums of one are too few to wait for
#: each other's products. By number of rows, from one on.
_PANELS_ABREAST = (4, 4) if _IS_WIDE else (4, 2)
_ROWS_ABREAST = len(_PANELS_ABREAST)
# From so many rows on panels are multiplied in blocks; where numbers have to be unpacked for that, passes of more rows
# pay for it. (That is with AVX-512 and with AVX2, which takes longer for numbers of 4 bits in registers.)
_FEW_ROWS = 36
_ROWS_OF_BLOCK = (
    MAX_ROWS + 1, _FEW_ROWS + 1, _FEW_ROWS + 1, MAX_ROWS + 1,
    _FEW_ROWS + 1, _FEW_ROWS + 1 if _IS_WIDE else MAX_ROWS + 1, MAX_ROWS + 1, MAX_ROWS + 1,
)  # fmt: skip
# A block has so many panels, and passes of so many rows, at most: with AVX-512 256 KiB each of weights and of sums.
_PANELS_OF_BLOCK, _PASSES_OF_BLOCK = 4, 504 // MAX_ROWS


def _pass_of(
    rows: range,
    *,
    together: bool = False,
    abreast: bool = False,
    of_blocks: bool = False,
    kind_of: Callable[[int], int | None] = lambda kind: kind,
) -> Callable[..., None]:
    """A kernel for a number of rows out of `rows` (of any other it computes nothing), and a panel.

    Its arguments are the kind of weights, a constant, then counts and addresses: how many rows; x, the distance of its
    rows in bytes, the panel, its steps, the outputs, the distance of their rows in bytes; where to prefetch from, and
    by how many bytes to go on with each step, for passes of rows that lie together; the scales, where there are any:
    then the outputs are added to; how many bytes panels, and their scales, are apart. And for those of blocks: where to
    prefetch numbers of rows from, and by how many bytes to go on with each step; what the products are added to, which
    may be others than the outputs, and the distance of their rows in bytes.

    Args:
        together: whether x is `[K][rows]`, and not rows some distance apart; such a pass is one of several, and fetches
            its share of what comes next. Others fetch weights `BYTES_AHEAD` before they read them.
        abreast: whether it takes several panels at once.
        of_blocks: whether it is one of a block.
        kind_of: the kind as which weights of another are multiplied; `None`: they never are in such a pass.
    """

    def emit_of(kind: int) -> Callable[..., None]:
        if (multiplied_as := kind_of(kind)) is None:
            return lambda *_: None

        def emit_rows(count: int, builder: Any, *arguments: Any) -> None:
            num_panels = _PANELS_ABREAST[count - 1] if abreast else 1
            _emit_pass(builder, count, multiplied_as, together, num_panels, *arguments)

        return partial(vir.emit_by_number, rows, emit_rows)

    return vir.kernel_by_kind(16 if of_blocks else 12, 0, types.void, emit_of)


def _emit_pass(
    builder: Any, num_rows: int, kind: int, together: bool, num_panels: int,
    x: Any, x_stride: Any, panel: Any, k: Any, y: Any, y_stride: Any, fetch: Any, fetch_step: Any, scales: Any,
    panel_bytes: Any, scales_bytes: Any, fetch_x: Any = None, fetch_x_step: Any = None, before: Any = None,
    before_stride: Any = None,
) -> None:  # fmt: skip
    def vectors_of(start: Any, stride: Any, vector_bytes: int) -> list[Any]:
        of_panels = [vir.advance(builder, start, stride, index) if index else start for index in range(num_panels)]
        return [vir.offset(builder, place, n * vector_bytes) for place in of_panels for n in range(_NUM_VECTORS)]

    if together:
        rows = [vir.offset(builder, x, row * FLOAT_BYTES) for row in range(num_rows)]
        number_bytes = num_rows * FLOAT_BYTES
    else:
        rows = [vir.advance(builder, x, x_stride, row) for row in range(num_rows)]
        number_bytes = FLOAT_BYTES
    x_step = k.type(number_bytes * _NUMBERS_PER_STEP[kind])

    def outputs_of(start: Any, stride: Any) -> list[list[Any]]:
        of_rows = (vir.advance(builder, start, stride, row) for row in range(num_rows))
        return [vectors_of(row, row.type(_OUTPUT_BYTES), _vec.num_bytes) for row in of_rows]

    places = outputs_of(y, y_stride)
    places_before = places if before is None else outputs_of(before, before_stride)
    goes_on = kind in (_GOES_ON, _GOES_ON_BY_TWO)
    # Stack slots that LLVM turns into registers.
    sums = [
        [
            cgutils.alloca_once_value(builder, _vec.load(builder, place) if goes_on else _vec.constant(0.0))
            for place in of_row
        ]
        for of_row in places_before
    ]
    step_bytes = k.type(PANEL * _ITEM_BYTES[kind])
    vector_bytes = _vec.lanes * (1 if kind == _INT8_BY_TWO else _ITEM_BYTES[kind])
    multiply_add = _vec.fma_by_two if kind in _KINDS_BY_TWO else _vec.fma
    lowest = _vec.lowest_int4_pair if kind == _INT4_BY_TWO else _vec.lowest_int4
    num_in_step = _NUMBERS_PER_STEP[kind]

    def add_products(places: list[Any], weights: list[Any]) -> None:
        for place, row_sums in zip(places, sums, strict=True):
            number = _vec.spread(builder, vir.load_real(builder, place))
            for weight, slot in zip(weights, row_sums, strict=True):
                builder.store(multiply_add(builder, number, weight, builder.load(slot)), slot)

    with cgutils.for_range(builder, k) as loop:
        step = vir.advance(builder, panel, step_bytes, loop.index)
        weight_places = vectors_of(step, panel_bytes, vector_bytes)
        loaded = [_LOADS[kind](builder, place, alignment=vector_bytes) for place in weight_places]
        if together:  # of several passes each fetches a share
            vir.prefetch(builder, vir.advance(builder, fetch, fetch_step, loop.index))
            if fetch_x is not None:
                vir.prefetch(builder, vir.advance(builder, fetch_x, fetch_x_step, loop.index))
        else:
            for place in weight_places[::_NUM_VECTORS]:
                for n in range(0, _NUM_VECTORS * vector_bytes, LINE_BYTES):
                    vir.prefetch(builder, vir.offset(builder, place, n + BYTES_AHEAD))
        of_step = [vir.advance(builder, row, x_step, loop.index) for row in rows]
        if num_in_step == 1:
            add_products(of_step, loaded)
        elif num_rows == 1 or kind == _INT4_BY_TWO:
            for index in range(num_in_step):
                of_number = [vir.offset(builder, place, index * number_bytes) for place in of_step]
                add_products(of_number, [lowest(builder, each) for each in loaded])
                loaded = [_vec.without_lowest_int4(builder, each) for each in loaded]
        else:
            # A loop of its own: beside more sums all float32 of each word have no room in registers.
            words = [cgutils.alloca_once(builder, each.type) for each in loaded]
            for slot, each in zip(words, loaded, strict=True):
                builder.store(each, slot)
            with cgutils.for_range(builder, vir.unknown(builder, k.type(num_in_step))) as inner:
                left = [builder.load(slot) for slot in words]
                of_number = [vir.advance(builder, place, k.type(number_bytes), inner.index) for place in of_step]
                add_products(of_number, [lowest(builder, each) for each in left])
                for slot, each in zip(words, left, strict=True):
                    builder.store(_vec.without_lowest_int4(builder, each), slot)
    scale_places = vectors_of(scales, scales_bytes, _vec.num_bytes)
    for of_row, of_row_before, row_sums in zip(places, places_before, sums, strict=True):
        for place, place_before, scale_place, slot in zip(of_row, of_row_before, scale_places, row_sums, strict=True):
            total = builder.load(slot)
            if kind in _KINDS_WITH_SCALES:
                scale = _vec.load(builder, scale_place)
                total = _vec.fma(builder, total, scale, _vec.load(builder, place_before))
            _vec.store(builder, total, place)


# For hardly any rows and several panels; for those of one pass; and for passes of more rows: no even share of more rows
# than `MAX_ROWS` is less than half of the most.
_abreast = _pass_of(range(1, _ROWS_ABREAST + 1), abreast=True)
_alone = _pass_of(range(1, MAX_ROWS + 1))
_ROWS_OF_MANY = range(MAX_ROWS // 2, MAX_ROWS + 1)
_many = _pass_of(
    _ROWS_OF_MANY, together=True, kind_of=lambda kind: None if _ROWS_OF_BLOCK[kind] == MAX_ROWS + 1 else kind
)
_many_of_block = _pass_of(_ROWS_OF_MANY, together=True, of_blocks=True, kind_of=_IN_BLOCK.__getitem__)


def _emit_add(builder: Any, y: Any, bias: Any) -> None:
    for n in range(_NUM_VECTORS):
        place, other = (vir.offset(builder, address, n * _vec.num_bytes) for address in (y, bias))
        _vec.store(builder, builder.fadd(_vec.load(builder, place), _vec.load(builder, other)), place)


def _emit_clear(builder: Any, y: Any) -> None:
    for n in range(_NUM_VECTORS):
        _vec.store(builder, _vec.constant(0.0), vir.offset(builder, y, n * _vec.num_bytes))


def _emit_gate(builder: Any, pair: Any, y: Any) -> None:
    for n in range(_NUM_VECTORS):
        gate = _vec.load(builder, vir.offset(builder, pair, n * _vec.num_bytes))
        up = _vec.load(builder, vir.offset(builder, pair, (_NUM_VECTORS + n) * _vec.num_bytes))
        gated = builder.fmul(_vec.silu(builder, gate), up)
        _vec.store(builder, gated, vir.offset(builder, y, n * _vec.num_bytes))


def _emit_round(builder: Any, x: Any, y: Any, vectors: Any) -> None:
    with cgutils.for_range(builder, vectors) as loop:
        numbers = _vec.load(builder, vir.advance(builder, x, vectors.type(_vec.num_bytes), loop.index))
        place = vir.advance(builder, y, vectors.type(_vec.lanes * vir.SHORT_BYTES), loop.index)
        _vec.store_bfloat16(builder, numbers, place)


def _emit_round_one(builder: Any, x: Any, y: Any) -> None:
    vir.store_bfloat16(builder, vir.load_real(builder, x), y)


def _unpack_of(kind: int) -> Callable[..., None]:
    """So many steps (second) of a panel (first address) to the third, as `_IN_BLOCK` has them."""
    if kind in _READY:
        return lambda *_: None
    if kind in _KINDS_BY_TWO:
        emit_numbers = emit_int8_pairs if kind == _INT8_BY_TWO else emit_int4_pairs

        def emit_pairs(builder: Any, packed: Any, steps: Any, target: Any) -> None:
            emit_numbers(builder, packed, builder.mul(steps, steps.type(2 * _NUMBERS_PER_STEP[kind])), target)

        return emit_pairs
    item_bytes, num_in_step = _ITEM_BYTES[kind], _NUMBERS_PER_STEP[kind]

    def emit(builder: Any, packed: Any, steps: Any, target: Any) -> None:
        with cgutils.for_range(builder, steps) as loop:
            start = vir.advance(builder, packed, steps.type(PANEL * item_bytes), loop.index)
            to = vir.advance(builder, target, steps.type(num_in_step * _OUTPUT_BYTES), loop.index)
            vir.prefetch(builder, vir.offset(builder, start, BYTES_AHEAD))
            for n in range(_NUM_VECTORS):
                place = vir.offset(builder, start, n * _vec.lanes * item_bytes)
                numbers = _LOADS[kind](builder, place, alignment=item_bytes)
                for index in range(num_in_step):
                    at = vir.offset(builder, to, index * _OUTPUT_BYTES + n * _vec.num_bytes)
                    _vec.store(builder, _vec.lowest_int4(builder, numbers) if num_in_step > 1 else numbers, at)
                    numbers = _vec.without_lowest_int4(builder, numbers) if num_in_step > 1 else numbers

    return emit


def _put_of(kind: int) -> Callable[..., None]:
    """Of so many rows of a pass so many vectors each, as `[K][rows]`; by two rounded to bfloat16, a pair for each lane.
    Arguments: rows, x, the distance of its rows in bytes, vectors, y."""
    vector_bytes = _vec.num_bytes * (2 if kind == _BY_TWO else 1)

    def load(builder: Any, place: Any) -> Any:
        low = _vec.load(builder, place)
        if kind != _BY_TWO:
            return low
        high = _vec.load(builder, vir.offset(builder, place, _vec.num_bytes))
        return builder.bitcast(_vec.rounded(builder, low, high), _vec.type)

    def emit_rows(count: int, builder: Any, x: Any, x_stride: Any, vectors: Any, y: Any) -> None:
        with cgutils.for_range(builder, vectors) as loop:
            column = vir.advance(builder, x, vectors.type(vector_bytes), loop.index)
            rows = [load(builder, vir.advance(builder, column, x_stride, row)) for row in range(count)]
            rows += [_vec.constant(0.0)] * (_vec.lanes - count)
            target = vir.advance(builder, y, vectors.type(_vec.lanes * count * FLOAT_BYTES), loop.index)
            for step, numbers in enumerate(vir.transposed(builder, rows)):
                _vec.store_part(builder, numbers, 0, count, vir.offset(builder, target, step * count * FLOAT_BYTES))

    return partial(vir.emit_by_number, _ROWS_OF_MANY, emit_rows)


def _put_one_of(kind: int) -> Callable[..., None]:
    """A number of a row, or a pair of them, to an address. Arguments: the row, which one, where to."""

    def emit(builder: Any, row: Any, step: Any, y: Any) -> None:
        if kind != _BY_TWO:
            vir.store_real(builder, vir.load_real(builder, vir.advance(builder, row, step.type(FLOAT_BYTES), step)), y)
            return
        pair = vir.advance(builder, row, step.type(2 * FLOAT_BYTES), step)
        for n in range(2):
            number, place = vir.offset(builder, pair, n * FLOAT_BYTES), vir.offset(builder, y, n * _SHORT_BYTES)
            _emit_round_one(builder, number, place)

    return emit


#: Adds the bias of a panel (second address) to a row's outputs.
add_bias = vir.kernel(2, 0, types.void, _emit_add)
#: Makes a row's outputs of one panel zero.
_clear = vir.kernel(1, 0, types.void, _emit_clear)
#: SiLU of a row's outputs of one panel times those of the panel behind it.
gate = vir.kernel(2, 0, types.void, _emit_gate)
#: So many vectors (third) of the first address as bfloat16 to the second.
_round = vir.kernel(3, 0, types.void, _emit_round)
_round_one = vir.kernel(2, 0, types.void, _emit_round_one)
_put, _put_one = vir.kernel_by_kind(5, 0, types.void, _put_of), vir.kernel_by_kind(3, 0, types.void, _put_one_of)
_unpack = vir.kernel_by_kind(3, 0, types.void, _unpack_of)


@numba.njit(nogil=True, inline="always")
def _num_passes(num_rows):  # type: ignore[no-untyped-def]
    """As few passes as there can be."""
    return (num_rows + MAX_ROWS - 1) // MAX_ROWS


@numba.njit(nogil=True, inline="always")
def _panels_abreast(num_rows):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """How many panels a pass takes at once."""
    return _PANELS_ABREAST[num_rows - 1] if num_rows <= _ROWS_ABREAST else 1


@numba.njit(nogil=True, inline="always")
def _first_row(index, num_passes, num_rows):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Where pass `index` of as even ones as there can be begins: the first `num_rows % num_passes` have a row more."""
    return index * (num_rows // num_passes) + min(index, num_rows % num_passes)


@numba.njit(nogil=True, inline="always")
def _multiply_panels(  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    kind, first, end, x, x_stride, num_rows, k, panels, bias, y, y_stride, scales, group
):
    """Panels `[first, end)`; all else of the first panel that there is."""
    panel_bytes, scales_bytes = k * PANEL * _ITEM_BYTES[kind], (k + group - 1) // group * _OUTPUT_BYTES
    index = first
    while index < end:
        panel, place, of_panel = panels + index * panel_bytes, y + index * _OUTPUT_BYTES, scales + index * scales_bytes
        shift = bias + index * _OUTPUT_BYTES if bias else 0
        abreast = _panels_abreast(num_rows)
        if 1 < abreast <= end - index:
            _multiply_abreast(
                kind, x, x_stride, num_rows, k, panel, panel_bytes, shift, place, y_stride, of_panel, scales_bytes,
                group, abreast,
            )  # fmt: skip
            index += abreast
        elif num_rows >= _ROWS_OF_BLOCK[kind]:
            count = min(_PANELS_OF_BLOCK, end - index)
            _multiply_block(
                kind, x, num_rows, k, panel, panel_bytes, count, shift, place, y_stride, of_panel, scales_bytes, group
            )
            index += count
        else:
            _multiply_panel(kind, x, x_stride, num_rows, k, panel, shift, place, y_stride, of_panel, group)
            index += 1


@numba.njit(nogil=True, inline="always")
def _at_once(kind, begin, k, group):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Steps from `begin` on that are added up before they are scaled."""
    return min(_MOST_STEPS[kind], k - begin, group - begin % group)


@numba.njit(nogil=True, inline="always")
def _even_part(count, most):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """The first of as even parts of `count` as there can be, none larger than `most`."""
    num_parts = (count + most - 1) // most
    return (count + num_parts - 1) // num_parts


@numba.njit(nogil=True, inline="always")
def _multiply_abreast(  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    kind, x, x_stride, num_rows, k, panel, panel_bytes, bias, y, y_stride, scales, scales_bytes, group,
    num_panels,
):  # fmt: skip
    """As `_multiply_panel`, of several panels and hardly any rows."""
    number_bytes, step_bytes = FLOAT_BYTES * _NUMBERS_PER_STEP[kind], PANEL * _ITEM_BYTES[kind]
    if kind >= _INT8:
        for index in range(num_rows):
            for other in range(num_panels):
                _clear(y + index * y_stride + other * _OUTPUT_BYTES)
    begin = 0
    while begin < k:
        count = _at_once(kind, begin, k, group)
        _abreast(
            kind, num_rows, x + begin * number_bytes, x_stride, panel + begin * step_bytes, count, y, y_stride, 0, 0,
            scales + begin // group * _OUTPUT_BYTES, panel_bytes, scales_bytes,
        )  # fmt: skip
        begin += count
    if bias:
        for index in range(num_rows):
            for other in range(num_panels):
                add_bias(y + index * y_stride + other * _OUTPUT_BYTES, bias + other * _OUTPUT_BYTES)


@numba.njit(nogil=True, inline="always")
def _multiply_panel(kind, x, x_stride, num_rows, k, panel, bias, y, y_stride, scales, group):  # type: ignore[no-untyped-def] # pragma: no cover
    """A panel's product: of all steps at once, or a group after the other where each has its scales."""
    number_bytes, step_bytes = FLOAT_BYTES * _NUMBERS_PER_STEP[kind], PANEL * _ITEM_BYTES[kind]
    if kind >= _INT8:
        for index in range(num_rows):
            _clear(y + index * y_stride)
    ahead = panel + k * step_bytes
    begin = 0
    while begin < k:
        count = _at_once(kind, begin, k, group)
        _multiply_group(
            kind, x, x_stride, num_rows, k, begin, count, number_bytes, panel + begin * step_bytes, step_bytes, ahead,
            y, y_stride, scales + begin // group * _OUTPUT_BYTES,
        )  # fmt: skip
        ahead += count * step_bytes
        begin += count
    if bias:
        for index in range(num_rows):
            add_bias(y + index * y_stride, bias)


@called
def _multiply_block(  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    kind, x, num_rows, k, panel, panel_bytes, num_panels, bias, y, y_stride, scales, scales_bytes, group
):
    """As `_multiply_panel`, of several panels and rows of several passes: a few hundred numbers of k of all of them,
    and then the next, so that what a pass reads has been read by the one before it.

    Sums lie close together until the last numbers of k are added: rows of outputs are often a power of two apart, and
    share few lines of the L1 cache.
    """
    all_passes, num_in_step, step_bytes = _num_passes(num_rows), _NUMBERS_PER_STEP[kind], PANEL * _ITEM_BYTES[kind]
    number_bytes, is_ready = FLOAT_BYTES * num_in_step, kind in _READY
    at_once = _even_part(all_passes, _PASSES_OF_BLOCK)
    most_steps = min(_MOST_STEPS[kind], MOST_UNPACKED // num_in_step, group, k)
    sums = on_lines(num_panels * min(num_rows, at_once * MAX_ROWS) * PANEL if most_steps < k else 0)
    unpacked = on_lines(0 if is_ready else num_panels * most_steps * num_in_step * PANEL)
    nothing = on_lines(PANEL)
    nothing[:] = 0
    for first_pass in range(0, all_passes, at_once):
        end_pass = min(first_pass + at_once, all_passes)
        first_row = _first_row(first_pass, all_passes, num_rows)
        rows, num_passes = _first_row(end_pass, all_passes, num_rows) - first_row, end_pass - first_pass
        first_rows = _first_row(first_pass + 1, all_passes, num_rows) - first_row
        begin, sums_at = 0, sums.ctypes.data
        # Bytes of a step's weights, rounded up: what several of them have is fetched twice, and nothing never.
        share = (step_bytes // num_in_step + num_passes - 1) // num_passes
        while begin < k:
            steps = _even_part(_at_once(kind, begin, k, group), most_steps)
            count, weights, weights_bytes = steps * num_in_step, panel + begin * step_bytes, panel_bytes
            if not is_ready:
                weights, weights_bytes = unpacked.ctypes.data, count * _OUTPUT_BYTES
                for other in range(num_panels):
                    packed = panel + other * panel_bytes + begin * step_bytes
                    _unpack(kind, packed, steps, weights + other * weights_bytes)
            of_group, behind = scales + begin // group * _OUTPUT_BYTES, begin + steps
            # Each pass fetches its share of the weights that come next, and the numbers of the pass behind it.
            fetch = panel + behind * step_bytes
            if behind == k:
                fetch = panel if end_pass < all_passes else panel + num_panels * panel_bytes
            for index in range(first_pass, end_pass):
                row = _first_row(index, all_passes, num_rows)
                num = _first_row(index + 1, all_passes, num_rows) - row
                start = x + (row * k + begin * num) * number_bytes
                next_x, x_share = start + num * k * number_bytes, num * FLOAT_BYTES // num_panels
                if index + 1 == end_pass:
                    next_x = x + (first_row * k + behind % k * first_rows) * number_bytes
                ahead = fetch + (index - first_pass) * steps * step_bytes // num_passes
                for other in range(num_panels):
                    place = sums_at + (other * rows + row - first_row) * _OUTPUT_BYTES
                    before, before_stride = (place, _OUTPUT_BYTES) if begin else (nothing.ctypes.data, 0)
                    to, to_stride = place, _OUTPUT_BYTES
                    if behind == k:
                        to, to_stride = y + row * y_stride + other * _OUTPUT_BYTES, y_stride
                    _many_of_block(
                        kind, num, start, 0, weights + other * weights_bytes, count, to, to_stride,
                        ahead + other * panel_bytes, share, of_group + other * scales_bytes, 0, 0,
                        next_x + other * count * x_share, x_share, before, before_stride,
                    )  # fmt: skip
            begin = behind
    if bias:
        for row in range(num_rows):
            for other in range(num_panels):
                add_bias(y + row * y_stride + other * _OUTPUT_BYTES, bias + other * _OUTPUT_BYTES)


@numba.njit(nogil=True, inline="always")
def _multiply_group(  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    kind, x, x_stride, num_rows, k, begin, count, number_bytes, panel, step_bytes, ahead, y, y_stride, scales
):
    """`count` steps from `begin` on, in one pass or several.

    Memory would rest while passes compute: so each of several fetches its share of the next panel, evenly (faster
    fetching stalls the pass), and a single pass what it reads next.
    """
    num_passes = _num_passes(num_rows)
    step = step_bytes // num_passes
    if num_passes == 1:
        _alone(kind, num_rows, x + begin * number_bytes, x_stride, panel, count, y, y_stride, 0, 0, scales, 0, 0)
        return
    for index in range(num_passes):
        row = _first_row(index, num_passes, num_rows)
        num = _first_row(index + 1, num_passes, num_rows) - row
        start = x + (row * k + begin * num) * number_bytes
        _many(kind, num, start, 0, panel, count, y + row * y_stride, y_stride, ahead, step, scales, 0, 0)
        ahead += count * step


@numba.njit(nogil=True, inline="always")
def _arrange(kind, first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Passes `[first, end)` over `x[num_rows, k]`: their rows as `[k][rows of the pass]`, one behind the other. By two
    `k` counts pairs of numbers, which are rounded to bfloat16."""
    x, x_stride, num_rows, k, y = _five_words(arguments)
    num_passes, num_vectors = _num_passes(num_rows), k // _LANES
    for index in range(first, end):
        row = _first_row(index, num_passes, num_rows)
        count = _first_row(index + 1, num_passes, num_rows) - row
        place = y + row * k * FLOAT_BYTES
        _put(kind, count, x + row * x_stride, x_stride, num_vectors, place)
        for member in range(count):
            source = x + (row + member) * x_stride
            for step in range(num_vectors * _LANES, k):
                _put_one(kind, source, step, place + (step * count + member) * FLOAT_BYTES)


def _put_together(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    _arrange(_FLOAT32, first, end, arguments)


def _round_together(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    _arrange(_BY_TWO, first, end, arguments)


def _round_rows(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Rows `[first, end)` of `x[num_rows, k]` as bfloat16; strides in bytes."""
    x, x_stride, k, y, y_stride = _five_words(arguments)
    for row in range(first, end):
        source, target = x + row * x_stride, y + row * y_stride
        num_vectors = k // _LANES
        _round(source, target, num_vectors)
        for index in range(num_vectors * _LANES, k):
            _round_one(source + index * FLOAT_BYTES, target + index * _SHORT_BYTES)


@numba.njit(nogil=True, inline="always")
def _multiply(kind, first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Panels `[first, end)` of `y[num_rows, PANEL * num_panels] = x[num_rows, k] @ panels + bias`.

    All by address; `x_stride` in bytes, `bias` 0 where there is none, `y` without gaps. More than `MAX_ROWS` rows of x
    are as `put_together` leaves them. `k` and `group` are steps; weights without scales have one group. Scales are
    `[num_panels][groups][PANEL]`.
    """
    x, x_stride, num_rows, k, panels, num_panels, bias, y, scales, group = _ten_words(arguments)
    y_stride = num_panels * _OUTPUT_BYTES
    _multiply_panels(kind, first, end, x, x_stride, num_rows, k, panels, bias, y, y_stride, scales, group)


@numba.njit(nogil=True, inline="always")
def _multiply_gated(kind, first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """As `_multiply`, for pairs of panels: `y[num_rows, PANEL * num_pairs] = silu(x @ first) * (x @ second)`.

    `both[num_rows, 2 * PANEL * num_pairs]` takes the products in between.
    """
    x, x_stride, num_rows, k, panels, num_pairs, bias, both, scales, group, y = _eleven_words(arguments)
    both_stride, y_stride = 2 * num_pairs * _OUTPUT_BYTES, num_pairs * _OUTPUT_BYTES
    at_once = max((_PANELS_OF_BLOCK if num_rows >= _ROWS_OF_BLOCK[kind] else _panels_abreast(num_rows)) // 2, 1)
    for begin in range(first, end, at_once):
        behind = min(begin + at_once, end)
        _multiply_panels(
            kind, 2 * begin, 2 * behind, x, x_stride, num_rows, k, panels, bias, both, both_stride, scales, group
        )
        for index in range(begin, behind):
            for row in range(num_rows):
                gate(both + row * both_stride + 2 * index * _OUTPUT_BYTES, y + row * y_stride + index * _OUTPUT_BYTES)


def _multiply_float32(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    _multiply(_FLOAT32, first, end, arguments)


def _multiply_bfloat16(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    _multiply(_BFLOAT16, first, end, arguments)


def _multiply_float16(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    _multiply(_FLOAT16, first, end, arguments)


def _multiply_by_two(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    _multiply(_BY_TWO, first, end, arguments)


def _multiply_gated_float32(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    _multiply_gated(_FLOAT32, first, end, arguments)


def _multiply_gated_bfloat16(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    _multiply_gated(_BFLOAT16, first, end, arguments)


def _multiply_gated_float16(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    _multiply_gated(_FLOAT16, first, end, arguments)


def _multiply_gated_by_two(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    _multiply_gated(_BY_TWO, first, end, arguments)


def _multiply_int8(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    _multiply(_INT8, first, end, arguments)


def _multiply_gated_int8(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    _multiply_gated(_INT8, first, end, arguments)


def _multiply_int4(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    _multiply(_INT4, first, end, arguments)


def _multiply_gated_int4(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    _multiply_gated(_INT4, first, end, arguments)


def _multiply_int8_by_two(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    _multiply(_INT8_BY_TWO, first, end, arguments)


def _multiply_gated_int8_by_two(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    _multiply_gated(_INT8_BY_TWO, first, end, arguments)


def _multiply_int4_by_two(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    _multiply(_INT4_BY_TWO, first, end, arguments)


def _multiply_gated_int4_by_two(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    _multiply_gated(_INT4_BY_TWO, first, end, arguments)


_five_words, _ten_words, _eleven_words = words(5), words(10), words(11)
#: Their items are passes.
put_together, round_together = Kernel(_put_together, "i" * 5), Kernel(_round_together, "i" * 5)


#: Its items are rows.
round_rows = Kernel(_round_rows, "i" * 5, items_to_share=_ROWS_TO_SHARE)


@dataclass(frozen=True)
class Products:
    """With weights of one type.

    Attributes:
        multiply: its items are panels.
        multiply_gated: its items are pairs of panels.
        per_step: how many numbers of a row a step takes; K is a multiple of them.
        rounds: rows are rounded to bfloat16, so that two numbers are in the place of one.
        in_rows: rows stay as they are, however many there are.
    """

    multiply: Kernel
    multiply_gated: Kernel
    per_step: int = 1
    rounds: bool = False
    in_rows: bool = False

    def arrange(
        self, x: int, x_stride: int, num_rows: int, k: int, arranged: int
    ) -> tuple[tuple[bytes, ...], int, int]:
        """Rows as the products take them: calls to run before the product, and its `x` and `x_stride`.

        Args:
            x: address of `[num_rows, k]`, rows `x_stride` bytes apart.
            arranged: address of memory for `[num_rows, arranged_features]`.
        """
        if num_rows > MAX_ROWS and not self.in_rows:
            put, numbers = (round_together, k // 2) if self.rounds else (put_together, k)
            return (put.call(_num_passes.py_func(num_rows), x, x_stride, num_rows, numbers, arranged),), arranged, 0
        if not self.rounds:
            return (), x, x_stride
        # Rows that stay are a line further apart where there are many: at powers of two they share few lines of the L1
        # cache.
        apart = LINE_BYTES if num_rows > MAX_ROWS else 0
        stride = k * vir.SHORT_BYTES + apart
        return (round_rows.call(num_rows, x, x_stride, k, arranged, stride),), arranged, stride


def _products(plain: Callable[..., None], gated: Callable[..., None], **options: Any) -> Products:
    return Products(Kernel(plain, "i" * 10), Kernel(gated, "i" * 11), **options)


#: By torch's type of the weights, which are widened.
PRODUCTS: Mapping[torch.dtype, Products] = {
    torch.float32: _products(_multiply_float32, _multiply_gated_float32),
    torch.bfloat16: _products(_multiply_bfloat16, _multiply_gated_bfloat16),
    torch.float16: _products(_multiply_float16, _multiply_gated_float16),
}
#: Of bfloat16 by two, where the CPU has it (`vector_ir.has_bfloat16_products`).
BY_TWO = _products(_multiply_by_two, _multiply_gated_by_two, per_step=2, rounds=True)
#: Of whole numbers with scales, by their bits.
QUANTIZED: Mapping[int, Products] = {
    8: _products(_multiply_int8, _multiply_gated_int8),
    4: _products(_multiply_int4, _multiply_gated_int4, per_step=vir.INT4_PER_WORD),
}

#: The same by two, where the CPU has it, and groups have an even number of numbers.
QUANTIZED_BY_TWO: Mapping[int, Products] = {
    8: _products(_multiply_int8_by_two, _multiply_gated_int8_by_two, per_step=2, rounds=True),
    4: _products(_multiply_int4_by_two, _multiply_gated_int4_by_two, per_step=vir.INT4_PER_WORD, rounds=True),
}


def arranged_features(num_rows: int, k: int) -> int:
    """How many float32 of each row `Products.arrange` needs at most."""
    return k if num_rows > MAX_ROWS else (k + 1) // 2
