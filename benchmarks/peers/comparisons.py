"""Many comparisons, each in a file of its own: what of them is measured, and the loop that measures the rest."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import Field, asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from rich.console import Console

from benchmarks.code import PACKAGES, Code
from benchmarks.peers.models import Model
from benchmarks.peers.run import Comparison, compare
from benchmarks.peers.servers import Contestant, Place
from benchmarks.peers.turns import Measured, Plan, is_current, read
from tandem.bench.load.trace_entry import TraceEntry
from tandem.bench.repetitions import rotated
from tandem.core.errors import ConfigError, TandemError


class Point(Protocol):
    """What is compared; a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def name(self) -> str:
        """Of its file."""

    @property
    def dtype(self) -> str:
        """Of its model."""

    @property
    def seed(self) -> int:
        """Of its own: a generator with one seed for all may make prompts that begin alike."""


class Named(Protocol):
    """What is measured at once: a point, or some."""

    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=Named)

OUT = "--out"  # the option that says where the files lie


def seed_of_name(name: str) -> int:
    """One that no other name has, nor a name that is alike one near it."""
    return int(hashlib.sha256(name.encode()).hexdigest()[:7], 16)


@dataclass(frozen=True)
class Comparisons:
    """The files of points, and the servers that each point is to be measured on, with their code of now.

    Attributes:
        place: of the servers; its model and its type are each point's.
        settings: what a file says of a plan, its model and the contestants.
        is_fresh: what the files hold is lost.
    """

    directory: Path
    contestants: Sequence[Contestant]
    place: Place
    settings: Callable[[Plan, Path], dict[str, Any]]
    console: Console
    is_fresh: bool = False
    packages: Path = PACKAGES

    def path(self, point: Point) -> Path:
        return self.directory / f"{point.name}.json"

    def held(self, point: Point) -> dict[str, Any] | None:
        """What its file says; `None`: it has none. Raises `ConfigError` where that is none of a comparison."""
        path = self.path(point)
        return read(path, OUT) if path.exists() else None

    @property
    def names(self) -> set[str]:
        return {contestant.name for contestant in self.contestants}

    def digests(self) -> dict[str, str]:
        """Of the code that Tandem's servers have now."""
        digest = Code.of(self.packages).digest
        return {contestant.name: digest for contestant in self.contestants if not contestant.is_peer}

    def current(self, items: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Of runs or searches, those of the code of now."""
        digests = self.digests()
        return [item for item in items if is_current(item, digests)]

    def are_all_in(self, items: Iterable[dict[str, Any]]) -> bool:
        """Runs or searches by the code of now, of all servers."""
        return {item["contestant"] for item in self.current(items)} >= self.names

    def turns(self, point: Point) -> tuple[str, ...]:
        """The servers' names; none is the first at all points."""
        return tuple(rotated([contestant.name for contestant in self.contestants], point.seed))

    async def compare(
        self, point: Point, plan: Plan, model: Model, *, trace: Sequence[TraceEntry] = (), is_outdated: bool = False
    ) -> int:
        """Measure what of `plan` the point's file does not hold; how many requests failed in that.

        Args:
            trace, is_outdated: as of `comparison`.

        Raises:
            ConfigError: as `comparison`.
            TandemError, KeyboardInterrupt: as `benchmarks.peers.run.compare`.
        """
        return await compare(self.comparison(point, plan, model, trace=trace, is_outdated=is_outdated))

    def comparison(
        self, point: Point, plan: Plan, model: Model, *, trace: Sequence[TraceEntry] = (), is_outdated: bool = False
    ) -> Comparison:
        """What measures a point by `plan`, with what its file holds.

        Args:
            trace: of a search.
            is_outdated: what the file holds is of another plan, and is lost.

        Raises:
            ConfigError: the file is of another machine or other versions, or cannot be written.
        """
        measured = Measured.opened(
            self.path(point),
            {**self.settings(plan, model.directory), "point": asdict(point)},
            digests=self.digests(),
            is_fresh=self.is_fresh or is_outdated,
            option=OUT,
        )
        return Comparison(
            plan=plan,
            place=replace(self.place, model=model.directory, dtype=point.dtype),
            contestants=self.contestants,
            vocabulary=model.vocabulary,
            trace=trace,
            measured=measured,
            console=self.console,
            code=Code.of(self.packages),
            packages=self.packages,
        )


async def measure_each(
    left: Sequence[N], measure: Callable[[N], Awaitable[int]], weight: Callable[[N], float], console: Console
) -> tuple[int, dict[str, str]]:
    """`measure` each, a point or some; how many requests failed in that, and why some could not be measured: the others
    go on.

    Args:
        measure: gives the number of requests that failed.
        weight: how long a point takes, beside others.

    Raises:
        ConfigError: `measure` did.
        KeyboardInterrupt: SIGINT came.
    """
    failures: dict[str, str] = {}
    all_weight = sum(map(weight, left))
    began_s, done_weight, num_failed = time.monotonic(), 0.0, 0
    for number, point in enumerate(left, 1):
        remaining = ""
        if done_weight:
            seconds = (time.monotonic() - began_s) / done_weight * (all_weight - done_weight)
            remaining = f", about {duration(seconds)} left"
        console.print(f"{number} of {len(left)}: {point.name}{remaining}", highlight=False)
        try:
            num_failed += await measure(point)
        except ConfigError:
            raise
        except TandemError as error:
            failures[point.name] = error.message
            console.print(f"{point.name}: {error.message}", style="red", highlight=False, markup=False)
        done_weight += weight(point)
    return num_failed, failures


def duration(seconds: float) -> str:
    """In hours and minutes."""
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
