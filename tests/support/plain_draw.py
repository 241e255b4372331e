"""Drawing from logits with full sorts, by numpy: what the compiled kernel is held against."""

from __future__ import annotations

import numpy as np

from tandem.core.sampling import SamplingParams


def plain_draw(logits: np.ndarray, params: SamplingParams, number: float) -> int:
    """The token at `number` in [0, 1) of the distribution that `params` make of `logits` (`[vocab]`)."""
    scaled = logits.astype(np.float64) / params.temperature
    weights = np.exp(scaled - scaled.max())
    ids = allowed(weights, params)
    cumulative = np.cumsum(weights[ids])
    index = int(np.searchsorted(cumulative, number * cumulative[-1], side="right"))
    return int(ids[min(index, int(np.flatnonzero(weights[ids])[-1]))])


def allowed(weights: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The ids that `min_p`, `top_k` and `top_p` leave of weights relative to the likeliest token's, ascending."""
    ids = np.flatnonzero(weights >= params.min_p)
    if 0 < params.top_k < len(ids):
        edge = np.sort(weights[ids])[-params.top_k]
        ids = ids[weights[ids] >= edge]
    if params.top_p < 1:
        falling = np.argsort(-weights[ids], kind="stable")  # of tokens that tie, the lower id first
        sums = np.cumsum(weights[ids][falling])
        count = max(1, int(np.count_nonzero(sums - weights[ids][falling] < params.top_p * sums[-1])))
        ids = np.sort(ids[falling[:count]])
    return ids
