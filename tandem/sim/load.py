"""Requests of a simulation: of a recorded trace, or drawn. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from tandem.bench.load.trace_entry import MOONCAKE_BLOCK, TraceEntry
from tandem.core.errors import ConfigError

APART_S = 30.0
"""Seconds by which copies of a request come sooner or later: as from other clients who do the same at that time."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request."""

    number: int
    arrived_s: float
    num_input: int
    num_output: int
    block_ids: tuple[int, ...] = ()  # as of `TraceEntry`, of its answer too where that is known; none: not named
    block_size: int = MOONCAKE_BLOCK
    tenant: str = ""  # its name; empty: all are of one
    kind: str = ""  # the name of its class; empty: all are of one
    conversation: int | None = None  # the number of its first turn; `None`: it is no turn of one
    turn: int = 1
    num_common: int = 0  # tokens with which all prompts of the load begin
    then: Following | None = field(default=None, repr=False, compare=False)

    @property
    def begins_like_others(self) -> bool:
        """Whether a cache may hold some of its prompt."""
        return bool(self.block_ids or self.num_common) or self.conversation is not None

    def turns(self) -> Iterator[Arrival]:
        """It and all that follow, in order; only the first one says when it comes."""
        arrival: Arrival | None = self
        while arrival is not None:
            yield arrival
            arrival = arrival.then.arrival if arrival.then is not None else None


@dataclass(frozen=True, slots=True)
class Following:
    """A request that comes once another one has its answer.

    Attributes:
        think_s: so long after the answer, at least.
        gap_s: so long after the other one came, at least.
    """

    arrival: Arrival
    think_s: float = 0.0
    gap_s: float = 0.0

    def arrived_s(self, other_came_s: float, answered_s: float) -> float:
        return max(other_came_s + self.gap_s, answered_s + self.think_s)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of prompts or outputs: lognormal around `median`; `spread` is the standard deviation of the logarithm."""

    median: float
    spread: float = 0.0

    def draw(self, rng: random.Random) -> int:
        return max(1, round(self.median * math.exp(rng.gauss(0.0, self.spread))))


def drawn(
    num: int, rate: float, inputs: Lengths, outputs: Lengths, seed: int, num_common: int = 0
) -> list[Arrival]:
    """`num` requests that come by chance (a Poisson process), `rate` a second; `num_common`: tokens with which each
    begins, beside its own."""
    rng, now_s, found = random.Random(seed), 0.0, []
    for number in range(num):
        now_s += rng.expovariate(rate)
        lengths = num_common + inputs.draw(rng), outputs.draw(rng)
        found.append(Arrival(number, now_s, *lengths, num_common=num_common))
    return found


def of_tenants(arrivals: Sequence[Arrival], shares: Mapping[str, float], seed: int) -> list[Arrival]:
    """Each request, or conversation, is of one tenant, by chance; `shares`: how likely each is beside the others."""
    names = _by_chance(len(arrivals), shares, random.Random(seed))
    return [changed(arrival, partial(replace, tenant=name)) for arrival, name in zip(arrivals, names, strict=True)]


def of_kinds(arrivals: Sequence[Arrival], shares: Mapping[str, float], seed: int) -> list[Arrival]:
    """As `of_tenants`, of one class, whoever its tenant is."""
    names = _by_chance(len(arrivals), shares, random.Random(f"{seed}:classes"))
    return [changed(arrival, partial(replace, kind=name)) for arrival, name in zip(arrivals, names, strict=True)]


def _by_chance(num: int, shares: Mapping[str, float], rng: random.Random) -> list[str]:
    return rng.choices(list(shares), list(shares.values()), k=num)


def changed(first: Arrival, change: Callable[[Arrival], Arrival]) -> Arrival:
    """It and all that follow, each of them changed."""
    found: Arrival | None = None
    for one in reversed(list(first.turns())):
        then = replace(one.then, arrival=found) if one.then is not None and found is not None else None
        found = change(replace(one, then=then))
    assert found is not None
    return found


def recorded(
    traces: Sequence[Sequence[TraceEntry]], speed: float = 1.0, copies: int = 1, seed: int = 0
) -> list[Arrival]:
    """The requests of traces that follow each other, `speed` times as fast; each comes `copies` times, but for the
    first up to `APART_S` sooner or later. Blocks are of one trace, and of one copy: the others are of other clients,
    who ask something else. Raises `ConfigError` where a trace does not say when its requests came."""
    rng, began_s, found = random.Random(seed), 0.0, list[tuple[float, int, int, tuple[int, ...], int]]()
    for number_of_trace, entries in enumerate(traces):
        last_s = began_s
        for entry in entries:
            if entry.arrival_s is None:
                raise ConfigError("the trace does not say when its requests came; take one that does", key="load.trace")
            last_s = began_s + entry.arrival_s / speed
            lengths = max(1, entry.num_input), max(1, entry.num_output)
            for copy in range(copies):
                at_s = max(0.0, last_s + rng.uniform(-APART_S, APART_S)) if copy else last_s
                ids = tuple((block * len(traces) + number_of_trace) * copies + copy for block in entry.block_ids)
                found.append((at_s, *lengths, ids, entry.block_size))
        began_s = last_s
    return [Arrival(number, *each) for number, each in enumerate(sorted(found))]
