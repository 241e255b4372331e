"""`python -m benchmarks scale`: clusters of up to a thousand workers in the simulator."""

from __future__ import annotations

import cProfile
import multiprocessing
import pstats
import random
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.code import Code
from benchmarks.scale.section import COMMAND, FORMAT, section
from kvtransfer.layout import KvFormat
from router.policy.choose import choose
from router.policy.pool import Pool
from router.policy.route import RequestFacts
from router.policy.snapshot import Snapshot
from router.policy.worker_load import WorkerLoad
from tandem.bench.machine import machine, now
from tandem.bench.report import json_file
from tandem.bench.report.summary import distribution
from tandem.core.config_tree import build
from tandem.core.identity import WORKER_ROLES, Role, WorkerKey
from tandem.core.step_times import NO_PROMPTS, PromptSteps
from tandem.sim.outcome import Outcome
from tandem.sim.scenario import Scenario, arrivals
from tandem.sim.world import World

#: Workers of the clusters that are compared; each has as much to do.
SIZES = (64, 256, 1024)
TRACE = "AzureLLMInferenceTrace_conv.csv"
#: Of ten workers; the rest generate.
_PREFILL_SHARE = 0.4
#: 10,000 requests a second for 1,024 workers.
_RATE_PER_WORKER = 10_000 / 1024
_ROOM = {"prefill": 128_000, "decode": 384_000}  # tokens of KV
#: Requests a second of Azure's hour, beside as many as it has.
_AZURE_RATE = 70.0


@dataclass(frozen=True, slots=True)
class ScaleSizes:
    """Attributes:
    growth_s, thousand_s: of the loads, in seconds of the simulation.
    thousand: workers of the large cluster.
    azure_limit: requests of the trace; 0: all.
    """

    growth: tuple[int, ...] = SIZES
    growth_s: float = 1.0
    thousand: int = 1024
    thousand_s: float = 60.0
    azure_limit: int = 0


def run(traces: Path | None, only: tuple[str, ...], json: Path | None, sizes: ScaleSizes) -> None:
    """Print what `only` these parts find, and write it into `json`, where other parts stay as they are. Raises
    `ConfigError`. `traces`: the directory of Azure's file."""
    err = Console(stderr=True)
    content: dict[str, Any] = {"format": FORMAT}
    if json is not None and json.exists():
        content = json_file.read_format(json, FORMAT, COMMAND)
    about = {"date": now(), "machine": machine(), "code": Code.of().as_json()}
    for part in only:
        err.print(part)
        content[part] = {**about, **_MEASURES[part](sizes, traces)}
        if json is not None:
            json_file.write(json, content)
    Console(soft_wrap=True).print("\n".join(section(content)).strip(), highlight=False, markup=False)


def scenario_of(num_workers: int, seconds: float) -> Scenario:
    """Workers of an 8 B model on H100s, which have as much to do in a cluster of any size."""
    num_prefill, rate = round(num_workers * _PREFILL_SHARE), num_workers * _RATE_PER_WORKER
    pools = {"prefill": num_prefill, "decode": num_workers - num_prefill}
    tree: dict[str, Any] = {role: {"workers": num, "tokens": _ROOM[role]} for role, num in pools.items()}
    return build(Scenario, {**tree, "load": {"requests": round(rate * seconds), "rate": rate}})


# --- parts ------------------------------------------------------------------------------------------------------------


def _growth(sizes: ScaleSizes, _: Path | None) -> dict[str, Any]:
    cases = [in_a_process(profiled, scenario_of(num, sizes.growth_s)) for num in sizes.growth]
    return {"seconds": sizes.growth_s, "cases": cases}


def _thousand(sizes: ScaleSizes, _: Path | None) -> dict[str, Any]:
    return in_a_process(simulated, scenario_of(sizes.thousand, sizes.thousand_s), Path())


def _azure(sizes: ScaleSizes, traces: Path | None) -> dict[str, Any]:
    directory = traces or Path()
    pools = {
        "prefill": {"workers": 16, "tokens": _ROOM["prefill"]},
        "decode": {"workers": 24, "tokens": _ROOM["decode"]},
    }
    load = {"trace": TRACE, "limit": sizes.azure_limit}
    scenario = build(Scenario, {**pools, "load": load})
    recorded = in_a_process(simulated, scenario, directory)
    copies = max(1, round(_AZURE_RATE / recorded["rate"]))
    scaled = build(Scenario, {**pools, "load": {**load, "copies": copies}})
    return {"cases": [recorded, {**in_a_process(simulated, scaled, directory), "copies": copies}]}


_MEASURES = {"growth": _growth, "thousand": _thousand, "azure": _azure}


