"""Panels of whole numbers of 8 or 4 bits become bfloat16, exactly, for products by two and in tiles.

Panels are `packed_kernel`'s, of two vectors of sixteen; what comes out stays in the nearest caches.
"""

from __future__ import annotations

from typing import Any

from numba.core import cgutils

from tandem.engine.cpu import vector_ir as vir
from tandem.engine.huge_pages import FLOAT_BYTES

_VEC, _NUM_VECTORS = vir.Vectors(16), 2
_PANEL, _WORD = _NUM_VECTORS * _VEC.lanes, vir.INT4_PER_WORD
# Of a panel: bytes of its words, and of two numbers of K when it is unpacked.
_WORDS_BYTES, _PAIR_BYTES = _PANEL * FLOAT_BYTES, 2 * _PANEL * vir.SHORT_BYTES
#: Numbers of K that are unpacked at a time, at most: of a panel 32 KiB of bfloat16, or 64 of float32.
MOST_UNPACKED = 512
#: How far on weights are fetched while others are multiplied or unpacked.
BYTES_AHEAD = 8192


def _emit_unpack_int8(builder: Any, panel: Any, numbers: Any, target: Any) -> None:
    """So many numbers of K of a panel `[K][32]`, as `[K / 2][32][2]`."""
    step = numbers.type(2 * _PANEL)
    with cgutils.for_range(builder, builder.udiv(numbers, numbers.type(2))) as loop:
        start = vir.advance(builder, panel, step, loop.index)
        to = vir.advance(builder, target, numbers.type(_PAIR_BYTES), loop.index)
        vir.prefetch(builder, vir.offset(builder, start, BYTES_AHEAD))
        for n in range(_NUM_VECTORS):
            place = vir.offset(builder, start, n * _VEC.lanes)
            pair = _VEC.load_int8_pairs(builder, place, apart=_PANEL, alignment=1)
            vir.store_bits(builder, pair, vir.offset(builder, to, n * _VEC.num_bytes))


def _emit_unpack_int4(builder: Any, panel: Any, numbers: Any, target: Any) -> None:
    """So many numbers of K of a panel of words `[K / 8][32]`, as `[K / 2][32][2]`; they are looked up in a register."""
    with cgutils.for_range(builder, builder.udiv(numbers, numbers.type(_WORD))) as loop:
        start = vir.advance(builder, panel, numbers.type(_WORDS_BYTES), loop.index)
        to = vir.advance(builder, target, numbers.type(_WORD // 2 * _PAIR_BYTES), loop.index)
        for n in range(_NUM_VECTORS):
            place = vir.offset(builder, start, n * _VEC.num_bytes)
            vir.prefetch(builder, vir.offset(builder, place, BYTES_AHEAD))
            packed = _VEC.load_integers(builder, place)
            for pair in range(_WORD // 2):
                left = builder.lshr(packed, _VEC.integers(4 * pair)) if pair else packed
                found = _VEC.lowest_int4_pair(builder, left)
                vir.store_bits(builder, found, vir.offset(builder, to, pair * _PAIR_BYTES + n * _VEC.num_bytes))


#: So many numbers of K (second) of a panel (first address) to the third.
emit_int8_pairs = vir.apart("unpack_int8_pairs", _emit_unpack_int8)
emit_int4_pairs = vir.apart("unpack_int4_pairs", _emit_unpack_int4)
