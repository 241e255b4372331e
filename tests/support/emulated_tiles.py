"""A pytest plugin: tiles of bfloat16 (AMX) by Python, so that the kernels in tiles run on CPUs without them. Slow.

It replaces the pieces that `tandem.engine.cpu.tiles` is made of, so it must be there before kernels are compiled, and
their code must not be kept where others look for it (`NUMBA_CACHE_DIR`).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from tandem.engine.cpu import tiles
from tandem.engine.cpu import vector_ir as vir
from tandem.engine.cpu.tiles import ROW_BYTES, ROWS

_WORD = ir.IntType(64)
_NUM_REGISTERS = 8


class _Registers(threading.local):
    """Of one thread: each has its own."""

    def __init__(self) -> None:
        self.contents = np.zeros((_NUM_REGISTERS, ROWS, ROW_BYTES), dtype=np.uint8)
        self.num_rows, self.row_bytes = [ROWS] * _NUM_REGISTERS, [ROW_BYTES] * _NUM_REGISTERS


_registers = _Registers()
_kept: list[Any] = []  # ctypes frees what it has made


def _memory(address: int, num_bytes: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), np.uint8)


def _configure(register: int, num_rows: int, row_bytes: int) -> None:
    _registers.num_rows[register], _registers.row_bytes[register] = num_rows, row_bytes


def _zero(register: int) -> None:
    _registers.contents[register] = 0


def _load(register: int, address: int, stride: int) -> None:
    _zero(register)
    count = _registers.row_bytes[register]
    for row in range(_registers.num_rows[register]):
        _registers.contents[register, row, :count] = _memory(address + row * stride, count)


def _store(register: int, address: int, stride: int) -> None:
    count = _registers.row_bytes[register]
    for row in range(_registers.num_rows[register]):
        _memory(address + row * stride, count)[:] = _registers.contents[register, row, :count]


def _numbers(register: int) -> np.ndarray:
    """`[row, pair, 2]`, float32."""
    bits = _registers.contents[register].view(np.uint16).astype(np.uint32) << 16
    return bits.view(np.float32).reshape(ROWS, -1, 2)


def _multiply(sums: int, rows: int, columns: int) -> None:
    left, right = _numbers(rows), _numbers(columns)
    width = _registers.row_bytes[sums] // 4
    apart = np.zeros((2, ROWS, width), dtype=np.float32)
    with np.errstate(all="ignore"):
        for pair in range(_registers.row_bytes[rows] // 4):
            for which in range(2):
                apart[which] += left[:, pair, which][:, None] * right[pair, :width, which]
        _registers.contents[sums].view(np.float32)[:, :width] += apart[0] + apart[1]


def _calls(function: Callable[..., None], num_arguments: int) -> Callable[..., None]:
    """What emits a call of a Python function of so many whole numbers."""
    pointer = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * num_arguments)(function)
    _kept.append(pointer)
    address = ctypes.cast(pointer, ctypes.c_void_p).value

    def emit(builder: Any, *arguments: Any) -> None:
        signature = ir.FunctionType(ir.VoidType(), [_WORD] * num_arguments)
        place = builder.inttoptr(ir.Constant(_WORD, address), signature.as_pointer())
        words = (ir.Constant(_WORD, one) if isinstance(one, int) else one for one in arguments)
        builder.call(place, [one if one.type == _WORD else builder.zext(one, _WORD) for one in words])

    return emit


_emit_one_configured = _calls(_configure, 3)


def _emit_configure(builder: Any, num_rows: Mapping[int, Any], row_bytes: Mapping[int, Any]) -> None:
    for number in range(_NUM_REGISTERS):
        _emit_one_configured(builder, number, num_rows.get(number, ROWS), row_bytes.get(number, ROW_BYTES))


tiles.emit_configure = _emit_configure
tiles.emit_zero, tiles.emit_load = _calls(_zero, 1), _calls(_load, 3)
tiles.emit_store, tiles.emit_multiply = _calls(_store, 3), _calls(_multiply, 3)
tiles.emit_release = lambda _: None
tiles.release = vir.kernel(0, 0, types.void, tiles.emit_release)
vir.has_bfloat16_tiles = lambda: True  # type: ignore[assignment]
