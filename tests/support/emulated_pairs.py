"""A pytest plugin: products of bfloat16 by two (AVX512_BF16) from those of float32, so that the kernels by two run on
CPUs with AVX-512 that do not have them.

It replaces the pieces that `tandem.engine.cpu.vector_ir` has for them, so it must be there before kernels are compiled,
and their code must not be kept where others look for it (`NUMBA_CACHE_DIR`). Denormal numbers stay what they are.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from tandem.engine.cpu import vector_ir as vir

_WORD, _SHORT = ir.IntType(32), ir.IntType(16)
_HALF, _UPPER, _NAN = 16, 0xFFFF0000 - (1 << 32), 0x7FC0


def _all(like: ir.Type, number: int) -> ir.Constant:
    return ir.Constant(like, [number] * like.count if isinstance(like, ir.VectorType) else number)


def _of_type(item: ir.Type, like: ir.Type) -> ir.Type:
    return ir.VectorType(item, like.count) if isinstance(like, ir.VectorType) else item


def _upper_half(builder: Any, value: Any) -> Any:
    """Of float32, one or a vector, rounded to bfloat16."""
    words, shorts = _of_type(_WORD, value.type), _of_type(_SHORT, value.type)
    bits = builder.bitcast(value, words)
    last = builder.and_(builder.lshr(bits, _all(words, _HALF)), _all(words, 1))
    rounded = builder.lshr(builder.add(bits, builder.add(last, _all(words, 0x7FFF))), _all(words, _HALF))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(is_nan, _all(words, _NAN), rounded), shorts)


def _fma_by_two(self: vir.Vectors, builder: Any, a: Any, b: Any, c: Any) -> Any:
    words = ir.VectorType(_WORD, self.lanes)
    left, right = (builder.bitcast(each, words) for each in (a, b))

    def low(bits: Any) -> Any:
        return builder.bitcast(builder.shl(bits, _all(words, _HALF)), self.type)

    def high(bits: Any) -> Any:
        return builder.bitcast(builder.and_(bits, _all(words, _UPPER)), self.type)

    return self.fma(builder, low(left), low(right), self.fma(builder, high(left), high(right), c))


def _store_bfloat16(builder: Any, value: Any, address: Any, _to: Any = None) -> None:
    half = _upper_half(builder, value)
    builder.store(half, builder.inttoptr(address, half.type.as_pointer())).align = vir.SHORT_BYTES


def _rounded(self: vir.Vectors, builder: Any, low: Any, high: Any) -> Any:
    return vir.shuffled(
        builder, _upper_half(builder, low), _upper_half(builder, high), list(range(2 * self.lanes))
    )


if vir.has_wide_vectors():
    vir.Vectors.fma_by_two = _fma_by_two  # type: ignore[method-assign]
    vir.Vectors.rounded = _rounded  # type: ignore[method-assign]
    vir.store_bfloat16 = _store_bfloat16
    vir.has_bfloat16_products = lambda: True
