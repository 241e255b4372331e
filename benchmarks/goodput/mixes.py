"""The mixes of requests, and how each request's lengths are drawn. Pure.

Lengths are of one order for all servers and all rates: a rate that sends more requests sends the same ones first.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from tandem.bench.load.trace_entry import TraceEntry

#: Each length is drawn evenly from the mean less this share to the mean and this share.
SPREAD = 0.5


@dataclass(frozen=True)
class Kind:
    """Requests that are alike; mean lengths in tokens."""

    count: int  # of them in each round of the mix
    num_input: int
    num_output: int


@dataclass(frozen=True)
class Mix:
    """Requests come in rounds: each has all kinds, in an order of its own."""

    name: str
    kinds: tuple[Kind, ...]

    @property
    def num_a_round(self) -> int:
        return sum(kind.count for kind in self.kinds)

    @property
    def longest(self) -> int:
        """Tokens that a prompt may have at the most."""
        return max(_bounds(kind.num_input)[1] for kind in self.kinds)

    def entries(self, num: int) -> list[TraceEntry]:
        """The first `num` requests, the same each time."""
        return list(islice(self._all(), num))

    def _all(self) -> Iterator[TraceEntry]:
        generator = random.Random(f"mix:{self.name}")
        a_round = [kind for kind in self.kinds for _ in range(kind.count)]
        while True:
            generator.shuffle(a_round)
            for kind in a_round:
                num_input, num_output = (
                    generator.randint(*_bounds(mean)) for mean in (kind.num_input, kind.num_output)
                )
                yield TraceEntry(num_input, num_output)


def _bounds(mean: int) -> tuple[int, int]:
    return round(mean * (1 - SPREAD)), round(mean * (1 + SPREAD))


#: On two cores a server keeps about one request a second of each, so that sixty do not take long. The long prompts of
#: the last are more than the tenth of all requests that may be served badly: no server can give them up.
MIXES = (
    Mix("chats", (Kind(1, 128, 64),)),
    Mix("code", (Kind(1, 512, 32),)),
    Mix("long-outputs", (Kind(1, 96, 192),)),
    Mix("chats-and-summaries", (Kind(1, 128, 64), Kind(1, 768, 64))),
    Mix("mostly-short", (Kind(7, 96, 64), Kind(1, 2048, 64))),
)
