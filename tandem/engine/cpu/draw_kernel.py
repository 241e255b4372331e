"""Draws tokens of rows of logits: temperature, `min_p`, `top_k`, `top_p`, inverse CDF over what is left, by id.

Weights and sums are float64. Each row is drawn by one thread, by itself, so neither the batch nor the threads show.

First come the weights of all tokens, relative to the likeliest. What `min_p`, `top_k` and `top_p` leave is then a least
weight, and how many of those that weigh as much: the greatest of each few neighbours say where about it lies, those
above that are gathered, and bins narrow it down. The sums of blocks of what is left say in which block the drawn token
is. Neighbours that are all too light are read once, when their greatest is found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

#: Weights below e to this are 0: beside the likeliest token's 1 they change no sum. And less than all others.
_LEAST_EXPONENT = -700.0
_TINY = float(np.finfo(np.float64).tiny)
_LOG2_E = 1.4426950408889634
#: ln 2 in two parts; the first has zeros at its end, so that its product with an exponent rounds little.
_LN2_HIGH, _LN2_LOW = 0.6931471803691238, 1.9082149292705877e-10
#: Factors of the powers of what is left, the lowest first: by Chebyshev's polynomials for half of ln 2 on both sides,
#: 2.2e-16 relative, as Taylor's series is with two powers more.
_SERIES = (
    1.0, 1.0000000000000067, 0.5000000000000006, 0.16666666666554406, 0.04166666666657314, 0.008333333385667782,
    0.0013888888932488599, 0.00019841170270440067, 2.4801504346997686e-05, 2.7640180796210003e-06,
    2.762635724144735e-07,
)  # fmt: skip
_MANTISSA_BITS = 52
_WHOLE = 1.5 * 2.0**_MANTISSA_BITS
#: Of float32: all bits but the sign, and those of infinity.
_BELOW_SIGN, _INFINITE = np.int32(0x7FFFFFFF), np.int32(0x7F800000)

#: In place of a token: where a logit is NaN; where the greatest is infinite, so that there is no distribution.
NAN, NOT_FINITE = -1, -2
_UNDRAWN = -3

#: Tokens whose weights are summed by themselves, so that the one that is drawn is found among few.
_BLOCK = 512
_WEIGHT_BYTES, _LANES = 8, 8
_VECTOR, _VECTOR_BYTES = ir.VectorType(ir.DoubleType(), _LANES), _LANES * _WEIGHT_BYTES
#: Weights that are passed over together where the greatest of them is less than the least that is looked for; a part of
#: a block.
_GROUP = 32
#: Where a cut lies is guessed from those greatest, but in vocabularies of fewer than so many tokens, and where more
#: than this share of the groups has one above it: what is left is then a good part of the whole.
_FEW, _MOST_ABOVE = 4096, 0.95
#: The guess takes in this share more of what may be left out.
_CAUTION = 0.1
#: Bins that a cut is looked for in, half as many where it is guessed, and from how many members on they are made.
_BINS = 1024
_STEPS = _BINS // 2
_SORTED = 64
#: Ciura's, for as many as are sorted; more are all alike.
_GAPS = (57, 23, 10, 4, 1)

_jit = numba.njit(nogil=True, error_model="numpy")
_jit_fast = numba.njit(nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz", "arcp", "nnan"})


def _emit_times_two_to(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
    number, power = arguments
    word = ir.IntType(64)
    # The last bits of so great a number are whole ones: less than a conversion to a whole number takes.
    shifted = builder.bitcast(builder.fadd(power, ir.Constant(ir.DoubleType(), _WHOLE)), word)
    shifted = builder.shl(shifted, ir.Constant(word, _MANTISSA_BITS))
    return builder.bitcast(builder.add(builder.bitcast(number, word), shifted), ir.DoubleType())


@intrinsic
def _times_two_to(_typing, _number, _power):  # type: ignore[no-untyped-def]
    """`number * 2 ** power`, of a whole `power`, where neither is nor becomes subnormal."""
    return types.float64(types.float64, types.float64), _emit_times_two_to


def _emit_as_real(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
    return builder.bitcast(arguments[0], ir.FloatType())


@intrinsic
def _as_real(_typing, _bits):  # type: ignore[no-untyped-def]
    """The float32 of these bits."""
    return types.float32(types.int32), _emit_as_real


def _emit_as_weight(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
    return builder.bitcast(arguments[0], ir.DoubleType())


@intrinsic
def _as_weight(_typing, _bits):  # type: ignore[no-untyped-def]
    """The float64 of these bits."""
    return types.float64(types.int64), _emit_as_weight


def _load_group(builder: Any, address: Any) -> list[Any]:
    places = (builder.add(address, address.type(n * _VECTOR_BYTES)) for n in range(_GROUP // _LANES))
    loaded = [builder.load(builder.inttoptr(place, _VECTOR.as_pointer())) for place in places]
    for vector in loaded:
        vector.align = _WEIGHT_BYTES
    return loaded


def _reduced(builder: Any, vectors: list[Any], combine: Callable[[Any, Any], Any]) -> Any:
    """One number of vectors of a group: halves of them by halves, then of lanes."""
    while len(vectors) > 1:
        middle = len(vectors) // 2
        vectors = [combine(*both) for both in zip(vectors[:middle], vectors[middle:], strict=True)]
    vector, width = vectors[0], _LANES
    while width > 1:
        width //= 2
        unset, index = ir.Constant(vector.type, ir.Undefined), ir.VectorType(ir.IntType(32), width)
        vector = combine(*(
            builder.shuffle_vector(vector, unset, ir.Constant(index, list(range(first, first + width))))
            for first in (0, width)
        ))  # fmt: skip
    return builder.extract_element(vector, ir.Constant(ir.IntType(32), 0))


def _emit_top(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
    def greater(one: Any, other: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", one, other), one, other)

    return _reduced(builder, _load_group(builder, arguments[0]), greater)


def _emit_sum_of(relation: str, has_weight: bool) -> Callable[..., Any]:
    def emit(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        address, edge = arguments
        unset, index = ir.Constant(_VECTOR, ir.Undefined), ir.VectorType(ir.IntType(32), _LANES)
        first = builder.insert_element(unset, edge, ir.Constant(ir.IntType(32), 0))
        edges = builder.shuffle_vector(first, unset, ir.Constant(index, [0] * _LANES))
        ones, zeros = (ir.Constant(_VECTOR, [value] * _LANES) for value in (1.0, 0.0))
        chosen = [
            builder.select(builder.fcmp_ordered(relation, each, edges), each if has_weight else ones, zeros)
            for each in _load_group(builder, address)
        ]
        return _reduced(builder, chosen, builder.fadd)

    return emit


# LLVM makes gathers of the vectors that loops over groups become, or none at all; so these are written out.


@intrinsic
def _top(_typing, _address):  # type: ignore[no-untyped-def]
    """The greatest weight of the group there."""
    return types.float64(types.intp), _emit_top


@intrinsic
def _sum_above(_typing, _address, _edge):  # type: ignore[no-untyped-def]
    """The sum of the weights of the group there that are greater than `edge`."""
    return types.float64(types.intp, types.float64), _emit_sum_of(">", True)


@intrinsic
def _count_ties(_typing, _address, _edge):  # type: ignore[no-untyped-def]
    """How many weights of the group there are `edge`."""
    return types.float64(types.intp, types.float64), _emit_sum_of("==", False)


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


@_jit
def _find_tops(weights, num, tops):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Write the greatest of each group. What is behind the last weight, up to a whole group, is read too."""
    for first in range(0, num, _GROUP):
        tops[first // _GROUP] = _top(weights.ctypes.data + first * _WEIGHT_BYTES)


@_jit_fast
def _weigh(logits, num, greatest, inverse, weights, sums, tops, with_tops):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Write `exp((logits - greatest) * inverse)`, its sums by block and, `with_tops`, the greatest of each group.
    Returns the sum of all.

    2 to the nearest whole power, times a series over the half powers beside it: exact to some 1e-15 near the likeliest,
    and to 3e-14 far below it.
    """
    total = 0.0
    for first in range(0, num, _BLOCK):
        end = min(first + _BLOCK, num)
        # Parts, whose indices are from zero on: of others LLVM does not know that they are not negative, which would
        # mean from the end, so it gathers and scatters numbers instead of loading and storing vectors.
        block, of_weights, of_block = logits[first:end], weights[first:end], 0.0
        for index in range(end - first):
            exponent = (np.float64(block[index]) - greatest) * inverse
            inside = exponent if exponent > _LEAST_EXPONENT else _LEAST_EXPONENT
            twos = np.rint(inside * _LOG2_E)
            rest = (inside - twos * _LN2_HIGH) - twos * _LN2_LOW
            value = _SERIES[10]
            value = _SERIES[9] + rest * value
            value = _SERIES[8] + rest * value
            value = _SERIES[7] + rest * value
            value = _SERIES[6] + rest * value
            value = _SERIES[5] + rest * value
            value = _SERIES[4] + rest * value
            value = _SERIES[3] + rest * value
            value = _SERIES[2] + rest * value
            value = _SERIES[1] + rest * value
            value = _SERIES[0] + rest * value
            weight = _times_two_to(value, twos)
            weight = weight if exponent > _LEAST_EXPONENT else 0.0
            of_weights[index] = weight
            of_block += weight
        sums[first // _BLOCK] = of_block
        total += of_block
        if with_tops:
            _find_tops(of_weights, end - first, tops[first // _GROUP :])
    return total


@_jit_fast
def _sum(values, num):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    total = 0.0
    for index in range(num):
        total += values[index]
    return total


@_jit
def _keep(weights, first, end, least, kept, count):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Write those of `[first, end)` that are at least `least` behind the `count` that are kept; `kept` may be where
    they are. Returns how many it are then."""
    for index in range(first, end):
        # Written always and counted where it holds: no branch that a CPU guesses wrong.
        weight = weights[index]
        kept[count] = weight
        count += weight >= least
    return count


@_jit
def _gather(weights, num, least, tops, kept):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Those of at least `least`. Returns how many."""
    count = 0
    for first in range(0, num, _GROUP):
        if tops[first // _GROUP] >= least:
            count = _keep(weights, first, first + _GROUP, least, kept, count)
    return count


@_jit
def _extremes(numbers, num):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    least = greatest = numbers[0]
    for index in range(1, num):
        least = min(least, numbers[index])
        greatest = max(greatest, numbers[index])
    return least, greatest


@_jit
def _shift(most, num):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """By how many bits whole numbers of up to `most` are shifted to be below `num`."""
    shift = 0
    while most >> shift >= num:
        shift += 1
    return shift


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
        # By their bits, whole numbers in the same order: bins are fine where weights are small, and where all are near.
        bits = source.view(np.int64)
        least, greatest = _extremes(bits, num)
        if least == greatest:
            break
        shift = _shift(greatest - least, _BINS)
        bins[:] = 0.0
        for index in range(num):
            bins[(greatest - bits[index]) >> shift] += source[index] if by_weight else 1.0
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
            is_member = (greatest - bits[index]) >> shift == place
            members[count] = source[index]
            count += is_member
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
def _below_share(tops, wanted, total, bins):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """A weight above which are probably, and hardly more than, those that have `wanted` of `total`; -1: many have it.

    Each group whose greatest is above a weight has one token there at least. In all there are more of them: as many as
    balls are thrown until so many groups have one. They weigh about what those greatest do.
    """
    num_groups = len(tops)
    bits = tops.view(np.int64)
    low, high = _extremes(bits, num_groups)
    if low == high:
        return -1.0
    shift = _shift(high - low, _STEPS)
    numbers, sums = bins[:_STEPS], bins[_STEPS:]
    bins[:] = 0.0
    for group in range(num_groups):
        step = (high - bits[group]) >> shift
        numbers[step] += 1.0
        sums[step] += tops[group]
    goal = wanted + _CAUTION * (total - wanted)
    num_above, reached, thrown = 0.0, 0.0, 0.0
    for step in range(_STEPS):
        if numbers[step] == 0.0:
            continue
        num_above += numbers[step]
        if num_above > _MOST_ABOVE * num_groups:
            break
        before, thrown = thrown, -num_groups * np.log(1.0 - num_above / num_groups)
        reached += sums[step] * (thrown - before) / numbers[step]
        if reached >= goal:
            return _as_weight(max(low, high - ((step + 1) << shift) + 1))
    return -1.0


@_jit
def _below_edge(weights, num, wanted, by_weight, total, tops, kept, members, bins):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Gather the heaviest that surely have `wanted`, as `_edge` has it, or all that weigh anything. Returns how many;
    -1: it may be many."""
    if num < _FEW:
        return -1
    if by_weight:
        least = _below_share(tops, wanted, total, bins)
    elif wanted <= len(tops):
        least, _ = _edge(tops, len(tops), wanted, False, members, bins)  # a token of each of so many groups
        least = max(least, _TINY)  # not the zeros behind the last token, for which there is no room
    else:
        least = -1.0
    if least < 0.0:
        return -1
    count = _gather(weights, num, least, tops, kept)
    return count if not by_weight or _sum(kept, count) >= wanted else -1


@_jit_fast
def _sum_blocks(weights, num, edge, num_ties, tops, sums, ties):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Write by block the sums of what weighs more than `edge` and of the first `num_ties` that weigh as much, and how
    many of those are left to it. Returns the sum of all."""
    total = 0.0
    for first in range(0, num, _BLOCK):
        of_block, ties_of_block = 0.0, 0.0
        ties[first // _BLOCK] = num_ties
        for begin in range(first, min(first + _BLOCK, num), _GROUP):
            if tops[begin // _GROUP] >= edge:
                group = weights.ctypes.data + begin * _WEIGHT_BYTES
                of_block += _sum_above(group, edge)
                ties_of_block += _count_ties(group, edge)
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
    weights, sums, tops, ties, kept, members, bins = room
    edge, num_ties = 0.0, float(num)
    source, count = weights, num
    if min_p > 0.0:
        edge, source, count = min_p, kept, _gather(weights, num, min_p, tops, kept)
    if 0 < top_k < count:
        if count == num:
            count = _below_edge(weights, num, float(top_k), False, total, tops, kept, members, bins)
            source, count = (weights, num) if count < 0 else (kept, count)
        edge, _ = _edge(source, count, float(top_k), False, members, bins)
        source, count = kept, _keep(source, 0, count, edge, kept, 0)
    if top_p < 1.0:
        goal = top_p * (total if count == num else _sum(source, count))
        if count == num:
            count = _below_edge(weights, num, goal, True, total, tops, kept, members, bins)
            source, count = (weights, num) if count < 0 else (kept, count)
        edge, num_ties = _edge(source, count, goal, True, members, bins)
    if edge > 0.0:
        total = _sum_blocks(weights, num, edge, num_ties, tops, sums, ties)
    return _find(weights, num, edge, sums, ties, number * total)


def _draw_rows(first, end, arguments):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    num, at, wide, settings, top_ks, drawn = _words(arguments)
    addresses = numba.carray(int64s(at), end)
    is_wide = numba.carray(int64s(wide), end)
    reals = numba.carray(float64s(settings), (end, _REALS))
    counts = numba.carray(int64s(top_ks), end)
    tokens = numba.carray(int64s(drawn), end)
    num_groups = (num + _GROUP - 1) // _GROUP
    room = (
        np.zeros(num_groups * _GROUP, np.float64),  # behind the last token too, so that all groups are whole
        np.empty(num // _BLOCK + 1, np.float64),
        np.empty(num_groups, np.float64),
        np.empty(num // _BLOCK + 1, np.float64),
        np.empty(num + 1, np.float64),
        np.empty(num, np.float64),
        np.empty(_BINS, np.float64),
    )
    weights, sums, tops = room[:3]
    for row in range(first, end):
        greatest, temperature, top_p, min_p, number = reals[row]
        is_cut = min_p > 0.0 or counts[row] > 0 or top_p < 1.0
        if not is_wide[row]:
            greatest = np.float64(_greatest(numba.carray(int32s(addresses[row]), num), num))
        if not np.isfinite(greatest):
            tokens[row] = NAN if np.isnan(greatest) else NOT_FINITE
            continue
        inverse = 1.0 / temperature  # below some temperature a row is greedy, and not drawn
        if is_wide[row]:
            logits = numba.carray(float64s(addresses[row]), num)
            total = _weigh(logits, num, greatest, inverse, weights, sums, tops, is_cut)
        else:
            narrow = numba.carray(float32s(addresses[row]), num)
            total = _weigh(narrow, num, greatest, inverse, weights, sums, tops, is_cut)
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


def compile_draw_kernel() -> None:
    """Now, and not when a request first draws. Nothing runs: that would borrow threads of other workers."""
    _draw_kernel.compile()