def in_a_process(measure: Any, *arguments: Any) -> dict[str, Any]:
    """What it measures in a process of its own, whose memory is its own too."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as executor:
        found: dict[str, Any] = executor.submit(measure, *arguments).result()
    return found


# --- in the process ---------------------------------------------------------------------------------------------------


def simulated(scenario: Scenario, directory: Path) -> dict[str, Any]:
    """What a simulation took: one thread's CPU time, and the memory of the process, its load included."""
    load = arrivals(scenario, directory)
    world, cpu_s = World(scenario.shape()), time.thread_time()
    outcomes = world.run(load)
    cpu_s = time.thread_time() - cpu_s
    return {
        **_size(scenario, outcomes),
        "cpu_s": cpu_s,
        "num_events": world.kernel.num_run,
        "num_steps": sum(worker.work.num_steps for worker in world.machines.values()),
        "memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "end_s": world.kernel.now_s,
        "ttft_s": _percentiles([outcome.ttft_s for outcome in outcomes]),
        "tpot_s": _percentiles([outcome.tpot_s for outcome in outcomes if outcome.tpot_s is not None]),
    }


def profiled(scenario: Scenario) -> dict[str, Any]:
    """How much is done for a request, which no other load on the machine changes: calls of functions, and events."""
    load = arrivals(scenario, Path())
    world, profile = World(scenario.shape()), cProfile.Profile()
    outcomes = profile.runcall(world.run, load)
    return {
        **_size(scenario, outcomes),
        "calls_a_request": _num_calls(profile) / len(load),
        "events_a_request": world.kernel.num_run / len(load),
        **decisions(scenario.prefill.workers, scenario.decode.workers),
    }


def decisions(num_prefill: int, num_decode: int, num: int = 500) -> dict[str, dict[str, float]]:
    """What it costs to choose the workers of a request, and to learn how much one of them has to do: on average of
    `num`, in a cluster whose workers have different loads."""
    rng, kv_format = random.Random(num_prefill), scenario_of(10, 1.0).shape().kv_format
    loads = [_load(Role.PREFILL, number, kv_format, rng) for number in range(num_prefill)]
    loads += [_load(Role.DECODE, number, kv_format, rng) for number in range(num_decode)]
    pools = {role: Pool(role, [load for load in loads if load.key.worker_id.startswith(role)]) for role in WORKER_ROLES}
    snapshot = Snapshot(pools[Role.PREFILL], pools[Role.DECODE], prefill_tokens_per_s=30_000.0)
    facts = [RequestFacts(rng.randint(1, 4000), mixed_pool_tokens=2048) for _ in range(num)]
    changed = iter([replace(rng.choice(loads), num_queued_tokens=rng.randint(0, 9999)) for _ in range(2 * num)])

    def choose_all() -> None:
        for each in facts:
            choose(snapshot, each)

    def put_all() -> None:
        for load in islice(changed, num):
            pools[Role.PREFILL if load.key.worker_id.startswith(Role.PREFILL) else Role.DECODE].put(load)

    return {"choose": _cost_of(choose_all, num), "put": _cost_of(put_all, num)}


def _load(role: Role, number: int, kv_format: KvFormat, rng: random.Random) -> WorkerLoad:
    is_decode = role is Role.DECODE
    return WorkerLoad(
        key=WorkerKey(f"{role.value}-{number}", "1"),
        kv_format=kv_format,
        page_size=16,
        num_active=rng.randint(0, 100),
        num_queued_tokens=0 if is_decode else rng.randint(0, 9999),
        num_available_pages=rng.randint(1000, 20_000),
        num_stepping=rng.randint(0, 100),
        prompt_steps=PromptSteps(rng.randint(16, 512), rng.uniform(0.008, 0.02), 5e-5) if is_decode else NO_PROMPTS,
        max_num_seqs=256 if is_decode else 0,
    )


def _cost_of(call: Callable[[], None], num: int) -> dict[str, float]:
    """A `num`th of it: calls of functions, and this thread's CPU time; it is called twice."""
    profile = cProfile.Profile()
    profile.runcall(call)
    cpu_s = time.thread_time()
    call()
    return {"calls": _num_calls(profile) / num, "us": (time.thread_time() - cpu_s) / num * 1e6}


def _num_calls(profile: cProfile.Profile) -> int:
    return pstats.Stats(profile).total_calls  # type: ignore[attr-defined,no-any-return]


def _size(scenario: Scenario, outcomes: list[Outcome]) -> dict[str, Any]:
    last_s = max(outcome.arrival.arrived_s for outcome in outcomes)
    return {
        "workers": {"prefill": scenario.prefill.workers, "decode": scenario.decode.workers},
        "num_requests": len(outcomes),
        "num_tokens": sum(outcome.num_tokens for outcome in outcomes),
        "load_s": last_s,
        "rate": len(outcomes) / last_s,
    }


def _percentiles(seconds: list[float]) -> dict[str, float]:
    found = distribution(seconds)
    assert found is not None
    return {"p50": found.p50, "p99": found.p99}
