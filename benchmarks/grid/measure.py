"""Measures the points of the grid, each into a file of its own: all servers in turn, each started for some points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.grid.points import Group, Point, grouped
from benchmarks.peers.comparisons import Comparisons, measure_each
from benchmarks.peers.models import Model
from benchmarks.peers.run import Comparison, compare_together
from benchmarks.peers.turns import Plan
from tandem.core.errors import TandemError

#: Of the requests a second that the closed point has reached.
_OPEN_SHARE = 0.9
_RATE_DIGITS = 4


@dataclass
class Grid:
    """Everything that the measurement of a grid needs."""

    comparisons: Comparisons
    points: Sequence[Point]
    model: Callable[[Point], Model]
    num_warm_up: int = 4
    failures: dict[str, str] = field(default_factory=dict)  # by point, of the last `measure`

    def is_done(self, point: Point) -> bool:
        """By the code of now, on all servers, and at the rate that the closed point gives now.

        Raises:
            ConfigError: its file is none of a comparison.
        """
        held = self.comparisons.held(point)
        is_of_this_rate = not point.is_open or (held is not None and _rate_of(held, point) == self._rate(point))
        return held is not None and is_of_this_rate and self.comparisons.are_all_in(held["runs"])

    def _rate(self, point: Point) -> float | None:
        """Requests a second of an open point: a share of what the peer has reached closed, where there is one, else of
        the least that a server has; `None`: it is not known yet."""
        held = self.comparisons.held(point.closed)
        if held is None or not self.comparisons.are_all_in(held["runs"]):
            return None
        peers = {contestant.name for contestant in self.comparisons.contestants if contestant.is_peer}
        among = peers or self.comparisons.names
        reached = [float(run["figures"]["requests_per_s"]) for run in held["runs"] if run["contestant"] in among]
        return round(_OPEN_SHARE * min(reached), _RATE_DIGITS)

    async def measure(self) -> int:
        """Do what is left to do; how many requests failed in that. Points that cannot be measured are noted in
        `failures`, by group, and the others go on.

        Raises:
            ConfigError: the files are of another machine or other versions, or cannot be written.
            KeyboardInterrupt: SIGINT came.
        """
        left = [point for point in self.points if self.comparisons.is_fresh or not self.is_done(point)]
        num_failed, self.failures = await measure_each(
            grouped(left), self._measure_group, lambda group: group.weight, self.comparisons.console
        )
        return num_failed

    async def _measure_group(self, group: Group) -> int:
        unknown = [point for point in group.points if point.is_open and self._rate(point) is None]
        known = [self._comparison(point) for point in group.points if point not in unknown]
        num_failed = await compare_together(known) if known else 0
        if unknown:
            closed = ", ".join(point.closed.name for point in unknown)
            raise TandemError(f"the rate of open points is not known: {closed} was not measured on all servers")
        return num_failed

    def _comparison(self, point: Point) -> Comparison:
        rate = self._rate(point) if point.is_open else None
        plan = Plan(
            contestants=self.comparisons.turns(point),
            loads=(point.load(rate),),
            num_repetitions=1,
            seed=point.seed,
            num_warm_up=self.num_warm_up,
            has_answers=False,
        )
        held = self.comparisons.held(point)
        has_other_rate = point.is_open and held is not None and _rate_of(held, point) != rate
        return self.comparisons.comparison(point, plan, self.model(point), is_outdated=has_other_rate)


def _rate_of(held: dict[str, Any], point: Point) -> float:
    """The rate at which a file's point was measured."""
    return float(held["settings"]["loads"][point.name]["rate"])
