"""Measure a cluster under all loads, and ask simulations of it what it would have shown."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.predict.curves import Span, curves
from benchmarks.predict.loads import Load
from benchmarks.predict.real import ClusterSpec, Run, running, steps_of
from benchmarks.predict.simulated import (
    GOALS,
    Figures,
    Recorded,
    figures_of,
    is_met,
    off,
    outcomes,
)
from tandem.core.config_tree import build
from tandem.sim.calibrate import Fit, Step, cores_tree, fit_shared, spec_of, tree_of
from tandem.sim.scenario import Scenario
from tandem.sim.shape import WorldShape

# Pages in memory that both workers map: what a handoff takes beside is its latency.
_GB_PER_S = 2.0
# To pass on what a step gives takes so many times as long as to pass on one of its tokens, beside these: a router
# before scripted workers took some 140 us and 20 to 30.
_TOKENS_OF_A_STEP = 4.0
_MOST_TOKEN_US, _HALVINGS = 512.0, 8
# Seeds: no two loads have one.
_SETTLING, _ALONE, _MANY, _PREDICTED = range(4)


@dataclass(frozen=True)
class Case:
    """A cluster, and what it is measured under.

    Attributes:
        alone, many: the loads that are fitted to; the first has one request at a time.
        scenario: of a simulation: the room of its workers, its model, its settings; times and network are found.
        times: of steps, where they are known: nothing is fitted but the network.
    """

    name: str
    cluster: ClusterSpec
    longest: int
    alone: Load
    many: Load
    predicted: Sequence[Load]
    scenario: Mapping[str, Any]
    times: Mapping[str, float] | None = None


async def measure(case: Case, num_repetitions: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Plain data: what was fitted, and of each load what was said and what was measured."""
    with tempfile.TemporaryDirectory(prefix="tandem-predict-") as name:
        directory = Path(name)
        async with running(directory, case.cluster, case.longest) as cluster:
            tell(f"{case.name}: to calibrate")
            await cluster.run(case.many, _SETTLING)  # memory is used for the first time, and kernels are made
            alone, many = await cluster.run(case.alone, _ALONE), await cluster.run(case.many, _MANY)
            repeated: list[list[Run]] = []
            for seed, load in enumerate(case.predicted, _PREDICTED):
                tell(f"{case.name}: {load.name}")
                repeated.append([await cluster.run(load, seed, number) for number in range(num_repetitions)])
        return content(case, alone, many, repeated, await steps_of(directory))


def content(
    case: Case, alone: Run, many: Run, repeated: Sequence[Sequence[Run]], steps: Sequence[Step]
) -> dict[str, Any]:
    """What is found of real runs: plain data, as of `measure`."""
    num_cores = len(os.sched_getaffinity(0))  # a step takes one
    found = None if case.times is not None else fit_shared(alone.steps(steps) + many.steps(steps), num_cores)
    tree = scenario_tree(case, found, alone, steps)
    if found is not None:
        tree["cores"] |= passing(tree, many)
    shape = build(Scenario, tree).shape()
    return {
        "name": case.name,
        "num_of_each": case.cluster.num_of_each,
        "scenario": tree,
        "fit": None if found is None else {"median_off": found.median_off, "p90_off": found.p90_off, "num": found.num},
        # The real cluster has served loads before each of them, the first time one that is as `many`.
        "calibration": [compared(shape, [run], [many]) for run in (alone, many)],
        "loads": [compared(shape, runs, [many]) for runs in repeated],
    }


def scenario_tree(case: Case, found: Fit | None, alone: Run, steps: Sequence[Step]) -> dict[str, Any]:
    """The keys of a scenario of this cluster."""
    message_s, handoff_s = network(alone, steps)
    fitted = tree_of(spec_of(found.times)) if found is not None else dict(case.times or {})
    return {
        **case.scenario,
        "times": "fitted",
        "fitted": fitted,
        "cores": cores_tree(found.slowdowns) if found is not None and found.slowdowns is not None else {},
        "network": {"message_us": message_s * 1e6, "latency_us": handoff_s * 1e6, "gb_per_s": _GB_PER_S},
    }


def network(alone: Run, steps: Sequence[Step]) -> tuple[float, float]:
    """Seconds of a first token beside the steps of its prompt, and of a second one beside a step: of requests that
    come one at a time."""
    prefill_s = sum(step.seconds for step in alone.steps(steps) if not step.terms.num_rows)
    ttft_s = sum(record.ttft_s for record in alone.records)
    gaps = [record.itl_s for record in alone.records if len(record.event_s) > 2]
    second_s = sum(each[0] for each in gaps) / len(gaps)
    later_s = sum(sum(each[1:]) / (len(each) - 1) for each in gaps) / len(gaps)
    return max(0.0, ttft_s - prefill_s) / len(alone.records), max(0.0, second_s - later_s)


def passing(tree: Mapping[str, Any], many: Run) -> dict[str, float]:
    """Keys of `cores`: what it takes to pass tokens on, so that requests take as long on average as they did. None,
    where they take longer without, and where nothing that can be makes them take as long."""
    recorded, wanted_s = _recorded(many), many.figures.e2e_s

    def keys(token_us: float) -> dict[str, float]:
        return {"step_us": _TOKENS_OF_A_STEP * token_us, "token_us": token_us} if token_us else {}

    def is_enough(token_us: float) -> bool:
        shape = build(Scenario, {**tree, "cores": {**tree["cores"], **keys(token_us)}}).shape()
        began_s, found = outcomes(shape, recorded, [recorded])
        return figures_of(found, began_s).e2e_s >= wanted_s

    if is_enough(0.0) or not is_enough(_MOST_TOKEN_US):
        return {}
    low, high = 0.0, _MOST_TOKEN_US
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return keys(high)


def compared(shape: WorldShape, runs: Sequence[Run], before: Sequence[Run] = ()) -> dict[str, Any]:
    """What is said of a load, and what its runs have shown; over time, the first of them. `before`: what the cluster
    had served."""
    first, shown = runs[0], [run.figures for run in runs]
    began_s, found = outcomes(shape, _recorded(first), list(map(_recorded, before)))
    said = figures_of(found, began_s)
    return {
        "load": first.load.name,
        "num_requests": len(first.records),
        "duration_s": first.ended_s - first.began_s,
        "said": said.as_json(),
        "measured": [figures.as_json() for figures in shown],
        "figures": {name: judged(name, said, shown) for name in GOALS},
        "curves": curves([Span.of_outcome(one, began_s) for one in found], list(map(Span.of_record, first.records))),
    }


def _recorded(run: Run) -> Recorded:
    return Recorded(run.load, run.records)


def judged(name: str, said: Figures, shown: Sequence[Figures]) -> dict[str, Any]:
    one, runs = getattr(said, name), [getattr(figures, name) for figures in shown]
    return {"off": off(one, runs), "is_met": is_met(name, one, runs)}
