"""Loads of a simulated cluster: clients that ask again when they are answered, and requests that come by chance."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.sim.load import Arrival
from tandem.sim.outcome import Outcome
from tandem.sim.shape import WorldShape
from tandem.sim.world import World

# Between the first requests of two clients.
_APART_S = 0.001


@dataclass(frozen=True, slots=True)
class Kind:
    """Requests that are all alike: tokens of a prompt and of an output."""

    num_input: int
    num_output: int

    def __str__(self) -> str:
        return f"{self.num_input:,}/{self.num_output}"


def closed(
    shape: WorldShape, kind: Kind, num_clients: int, num_requests: int, *, varying: bool = False
) -> list[Outcome]:
    """Each client asks again as soon as it is answered, until there were so many requests; where they are `varying`,
    each length is from half to one and a half of its kind's."""
    rng = random.Random(1)

    def lengths() -> tuple[int, int]:
        of_input, of_output = (rng.uniform(0.5, 1.5) if varying else 1.0 for _ in range(2))
        return round(kind.num_input * of_input), round(kind.num_output * of_output)

    return closed_of(World(shape), [lengths() for _ in range(num_requests)], num_clients)


def closed_of(
    world: World, lengths: Sequence[tuple[int, int]], num_clients: int, first_number: int = 0
) -> list[Outcome]:
    """As `closed`, of requests with these tokens of prompt and output; who asks next takes the next one.

    Args:
        world: may have served others before.
        first_number: of the first request.
    """
    more: list[Outcome] = []

    def arrival(number: int, at_s: float) -> Arrival:
        return Arrival(first_number + number, at_s, *lengths[number])

    def answered(_: Outcome) -> None:
        number = num_clients + len(more)
        if number < len(lengths):
            more.append(world.ask(arrival(number, world.kernel.now_s)))

    world.on_end, began_s = answered, world.kernel.now_s
    first = [arrival(n, began_s + n * _APART_S) for n in range(min(num_clients, len(lengths)))]
    return [*world.run(first), *more]


def by_chance(phases: Sequence[tuple[Kind, float, float]], seed: int) -> list[Arrival]:
    """Requests of one kind after the other: each for so many seconds, at a rate (a Poisson process)."""
    rng, now_s, begins_s, found = random.Random(seed), 0.0, 0.0, list[Arrival]()
    for kind, rate, seconds in phases:
        now_s, ends_s = begins_s + rng.expovariate(rate), begins_s + seconds
        while now_s < ends_s:
            found.append(Arrival(len(found), now_s, kind.num_input, kind.num_output))
            now_s += rng.expovariate(rate)
        begins_s = ends_s
    return found


def opened(arrivals: Sequence[Arrival], shape: WorldShape) -> list[Outcome]:
    return World(shape).run(arrivals)
