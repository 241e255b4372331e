"""Pieces of LLVM code on vectors of float32, from which the CPU kernels are put together by way of Numba.

Users need no compiler for them. Addresses are integers; `builder` is LLVM's, and so are the values.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
import struct
import sys
from collections.abc import Callable, Iterable
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tandem.core.dtypes import KV_SCALE_BYTES
from tandem.engine.cpu.compiling import target_features
from tandem.engine.huge_pages import FLOAT_BYTES

_log = logging.getLogger(__name__)

SHORT_BYTES = 2
#: Whole numbers of 4 bits that lie in a word of 32.
INT4_PER_WORD = 8
#: What their bits mean.
INT4_VALUES = [float(number if number < 8 else number - 16) for number in range(16)]
#: Which of them lies where in a word that is read by two, the lowest bits first: of each pair the first number is in
#: the low half, where the second is in the high one.
INT4_BY_TWO = (0, 2, 4, 6, 1, 3, 5, 7)

#: What pages of K and V hold, as kernels are told it; bytes of a number, and of the scale behind those of a head. Pairs
#: are numbers of bfloat16 that are multiplied two at a time, as one.
FLOAT32, BFLOAT16, INT8, PAIRS = range(4)
KV_ITEM_BYTES, SCALE_BYTES = (FLOAT_BYTES, SHORT_BYTES, 1, 2 * SHORT_BYTES), (0, 0, KV_SCALE_BYTES, 0)

REAL = ir.FloatType()
_INDEX = ir.IntType(32)
_SHORT = ir.IntType(16)
_BYTE = ir.IntType(8)
# Of Linux on x86-64 (arch/x86/include/uapi/asm/prctl.h): a process has to ask for the registers of tiles.
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18
# Lanes of AVX-512's vectors.
_WIDE = 16
_UPPER_HALF = 0xFFFF0000 - (1 << 32)


class _BFloat(ir.types._BaseFloatType):  # type: ignore[misc]
    """LLVM's `bfloat`, which llvmlite has no name for."""

    null = "0.0"
    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"


_BFloat._create_instance()
_BFLOAT = _BFloat()


def is_fast_here() -> bool:
    """Whether this CPU fuses multiply and add on vectors; without it a call of a library stands for each."""
    if platform.machine() in ("aarch64", "arm64"):
        return True
    features = llvmlite.binding.get_host_cpu_features()
    return bool(features.get("fma") and features.get("avx2"))


def widens_float16() -> bool:
    """Whether this CPU makes float32 of float16 on vectors."""
    if platform.machine() in ("aarch64", "arm64"):
        return True
    return bool(llvmlite.binding.get_host_cpu_features().get("f16c"))


def has_wide_vectors() -> bool:
    """Whether Numba compiles for 32 vector registers of sixteen float32, AVX-512's; else for at least 16 of eight."""
    return {"+avx512f", "+avx512vl"} <= target_features()


def has_bfloat16_products() -> bool:
    """Whether Numba compiles for vectors that multiply bfloat16 in pairs, AVX-512's."""
    return has_wide_vectors() and "+avx512bf16" in target_features()


@functools.cache
def has_bfloat16_tiles() -> bool:
    """Whether Numba compiles for tiles of bfloat16, AMX's, beside such products, and Linux lets this process have them:
    it is asked, and from then on signal handlers need stacks that hold them."""
    has_them = has_bfloat16_products() and {"+amx-tile", "+amx-bf16"} <= target_features()
    if not has_them or sys.platform != "linux":
        return False
    call = ctypes.CDLL(None, use_errno=True).syscall
    if call(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA):
        _log.warning(
            "this CPU has AMX, and Linux does not let this process use it (%s): where other workers do, set "
            "model.kernels: vectors, as those that multiply otherwise share no pages",
            os.strerror(ctypes.get_errno()),
        )
        return False
    return True


def kernel(num_addresses: int, num_floats: int, returns: Any, emit: Callable[..., Any]) -> Callable[..., Any]:
    """A function for Numba's code: `num_addresses` integers, then `num_floats` float32, in that order.

    Args:
        returns: Numba's type of the result.
        emit: called with the builder and the arguments' values; returns the result's, or `None` for `types.void`.
    """
    signature = returns(*[types.intp] * num_addresses, *[types.float32] * num_floats)

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return _result(context, emit(builder, *arguments))

    return _callable("", num_addresses + num_floats, {"signature": signature, "generate": generate})


