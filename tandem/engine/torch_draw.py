"""Draws a token of each row by operations of torch, on any device: the rules of `cpu.draw_kernel`, for whole batches.

Sums are made of additions of single elements, in an order that follows from the vocabulary alone: a row's bits depend
on no other row, nor on how a device's reductions are cut. Nothing here waits for the device, but where `top_p` keeps
more than the `_GUESS` heaviest tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from tandem.core.sampling import SamplingParams
from tandem.engine.device import to_device

#: Tokens whose weights are summed by themselves; a power of 2.
_BLOCK = 256
#: So many of the heaviest tokens are looked at first for where `top_p` cuts.
_GUESS = 1024
#: Weights below e to this are 0: beside the likeliest token's 1 they change no sum.
_LEAST_EXPONENT = -700.0
#: Bytes of one tensor of weights; more rows are drawn in turns.
_MOST_BYTES = 128 << 20
_FLOAT64_BYTES = 8


@dataclass(frozen=True, slots=True)
class Draws:
    """What rows are drawn by.

    Attributes:
        reals: float64 `[5, rows]`: temperature, `top_p`, `min_p`, `top_k`, and the number in [0, 1) at which the token
            lies in the cumulative distribution.
        most_k: the greatest `top_k`; 0: there is none.
        has_top_p, has_min_p: whether a row has one that cuts.
    """

    reals: torch.Tensor
    most_k: int
    has_top_p: bool
    has_min_p: bool

    @property
    def cuts(self) -> bool:
        """Whether a row may have fewer tokens to choose from than all."""
        return bool(self.most_k) or self.has_top_p or self.has_min_p

    @classmethod
    def of(cls, params: Sequence[SamplingParams], numbers: Sequence[float], device: torch.device) -> Draws:
        """Of one row each."""
        fields = [(each.temperature, each.top_p, each.min_p, each.top_k) for each in params]
        reals = np.concatenate([np.array(fields, np.float64).T, np.array([numbers], np.float64)])
        return cls(
            to_device(reals, device),
            max(each.top_k for each in params),
            any(each.top_p < 1.0 for each in params),
            any(each.min_p > 0.0 for each in params),
        )

    def part(self, rows: slice) -> Draws:
        return Draws(self.reals[:, rows], self.most_k, self.has_top_p, self.has_min_p)


def draw(logits: torch.Tensor, greatest: torch.Tensor, draws: Draws) -> torch.Tensor:
    """The token of each row, int64 `[rows]`; any where `greatest` is not finite.

    Where several tokens tie at the edge of `top_k`, all of them stay; at the edge of `top_p`, the lower ids.

    Args:
        logits: `[rows, vocab]` float32 or float64.
        greatest: of each row, of the same type.
    """
    at_once = max(1, _MOST_BYTES // (logits.shape[1] * _FLOAT64_BYTES))
    turns = [slice(first, first + at_once) for first in range(0, len(logits), at_once)]
    return torch.cat([_draw(logits[rows], greatest[rows], draws.part(rows)) for rows in turns])


def _draw(logits: torch.Tensor, greatest: torch.Tensor, draws: Draws) -> torch.Tensor:
    temperature, _, _, _, number = draws.reals.unsqueeze(-1)
    exponents = (logits.double() - greatest.double()[:, None]) * (1.0 / temperature)
    weights = torch.where(exponents > _LEAST_EXPONENT, exponents.exp(), 0.0)
    return _find(_cut(weights, draws), number)


def _cut(weights: torch.Tensor, draws: Draws) -> torch.Tensor:
    """The weights, and 0 for what `min_p`, `top_k` and `top_p` take away."""
    _, top_p, min_p, top_k, _ = draws.reals.unsqueeze(-1)
    if draws.has_min_p:
        weights = torch.where(weights >= min_p, weights, 0.0)
    if draws.most_k:
        heaviest = weights.topk(min(draws.most_k, weights.shape[1])).values
        last = (top_k.long() - 1).clamp(0, heaviest.shape[1] - 1)
        edge = torch.where(top_k > 0, heaviest.gather(1, last), 0.0)
        weights = torch.where(weights >= edge, weights, 0.0)
    return _keep_top_p(weights, top_p) if draws.has_top_p else weights


def _keep_top_p(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep the fewest tokens, the heaviest first, that have the share `top_p` (`[rows, 1]`) of the weight."""
    cuts = top_p < 1.0
    wanted = top_p * _running_sums(_block_sums(weights))[:, -1:]
    falling = weights.topk(min(_GUESS, weights.shape[1])).values
    sums = _running_sums(falling)
    if falling.shape[1] < weights.shape[1] and not bool(((sums[:, -1:] >= wanted) | ~cuts).all()):
        falling = weights.sort(dim=-1, descending=True).values
        sums = _running_sums(falling)
    before = functional.pad(sums[:, :-1], (1, 0))
    count = (before < wanted).sum(dim=-1, keepdim=True).clamp(min=1)
    edge = falling.gather(1, count - 1)
    num_ties = count - (falling > edge).sum(dim=-1, keepdim=True)
    ties = weights == edge
    stays = (weights > edge) | (ties & (ties.cumsum(dim=-1) <= num_ties))
    return torch.where(stays | ~cuts, weights, 0.0)


def _find(weights: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """The first index that takes the sum beyond the share `number` (`[rows, 1]`) of it; where rounding hides it, the
    last that weighs something."""
    sums = _block_sums(weights)
    running = _running_sums(sums)
    goal = number * running[:, -1:]
    block = _first_or_last((running > goal) & (sums > 0.0), sums > 0.0)
    before = functional.pad(running[:, :-1], (1, 0)).gather(1, block)
    places = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    inside = weights.gather(1, places.clamp(max=weights.shape[1] - 1))
    inside = torch.where(places < weights.shape[1], inside, 0.0)
    token = block * _BLOCK + _first_or_last((before + _running_sums(inside) > goal) & (inside > 0.0), inside > 0.0)
    return token[:, 0]


def _first_or_last(wanted: torch.Tensor, possible: torch.Tensor) -> torch.Tensor:
    """By row the first index that is `wanted`; where none is, the last that is `possible`, or 0. `[rows, 1]`"""
    width = wanted.shape[1]
    places = torch.arange(width, device=wanted.device)
    first = torch.where(wanted, places, width).amin(dim=-1, keepdim=True)
    last = torch.where(possible, places, 0).amax(dim=-1, keepdim=True)
    return torch.where(first < width, first, last)


def _block_sums(weights: torch.Tensor) -> torch.Tensor:
    """`[rows, blocks]`: halves are added until one is left."""
    missing = -weights.shape[1] % _BLOCK
    padded = functional.pad(weights, (0, missing)) if missing else weights
    sums = padded.view(len(weights), -1, _BLOCK)
    while sums.shape[2] > 1:
        half = sums.shape[2] // 2
        sums = sums[:, :, :half] + sums[:, :, half:]
    return sums[:, :, 0]


def _running_sums(values: torch.Tensor) -> torch.Tensor:
    """`[rows, n]`: each with all before it, in steps that double (Hillis and Steele, 1986)."""
    reach = 1
    while reach < values.shape[1]:
        values = torch.cat([values[:, :reach], values[:, reach:] + values[:, :-reach]], dim=1)
        reach *= 2
    return values
