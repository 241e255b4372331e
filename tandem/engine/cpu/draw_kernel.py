"""Draws tokens of rows of logits: temperature, `min_p`, `top_k`, `top_p`, inverse CDF over what is left, by id.

Weights and sums are float64. Each row is drawn by one thread, by itself, so neither the batch nor the threads show.

First come the weights of all tokens, relative to the likeliest. What `min_p`, `top_k` and `top_p` leave is then a least
weight, and how many of those that weigh as much: a sample of the weights says where about it lies, those above that are
gathered, and bins narrow it down. The sums of blocks of what is left say in which block the drawn token is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tandem.core.sampling import SamplingParams
from tandem.engine.cpu.atomics import float32s, float64s, int32s, int64s, words
from tandem.engine.cpu.threads import Kernel

_ARGUMENTS = "iiiiii"
_REALS = 5
_words = words(len(_ARGUMENTS))

#: Weights below e to this are 0: beside the likeliest token's 1 they change no sum.
_LEAST_EXPONENT = -700.0
_LOG2_E = 1.4426950408889634
#: ln 2 in two parts; the first has zeros at its end, so that its product with an exponent rounds little.
_LN2_HIGH, _LN2_LOW = 0.6931471803691238, 1.9082149292705877e-10
#: Factors of the powers of what is left.
_TAYLOR = tuple(1.0 / math.factorial(power) for power in range(13))
_MANTISSA_BITS = 52
#: Of float32: all bits but the sign, and those of infinity.
_BELOW_SIGN, _INFINITE = np.int32(0x7FFFFFFF), np.int32(0x7F800000)

#: In place of a token: where a logit is NaN; where the greatest is infinite, so that there is no distribution.
NAN, NOT_FINITE = -1, -2
_UNDRAWN = -3

#: Tokens whose weights are summed by themselves, so that the one that is drawn is found among few.
_BLOCK = 512
#: Weights that are looked at to guess where a cut lies; vocabularies of fewer than a few times that are taken whole.
_SAMPLE = 512
_FEW = 8 * _SAMPLE
#: The guess leaves out what is at most this share of what may be left out.
_CAUTION = 0.8
#: Weights that are passed over together where all of them make less than the least that is looked for.
_GROUP = 64
#: Bins that a cut is looked for in, and from how many members on they are made.
_BINS = 1024
_SORTED = 64
#: Ciura's, for as many as are sorted.
_GAPS = (301, 132, 57, 23, 10, 4, 1)

_jit = numba.njit(nogil=True, error_model="numpy")
_jit_fast = numba.njit(nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz", "arcp", "nnan"})


def _emit_times_two_to(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
    number, power = arguments
    word = ir.IntType(64)
    shifted = builder.shl(builder.sext(power, word), ir.Constant(word, _MANTISSA_BITS))
    return builder.bitcast(builder.add(builder.bitcast(number, word), shifted), ir.DoubleType())


@intrinsic
def _times_two_to(_typing, _number, _power):  # type: ignore[no-untyped-def]
    """`number * 2 ** power`, of float64 and int32, where neither is nor becomes subnormal."""
    return types.float64(types.float64, types.int32), _emit_times_two_to


def _emit_as_real(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
    return builder.bitcast(arguments[0], ir.FloatType())


@intrinsic
def _as_real(_typing, _bits):  # type: ignore[no-untyped-def]
    """The float32 of these bits."""
    return types.float32(types.int32), _emit_as_real


@_jit
def _greatest(bits, num):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Of the float32 whose bits these are; NaN where one is.

    Compared as whole numbers in the same order: for those LLVM finds a maximum on vectors.
    """
    least = greatest = bits[0] ^ ((bits[0] >> 31) & _BELOW_SIGN)
    for index in range(1, num):
        place = bits[index] ^ ((bits[index] >> 31) & _BELOW_SIGN)
        least = min(least, place)
        greatest = max(greatest, place)
    if greatest > _INFINITE or least < ~_INFINITE:
        return np.float32(np.nan)
    return _as_real(np.int32(greatest ^ ((greatest >> 31) & _BELOW_SIGN)))


