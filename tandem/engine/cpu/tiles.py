"""Registers of tiles, matrices of 16 rows of 64 bytes that some CPUs (AMX) multiply at once, as pieces of LLVM code.

Reference: Intel, "Architecture Instruction Set Extensions Programming Reference", chapter on AMX.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from tandem.engine.cpu import vector_ir as vir

#: Of a tile: rows, and bytes of one.
ROWS, ROW_BYTES = 16, 64
TILE_BYTES = ROWS * ROW_BYTES

_NUM_REGISTERS, _CONFIG_BYTES, _ROW_LENGTHS_AT, _NUM_ROWS_AT = 8, 64, 16, 48
_BYTE, _SHORT, _WORD = ir.IntType(8), ir.IntType(16), ir.IntType(64)
_POINTER = _BYTE.as_pointer()


def _call(builder: Any, name: str, *arguments: Any) -> None:
    function = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    builder.call(cgutils.get_or_insert_function(builder.module, function, f"llvm.x86.{name}"), arguments)


def _register(number: int) -> Any:
    return ir.Constant(_BYTE, number)


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _POINTER)


def emit_configure(builder: Any, num_rows: Mapping[int, Any], row_bytes: Mapping[int, Any]) -> None:
    """So many rows, of so many bytes each, have the registers of these numbers; the others are whole tiles."""
    config = cgutils.alloca_once(builder, ir.ArrayType(_BYTE, _CONFIG_BYTES))
    config.align = _CONFIG_BYTES
    start = builder.bitcast(config, _POINTER)

    def put(value: Any, at: int) -> None:
        place = builder.gep(start, [ir.Constant(_WORD, at)])
        builder.store(value, builder.bitcast(place, value.type.as_pointer())).align = 1

    for at in range(_CONFIG_BYTES):
        put(ir.Constant(_BYTE, 0), at)
    put(ir.Constant(_BYTE, 1), 0)  # the palette
    for number in range(_NUM_REGISTERS):
        length = row_bytes.get(number, ir.Constant(_WORD, ROW_BYTES))
        put(builder.trunc(length, _SHORT), _ROW_LENGTHS_AT + 2 * number)
        put(builder.trunc(num_rows.get(number, ir.Constant(_WORD, ROWS)), _BYTE), _NUM_ROWS_AT + number)
    _call(builder, "ldtilecfg", start)


def emit_zero(builder: Any, register: int) -> None:
    _call(builder, "tilezero", _register(register))


def emit_load(builder: Any, register: int, address: Any, stride: Any) -> None:
    """Rows that are `stride` bytes apart."""
    _call(builder, "tileloadd64", _register(register), _pointer(builder, address), stride)


def emit_store(builder: Any, register: int, address: Any, stride: Any) -> None:
    _call(builder, "tilestored64", _register(register), _pointer(builder, address), stride)


def emit_multiply(builder: Any, sums: int, rows: int, columns: int) -> None:
    """Add products of bfloat16 to `sums`, float32: of `rows`, 32 numbers each, with `columns`, whose row i has the
    numbers 2 i and 2 i + 1 of all of these.

    Products at even and at odd places are added up apart, then both to the sum; denormal numbers count as zero.
    """
    _call(builder, "tdpbf16ps", *map(_register, (sums, rows, columns)))


def emit_release(builder: Any) -> None:
    """End the use of registers by this thread, so that its switches to others cost no more than before."""
    _call(builder, "tilerelease")


release = vir.kernel(0, 0, types.void, emit_release)
