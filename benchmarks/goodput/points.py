"""What is measured: for each type of numbers requests alone, then every mix. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.goodput.mixes import MIXES, Mix
from benchmarks.goodput.slo import LENGTHS
from benchmarks.peers.comparisons import seed_of_name
from benchmarks.peers.turns import Load

MODEL = "82m"
TYPES = ("float32", "bfloat16")
ALONE = "alone"
_NUM_ALONE, _OUTPUT_ALONE = 5, 16


@dataclass(frozen=True)
class Point:
    """A mix, or requests alone, on a model of one type."""

    mix: str  # its name, or `ALONE`
    dtype: str = "float32"

    @property
    def name(self) -> str:
        """Of its file, too."""
        return f"{MODEL}-{self.dtype}-{self.mix}"

    @property
    def seed(self) -> int:
        """Of its own."""
        return seed_of_name(self.name)

    @property
    def alone(self) -> Point:
        """The one that tells how long requests take alone."""
        return replace(self, mix=ALONE)


def all_points() -> list[Point]:
    """In the order in which they are measured."""
    return [Point(mix, dtype) for dtype in TYPES for mix in (ALONE, *(mix.name for mix in MIXES))]


def mix_of(point: Point) -> Mix | None:
    """`None`: requests alone."""
    return next((mix for mix in MIXES if mix.name == point.mix), None)


def alone_loads() -> tuple[Load, ...]:
    """Some requests of each length, one after the other."""
    return tuple(Load(f"{ALONE}-{length}", length, _OUTPUT_ALONE, 1, _NUM_ALONE) for length in LENGTHS)
