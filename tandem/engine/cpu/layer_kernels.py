"""What a decoder does between its products, on vector registers: norms, sums and gathering of rows, rotary
embedding, writing of K and V.

All by address. Whatever else is in the batch, a row goes through the same steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numba
import torch
from numba import types
from numba.core import cgutils

from tandem.engine.cpu import vector_ir as vir
from tandem.engine.cpu.atomics import int64s, real, words
from tandem.engine.cpu.threads import Kernel
from tandem.engine.cpu.vector_ir import BFLOAT16, FLOAT32, INT8, KV_ITEM_BYTES, SCALE_BYTES
from tandem.engine.huge_pages import FLOAT_BYTES
from tandem.engine.kv_numbers import GREATEST, LEAST

#: What widths are multiples of. Vectors are of eight on every CPU: memory sets the pace, and sums are the same bits.
LANES = 8
_vec = vir.Vectors(LANES)

#: Below this many rows norms, sums and rotation go without threads: their start costs more than they save.
ROWS_FOR_THREADS = 64

# Numba takes this for a constant.
_VECTOR_BYTES = _vec.num_bytes
_SHORT_BYTES = vir.SHORT_BYTES


def _emit_normalize(builder: Any, x: Any, weight: Any, y: Any, vectors: Any, eps: Any) -> None:
    """`y = x / sqrt(mean(x ** 2) + eps) * weight`; `y` may be `x`."""
    stride = vectors.type(_vec.num_bytes)
    total = cgutils.alloca_once_value(builder, _vec.constant(0.0))
    with cgutils.for_range(builder, vectors) as loop:
        part = _vec.load(builder, vir.advance(builder, x, stride, loop.index))
        builder.store(_vec.fma(builder, part, part, builder.load(total)), total)
    count = builder.sitofp(builder.mul(vectors, vectors.type(_vec.lanes)), vir.REAL)
    mean = builder.fdiv(_vec.sum_of(builder, builder.load(total)), count)
    factor = _vec.spread(builder, builder.fdiv(vir.REAL(1.0), vir.square_root(builder, builder.fadd(mean, eps))))
    with cgutils.for_range(builder, vectors) as loop:
        part, scale = (_vec.load(builder, vir.advance(builder, start, stride, loop.index)) for start in (x, weight))
        scaled = builder.fmul(builder.fmul(part, factor), scale)
        _vec.store(builder, scaled, vir.advance(builder, y, stride, loop.index))


def _emit_rotate(builder: Any, x: Any, cos: Any, sin: Any, y: Any, half: Any) -> None:
    """Turns pairs `(x[i], x[i + half])` of a head; `half` in bytes. `y` may be `x`."""
    width = half.type(_vec.num_bytes)
    with cgutils.for_range(builder, builder.udiv(half, width)) as loop:
        low = builder.mul(loop.index, width)
        high = builder.add(low, half)
        first, second = (_vec.load(builder, builder.add(x, place)) for place in (low, high))
        for place, own, other, is_low in ((low, first, second, True), (high, second, first, False)):
            cosine, sine = (_vec.load(builder, builder.add(table, place)) for table in (cos, sin))
            turned = builder.fmul(other, sine)
            if is_low:
                turned = _vec.negative(builder, turned)
            _vec.store(builder, _vec.fma(builder, own, cosine, turned), builder.add(y, place))


def _copy_by(load: Callable[..., Any], item_bytes: int) -> Callable[..., None]:
    """Copies so many vectors from `x`, whose numbers `load` makes float32 and `item_bytes` long, to `y`."""

    def emit(builder: Any, x: Any, y: Any, vectors: Any) -> None:
        x_stride, y_stride = vectors.type(_vec.lanes * item_bytes), vectors.type(_vec.num_bytes)
        with cgutils.for_range(builder, vectors) as loop:
            part = load(builder, vir.advance(builder, x, x_stride, loop.index), alignment=item_bytes)
            _vec.store(builder, part, vir.advance(builder, y, y_stride, loop.index))

    return vir.kernel(3, 0, types.void, emit)


def _emit_round(builder: Any, x: Any, y: Any, vectors: Any) -> None:
    """So many vectors from `x` to `y`, rounded to bfloat16."""
    x_stride, y_stride = vectors.type(_vec.num_bytes), vectors.type(_vec.lanes * _SHORT_BYTES)
    with cgutils.for_range(builder, vectors) as loop:
        part = _vec.load(builder, vir.advance(builder, x, x_stride, loop.index))
        _vec.store_rounded(builder, part, vir.advance(builder, y, y_stride, loop.index))


def _emit_quantize(builder: Any, x: Any, y: Any, vectors: Any) -> None:
    """A head of so many vectors from `x` to `y`, as `kv_numbers.encode` makes `int8` of it."""
    x_stride, y_stride = vectors.type(_vec.num_bytes), vectors.type(_vec.lanes)
    peak = cgutils.alloca_once_value(builder, _vec.constant(0.0))
    wrong = cgutils.alloca_once_value(builder, _vec.constant(0.0))
    with cgutils.for_range(builder, vectors) as loop:
        part = _vec.load(builder, vir.advance(builder, x, x_stride, loop.index))
        builder.store(_vec.greater(builder, _vec.absolute(builder, part), builder.load(peak)), peak)
        # Zero of what is finite, and NaN of what is not.
        builder.store(builder.fadd(builder.load(wrong), builder.fsub(part, part)), wrong)
    greatest = _vec.greatest_of(builder, builder.load(peak))
    has_size = builder.fcmp_ordered(">=", greatest, vir.REAL(LEAST))
    zero = vir.REAL(0.0)
    inverse = builder.select(has_size, builder.fdiv(vir.REAL(float(GREATEST)), greatest), zero)
    scale = builder.select(has_size, builder.fdiv(greatest, vir.REAL(float(GREATEST))), zero)
    scale = builder.fadd(scale, _vec.sum_of(builder, builder.load(wrong)))
    factor = _vec.spread(builder, inverse)
    with cgutils.for_range(builder, vectors) as loop:
        part = _vec.load(builder, vir.advance(builder, x, x_stride, loop.index))
        _vec.store_int8(builder, builder.fmul(part, factor), vir.advance(builder, y, y_stride, loop.index))
    vir.store_real(builder, scale, vir.advance(builder, y, y_stride, vectors))


def _emit_sum(builder: Any, x: Any, other: Any, y: Any, vectors: Any) -> None:
    """`y = x + other`; `y` may be either."""
    stride = vectors.type(_vec.num_bytes)
    with cgutils.for_range(builder, vectors) as loop:
        parts = [_vec.load(builder, vir.advance(builder, start, stride, loop.index)) for start in (x, other)]
        _vec.store(builder, builder.fadd(*parts), vir.advance(builder, y, stride, loop.index))


_normalize = vir.kernel(4, 1, types.void, _emit_normalize)
_rotate = vir.kernel(5, 0, types.void, _emit_rotate)
_copy = _copy_by(_vec.load, FLOAT_BYTES)
_copy_bfloat16 = _copy_by(_vec.load_bfloat16, _SHORT_BYTES)
_copy_float16 = _copy_by(_vec.load_float16, _SHORT_BYTES)
_round = vir.kernel(3, 0, types.void, _emit_round)
_quantize = vir.kernel(3, 0, types.void, _emit_quantize)
_sum = vir.kernel(4, 0, types.void, _emit_sum)


def _normalize_rows(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """RMSNorm of rows `[first, end)` of `x[rows, width]`, without gaps, to `y` of the same shape."""
    x, width, weight, eps, y = _five_words(arguments)
    for row in range(first, end):
        place = row * width * FLOAT_BYTES
        _normalize(x + place, weight, y + place, width // LANES, real(eps))


@numba.njit(nogil=True, inline="always")
def _place_head(source, target, head_bytes, norm, eps, cos, sin, rotary_bytes):  # type: ignore[no-untyped-def] # pragma: no cover
    """Normalises a head in place where there is a norm, turns its first `rotary_bytes`, copies the rest."""
    if norm:
        _normalize(source, norm, source, head_bytes // _VECTOR_BYTES, eps)
    _rotate(source, cos, sin, target, rotary_bytes // 2)
    _copy(source + rotary_bytes, target + rotary_bytes, (head_bytes - rotary_bytes) // _VECTOR_BYTES)


@numba.njit(nogil=True, inline="always")
def _place_kv(kind, source, target, head_dim):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Writes a head of K or V as pages have it."""
    if kind == BFLOAT16:
        _round(source, target, head_dim // LANES)
    elif kind == INT8:
        _quantize(source, target, head_dim // LANES)
    else:
        _copy(source, target, head_dim // LANES)


@numba.njit(nogil=True, inline="always")
def _place_heads(kind, first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Queries, turned, to `query[rows, num_heads, head_dim]`; keys, turned, and values into their slots.

    `heads` holds queries, keys and values of a row behind one another, rows `stride` bytes apart. `cos` and `sin` are
    `[rows, rotary_dim]`; `pages` is one layer of the arena, `write_pages` and `write_slots` are int64. `kind` is of
    what pages hold.
    """
    (
        heads, stride, num_heads, kv_heads, head_dim, q_norm, k_norm, eps_word, cos, sin, rotary_dim,
        query, pages, page_size, write_pages, write_slots,
    ) = _sixteen_words(arguments)  # fmt: skip
    eps = real(eps_word)
    head_bytes, rotary_bytes = head_dim * FLOAT_BYTES, rotary_dim * FLOAT_BYTES
    kv_bytes = head_dim * KV_ITEM_BYTES[kind] + SCALE_BYTES[kind]
    token_bytes = kv_heads * kv_bytes
    for row in range(first, end):
        source = heads + row * stride
        row_cos, row_sin = cos + row * rotary_bytes, sin + row * rotary_bytes
        for head in range(num_heads):
            target = query + (row * num_heads + head) * head_bytes
            _place_head(source, target, head_bytes, q_norm, eps, row_cos, row_sin, rotary_bytes)
            source += head_bytes
        key = pages + (int64s(write_pages)[row] * 2 * page_size + int64s(write_slots)[row]) * token_bytes
        for head in range(kv_heads):
            target = key + head * kv_bytes
            if kind == FLOAT32:
                _place_head(source, target, head_bytes, k_norm, eps, row_cos, row_sin, rotary_bytes)
            else:
                _place_head(source, source, head_bytes, k_norm, eps, row_cos, row_sin, rotary_bytes)
                _place_kv(kind, source, target, head_dim)
            source += head_bytes
        for head in range(kv_heads):
            _place_kv(kind, source, key + page_size * token_bytes + head * kv_bytes, head_dim)
            source += head_bytes


def _place_float32(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    _place_heads(FLOAT32, first, end, arguments)


def _place_bfloat16(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    _place_heads(BFLOAT16, first, end, arguments)


def _place_int8(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    _place_heads(INT8, first, end, arguments)


def _add_rows(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Rows `[first, end)` of `y = x + other`, all `[rows, width]`, x and y without gaps; `stride` of other in bytes."""
    x, other, stride, width, y = _five_words(arguments)
    for row in range(first, end):
        place = row * width * FLOAT_BYTES
        _sum(x + place, other + row * stride, y + place, width // LANES)


def _gather_rows(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Rows `[first, end)` of `y[rows, width] = table[indices]`, both without gaps; indices int64."""
    table, width, indices, y = _four_words(arguments)
    row_bytes = width * FLOAT_BYTES
    for row in range(first, end):
        _copy(table + int64s(indices)[row] * row_bytes, y + row * row_bytes, width // LANES)


def _gather_bfloat16(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """As `_gather_rows`, from a table of bfloat16."""
    table, width, indices, y = _four_words(arguments)
    for row in range(first, end):
        source = table + int64s(indices)[row] * width * _SHORT_BYTES
        _copy_bfloat16(source, y + row * width * FLOAT_BYTES, width // LANES)


def _gather_float16(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """As `_gather_rows`, from a table of float16."""
    table, width, indices, y = _four_words(arguments)
    for row in range(first, end):
        source = table + int64s(indices)[row] * width * _SHORT_BYTES
        _copy_float16(source, y + row * width * FLOAT_BYTES, width // LANES)


_four_words, _five_words, _sixteen_words = words(4), words(5), words(16)
#: Their items are rows.
normalize_rows = Kernel(_normalize_rows, "iiifi", items_to_share=ROWS_FOR_THREADS)
add_rows = Kernel(_add_rows, "iiiii", items_to_share=ROWS_FOR_THREADS)
gather_rows = Kernel(_gather_rows, "iiii", items_to_share=ROWS_FOR_THREADS)
#: By the type of K and V in the pages.
PLACE_HEADS: Mapping[str, Kernel] = {
    name: Kernel(function, "iiiiiii" + "f" + "iiiiiiii", items_to_share=ROWS_FOR_THREADS)
    for name, function in (("float32", _place_float32), ("bfloat16", _place_bfloat16), ("int8", _place_int8))
}
#: By torch's type of the table.
GATHER: Mapping[torch.dtype, Kernel] = {
    torch.float32: gather_rows,
    torch.bfloat16: Kernel(_gather_bfloat16, "iiii", items_to_share=ROWS_FOR_THREADS),
    torch.float16: Kernel(_gather_float16, "iiii", items_to_share=ROWS_FOR_THREADS),
}
