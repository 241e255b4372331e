"""The points of the grid: which loads stand for all combinations of prompt, output and clients. Pure.

Of 60 combinations 20 are measured. Each prompt length meets each number of clients once, and each output length meets
each prompt length and each number of clients. Fewer would not do: 5 prompts meet 4 clients in 20 pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.peers.comparisons import seed_of_name
from benchmarks.peers.models import MODEL_OPTIONS
from benchmarks.peers.turns import Load

INPUTS = (32, 128, 512, 1024, 2048)
OUTPUTS = (16, 64, 256)
CLIENTS = (1, 4, 16, 32)

#: By name, options of `tools/make_random_model.py` but the type.
MODELS: dict[str, dict[str, Any]] = {
    "82m": MODEL_OPTIONS,
    "qwen2-0.5b": {
        "arch": "qwen2", "hidden": 896, "layers": 24, "heads": 14, "kv-heads": 2, "intermediate": 4864, "vocab": 32768,
        "max-positions": 4096,
    },
    "gqa-8": {
        "arch": "llama", "hidden": 1024, "layers": 12, "heads": 16, "kv-heads": 2, "intermediate": 2816, "vocab": 8192,
        "max-positions": 4096,
    },
}  # fmt: skip
TYPES = ("float32", "bfloat16")

_LEAST_GAPS = 1000
_LEAST_REQUESTS, _LEAST_OPEN_REQUESTS = 8, 64  # arrivals by chance take more to look alike
_ROUNDS = 2  # of all clients, at least
#: Prompt and clients, by their places above, of the points that other models are measured at.
_OF_OTHER_MODELS = ((0, 2), (1, 0), (2, 1), (1, 3), (2, 2))
_START_WEIGHT = 20_000  # of a server's start, in tokens of a prompt
_OUTPUT_WEIGHT = 3  # of an output token
_MOST_TOGETHER = 4  # so that a point's servers are measured within some minutes


@dataclass(frozen=True)
class Point:
    """One load on one model. An open one has arrivals by chance, at a rate that the closed one's figures give."""

    num_input: int
    num_output: int
    num_clients: int
    model: str = "82m"
    dtype: str = "float32"
    is_open: bool = False

    @property
    def name(self) -> str:
        """Of its file, too."""
        open_or_not = "-open" if self.is_open else ""
        return f"{self.model}-{self.dtype}-{self.num_input}-{self.num_output}-{self.num_clients}{open_or_not}"

    @property
    def seed(self) -> int:
        """Of its own."""
        return seed_of_name(self.name)

    @property
    def num_requests(self) -> int:
        """So that a thousand gaps between tokens are measured, and each client asks twice."""
        least = _LEAST_OPEN_REQUESTS if self.is_open else _LEAST_REQUESTS
        return max(math.ceil(_LEAST_GAPS / (self.num_output - 1)), _ROUNDS * self.num_clients, least)

    @property
    def closed(self) -> Point:
        return replace(self, is_open=False)

    def load(self, rate: float | None = None) -> Load:
        """`rate` in requests a second, of an open one."""
        return Load(self.name, self.num_input, self.num_output, self.num_clients, self.num_requests, rate)

    @property
    def weight(self) -> float:
        """How long it takes on one server, beside others: in tokens of prompts."""
        return self.num_requests * (self.num_input + _OUTPUT_WEIGHT * self.num_output)


@dataclass(frozen=True)
class Group:
    """Points of one model and type, for which each server is started once."""

    points: tuple[Point, ...]

    @property
    def name(self) -> str:
        return ", ".join(point.name for point in self.points)

    @property
    def weight(self) -> float:
        """How long it takes on one server, its start among that."""
        return _START_WEIGHT + sum(point.weight for point in self.points)


def grouped(points: Sequence[Point], most: int = _MOST_TOGETHER) -> list[Group]:
    """Neighbours together, as far as they may be: an open one comes behind the group that gives its rate."""
    groups: list[list[Point]] = []
    for point in points:
        last = groups[-1] if groups else []
        is_alike = bool(last) and (last[0].model, last[0].dtype) == (point.model, point.dtype)
        if is_alike and len(last) < most and not (point.is_open and point.closed in last):
            last.append(point)
        else:
            groups.append([point])
    return [Group(tuple(group)) for group in groups]


def covering() -> list[Point]:
    """Each pair of prompt and clients once; outputs go round, so that they meet all of both."""
    return [_at(i, j) for i in range(len(INPUTS)) for j in range(len(CLIENTS))]


def opened() -> list[Point]:
    """A point of each prompt length that is also measured open; one client alone does not make a load of it."""
    return [replace(_at(i, 1 + i % (len(CLIENTS) - 1)), is_open=True) for i in range(len(INPUTS))]


def all_points() -> list[Point]:
    """In the order in which they are measured: an open one right after the closed one that gives its rate."""
    found = [
        point
        for dtype in TYPES
        for closed in covering()
        for point in (closed, *(each for each in opened() if each.closed == closed))
        for point in (replace(point, dtype=dtype),)
    ]
    others = [name for name in MODELS if name != Point(0, 0, 0).model]
    return found + [replace(_at(*at), model=model, dtype="bfloat16") for model in others for at in _OF_OTHER_MODELS]


def pairs(points: Sequence[Point]) -> set[tuple[tuple[str, int], tuple[str, int]]]:
    """What meets what in these points."""
    found = set()
    for point in points:
        factors = [("input", point.num_input), ("output", point.num_output), ("clients", point.num_clients)]
        found |= {(a, b) for number, a in enumerate(factors) for b in factors[number + 1 :]}
    return found


def _at(i: int, j: int) -> Point:
    return Point(INPUTS[i], OUTPUTS[(i + j) % len(OUTPUTS)], CLIENTS[j])
