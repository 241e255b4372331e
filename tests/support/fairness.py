"""How evenly something is divided."""

from __future__ import annotations

from collections.abc import Sequence


def jain(shares: Sequence[float]) -> float:
    """Jain's index: 1 where all have the same, 1 ÷ their number where one has all."""
    return sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))
