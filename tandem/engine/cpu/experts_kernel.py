"""What a mixture of experts does between its products, on vector registers: gating as gpt-oss has it, and sums.

All by address. Whatever else is in the batch, a row goes through the same steps.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils

from tandem.engine.cpu import vector_ir as vir
from tandem.engine.cpu.atomics import float32s, int64s, real, words
from tandem.engine.cpu.packed_kernel import PANEL
from tandem.engine.cpu.threads import Kernel
from tandem.engine.huge_pages import FLOAT_BYTES

# Vectors are of eight on every CPU: these steps are few beside the products.
_vec = vir.Vectors(8)
_NUM_VECTORS = PANEL // _vec.lanes
# Numba takes these for constants.
_PANEL, _PANEL_BYTES = PANEL, PANEL * FLOAT_BYTES
#: Fewer rows go on one thread: the start of others costs more than it saves.
_ROWS_TO_SHARE = 64


def _emit_clamped_gate(builder: Any, pair: Any, y: Any, alpha: Any, limit: Any) -> None:
    """`gate * sigmoid(alpha * gate) * (up + 1)`, the gate at most `limit`, `up` within it on both sides.

    Of a pair of panels the first one is the gate. NaN stays NaN.
    """
    slope, most = _vec.spread(builder, alpha), _vec.spread(builder, limit)
    least, one = _vec.negative(builder, most), _vec.constant(1.0)

    def at_most(x: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", x, most), most, x)

    for n in range(_NUM_VECTORS):
        gate = at_most(_vec.load(builder, vir.offset(builder, pair, n * _vec.num_bytes)))
        up = at_most(_vec.load(builder, vir.offset(builder, pair, (_NUM_VECTORS + n) * _vec.num_bytes)))
        up = builder.select(builder.fcmp_ordered("<", up, least), least, up)
        swish = builder.fdiv(_vec.silu(builder, builder.fmul(slope, gate)), slope)
        _vec.store(builder, builder.fmul(builder.fadd(up, one), swish), vir.offset(builder, y, n * _vec.num_bytes))


def _emit_add_weighted(builder: Any, x: Any, y: Any, vectors: Any, weight: Any) -> None:
    """`y += weight * x`, rounded twice, as one after the other is."""
    factor, stride = _vec.spread(builder, weight), vectors.type(_vec.num_bytes)
    with cgutils.for_range(builder, vectors) as loop:
        source, target = (vir.advance(builder, start, stride, loop.index) for start in (x, y))
        product = builder.fmul(factor, _vec.load(builder, source))
        _vec.store(builder, builder.fadd(_vec.load(builder, target), product), target)


_clamped_gate = vir.kernel(2, 2, types.void, _emit_clamped_gate)
_add_weighted = vir.kernel(3, 1, types.void, _emit_add_weighted)


def _gate_clamped(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Rows `[first, end)` of `y[num_rows, PANEL * num_pairs]` from `both[num_rows, 2 * PANEL * num_pairs]`."""
    both, num_pairs, alpha, limit, y = _five_words(arguments)
    for row in range(first, end):
        for pair in range(num_pairs):
            place = row * num_pairs + pair
            _clamped_gate(both + 2 * place * _PANEL_BYTES, y + place * _PANEL_BYTES, real(alpha), real(limit))


def _sum_experts(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Rows `[first, end)` of `y[rows, width]`: the sum of `num` rows of `x[_, stride]` each, weighted, in their order.

    `places[rows, num]` says which rows, int64; `weights[rows, num]` float32. Widths are multiples of 8.
    """
    x, stride, places_at, weights_at, num, width, y = _seven_words(arguments)
    places, weights = int64s(places_at), float32s(weights_at)
    for row in range(first, end):
        target = y + row * width * FLOAT_BYTES
        out = float32s(target)
        for dim in range(width):
            out[dim] = 0.0
        for index in range(row * num, (row + 1) * num):
            _add_weighted(x + places[index] * stride * FLOAT_BYTES, target, width // 8, weights[index])


_five_words, _seven_words = words(5), words(7)
#: Its items are rows.
gate_clamped = Kernel(_gate_clamped, "iiffi", items_to_share=_ROWS_TO_SHARE)
sum_experts = Kernel(_sum_experts, "iiiiiii", items_to_share=_ROWS_TO_SHARE)
