"""What was done for one request, and when: for the request's waterfall. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

MAX_SPANS = 64
"""Of each name; there are few names."""


@dataclass(frozen=True, slots=True)
class Span:
    """Begin and end are on the worker's clock.

    Attributes:
        count: tokens that were computed, or bytes that were sent.
    """

    name: str
    begin_s: float
    end_s: float
    count: int


@dataclass(slots=True)
class Spans:
    """The first `MAX_SPANS` of each name; what follows is added to the last of them."""

    kept: list[Span] = field(default_factory=list)
    _counts: Counter[str] = field(default_factory=Counter)
    _last: dict[str, int] = field(default_factory=dict)  # where the last of each name lies

    def add(self, name: str, begin_s: float, end_s: float, count: int) -> None:
        if self._counts[name] < MAX_SPANS:
            self._counts[name] += 1
            self._last[name] = len(self.kept)
            self.kept.append(Span(name, begin_s, end_s, count))
            return
        index = self._last[name]
        last = self.kept[index]
        self.kept[index] = Span(name, last.begin_s, end_s, last.count + count)


def before(spans: Iterable[Span], now_s: float) -> tuple[Span, ...]:
    """The same in seconds before now: other hosts have other clocks."""
    return tuple(Span(span.name, now_s - span.begin_s, now_s - span.end_s, span.count) for span in spans)
