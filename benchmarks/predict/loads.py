"""Loads that a cluster is measured under and a simulation is asked about. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tandem.bench.load.trace_entry import TraceEntry
from tandem.bench.session import Shape
from tandem.sim.load import Lengths


@dataclass(frozen=True)
class Load:
    """Requests of drawn lengths.

    Attributes:
        num_clients: that each wait for an answer before they ask again; 0: requests come by themselves.
        rate: of requests that come by chance, a second; 0: not so.
        burst: so many come at once, `every_s` seconds after the ones before; 0: not so.
    """

    name: str
    num: int
    inputs: Lengths
    outputs: Lengths
    num_clients: int = 0
    rate: float = 0.0
    burst: int = 0
    every_s: float = 0.0

    def entries(self, seed: int, longest: int) -> list[TraceEntry]:
        """What is asked; no part of it is longer than `longest` tokens."""
        rng = random.Random(f"{self.name}:{seed}")
        found = [
            TraceEntry(min(longest, self.inputs.draw(rng)), min(longest, self.outputs.draw(rng)))
            for _ in range(self.num)
        ]
        if self.burst:
            return [replace(one, arrival_s=number // self.burst * self.every_s) for number, one in enumerate(found)]
        return found

    @property
    def shape(self) -> Shape:
        return Shape(concurrency=self.num_clients or None, rate=self.rate or None)


def calibration(scale: float, longest: int, rate: float) -> tuple[Load, Load]:
    """One request at a time, which shows what is beside the steps; and many, that come at once and end one after the
    other, so that steps of all sizes are seen beside many others, beside few and beside none."""
    mixed = Lengths(0.1 * longest, 1.0), Lengths(40, 0.8)
    alone = Load("alone", round(32 * scale), *mixed, num_clients=1)
    return alone, Load("bursts of 16", round(6 * scale) * 16, *mixed, burst=16, every_s=16 / (0.5 * rate))


def predicted(scale: float, longest: int, rate: float) -> Sequence[Load]:
    """That differ from those, and from each other. `rate`: requests a second of middling size that are much."""
    long, middle, short = (Lengths(share * longest, 0.4) for share in (0.35, 0.12, 0.03))
    few, some, many = Lengths(8, 0.4), Lengths(32, 0.4), Lengths(100, 0.4)
    return (
        Load("long prompts, 3 clients", round(36 * scale), long, few, num_clients=3),
        Load("long outputs, 6 clients", round(36 * scale), short, many, num_clients=6),
        Load("mixed, 12 clients", round(90 * scale), middle, some, num_clients=12),
        Load("mixed, by chance", round(60 * scale), middle, some, rate=0.5 * rate),
        Load("bursts of 8", round(64 * scale), middle, some, burst=8, every_s=8 / (0.5 * rate)),
    )