def kernel_by_kind(
    num_addresses: int, num_floats: int, returns: Any, emit_of: Callable[[int], Callable[..., Any]]
) -> Callable[..., Any]:
    """As `kernel`, with one more argument before the others, a constant of the code that calls it: for what of kinds of
    numbers (`KV_ITEM_BYTES`) it is. No code is made for the other kinds.

    Args:
        emit_of: what `kernel` is given, for each kind.
    """
    others = [*[types.intp] * num_addresses, *[types.float32] * num_floats]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit = emit_of(signature.args[0].literal_value)
        return _result(context, emit(builder, *arguments[1:]))

    def signature_of(kind: Any) -> Any:
        return returns(kind, *others) if isinstance(kind, types.IntegerLiteral) else None

    scope = {"signature_of": signature_of, "generate": generate}
    return _callable("kind, ", len(others), scope, "signature_of(kind)")


def _result(context: Any, result: Any) -> Any:
    return context.get_dummy_value() if result is None else result


def _callable(first: str, num_others: int, scope: dict[str, Any], signature: str = "signature") -> Callable[..., Any]:
    """Numba wants each argument by name, so that a function cannot take `*arguments`."""
    names = ", ".join(f"argument_{index}" for index in range(num_others))
    exec(f"def call(typing, {first}{names}): return {signature}, generate", scope)
    made: Callable[..., Any] = intrinsic(prefer_literal=bool(first))(scope["call"])
    return made


def apart(name: str, emit: Callable[..., None]) -> Callable[..., None]:
    """`emit`, as a function that LLVM does not inline: code in the middle of a loop that has all registers to itself.

    Args:
        name: of this code and of no other.
    """

    def emit_call(builder: Any, *arguments: Any) -> None:
        function = builder.module.globals.get(name)
        if function is None:
            signature = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
            function = ir.Function(builder.module, signature, name)
            function.linkage = "internal"
            function.attributes.add("noinline")
            inner = ir.IRBuilder(function.append_basic_block("entry"))
            emit(inner, *function.args)
            inner.ret_void()
        builder.call(function, arguments)

    return emit_call


def emit_by_number(
    numbers: Iterable[int], emit: Callable[..., None], builder: Any, number: Any, *arguments: Any
) -> None:
    """Code of its own for each of `numbers`, which `emit` is given before the builder; of any other nothing is done."""
    end = builder.append_basic_block("end")
    choice = builder.switch(number, end)
    for each in numbers:
        block = builder.append_basic_block(f"of_{each}")
        choice.add_case(number.type(each), block)
        builder.position_at_end(block)
        emit(each, builder, *arguments)
        builder.branch(end)
    builder.position_at_end(end)


def offset(builder: Any, address: Any, num_bytes: int) -> Any:
    return builder.add(address, ir.Constant(address.type, num_bytes)) if num_bytes else address


def advance(builder: Any, address: Any, stride: Any, count: Any) -> Any:
    """`address + stride * count`; `count` is a value or a Python integer."""
    steps = ir.Constant(address.type, count) if isinstance(count, int) else count
    return builder.add(address, builder.mul(stride, steps))


def unknown(builder: Any, value: Any) -> Any:
    """The same, of which LLVM knows nothing: a loop of so many steps stays one."""
    return builder.asm(ir.FunctionType(value.type, [value.type]), "", "=r,0", [value], False)


def load_real(builder: Any, address: Any) -> Any:
    return builder.load(builder.inttoptr(address, REAL.as_pointer()))


def store_real(builder: Any, number: Any, address: Any) -> None:
    builder.store(number, builder.inttoptr(address, REAL.as_pointer()))


def store_bits(builder: Any, vector: Any, address: Any) -> None:
    """A vector of any type, as it is."""
    builder.store(vector, builder.inttoptr(address, vector.type.as_pointer())).align = FLOAT_BYTES


def square_root(builder: Any, number: Any) -> Any:
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(REAL, [REAL]), "llvm.sqrt.f32")
    return builder.call(function, [number])


