"""What was done for one request, and when: for the request's waterfall. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

MAX_SPANS = 64


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
    """The first `MAX_SPANS`; what follows is added to the last of its name."""

    kept: list[Span] = field(default_factory=list)

    def add(self, name: str, begin_s: float, end_s: float, count: int) -> None:
        if len(self.kept) < MAX_SPANS:
            self.kept.append(Span(name, begin_s, end_s, count))
            return
        for index in range(MAX_SPANS - 1, -1, -1):
            last = self.kept[index]
            if last.name == name:
                self.kept[index] = Span(name, last.begin_s, end_s, last.count + count)
                return


def before(spans: Iterable[Span], now_s: float) -> tuple[Span, ...]:
    """The same in seconds before now: other hosts have other clocks."""
    return tuple(Span(span.name, now_s - span.begin_s, now_s - span.end_s, span.count) for span in spans)