@_jit_fast
def _weigh(logits, num, greatest, inverse, weights, sums):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Write `exp((logits - greatest) * inverse)` and its sums by block. Returns the sum of all.

    2 to the nearest whole power, times a series over the half powers beside it: exact to some 1e-14.
    """
    total = 0.0
    for first in range(0, num, _BLOCK):
        of_block = 0.0
        for index in range(first, min(first + _BLOCK, num)):
            exponent = (np.float64(logits[index]) - greatest) * inverse
            inside = exponent if exponent > _LEAST_EXPONENT else _LEAST_EXPONENT
            twos = np.rint(inside * _LOG2_E)
            rest = (inside - twos * _LN2_HIGH) - twos * _LN2_LOW
            value = _TAYLOR[12]
            value = _TAYLOR[11] + rest * value
            value = _TAYLOR[10] + rest * value
            value = _TAYLOR[9] + rest * value
            value = _TAYLOR[8] + rest * value
            value = _TAYLOR[7] + rest * value
            value = _TAYLOR[6] + rest * value
            value = _TAYLOR[5] + rest * value
            value = _TAYLOR[4] + rest * value
            value = _TAYLOR[3] + rest * value
            value = _TAYLOR[2] + rest * value
            value = _TAYLOR[1] + rest * value
            value = _TAYLOR[0] + rest * value
            weight = _times_two_to(value, np.int32(twos))
            weight = weight if exponent > _LEAST_EXPONENT else 0.0
            weights[index] = weight
            of_block += weight
        sums[first // _BLOCK] = of_block
        total += of_block
    return total


@_jit_fast
def _sum(values, num):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    total = 0.0
    for index in range(num):
        total += values[index]
    return total


@_jit
def _gather(weights, num, least, kept):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Those of at least `least`; `kept` may be where they are. Returns how many."""
    count = 0
    for first in range(0, num, _GROUP):
        end = min(first + _GROUP, num)
        if _sum(weights[first:end], end - first) < least:
            continue
        for index in range(first, end):
            # Written always and counted where it holds: no branch that a CPU guesses wrong.
            weight = weights[index]
            kept[count] = weight
            count += weight >= least
    return count


@_jit_fast
def _extremes(weights, num):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    least = greatest = weights[0]
    for index in range(1, num):
        weight = weights[index]
        least = weight if weight < least else least
        greatest = weight if weight > greatest else greatest
    return least, greatest


@_jit
def _sort(values, num):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """The first `num`, rising: Shell's sort, which is little to compile."""
    for gap in _GAPS:
        for index in range(gap, num):
            value, place = values[index], index
            while place >= gap and values[place - gap] > value:
                values[place] = values[place - gap]
                place -= gap
            values[place] = value