def prefetch(builder: Any, address: Any) -> None:
    """Into the second-level cache; an address that is not mapped does no harm."""
    byte = ir.IntType(8).as_pointer()
    function = ir.FunctionType(ir.VoidType(), [byte, _INDEX, _INDEX, _INDEX])
    call = cgutils.get_or_insert_function(builder.module, function, "llvm.prefetch.p0i8")
    reads, second_level, data = (ir.Constant(_INDEX, value) for value in (0, 2, 1))
    builder.call(call, [builder.inttoptr(address, byte), reads, second_level, data])


def store_bfloat16(builder: Any, value: Any, address: Any, to: Any = _BFLOAT) -> None:
    """Rounded to the nearest; of two that are as near, to the even one. For CPUs that have such an instruction."""
    builder.store(builder.fptrunc(value, to), builder.inttoptr(address, to.as_pointer())).align = SHORT_BYTES


def shuffled(builder: Any, first: Any, second: Any, places: list[int]) -> Any:
    """What lies at these places of two vectors, one behind the other."""
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(_INDEX, len(places)), places))


def transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """The columns of as many vectors of numbers of 32 bits as each has numbers, a power of two."""
    count, width = len(rows), 1
    while width < count:
        # Blocks of `width` by `width` at the far corners of blocks twice as wide change places.
        low = [i if not i & width else i - width + count for i in range(count)]
        high = [i + width if not i & width else i + count for i in range(count)]
        rows = [
            shuffled(builder, rows[i], rows[i + width], low)
            if not i & width
            else shuffled(builder, rows[i - width], rows[i], high)
            for i in range(count)
        ]
        width *= 2
    return rows


