"""Requests of a simulation: of a recorded trace, or drawn. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.bench.load.trace_entry import TraceEntry
from tandem.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request."""

    number: int
    arrived_s: float
    num_input: int
    num_output: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of prompts or outputs: lognormal around `median`; `spread` is the standard deviation of the logarithm."""

    median: float
    spread: float = 0.0

    def draw(self, rng: random.Random) -> int:
        return max(1, round(self.median * math.exp(rng.gauss(0.0, self.spread))))


def drawn(num: int, rate: float, inputs: Lengths, outputs: Lengths, seed: int) -> list[Arrival]:
    """`num` requests that come by chance (a Poisson process), `rate` a second."""
    rng, now_s, found = random.Random(seed), 0.0, []
    for number in range(num):
        now_s += rng.expovariate(rate)
        found.append(Arrival(number, now_s, inputs.draw(rng), outputs.draw(rng)))
    return found


def recorded(entries: Sequence[TraceEntry], speed: float) -> list[Arrival]:
    """The requests of a trace, `speed` times as fast. Raises `ConfigError` where it does not say when they came."""
    found = []
    for number, entry in enumerate(entries):
        if entry.arrival_s is None:
            raise ConfigError("the trace does not say when its requests came; take one that does", key="load.trace")
        found.append(Arrival(number, entry.arrival_s / speed, max(1, entry.num_input), max(1, entry.num_output)))
    return found
