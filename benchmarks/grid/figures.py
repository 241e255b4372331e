"""What the grid's points say: ratios of two servers at each, and the goals. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.grid.points import Point
from benchmarks.peers.figures import ITL, THROUGHPUT, TTFT, Figure, Goal
from benchmarks.peers.origin import are_together

Content = dict[str, Any]  # of a point's file

TANDEM, COLOCATED, PEER = "tandem", "tandem-colocated", "peer-colocated"

_MOSTLY_PROMPT = 0.9  # of the tokens
_LONG_PROMPT, _SEVERAL_CLIENTS = 512, 4


@dataclass(frozen=True)
class Aim:
    """A ratio of Tandem to `base` that is looked at; `goal` is each point's, `mean_goal` of the geometric mean."""

    title: str
    figure: Figure
    base: str
    goal: Callable[[Point], Goal | None]
    mean_goal: Goal | None = None


def _throughput_goal(point: Point) -> Goal | None:
    if point.is_open:
        return None  # what comes decides, not the server
    if point.num_clients == 1:
        return _at_least(1.2)
    is_prompt = point.num_input > _MOSTLY_PROMPT * (point.num_input + point.num_output)
    return _at_least(0.95 if point.dtype == "bfloat16" and is_prompt else 1.0)


def _ttft_goal(point: Point) -> Goal:
    return _at_most(1.1 if point.num_clients == 1 else 1.3)


def _colocated_throughput_goal(point: Point) -> Goal | None:
    return None if point.is_open else _at_least(0.95)


def _colocated_itl_goal(point: Point) -> Goal | None:
    is_hard = point.num_input > _LONG_PROMPT and point.num_clients >= _SEVERAL_CLIENTS
    return _at_most(0.5) if is_hard else None


def _at_least(bound: float) -> Goal:
    return Goal(bound, is_lower=True)


def _at_most(bound: float) -> Goal:
    return Goal(bound, is_lower=False)


AIMS = (
    Aim("output tokens/s over vLLM's", THROUGHPUT, PEER, _throughput_goal, _at_least(1.3)),
    Aim("mean TTFT over vLLM's", TTFT, PEER, _ttft_goal, _at_most(1.0)),
    Aim("p99 ITL over vLLM's", ITL, PEER, lambda _: _at_most(1.0)),
    Aim("output tokens/s over those colocated", THROUGHPUT, COLOCATED, _colocated_throughput_goal),
    Aim("p99 ITL over that colocated", ITL, COLOCATED, _colocated_itl_goal),
)


def point_of(content: Content) -> Point:
    """Which one a file is of."""
    return Point(**content["settings"]["point"])


def ratio(content: Content, aim: Aim) -> float | None:
    """Tandem's over the base's; `None`: one of them is not there, or they were measured too far apart."""
    runs = {run["contestant"]: run for run in content["runs"]}
    if TANDEM not in runs or aim.base not in runs or not are_together(runs[TANDEM], runs[aim.base]):
        return None
    ours, other = aim.figure.of(runs[TANDEM]), aim.figure.of(runs[aim.base])
    return ours / other if ours is not None and other else None


def geometric_mean(ratios: Sequence[float]) -> float:
    """Of at least one."""
    return math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
