"""The vector of a prompt: which tokens' hidden states become part of it, and from which steps. Pure.

last   ........................x     the step that ends the prompt gives it
cls    x........................     the first step does
mean   xxxxxxxxxxxxxxxxxxxxxxxxx     every step gives its part; a cached prefix would give none, so none is used
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from tandem.core.errors import InternalError
from tandem.core.pooling import PoolingKind


class SumRows(Protocol):
    """See `tandem.engine.pooler.sum_rows`."""

    def __call__(self, rows: Any, total: Any, /) -> Any: ...


class MeanOf(Protocol):
    """See `tandem.engine.pooler.mean_of`."""

    def __call__(self, total: Any, num_rows: int, /) -> list[float] | InternalError: ...


@dataclass(slots=True)
class PromptPooling:
    """What is known of one prompt's vector.

    Attributes:
        total: the sum of the hidden states that count, so far; `None` before the first.
        num_seen: leading tokens that are in it, or do not count. They need not be computed again.
    """

    kind: PoolingKind
    total: Any = None
    num_seen: int = 0

    def num_cacheable(self, num_prompt: int) -> int:
        """How many leading tokens need not be computed where their KV is cached; the last one always is."""
        return num_prompt - 1 if self.kind is PoolingKind.LAST else min(self.num_seen, num_prompt - 1)

    def in_step(self, start: int, num_tokens: int, num_prompt: int) -> range:
        """The tokens that count, of a step that computes [start, start + num_tokens)."""
        end = start + num_tokens
        match self.kind:
            case PoolingKind.LAST:
                return range(max(start, num_prompt - 1), end)
            case PoolingKind.CLS:
                return range(max(start, self.num_seen), min(end, 1))
            case PoolingKind.MEAN:
                return range(max(start, self.num_seen), end)

    def take(self, rows: Any, end: int, num_prompt: int, sum_rows: SumRows) -> None:
        """The hidden states of `in_step`, `[tokens, N]`, of a step that ends before token `end`."""
        if len(rows):
            self.total = sum_rows(rows, self.total)
        self.num_seen = max(self.num_seen, end) if self.kind is not PoolingKind.CLS else num_prompt

    def values(self, num_prompt: int, mean_of: MeanOf) -> list[float] | InternalError:
        """The vector's numbers, once the prompt is computed."""
        return mean_of(self.total, num_prompt if self.kind is PoolingKind.MEAN else 1)
