"""Fused multiply-adds that find all in registers: the most that the threads of this machine can compute.

Two rates: of float32, and of bfloat16 by two, where the CPU multiplies that (`vector_ir.has_bfloat16_products`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils

from tandem.engine.cpu import vector_ir as vir
from tandem.engine.cpu.atomics import words
from tandem.engine.cpu.threads import Kernel

# Sums that do not wait for each other: more than a multiply-add takes cycles, times those that begin in each.
_NUM_SUMS = 12
_vec = vir.Vectors(16 if vir.has_wide_vectors() else 8)
_STRIDE = 2 * _vec.num_bytes


class MultiplyAdds:
    """`run` has each of `num_threads` threads do `steps` multiply-adds of each sum.

    Attributes:
        flop: operations of one run; a multiply and an add are two.
        num_lanes: of a vector.
        place: for each thread a vector of factors, and then one of what the sums came to together.

    Args:
        by_two: of bfloat16, two products in each lane.
    """

    def __init__(self, num_threads: int, steps: int, *, by_two: bool = False) -> None:
        self.flop = num_threads * steps * _NUM_SUMS * _vec.lanes * 2 * (1 + by_two)
        self._num_threads, self._steps = num_threads, steps
        self._kernel = _by_two if by_two else _by_one
        self.num_lanes = _vec.lanes
        self.place = torch.ones(num_threads * 2 * _vec.lanes)

    def run(self) -> None:
        self._kernel(self._num_threads, self._num_threads, self._steps, self.place.data_ptr())


def _chains(multiply_add: Callable[..., Any]) -> Callable[..., None]:
    """A kernel: so many steps of each sum. Its factor is read from an address; what comes out is written behind it."""

    def emit(builder: ir.IRBuilder, steps: ir.Value, place: ir.Value) -> None:
        factor = _vec.load(builder, place)
        sums = [cgutils.alloca_once_value(builder, _vec.constant(float(n))) for n in range(_NUM_SUMS)]
        with cgutils.for_range(builder, steps):
            for one in sums:
                builder.store(multiply_add(builder, factor, factor, builder.load(one)), one)
        total = builder.load(sums[0])
        for one in sums[1:]:
            total = builder.fadd(total, builder.load(one))
        _vec.store(builder, total, vir.offset(builder, place, _vec.num_bytes))

    return vir.kernel(2, 0, types.void, emit)


_chains_by_one = _chains(_vec.fma)
# Without the instruction nothing calls these, and other ones stand for them.
_chains_by_two = _chains(_vec.fma_by_two if vir.has_bfloat16_products() else _vec.fma)
_two_words = words(2)


def _parts_by_one(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    steps, place = _two_words(arguments)
    for part in range(first, end):
        _chains_by_one(steps, place + part * _STRIDE)


def _parts_by_two(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    steps, place = _two_words(arguments)
    for part in range(first, end):
        _chains_by_two(steps, place + part * _STRIDE)


_by_one, _by_two = Kernel(_parts_by_one, "ii"), Kernel(_parts_by_two, "ii")
