"""Figures of the last seconds from what `/v1/events` tells. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from router.observe.histogram import histogram_of, merged

NUM_SECONDS = 60
_BLOCKS = " ▁▂▃▄▅▆▇█"


class Window:
    """The last `NUM_SECONDS` of a cluster."""

    def __init__(self) -> None:
        self.seconds: list[Mapping[str, Any]] = []

    def add(self, state: Mapping[str, Any]) -> None:
        """Take in one event."""
        newest = self.seconds[-1]["second"] if self.seconds else -1
        fresh = [second for second in state["seconds"] if second["second"] > newest]
        self.seconds = [*self.seconds, *fresh][-NUM_SECONDS:]

    def rate(self, name: str, last: int = NUM_SECONDS) -> float:
        """Of `tokens` or `arrived`, a second."""
        counted = self.seconds[-last:]
        return sum(second[name] for second in counted) / len(counted) if counted else 0.0

    def quantile(self, name: str, share: float) -> float | None:
        """Seconds of `ttft` or `itl` that so great a share does not exceed; `None` where none was."""
        return merged(histogram_of(second[name]) for second in self.seconds).quantile(share)

    @property
    def outcomes(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for second in self.seconds:
            total.update(second["outcomes"])
        return total


def sparkline(values: Sequence[float]) -> str:
    """One character for each value."""
    top = max(values, default=0.0)
    return "".join(_BLOCKS[math.ceil(8 * value / top)] if top else _BLOCKS[0] for value in values)


def duration(seconds: float | None) -> str:
    """With the unit that people would choose."""
    if seconds is None:
        return "-"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"
