"""Measures requests alone and goodput on mixes, each point into a file of its own: all servers in turn, each started
for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.goodput.figures import alone_ttft_s, reference
from benchmarks.goodput.load import Effort, MixLoad
from benchmarks.goodput.mixes import Mix
from benchmarks.goodput.points import Point
from benchmarks.goodput.slo import SloByPrompt
from benchmarks.peers.comparisons import Comparisons, measure_each
from benchmarks.peers.models import Model
from benchmarks.peers.turns import Load, Plan
from tandem.core.errors import TandemError

_NUM_WARM_UP, _NUM_WARM_UP_ALONE = 4, 1
_ALONE_WEIGHT = 0.5  # beside a mix


@dataclass
class Goodput:
    """Everything that the measurement needs.

    Attributes:
        mix: of a point; `None`: it is of requests alone.
        alone_loads: closed loads of one client, by rising length.
        slo: of what requests take alone.
    """

    comparisons: Comparisons
    points: Sequence[Point]
    model: Callable[[Point], Model]
    mix: Callable[[Point], Mix | None]
    alone_loads: tuple[Load, ...]
    effort: Effort
    slo: Callable[[tuple[tuple[int, float], ...]], SloByPrompt] = SloByPrompt
    failures: dict[str, str] = field(default_factory=dict)  # by point, of the last `measure`

    def is_done(self, point: Point) -> bool:
        """By the code of now, on all servers, and a mix with the targets that requests alone give now, and this effort.

        Raises:
            ConfigError: its file is none of a comparison.
        """
        held, mix = self.comparisons.held(point), self.mix(point)
        if held is None:
            return False
        if mix is None:
            return self.comparisons.are_all_in(held["runs"])
        load = self._load(point, mix)
        return (
            load is not None
            and held["settings"]["goodput"] == load.settings()
            and self.comparisons.are_all_in(held["goodput"])
        )

    def _load(self, point: Point, mix: Mix) -> MixLoad | None:
        """`None`: how long requests take alone is not known yet."""
        held = self.comparisons.held(point.alone)
        if held is None:
            return None
        current = self.comparisons.current(held["runs"])
        whose = reference(run["contestant"] for run in current)
        alone = alone_ttft_s({**held, "runs": current}, whose) if whose else ()
        if [num_input for num_input, _ in alone] != [load.num_input for load in self.alone_loads]:
            return None
        return MixLoad(mix, self.slo(alone), self.effort)

    async def measure(self) -> int:
        """Do what is left to do; how many requests failed in that, but for those of rates that were too high. A point
        that cannot be measured is noted in `failures`, and the others go on.

        Raises:
            ConfigError: the files are of another machine or other versions, or cannot be written.
            KeyboardInterrupt: SIGINT came.
        """
        left = [point for point in self.points if self.comparisons.is_fresh or not self.is_done(point)]
        num_failed, self.failures = await measure_each(left, self._measure_one, self._weight, self.comparisons.console)
        return num_failed

    def _weight(self, point: Point) -> float:
        return _ALONE_WEIGHT if self.mix(point) is None else 1.0

    async def _measure_one(self, point: Point) -> int:
        mix = self.mix(point)
        if mix is None:
            plan = self._plan(point, _NUM_WARM_UP_ALONE, loads=self.alone_loads)
            return await self.comparisons.compare(point, plan, self.model(point))
        load = self._load(point, mix)
        if load is None:
            path = self.comparisons.path(point.alone)
            raise TandemError(
                f"its targets are not known: {point.alone.name} was not measured, or a request of it failed; "
                f"see {path}, and measure it anew with --fresh"
            )
        held = self.comparisons.held(point)
        return await self.comparisons.compare(
            point,
            self._plan(point, _NUM_WARM_UP, goodput=load),
            self.model(point),
            trace=load.entries,
            is_outdated=held is not None and not _has_targets_of(held, load),
        )

    def _plan(
        self, point: Point, num_warm_up: int, *, loads: tuple[Load, ...] = (), goodput: MixLoad | None = None
    ) -> Plan:
        return Plan(
            contestants=self.comparisons.turns(point),
            loads=loads,
            num_repetitions=1,
            seed=point.seed,
            num_warm_up=num_warm_up,
            goodput=goodput,
            has_answers=False,
        )


def _has_targets_of(held: dict[str, Any], load: MixLoad) -> bool:
    return bool(held["settings"]["goodput"]["alone_ttft_s"] == load.settings()["alone_ttft_s"])
