"""Words of memory that several threads share, and calls by address: pieces of LLVM code for Numba's.

A word is an aligned 64-bit integer, named by its address. All of these are sequentially consistent.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tandem.engine.cpu.vector_ir import kernel

WORD = ir.IntType(64)
WORD_BYTES = 8
_ORDER = "seq_cst"
# LLVM's own instruction that tells a core of a waiting loop, and its arguments.
_PAUSE: tuple[str, list[Any]] = (
    ("llvm.aarch64.hint", [ir.Constant(ir.IntType(32), 1)])
    if platform.machine() in ("aarch64", "arm64")
    else ("llvm.x86.sse2.pause", [])
)


def _place(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, WORD.as_pointer())


def _emit_read(builder: Any, address: Any) -> Any:
    return builder.load_atomic(_place(builder, address), _ORDER, WORD_BYTES)


def _emit_write(builder: Any, address: Any, value: Any) -> None:
    builder.store_atomic(value, _place(builder, address), _ORDER, WORD_BYTES)


def _emit_add(builder: Any, address: Any, value: Any) -> Any:
    return builder.atomic_rmw("add", _place(builder, address), value, _ORDER)


def _emit_and(builder: Any, address: Any, value: Any) -> Any:
    return builder.atomic_rmw("and", _place(builder, address), value, _ORDER)


def _emit_swap(builder: Any, address: Any, expected: Any, value: Any) -> Any:
    pair = builder.cmpxchg(_place(builder, address), expected, value, _ORDER, _ORDER)
    return builder.zext(builder.extract_value(pair, 1), WORD)


def _emit_pause(builder: Any) -> None:
    name, arguments = _PAUSE
    signature = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    builder.call(cgutils.get_or_insert_function(builder.module, signature, name), arguments)


def _emit_call(builder: Any, function: Any, first: Any, end: Any, arguments: Any) -> None:
    signature = ir.FunctionType(ir.VoidType(), [WORD] * 3)
    builder.call(builder.inttoptr(function, signature.as_pointer()), [first, end, arguments])


#: `read(address)`; `write(address, value)`.
read = kernel(1, 0, types.intp, _emit_read)
write = kernel(2, 0, types.void, _emit_write)
#: `add(address, value)` and `keep_bits(address, bits)` change the word, and give what it was.
add = kernel(2, 0, types.intp, _emit_add)
keep_bits = kernel(2, 0, types.intp, _emit_and)
#: `compare_and_swap(address, expected, value)`: writes if the word is as expected; whether it was, as 1 or 0.
compare_and_swap = kernel(3, 0, types.intp, _emit_swap)
pause = kernel(0, 0, types.void, _emit_pause)
#: `call(function, first, end, arguments)`: a C function of three words.
call = kernel(4, 0, types.void, _emit_call)


def _of_address(returns: Any, emit: Callable[[Any, Any, Any, Any], Any]) -> Callable[[Any], Any]:
    """A function for Numba's code of one address; `emit` gets Numba's context, the builder, the type, the address."""
    signature = returns(types.intp)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return emit(context, builder, signature.return_type, arguments[0])

    def typing(typing_context, address):  # type: ignore[no-untyped-def] # noqa: ARG001 - what Numba calls it with
        return signature, generate

    result: Callable[[Any], Any] = intrinsic(typing)
    return result


def words(count: int) -> Callable[[Any], Any]:
    """A function for Numba's code that gives the `count` words from an address on, as a tuple."""

    def emit(context: Any, builder: Any, returns: Any, address: Any) -> Any:
        start = _place(builder, address)
        places = [builder.gep(start, [ir.Constant(WORD, index)]) for index in range(count)]
        return context.make_tuple(builder, returns, [builder.load(place) for place in places])

    return _of_address(types.UniTuple(types.intp, count), emit)


def _emit_real(builder: Any, word: Any) -> Any:
    return builder.bitcast(builder.trunc(word, ir.IntType(32)), ir.FloatType())


#: The float32 in the low half of a word.
real = kernel(1, 0, types.float32, _emit_real)


def _emit_pointer(context: Any, builder: Any, returns: Any, address: Any) -> Any:
    return builder.inttoptr(address, context.get_value_type(returns))


#: Pointers to what lies at an address, for `numba.carray`.
float32s, float64s, int32s, int64s = (
    _of_address(types.CPointer(kind), _emit_pointer)
    for kind in (types.float32, types.float64, types.int32, types.int64)
)
