"""`python -m benchmarks autoscale`: laws that size pools, and fixed sizes, on Azure's traces in the simulator."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.autoscale.laws import Latencies, OneAtATime, Proportional
from benchmarks.autoscale.section import FORMAT, section
from benchmarks.code import Code
from tandem.bench.machine import now
from tandem.bench.report import json_file
from tandem.bench.report.summary import distribution
from tandem.cluster.supervisor.autoscale import Settings
from tandem.core.identity import WORKER_ROLES, Role
from tandem.sim.load import Arrival
from tandem.sim.report import worker_hours
from tandem.sim.scaling import Scaler
from tandem.sim.scenario import arrivals, read_scenario
from tandem.sim.shape import WorldShape
from tandem.sim.world import World

SCENARIO = Path(__file__).resolve().parents[2] / "scenarios" / "azure_by_load.yaml"
#: Prefill and decode workers of pools of fixed size.
FIXED = ((12, 3), (18, 5), (24, 6), (30, 8), (36, 10), (40, 12))
#: Of the law that ships, beside its defaults.
PATIENT_S, FLEXIBLE = 600.0, 8


def run(traces: Path, json: Path | None) -> None:
    """Print the table, and write it to `json`. `traces`: the directory of Azure's files. Raises `ConfigError`."""
    scenario = read_scenario(SCENARIO)
    measured = measure(scenario.shape(), arrivals(scenario, traces), lambda text: Console(stderr=True).print(text))
    settings = {
        "scenario": SCENARIO.name,
        "start_s": scenario.pools.start_s,
        "copies": scenario.load.copies,
        "limit": scenario.load.limit,
    }
    content = {"format": FORMAT, "date": now(), "code": Code.of().as_json(), "settings": settings, **measured}
    Console(soft_wrap=True).print("\n".join(section(content)).strip(), highlight=False, markup=False)
    if json is not None:
        json_file.write(json, content)


def measure(
    shape: WorldShape,
    load: Sequence[Arrival],
    tell: Callable[[str], None],
    fixed: Sequence[tuple[int, int]] = FIXED,
) -> dict[str, Any]:
    """What was found: plain data."""
    targets = {Role.PREFILL: shape.ttft_s, Role.DECODE: shape.tpot_s}
    patient = dataclasses.replace(shape, settings=Settings(shape.settings.utilisation, PATIENT_S))
    found = []
    cases = [("the law", shape), (f"the law, shrink_delay_s {PATIENT_S:.0f}", patient)]
    for name, of_case in cases.copy():
        cases.append((f"{name}, flexible {FLEXIBLE}", dataclasses.replace(of_case, flexible=FLEXIBLE)))
    for name, of_case in cases:
        found.append(_case(name, of_case, load, tell))
    latencies = Latencies()
    found.append(_case("proportional", shape, load, tell, Proportional(shape.ranges, latencies, targets), latencies))
    found.append(_case("one at a time", shape, load, tell, OneAtATime(shape.ranges)))
    for num_prefill, num_decode in fixed:
        name, of_case = f"fixed: {num_prefill} + {num_decode}", _fixed(shape, num_prefill, num_decode)
        found.append(_case(name, of_case, load, tell))
    bounds = {role.value: [shape.ranges[role].least, shape.ranges[role].most] for role in WORKER_ROLES}
    return {
        "num_requests": len(load),
        "hours": max(arrival.arrived_s for arrival in load) / 3600,
        "bounds": bounds,
        "targets": {"ttft_s": shape.ttft_s, "tpot_s": shape.tpot_s},
        "cases": found,
    }


def _fixed(shape: WorldShape, num_prefill: int, num_decode: int) -> WorldShape:
    prefill = dataclasses.replace(shape.prefill, num_workers=num_prefill, bounds=None)
    decode = dataclasses.replace(shape.decode, num_workers=num_decode, bounds=None)
    return dataclasses.replace(shape, prefill=prefill, decode=decode)


def _case(
    name: str,
    shape: WorldShape,
    load: Sequence[Arrival],
    tell: Callable[[str], None],
    scaler: Scaler | None = None,
    latencies: Latencies | None = None,
) -> dict[str, Any]:
    tell(name)
    world = World(shape, latencies.note if latencies is not None else lambda _: None, scaler)
    if latencies is not None:
        latencies.now_s = lambda: world.kernel.now_s
    outcomes = world.run(load)
    end_s = max(outcome.last_token_s for outcome in outcomes)
    ttft = distribution([outcome.ttft_s for outcome in outcomes])
    tpot = distribution([outcome.tpot_s for outcome in outcomes if outcome.tpot_s is not None])
    assert ttft is not None
    assert tpot is not None
    return {
        "name": name,
        "is_fixed": world.scaler is None,
        "kept_share": world.figures.num_kept / len(outcomes),
        "ttft_kept_share": sum(outcome.ttft_s <= shape.ttft_s for outcome in outcomes) / len(outcomes),
        "worker_hours": {role.value: worker_hours(world, role, end_s) for role in WORKER_ROLES},
        "num_role_changes": len(world.role_changes),
        "num_changes": {role.value: sum(d.role is role for d in world.decisions) for role in WORKER_ROLES},
        "ttft_p90_s": ttft.p90,
        "ttft_p99_s": ttft.p99,
        "tpot_p90_s": tpot.p90,
    }
