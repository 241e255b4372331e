"""Measures the points of the grid, each into a file of its own: all servers in turn, each started for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.code import PACKAGES, Code
from benchmarks.grid.points import Point
from benchmarks.peers.run import Comparison, compare
from benchmarks.peers.servers import Contestant, Place
from benchmarks.peers.turns import Measured, Plan, is_current, read
from tandem.bench.repetitions import rotated
from tandem.core.errors import ConfigError, TandemError

#: Of the requests a second that the closed point has reached.
_OPEN_SHARE = 0.9
_RATE_DIGITS = 4


@dataclass(frozen=True)
class Model:
    """A checkpoint, and what prompts are drawn from."""

    directory: Path
    vocabulary: Sequence[int]


@dataclass
class Grid:
    """Everything that the measurement of a grid needs.

    Attributes:
        place: of the servers; its model and its type are each point's.
        settings: what a file says of its point's model and the contestants.
    """

    directory: Path
    points: Sequence[Point]
    contestants: Sequence[Contestant]
    place: Place
    model: Callable[[Point], Model]
    settings: Callable[[Plan, Model], dict[str, Any]]
    console: Console
    is_fresh: bool = False
    num_warm_up: int = 4
    packages: Path = PACKAGES
    failures: dict[str, str] = field(default_factory=dict)  # by point, of the last `measure`

    def path(self, point: Point) -> Path:
        return self.directory / f"{point.name}.json"

    def is_done(self, point: Point) -> bool:
        """By the code of now, on all servers, and at the rate that the closed point gives now.

        Raises:
            ConfigError: its file is none of a comparison.
        """
        held = self._held(point)
        is_of_this_rate = not point.is_open or (held is not None and _rate_of(held, point) == self._rate(point))
        return held is not None and is_of_this_rate and self._measured(held) >= self._names

    def _held(self, point: Point) -> dict[str, Any] | None:
        path = self.path(point)
        return read(path) if path.exists() else None

    @property
    def _names(self) -> set[str]:
        return {contestant.name for contestant in self.contestants}

    def _digests(self) -> dict[str, str]:
        digest = Code.of(self.packages).digest
        return {contestant.name: digest for contestant in self.contestants if not contestant.is_peer}

    def _measured(self, held: dict[str, Any]) -> set[str]:
        digests = self._digests()
        return {run["contestant"] for run in held["runs"] if is_current(run, digests)}

    def _rate(self, point: Point) -> float | None:
        """Requests a second of an open point: a share of what the peer has reached closed, where there is one, else of
        the least that a server has; `None`: it is not known yet."""
        held = self._held(point.closed)
        if held is None or not self._measured(held) >= self._names:
            return None
        peers = {contestant.name for contestant in self.contestants if contestant.is_peer} or self._names
        reached = [float(run["figures"]["requests_per_s"]) for run in held["runs"] if run["contestant"] in peers]
        return round(_OPEN_SHARE * min(reached), _RATE_DIGITS)

    async def measure(self) -> int:
        """Do what is left to do; how many requests failed in that. A point that cannot be measured is noted in
        `failures`, and the others go on.

        Raises:
            ConfigError: the files are of another machine or other versions, or cannot be written.
            KeyboardInterrupt: SIGINT came.
        """
        self.failures.clear()
        left = [point for point in self.points if self.is_fresh or not self.is_done(point)]
        all_weight = sum(point.weight(len(self.contestants)) for point in left)
        began_s, done_weight, num_failed = time.monotonic(), 0.0, 0
        for number, point in enumerate(left, 1):
            remaining = ""
            if done_weight:
                seconds = (time.monotonic() - began_s) / done_weight * (all_weight - done_weight)
                remaining = f", about {duration(seconds)} left"
            self.console.print(f"point {number} of {len(left)}: {point.name}{remaining}", highlight=False)
            try:
                num_failed += await self._measure_one(point)
            except ConfigError:
                raise
            except TandemError as error:
                self.failures[point.name] = error.message
                self.console.print(f"{point.name}: {error.message}", style="red", highlight=False, markup=False)
            done_weight += point.weight(len(self.contestants))
        return num_failed

    async def _measure_one(self, point: Point) -> int:
        rate = self._rate(point) if point.is_open else None
        if point.is_open and rate is None:
            raise TandemError(f"its rate is not known: {point.closed.name} was not measured on all servers")
        names = [contestant.name for contestant in self.contestants]
        plan = Plan(
            contestants=tuple(rotated(names, point.seed)),  # none is the first at all points
            loads=(point.load(rate),),
            num_repetitions=1,
            seed=point.seed,
            num_warm_up=self.num_warm_up,
            has_answers=False,
        )
        held, model = self._held(point), self.model(point)
        has_other_rate = point.is_open and held is not None and _rate_of(held, point) != rate
        measured = Measured.opened(
            self.path(point),
            {**self.settings(plan, model), "point": asdict(point)},
            digests=self._digests(),
            is_fresh=self.is_fresh or has_other_rate,
        )
        comparison = Comparison(
            plan=plan,
            place=replace(self.place, model=model.directory, dtype=point.dtype),
            contestants=self.contestants,
            vocabulary=model.vocabulary,
            trace=(),
            measured=measured,
            console=self.console,
            code=Code.of(self.packages),
            packages=self.packages,
        )
        return await compare(comparison)


def _rate_of(held: dict[str, Any], point: Point) -> float:
    """The rate at which a file's point was measured."""
    return float(held["settings"]["loads"][point.name]["rate"])


def duration(seconds: float) -> str:
    """In hours and minutes."""
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