@_jit
def _edge(source, num, wanted, by_weight, members, bins):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Where to cut so that the fewest, the heaviest first, have at least `wanted`: a number, or a sum `by_weight`.

    Returns the least weight that stays, and how many that weigh as much do.
    """
    above = 0.0  # what all have that are heavier than those in `source`
    while num > _SORTED:
        least, greatest = _extremes(source, num)
        per_weight = (_BINS - 1) / (greatest - least)
        if not per_weight < np.inf:  # all alike, or as good as
            break
        bins[:] = 0.0
        for index in range(num):
            weight = source[index]
            bins[int((greatest - weight) * per_weight)] += weight if by_weight else 1.0
        place, last = 0, 0
        before = above
        while place < _BINS and above + bins[place] < wanted:
            if bins[place] > 0.0:
                last, before = place, above
            above += bins[place]
            place += 1
        if place == _BINS:  # sums in another order: all stay but for rounding
            place, above = last, before
        count = 0
        for index in range(num):
            weight = source[index]
            members[count] = weight
            count += int((greatest - weight) * per_weight) == place
        source, num = members, count
    for index in range(num):
        members[index] = source[index]
    _sort(members, num)
    count = 0
    while count < num and above < wanted:
        count += 1
        above += members[num - count] if by_weight else 1.0
    count = max(count, 1)
    edge = members[num - count]
    num_ties = 0
    while num_ties < count and members[num - count + num_ties] == edge:
        num_ties += 1
    return edge, num_ties


@_jit
def _below_edge(weights, num, wanted, by_weight, total, kept):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Gather the heaviest that surely have `wanted`, as `_edge` has it. Returns how many; -1: it may be most."""
    if num < _FEW:
        return -1
    stride = num // _SAMPLE
    for index in range(_SAMPLE):
        kept[index] = weights[index * stride]
    _sort(kept, _SAMPLE)
    rising = kept[:_SAMPLE].copy()
    if by_weight:
        out, place = _CAUTION * (total - wanted) / stride, 0
        while place < _SAMPLE - 1 and out > rising[place]:
            out -= rising[place]
            place += 1
    else:
        place = _SAMPLE - 2 - int(2 * wanted / stride)
    while place > _SAMPLE // 2:
        count = _gather(weights, num, rising[place], kept)
        if (_sum(kept, count) if by_weight else float(count)) >= wanted:
            return count
        place -= max(16, _SAMPLE - place)
    return -1


