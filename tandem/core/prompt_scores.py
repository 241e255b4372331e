"""How likely the tokens of a prompt were, each after all before it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenScore:
    """One token of a prompt at its place.

    Attributes:
        logprob: natural log.
        rank: among all tokens at this place; 1 is the likeliest.
        top_logprobs: (token id, log-probability) of the likeliest, as many as were asked for.
    """

    logprob: float
    rank: int
    top_logprobs: tuple[tuple[int, float], ...] = ()