def _short_bits(value: float) -> int:
    """Of a number that bfloat16 has exactly."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return bits >> 16


class Vectors:
    """Vectors of so many float32.

    Attributes:
        type: LLVM's.
        lanes: the numbers of one.
        num_bytes: of one.
    """

    def __init__(self, lanes: int) -> None:
        self.type = ir.VectorType(REAL, lanes)
        self._integers = ir.VectorType(_INDEX, lanes)
        self.lanes = lanes
        self.num_bytes = lanes * FLOAT_BYTES

    def constant(self, values: float | list[float]) -> Any:
        """A vector; a single number is in all lanes."""
        return ir.Constant(self.type, values if isinstance(values, list) else [values] * self.lanes)

    def integers(self, value: int) -> Any:
        """A vector of 32-bit integers, all the same."""
        return ir.Constant(self._integers, [value] * self.lanes)

    def load(self, builder: Any, address: Any, *, alignment: int = FLOAT_BYTES) -> Any:
        loaded = builder.load(builder.inttoptr(address, self.type.as_pointer()))
        loaded.align = alignment
        return loaded

    def load_bfloat16(self, builder: Any, address: Any, *, alignment: int) -> Any:
        """Numbers of 16 bits, which are the upper halves of float32."""
        halves = builder.load(builder.inttoptr(address, ir.VectorType(_SHORT, self.lanes).as_pointer()))
        halves.align = alignment
        return builder.bitcast(builder.shl(builder.zext(halves, self._integers), self.integers(16)), self.type)

    def load_float16(self, builder: Any, address: Any, *, alignment: int) -> Any:
        loaded = builder.load(builder.inttoptr(address, ir.VectorType(ir.HalfType(), self.lanes).as_pointer()))
        loaded.align = alignment
        return builder.fpext(loaded, self.type)

    def load_int8(self, builder: Any, address: Any, *, alignment: int) -> Any:
        bytes_ = builder.load(builder.inttoptr(address, ir.VectorType(_BYTE, self.lanes).as_pointer()))
        bytes_.align = alignment
        return builder.sitofp(builder.sext(bytes_, self._integers), self.type)

    def load_int8_pairs(self, builder: Any, address: Any, *, apart: int, alignment: int) -> Any:
        """Bytes there, and so many bytes behind, as pairs of bfloat16, exactly: in each lane the first one is the low
        half."""
        places = (offset(builder, address, distance) for distance in (0, apart))
        first, second = (
            builder.bitcast(self.load_int8(builder, place, alignment=alignment), self._integers) for place in places
        )
        pair = builder.or_(builder.lshr(first, self.integers(16)), builder.and_(second, self.integers(_UPPER_HALF)))
        return builder.bitcast(pair, self.type)

    def load_integers(self, builder: Any, address: Any, *, alignment: int = FLOAT_BYTES) -> Any:
        """As many integers of 32 bits as there are lanes."""
        loaded = builder.load(builder.inttoptr(address, self._integers.as_pointer()))
        loaded.align = alignment
        return loaded

    def lowest_int4(self, builder: Any, words: Any) -> Any:
        """The whole numbers that the lowest four bits of each word are."""
        if self.lanes == _WIDE:  # a table in a register; what is above the lowest bits of an index does not count
            signature = ir.FunctionType(self.type, [self.type, self._integers])
            look_up = cgutils.get_or_insert_function(builder.module, signature, "llvm.x86.avx512.permvar.sf.512")
            table = self.constant(INT4_VALUES)
            return builder.call(look_up, [table, words])
        return builder.sitofp(builder.ashr(builder.shl(words, self.integers(28)), self.integers(28)), self.type)

    def without_lowest_int4(self, builder: Any, words: Any) -> Any:
        return builder.lshr(words, self.integers(4))

    def lowest_int4_pair(self, builder: Any, words: Any) -> Any:
        """The whole numbers that the lowest four bits of each half of a word are, as pairs of bfloat16, exactly. For
        vectors of sixteen."""
        halves = ir.VectorType(_SHORT, 2 * self.lanes)
        # What is above five bits of an index does not count, and the table has all twice.
        table = ir.Constant(halves, [_short_bits(value) for value in INT4_VALUES] * 2)
        signature = ir.FunctionType(halves, [halves, halves])
        look_up = cgutils.get_or_insert_function(builder.module, signature, "llvm.x86.avx512.permvar.hi.512")
        return builder.bitcast(builder.call(look_up, [table, builder.bitcast(words, halves)]), self.type)

    def store(self, builder: Any, value: Any, address: Any) -> None:
        builder.store(value, builder.inttoptr(address, self.type.as_pointer())).align = FLOAT_BYTES

    def store_part(self, builder: Any, value: Any, first: int, count: int, address: Any) -> None:
        """Store `count` lanes from `first` on."""
        unset = ir.Constant(self.type, ir.Undefined)
        lanes = ir.Constant(ir.VectorType(_INDEX, count), list(range(first, first + count)))
        part = builder.shuffle_vector(value, unset, lanes)
        builder.store(part, builder.inttoptr(address, part.type.as_pointer())).align = FLOAT_BYTES

    def gather(self, builder: Any, numbers: list[Any]) -> Any:
        """These numbers in the first lanes; what is in the others is not said."""
        vector = ir.Constant(self.type, ir.Undefined)
        for lane, number in enumerate(numbers):
            vector = builder.insert_element(vector, number, ir.Constant(_INDEX, lane))
        return vector

    def spread(self, builder: Any, number: Any) -> Any:
        """The same number in all lanes."""
        unset = ir.Constant(self.type, ir.Undefined)
        first = builder.insert_element(unset, number, ir.Constant(_INDEX, 0))
        return builder.shuffle_vector(first, unset, self.integers(0))

    def spread_integer(self, builder: Any, number: Any) -> Any:
        """The low 32 bits of a word, in all lanes."""
        unset = ir.Constant(self._integers, ir.Undefined)
        first = builder.insert_element(unset, builder.trunc(number, _INDEX), ir.Constant(_INDEX, 0))
        return builder.shuffle_vector(first, unset, self.integers(0))

    def fma(self, builder: Any, a: Any, b: Any, c: Any) -> Any:
        """`a * b + c`, rounded once."""
        function = ir.FunctionType(self.type, [self.type] * 3)
        fma = cgutils.get_or_insert_function(builder.module, function, f"llvm.fma.v{self.lanes}f32")
        return builder.call(fma, [a, b, c])

    def spread_bits(self, builder: Any, address: Any) -> Any:
        """The 32 bits at an address, in all lanes."""
        unset = ir.Constant(self._integers, ir.Undefined)
        loaded = builder.load(builder.inttoptr(address, _INDEX.as_pointer()))
        first = builder.insert_element(unset, loaded, ir.Constant(_INDEX, 0))
        return builder.shuffle_vector(first, unset, self.integers(0))

    def fma_by_two(self, builder: Any, a: Any, b: Any, c: Any) -> Any:
        """`c` and two products of bfloat16, where each lane of `a` and of `b` is the bits of two: the sum of each lane.

        Denormal numbers count as zero. For CPUs that have such an instruction (`has_bfloat16_products`).
        """
        pairs = ir.VectorType(_BFLOAT, 2 * self.lanes)
        function = ir.FunctionType(self.type, [self.type, pairs, pairs])
        name = f"llvm.x86.avx512bf16.dpbf16ps.{8 * self.num_bytes}"
        dot = cgutils.get_or_insert_function(builder.module, function, name)
        return builder.call(dot, [c, builder.bitcast(a, pairs), builder.bitcast(b, pairs)])

    def store_bfloat16(self, builder: Any, value: Any, address: Any) -> None:
        """As the function of this name."""
        store_bfloat16(builder, value, address, ir.VectorType(_BFLOAT, self.lanes))

    def rounded(self, builder: Any, low: Any, high: Any) -> Any:
        """The bits of twice as many bfloat16, those of `low` first: rounded to the nearest, or of two to the even one.

        Denormal numbers become zero. For CPUs that have such an instruction, and vectors of sixteen.
        """
        result = ir.VectorType(_BFLOAT, 2 * self.lanes)
        function = ir.FunctionType(result, [self.type, self.type])
        name = f"llvm.x86.avx512bf16.cvtne2ps2bf16.{8 * self.num_bytes}"
        both = builder.call(cgutils.get_or_insert_function(builder.module, function, name), [high, low])
        return builder.bitcast(both, ir.VectorType(_SHORT, 2 * self.lanes))

    def store_rounded(self, builder: Any, value: Any, address: Any) -> None:
        """As bfloat16, rounded to the nearest, or of two to the even one: the same bits on all CPUs, and torch's.

        The instruction for it makes zero of denormal numbers, and not every CPU has it.
        """
        bits = builder.bitcast(value, self._integers)
        last = builder.and_(builder.lshr(bits, self.integers(16)), self.integers(1))
        rounded = builder.lshr(builder.add(bits, builder.add(last, self.integers(0x7FFF))), self.integers(16))
        upper = builder.select(builder.fcmp_unordered("uno", value, value), self.integers(0x7FC0), rounded)
        halves = builder.trunc(upper, ir.VectorType(_SHORT, self.lanes))
        builder.store(halves, builder.inttoptr(address, halves.type.as_pointer())).align = SHORT_BYTES

    def store_int8(self, builder: Any, value: Any, address: Any) -> None:
        """As the nearest whole numbers, or of two the even ones, of at most 127 by amount; zero for what is NaN."""
        rounded = self.nearest_whole(builder, value)
        rounded = builder.select(builder.fcmp_ordered("ord", value, value), rounded, self.constant(0.0))
        bytes_ = builder.trunc(builder.fptosi(rounded, self._integers), ir.VectorType(_BYTE, self.lanes))
        builder.store(bytes_, builder.inttoptr(address, bytes_.type.as_pointer())).align = 1

    def absolute(self, builder: Any, vector: Any) -> Any:
        return self._apply(builder, "fabs", vector)

    def nearest_whole(self, builder: Any, vector: Any) -> Any:
        """Of two that are as near, the even one."""
        return self._apply(builder, "rint", vector)

    def times_power_of_two(self, builder: Any, vector: Any, power: Any) -> Any:
        """`vector * 2 ** power` of a whole `power`, for AVX-512's vectors of sixteen."""
        mask, default = ir.IntType(self.lanes), ir.Constant(_INDEX, 4)  # all lanes; rounding as ever
        function = ir.FunctionType(self.type, [self.type, self.type, self.type, mask, _INDEX])
        name = f"llvm.x86.avx512.mask.scalef.ps.{8 * self.num_bytes}"
        scale = cgutils.get_or_insert_function(builder.module, function, name)
        return builder.call(scale, [vector, power, vector, mask(-1), default])

    def any_lane(self, builder: Any, lanes: Any) -> Any:
        """Whether it is so of any lane."""
        bits = builder.bitcast(lanes, ir.IntType(self.lanes))
        return builder.icmp_unsigned("!=", bits, bits.type(0))

    def _apply(self, builder: Any, name: str, vector: Any) -> Any:
        function = ir.FunctionType(self.type, [self.type])
        return builder.call(
            cgutils.get_or_insert_function(builder.module, function, f"llvm.{name}.v{self.lanes}f32"), [vector]
        )

    def negative(self, builder: Any, vector: Any) -> Any:
        return builder.fsub(self.constant(-0.0), vector)

    def sum_of(self, builder: Any, vector: Any) -> Any:
        """The sum of all lanes, in an order that never changes: halves, then pairs."""
        return self._reduce(builder, vector, builder.fadd)

    def sums_of(self, builder: Any, vectors: list[Any]) -> Any:
        """The sums of up to as many vectors as one has lanes, in their order; each the same bits as `sum_of` gives."""
        width = self.lanes
        vectors = [*vectors, *[self.constant(0.0)] * (self.lanes - len(vectors))]
        while width > 1:
            # Each vector holds sums of groups of numbers: the halves of each group are added, those of two vectors make
            # one.
            width //= 2
            groups = [range(begin, begin + width) for begin in range(0, 2 * self.lanes, 2 * width)]
            low = ir.Constant(self._integers, [lane for group in groups for lane in group])
            high = ir.Constant(self._integers, [lane + width for group in groups for lane in group])
            vectors = [
                builder.fadd(builder.shuffle_vector(first, second, low), builder.shuffle_vector(first, second, high))
                for first, second in zip(vectors[::2], vectors[1::2], strict=True)
            ]
        return vectors[0]

    def widen(self, builder: Any, vector: Any) -> Any:
        """A vector of half the length, then zeros."""
        zeros = ir.Constant(vector.type, [0.0] * vector.type.count)
        return builder.shuffle_vector(vector, zeros, ir.Constant(self._integers, list(range(self.lanes))))

    def greatest_of(self, builder: Any, vector: Any) -> Any:
        """The greatest lane."""
        return self._reduce(builder, vector, lambda a, b: self.greater(builder, a, b))

    def greater(self, builder: Any, a: Any, b: Any) -> Any:
        """The greater of each two lanes."""
        return builder.select(builder.fcmp_ordered(">", a, b), a, b)

    def _reduce(self, builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
        width = self.lanes
        while width > 1:
            width //= 2
            unset = ir.Constant(vector.type, ir.Undefined)
            halves = [
                builder.shuffle_vector(vector, unset, ir.Constant(ir.VectorType(_INDEX, width), list(lanes)))
                for lanes in (range(width), range(width, 2 * width))
            ]
            vector = combine(*halves)
        return builder.extract_element(vector, ir.Constant(_INDEX, 0))

    def exponential(self, builder: Any, x: Any) -> Any:
        """e to the power of `x <= 0`, to about 1e-7 relative; below -87.3 it is that of -87.3. NaN stays NaN."""
        least = self.constant(-87.3)
        return self.exponential_above(builder, builder.select(builder.fcmp_ordered("<", x, least), least, x))

    def exponential_above(self, builder: Any, x: Any) -> Any:
        """As `exponential`, but of less than -87.3 it may be anything.

        2 ** n * e ** r with n whole and |r| <= log(2) / 2: n is what the lowest bits of a great number come to when it
        is added, and goes into the exponent's bits; e ** r is the polynomial of six powers whose greatest relative
        error is least, 2e-9 (by Lawson's algorithm). log(2) is in two parts, as in Cephes' `expf`, S. Moshier.
        """
        great = self.constant(1.5 * 2.0**23)
        shifted = self.fma(builder, x, self.constant(1.44269504088896341), great)
        whole = builder.fsub(shifted, great)
        rest = self.fma(builder, whole, self.constant(-0.693359375), x)
        rest = self.fma(builder, whole, self.constant(2.12194440e-4), rest)
        series = self.constant(1.384360716e-3)
        for coefficient in (8.374195546e-3, 4.166800529e-2, 1.666643023e-1, 4.999999404e-1, 1.0, 1.0):
            series = self.fma(builder, series, rest, self.constant(coefficient))
        exponent = builder.shl(builder.bitcast(shifted, self._integers), self.integers(23))
        power = builder.add(exponent, builder.bitcast(self.constant(1.0), self._integers))
        return builder.fmul(series, builder.bitcast(power, self.type))

    def silu(self, builder: Any, x: Any) -> Any:
        """`x / (1 + e ** -x)`, by way of a power that cannot overflow. NaN stays NaN."""
        is_negative = builder.fcmp_ordered("<", x, self.constant(0.0))
        power = self.exponential(builder, builder.select(is_negative, x, self.negative(builder, x)))
        numerator = builder.select(is_negative, builder.fmul(x, power), x)
        return builder.fdiv(numerator, builder.fadd(self.constant(1.0), power))
