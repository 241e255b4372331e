"""Draws a token of each row in two Triton kernels, where nothing cuts the distribution; else as `torch_draw` does.

The first goes over the whole vocabulary and leaves one sum for each block of it, the second looks for the token in one
block alone: weights are never kept. A row is summed in an order that follows from the vocabulary, whatever its company.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tandem.engine import torch_draw
from tandem.engine.torch_draw import Draws

#: Tokens whose weights are summed by themselves, and blocks that one program sums.
_BLOCK, _BLOCKS_OF_A_PROGRAM = 256, 8
#: Weights below e to this are 0, as in `torch_draw`.
_LEAST_EXPONENT = tl.constexpr(-700.0)


@triton.jit
def _weights(  # type: ignore[no-untyped-def]  # Triton would look the types up
    logits, greatest, temperature
):  # fmt: skip
    exponents = (logits.to(tl.float64) - greatest) * (1.0 / temperature)
    return tl.where(exponents > _LEAST_EXPONENT, tl.exp(exponents), 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _first_or_last(  # type: ignore[no-untyped-def]
    places, wanted, possible, NUM: tl.constexpr
):  # fmt: skip
    """The first place that is wanted; where none is, the last that is possible, or 0."""
    first = tl.min(tl.where(wanted, places, NUM), 0)
    last = tl.max(tl.where(possible, places, 0), 0)
    return tl.where(first < NUM, first, last)


@triton.jit(do_not_specialize=("row_stride", "vocab_size"))  # type: ignore[untyped-decorator]
def _sum_kernel(  # type: ignore[no-untyped-def]
    logits, greatest, reals, sums, row_stride, vocab_size,
    NUM_BLOCKS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The weights of some blocks of one row, each block summed."""
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    tokens = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    values = tl.load(logits + row * row_stride + tokens, mask=tokens < vocab_size, other=float("-inf"))
    weights = _weights(values, tl.load(greatest + row).to(tl.float64), tl.load(reals + row))
    tl.store(sums + row * NUM_BLOCKS + blocks, tl.sum(weights, 1), mask=blocks < NUM_BLOCKS)


@triton.jit(do_not_specialize=("row_stride", "vocab_size", "num_rows"))  # type: ignore[untyped-decorator]
def _find_kernel(  # type: ignore[no-untyped-def]
    logits, greatest, reals, sums, tokens, row_stride, vocab_size, num_rows,
    NUM_BLOCKS: tl.constexpr, ALL_BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first token that takes the sum beyond the row's share; where rounding hides it, the last that weighs."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, ALL_BLOCKS)
    of_blocks = tl.load(sums + row * NUM_BLOCKS + block, mask=block < NUM_BLOCKS, other=0.0)
    running = tl.cumsum(of_blocks, 0)
    goal = tl.load(reals + 4 * num_rows + row) * tl.max(running, 0)
    weighs = of_blocks > 0.0
    chosen = _first_or_last(block, (running > goal) & weighs, weighs, ALL_BLOCKS)
    before = tl.sum(tl.where(block == chosen - 1, running, 0.0), 0)
    place = tl.arange(0, BLOCK)
    at = chosen * BLOCK + place
    values = tl.load(logits + row * row_stride + at, mask=at < vocab_size, other=float("-inf"))
    inside = _weights(values, tl.load(greatest + row).to(tl.float64), tl.load(reals + row))
    weighs = inside > 0.0
    found = _first_or_last(place, (before + tl.cumsum(inside, 0) > goal) & weighs, weighs, BLOCK)
    tl.store(tokens + row, (chosen * BLOCK + found).to(tl.int64))


def draw(logits: torch.Tensor, greatest: torch.Tensor, draws: Draws) -> torch.Tensor:
    """The token of each row, int64 `[rows]`: see `torch_draw.draw`, whose arguments and tokens these are."""
    if draws.cuts:
        return torch_draw.draw(logits, greatest, draws)
    num_rows, vocab_size = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    reals = draws.reals.contiguous()
    num_blocks = triton.cdiv(vocab_size, _BLOCK)
    sums = torch.empty((num_rows, num_blocks), dtype=torch.float64, device=logits.device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    _sum_kernel[(num_rows, triton.cdiv(num_blocks, _BLOCKS_OF_A_PROGRAM))](
        logits, greatest, reals, sums, logits.stride(0), vocab_size,
        NUM_BLOCKS=num_blocks, BLOCK=_BLOCK, BLOCKS=_BLOCKS_OF_A_PROGRAM,
    )  # fmt: skip
    _find_kernel[(num_rows,)](
        logits, greatest, reals, sums, tokens, logits.stride(0), vocab_size, num_rows,
        NUM_BLOCKS=num_blocks, ALL_BLOCKS=triton.next_power_of_2(num_blocks), BLOCK=_BLOCK,
    )  # fmt: skip
    return tokens
