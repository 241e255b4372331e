"""The nine objectives of Splitwise's paper: how much slower requests are than on a machine of their own. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from benchmarks.splitwise_oracle.runs import Arrival, Times
from benchmarks.splitwise_oracle.world import OnEnd

PERCENTILES = (50, 90, 99)
#: Of the slowdown at each percentile; what reaches it has failed.
BOUNDS = {"ttft": (2.0, 3.0, 6.0), "tbt": (1.25, 1.5, 5.0), "e2e": (1.25, 1.5, 5.0)}
OBJECTIVES = tuple(product(BOUNDS, PERCENTILES))


@dataclass(frozen=True)
class Reference:
    """What a request takes that an A100 machine computes alone: seconds of a prompt of so many tokens, and of a token
    behind it."""

    prompt_s: Callable[[int], float]
    token_s: Callable[[int], float]

    def slowdowns(self, arrival: Arrival, times: Times | None) -> tuple[float, float, float]:
        """Of TTFT, TBT and E2E; endless for a request that did not end."""
        if times is None:
            return math.inf, math.inf, math.inf
        prompt_s, token_s = self.prompt_s(arrival.num_prompt), self.token_s(arrival.num_prompt)
        alone_s = prompt_s + token_s * (arrival.num_output - 1)
        return times.ttft_s / prompt_s, times.tbt_s / token_s, times.e2e_s / alone_s


class Lost(Exception):
    """An objective cannot be kept any more, whatever the requests do that have not ended."""


class Tally:
    """The slowdowns of a load's requests as they end.

    A percentile lies between the two requests next to its place, so it reaches a bound for certain once all from that
    place on do. At the end it is taken exactly.
    """

    def __init__(self, num_requests: int, reference: Reference) -> None:
        self._num, self._reference = num_requests, reference
        self._slowdowns: dict[str, list[float]] = {metric: [] for metric in BOUNDS}
        # Requests that may still reach the bound: below 0 the objective is lost.
        self._num_spare = {
            (metric, percentile): num_requests - math.floor(_place(percentile, num_requests)) - 1
            for metric, percentile in OBJECTIVES
        }

    def note(self, arrival: Arrival, times: Times | None) -> None:
        """Of a request that has ended, or never will (`None`). Raises `Lost`."""
        for metric, slowdown in zip(BOUNDS, self._reference.slowdowns(arrival, times), strict=True):
            self._slowdowns[metric].append(slowdown)
            for percentile, bound in zip(PERCENTILES, BOUNDS[metric], strict=True):
                if slowdown >= bound:
                    self._num_spare[metric, percentile] -= 1
                    if self._num_spare[metric, percentile] < 0:
                        raise Lost(_name(metric, percentile))

    @property
    def lost(self) -> list[str]:
        """The objectives that cannot be kept any more, such as "TBT p50"."""
        return [_name(*objective) for objective in OBJECTIVES if self._num_spare[objective] < 0]

    @property
    def missed(self) -> list[str]:
        """The objectives that were not kept, of all requests."""
        ascending = {metric: sorted(slowdowns) for metric, slowdowns in self._slowdowns.items()}
        assert all(len(slowdowns) == self._num for slowdowns in ascending.values())
        return [
            _name(metric, percentile)
            for metric, percentile in OBJECTIVES
            if not _percentile(ascending[metric], percentile) < BOUNDS[metric][PERCENTILES.index(percentile)]
        ]


def missed(
    arrivals: Sequence[Arrival], reference: Reference, serve: Callable[[OnEnd], Sequence[Times | None]]
) -> list[str]:
    """The objectives that were not kept, of those that were known when the first of them was lost.

    Args:
        serve: serves the requests, calls with each that ends, and gives the times of all.
    """
    tally = Tally(len(arrivals), reference)
    try:
        times = serve(tally.note)
        for arrival, found in zip(arrivals, times, strict=True):
            if found is None:
                tally.note(arrival, None)
    except Lost:
        return tally.lost
    return tally.missed


def _name(metric: str, percentile: int) -> str:
    return f"{metric.upper()} p{percentile}"


def _place(percentile: int, num: int) -> float:
    return percentile / 100 * (num - 1)


def _percentile(ascending: Sequence[float], percentile: int) -> float:
    """Between two neighbours on a straight line."""
    place = _place(percentile, len(ascending))
    low = math.floor(place)
    if place == low:
        return ascending[low]
    below, above = ascending[low], ascending[low + 1]
    return above if math.isinf(above) else below + (above - below) * (place - low)
