"""What the runs of a comparison say: medians over the repetitions, ratios of two servers, and the goals. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from tandem.bench.repetitions import Spread, spread

Run = dict[str, Any]  # as `side_by_side_run` wrote it


@dataclass(frozen=True)
class Figure:
    """One figure of a run; `None` where the run has none. Latencies are in milliseconds."""

    title: str
    of: Callable[[Run], float | None]


@dataclass(frozen=True)
class Goal:
    """A bound of a figure."""

    bound: float
    is_lower: bool  # the figure is to be at least `bound`, else at most

    def is_reached_by(self, value: float) -> bool:
        return value >= self.bound if self.is_lower else value <= self.bound

    def __str__(self) -> str:
        return f"{'≥' if self.is_lower else '≤'} {self.bound:g}"


def _latency(name: str, statistic: str) -> Callable[[Run], float | None]:
    def of(run: Run) -> float | None:
        found = run["figures"][name]
        return None if found is None else float(found[statistic]) * 1e3

    return of


THROUGHPUT = Figure("output tokens/s", lambda run: float(run["figures"]["output_tokens_per_s"]))
TTFT = Figure("mean TTFT, ms", _latency("ttft_s", "mean"))
TPOT = Figure("mean TPOT, ms", _latency("tpot_s", "mean"))
ITL = Figure("p99 ITL, ms", _latency("itl_s", "p99"))
SECOND_GAP = Figure("p99 gap of tokens 1 to 2, ms", _latency("second_gap_s", "p99"))
GENERATOR = Figure("load generator, % of a core", lambda run: float(run["generator"]["cpu_share"]) * 100)

#: Those whose ratios count.
COMPARED = (THROUGHPUT, TTFT, TPOT, ITL)


def _at_least(bound: float) -> Goal:
    return Goal(bound, is_lower=True)


def _at_most(bound: float) -> Goal:
    return Goal(bound, is_lower=False)


#: Ratios to vLLM with one engine, by server and load, in the order of `COMPARED`.
RATIO_GOALS: dict[tuple[str, str], tuple[Goal | None, ...]] = {
    ("tandem", "A"): (_at_least(1.1), _at_most(1.3), _at_most(0.6), _at_most(0.6)),
    ("tandem", "B"): (_at_least(1.4), _at_most(1.0), _at_most(0.6), _at_most(0.6)),
    ("tandem", "C"): (_at_least(1.4), _at_most(1.0), _at_most(0.7), _at_most(0.7)),
    ("tandem-strict", "A"): (_at_least(0.75),),
    ("tandem-strict", "B"): (_at_least(1.25),),
}
#: The same with a checkpoint of 16 bits: load D is one stream.
SHORT_GOALS: dict[tuple[str, str], tuple[Goal | None, ...]] = {
    ("tandem", load): (_at_least(1.2 if load == "D" else 1.0), None, None, _at_most(1.0)) for load in "ABDEF"
}
#: Of weights that are rounded when they are loaded, over Tandem with the checkpoint's own: load D is one stream.
QUANTIZED_GOALS: dict[tuple[str, str], tuple[Goal | None, ...]] = {
    ("tandem-int8", "D"): (_at_least(1.6),),
    ("tandem-int4", "D"): (_at_least(2.3),),
}
#: Share of the prompt tokens that a prefill worker computed and handed off.
HANDED_OFF_GOALS = {("tandem", load): _at_least(0.5) for load in ("A", "B", "C")}
#: p99 of the gap from first to second token, over mean TPOT.
GAP_GOALS = {("tandem", load): _at_most(2.0) for load in ("B", "C")}
GOODPUT_GOAL = _at_least(1.5)


def judged(value: Spread | None, goal: Goal | None) -> str:
    """How its median stands to the goal; empty where there is no such."""
    if value is None or goal is None:
        return ""
    return f"{goal}: {'reached' if goal.is_reached_by(value.median) else '**missed**'}"


def runs_of(runs: Sequence[Run], contestant: str, load: str) -> dict[int, Run]:
    """By repetition."""
    return {run["repetition"]: run for run in runs if (run["contestant"], run["load"]) == (contestant, load)}


def ratios(first: dict[int, Run], second: dict[int, Run], figure: Figure) -> Spread | None:
    """First over second, of the repetitions that both have: these had the same prompts and ran one after the other."""
    return spread(_ratio(figure.of(first[number]), figure.of(second[number])) for number in first if number in second)


def handed_off(run: Run) -> float | None:
    """Share of the computed prompt tokens that were computed by prefill workers; `None`: the server does not say."""
    computed = run["prompt_tokens_computed"]
    return _ratio(computed.get("prefill", 0), sum(computed.values()))


def gap_over_tpot(run: Run) -> float | None:
    """How much longer than a usual token the second one takes, at the 99th percentile."""
    return _ratio(SECOND_GAP.of(run), TPOT.of(run))


def same_outputs(first: dict[int, Run], second: dict[int, Run]) -> tuple[int, int]:
    """How many outputs have the same text, and of how many; only of runs with the same prompts."""
    pairs = [
        pair
        for number, run in first.items()
        if number in second and run["seed"] == second[number]["seed"]
        for pair in zip(run["digests"], second[number]["digests"], strict=False)
    ]
    return sum(a == b and a != "" for a, b in pairs), len(pairs)


def first_difference(first: Sequence[str], second: Sequence[str]) -> int | None:
    """The token, counted from 1, at which two answers part, by the texts of their events; `None`: they are the same.

    A server may keep a part of a character back until it has the rest, so only the whole texts are compared.
    """
    a, b = "".join(first), "".join(second)
    if a == b:
        return None
    num_same = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    ends = accumulate(len(text) for text in first)
    return 1 + sum(end <= num_same for end in ends)


def num_failed(runs: Iterable[Run]) -> int:
    """Requests that failed, in all of them."""
    return sum(sum(run["figures"]["num_failed"].values()) for run in runs)


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None
