"""Pieces of LLVM code on vectors of eight float32, from which the CPU kernels are put together by way of Numba.

They need no compiler at the user's. Addresses are integers; `builder` is LLVM's, values are its own.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

LANES = 8
FLOAT_BYTES = 4
VECTOR_BYTES = LANES * FLOAT_BYTES
#: What memory is read by.
LINE_BYTES = 64

REAL = ir.FloatType()
VECTOR = ir.VectorType(REAL, LANES)
_INDEX = ir.IntType(32)
_INDICES = ir.VectorType(_INDEX, LANES)


def is_fast_here() -> bool:
    """Whether this CPU fuses multiply and add on vectors; without it a call of a library stands for each."""
    if platform.machine() in ("aarch64", "arm64"):
        return True
    features = llvmlite.binding.get_host_cpu_features()
    return bool(features.get("fma") and features.get("avx2"))


def num_registers() -> int:
    """How many vectors of eight float32 the registers of the machine hold for which Numba compiles.

    AVX has 16 registers, its successor 32; NEON's 32 hold half a vector each.
    """
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return 32 if "+avx512vl" in features.split(",") else 16


def kernel(num_addresses: int, num_floats: int, returns: Any, emit: Callable[..., Any]) -> Callable[..., Any]:
    """A function for Numba's code: `num_addresses` integers, then `num_floats` float32, in that order.

    Args:
        returns: Numba's type of the result.
        emit: called with the builder and the arguments' values; returns the result's, or `None` for `types.void`.
    """
    signature = returns(*[types.intp] * num_addresses, *[types.float32] * num_floats)

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        result = emit(builder, *arguments)
        return context.get_dummy_value() if result is None else result

    names = [f"argument_{index}" for index in range(num_addresses + num_floats)]
    # Numba wants each argument by name, so that the function cannot take `*arguments`.
    scope: dict[str, Any] = {"signature": signature, "generate": generate}
    exec(f"def call(typing, {', '.join(names)}): return signature, generate", scope)
    result: Callable[..., Any] = intrinsic(scope["call"])
    return result


def constant(values: float | list[float]) -> Any:
    """A vector; a single number is in all lanes."""
    return ir.Constant(VECTOR, values if isinstance(values, list) else [values] * LANES)


def integers(value: int) -> Any:
    """A vector of 32-bit integers, all the same."""
    return ir.Constant(_INDICES, [value] * LANES)


def offset(builder: Any, address: Any, num_bytes: int) -> Any:
    return builder.add(address, ir.Constant(address.type, num_bytes)) if num_bytes else address


def advance(builder: Any, address: Any, stride: Any, count: Any) -> Any:
    """`address + stride * count`; `count` is a value or a Python integer."""
    steps = ir.Constant(address.type, count) if isinstance(count, int) else count
    return builder.add(address, builder.mul(stride, steps))


def load(builder: Any, address: Any, *, alignment: int = FLOAT_BYTES) -> Any:
    loaded = builder.load(builder.inttoptr(address, VECTOR.as_pointer()))
    loaded.align = alignment
    return loaded


def store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, VECTOR.as_pointer())).align = FLOAT_BYTES


def load_real(builder: Any, address: Any) -> Any:
    return builder.load(builder.inttoptr(address, REAL.as_pointer()))


def store_real(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, REAL.as_pointer()))


def spread(builder: Any, number: Any) -> Any:
    """The same number in all lanes."""
    unset = ir.Constant(VECTOR, ir.Undefined)
    first = builder.insert_element(unset, number, ir.Constant(_INDEX, 0))
    return builder.shuffle_vector(first, unset, integers(0))


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """`a * b + c`, rounded once."""
    function = ir.FunctionType(VECTOR, [VECTOR] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, function, f"llvm.fma.v{LANES}f32"), [a, b, c])


def negative(builder: Any, vector: Any) -> Any:
    return builder.fsub(constant(-0.0), vector)


def square_root(builder: Any, number: Any) -> Any:
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(REAL, [REAL]), "llvm.sqrt.f32")
    return builder.call(function, [number])


def sum_of(builder: Any, vector: Any) -> Any:
    """The sum of all lanes, in an order that never changes: halves, then pairs."""
    return _reduce(builder, vector, builder.fadd)


def greatest_of(builder: Any, vector: Any) -> Any:
    """The greatest lane."""
    return _reduce(builder, vector, lambda a, b: greater(builder, a, b))


def greater(builder: Any, a: Any, b: Any) -> Any:
    """The greater of each two lanes."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _reduce(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    width = LANES
    while width > 1:
        width //= 2
        unset = ir.Constant(vector.type, ir.Undefined)
        halves = [
            builder.shuffle_vector(vector, unset, ir.Constant(ir.VectorType(_INDEX, width), list(lanes)))
            for lanes in (range(width), range(width, 2 * width))
        ]
        vector = combine(*halves)
    return builder.extract_element(vector, ir.Constant(_INDEX, 0))


def exponential(builder: Any, x: Any) -> Any:
    """e to the power of `x <= 0`, to about 1e-7 relative; below -87.3 it is that of -87.3. NaN stays NaN.

    2 ** n * e ** r with n whole and |r| <= log(2) / 2: n goes into the exponent's bits, e ** r is a polynomial.
    Reference: Cephes' `expf`, S. Moshier.
    """
    x = builder.select(builder.fcmp_ordered("<", x, constant(-87.3)), constant(-87.3), x)
    floor_type = ir.FunctionType(VECTOR, [VECTOR])
    floor = cgutils.get_or_insert_function(builder.module, floor_type, f"llvm.floor.v{LANES}f32")
    whole = builder.call(floor, [fma(builder, x, constant(1.44269504088896341), constant(0.5))])
    rest = fma(builder, whole, constant(-0.693359375), x)
    rest = fma(builder, whole, constant(2.12194440e-4), rest)
    series = constant(1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        series = fma(builder, series, rest, constant(coefficient))
    series = fma(builder, series, builder.fmul(rest, rest), builder.fadd(rest, constant(1.0)))
    exponent = builder.add(builder.fptosi(whole, _INDICES), integers(127))
    return builder.fmul(series, builder.bitcast(builder.shl(exponent, integers(23)), VECTOR))


def silu(builder: Any, x: Any) -> Any:
    """`x / (1 + e ** -x)`, by way of a power that cannot overflow. NaN stays NaN."""
    is_negative = builder.fcmp_ordered("<", x, constant(0.0))
    power = exponential(builder, builder.select(is_negative, x, negative(builder, x)))
    numerator = builder.select(is_negative, builder.fmul(x, power), x)
    return builder.fdiv(numerator, builder.fadd(constant(1.0), power))


def prefetch(builder: Any, address: Any) -> None:
    """Into the second-level cache; an address that is not mapped does no harm."""
    byte = ir.IntType(8).as_pointer()
    function = ir.FunctionType(ir.VoidType(), [byte, _INDEX, _INDEX, _INDEX])
    call = cgutils.get_or_insert_function(builder.module, function, "llvm.prefetch.p0i8")
    reads, second_level, data = (ir.Constant(_INDEX, value) for value in (0, 2, 1))
    builder.call(call, [builder.inttoptr(address, byte), reads, second_level, data])