@_jit_fast
def _sum_blocks(weights, num, edge, num_ties, sums, ties):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Write by block the sums of what weighs more than `edge` and of the first `num_ties` that weigh as much, and how
    many of those are left to it. Returns the sum of all."""
    total = 0.0
    for first in range(0, num, _BLOCK):
        of_block, ties_of_block = 0.0, 0.0
        ties[first // _BLOCK] = num_ties
        for index in range(first, min(first + _BLOCK, num)):
            weight = weights[index]
            of_block += weight if weight > edge else 0.0
            ties_of_block += 1.0 if weight == edge else 0.0
        ties_of_block = min(ties_of_block, num_ties)
        num_ties -= ties_of_block
        of_block += ties_of_block * edge
        sums[first // _BLOCK] = of_block
        total += of_block
    return total


@_jit
def _find(weights, num, edge, sums, ties, goal):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """The first index, of what `_sum_blocks` sums, that takes the sum beyond `goal`; where rounding hides it, the last
    of its block."""
    running, before, block = 0.0, 0.0, 0
    for place in range((num + _BLOCK - 1) // _BLOCK):
        if sums[place] > 0.0:
            block, before = place, running
            running += sums[place]
            if running > goal:
                break
    found, num_ties = 0, ties[block]
    for index in range(block * _BLOCK, min((block + 1) * _BLOCK, num)):
        weight = weights[index]
        if weight > edge or (weight == edge and num_ties > 0.0):
            num_ties -= weight == edge
            before += weight
            if weight > 0.0:
                found = index
            if before > goal:
                break
    return found


@_jit
def _draw(num, total, top_k, top_p, min_p, number, room):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    weights, sums, ties, kept, members, bins = room
    edge, num_ties = 0.0, float(num)
    source, count = weights, num
    if min_p > 0.0:
        edge, source, count = min_p, kept, _gather(weights, num, min_p, kept)
    if 0 < top_k < count:
        if count == num:
            count = _below_edge(weights, num, float(top_k), False, total, kept)
            source, count = (weights, num) if count < 0 else (kept, count)
        edge, _ = _edge(source, count, float(top_k), False, members, bins)
        count = _gather(source, count, edge, kept)
        source = kept
    if top_p < 1.0:
        goal = top_p * (total if count == num else _sum(source, count))
        if count == num:
            count = _below_edge(weights, num, goal, True, total, kept)
            source, count = (weights, num) if count < 0 else (kept, count)
        edge, num_ties = _edge(source, count, goal, True, members, bins)
    if edge > 0.0:
        total = _sum_blocks(weights, num, edge, num_ties, sums, ties)
    return _find(weights, num, edge, sums, ties, number * total)


def _draw_rows(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    num, at, wide, settings, top_ks, drawn = _words(arguments)
    addresses = numba.carray(int64s(at), end)
    is_wide = numba.carray(int64s(wide), end)
    reals = numba.carray(float64s(settings), (end, _REALS))
    counts = numba.carray(int64s(top_ks), end)
    tokens = numba.carray(int64s(drawn), end)
    room = (
        np.empty(num, np.float64),
        np.empty(num // _BLOCK + 1, np.float64),
        np.empty(num // _BLOCK + 1, np.float64),
        np.empty(num + 1, np.float64),
        np.empty(num, np.float64),
        np.empty(_BINS, np.float64),
    )
    weights, sums = room[0], room[1]
    for row in range(first, end):
        greatest, temperature, top_p, min_p, number = reals[row]
        if not is_wide[row]:
            greatest = np.float64(_greatest(numba.carray(int32s(addresses[row]), num), num))
        if not np.isfinite(greatest):
            tokens[row] = NAN if np.isnan(greatest) else NOT_FINITE
            continue
        inverse = 1.0 / temperature  # below some temperature a row is greedy, and not drawn
        if is_wide[row]:
            total = _weigh(numba.carray(float64s(addresses[row]), num), num, greatest, inverse, weights, sums)
        else:
            total = _weigh(numba.carray(float32s(addresses[row]), num), num, greatest, inverse, weights, sums)
        tokens[row] = _draw(num, total, counts[row], top_p, min_p, number, room)


_draw_kernel = Kernel(_draw_rows, _ARGUMENTS)


@dataclass(frozen=True, slots=True)
class Draw:
    """What one row is drawn by.

    Attributes:
        logits: `[vocab]` float32 or float64, contiguous.
        greatest: of them, where they are float64; else it is found.
        number: in [0, 1): the token is where the cumulative distribution comes to it.
    """

    logits: np.ndarray
    params: SamplingParams
    number: float
    greatest: float = 0.0


def draw_rows(draws: Sequence[Draw], num_threads: int) -> list[int]:
    """The token of each, or `NAN`, or `NOT_FINITE`; all have the same vocabulary.

    Where several tokens tie at the edge of `top_k`, all of them stay; at the edge of `top_p`, the lower ids.
    """
    count, vocab_size = len(draws), len(draws[0].logits)
    for draw in draws:  # the kernel reads by address
        values = draw.logits
        if values.dtype.char not in "fd" or values.shape != (vocab_size,) or not values.flags.c_contiguous:
            raise ValueError(f"logits {values.dtype} {values.shape}, not {vocab_size} float32 or float64 without gaps")
    addresses = np.array([draw.logits.ctypes.data for draw in draws], np.int64)
    is_wide = np.array([draw.logits.dtype == np.float64 for draw in draws], np.int64)
    reals = np.empty((count, _REALS))
    for row, draw in enumerate(draws):
        params = draw.params
        reals[row] = draw.greatest, params.temperature, params.top_p, params.min_p, draw.number
    top_ks = np.array([draw.params.top_k for draw in draws], np.int64)
    tokens = np.full(count, _UNDRAWN, np.int64)
    arrays = addresses, is_wide, reals, top_ks, tokens
    _draw_kernel(num_threads, count, vocab_size, *(array.ctypes.data for array in arrays))
    found: list[int] = tokens.tolist()
    if _UNDRAWN in found:
        raise MemoryError(f"no memory to draw {count} rows of {vocab_size} tokens")
    return found


def compile_kernel() -> None:
    """Now, and not when a request first draws. Nothing runs: that would borrow threads of other workers."""
    _draw_kernel.call(0, *[0] * len(_ARGUMENTS))
