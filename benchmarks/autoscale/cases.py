"""What is compared on Azure's conversations, then its code, then its conversations again: laws and fixed sizes."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.autoscale.laws import Latencies, OneAtATime, Proportional
from tandem.bench.load.trace_entry import TraceEntry
from tandem.bench.load.traces import load_trace
from tandem.bench.report.summary import distribution
from tandem.cluster.supervisor.autoscale import Range, Settings
from tandem.core.errors import ConfigError
from tandem.core.identity import WORKER_ROLES, Role
from tandem.sim.load import Arrival, recorded
from tandem.sim.outcome import Outcome
from tandem.sim.report import worker_hours
from tandem.sim.scenario import read_scenario
from tandem.sim.shape import PoolShape, WorldShape
from tandem.sim.world import World

SCENARIO = Path(__file__).resolve().parents[2] / "scenarios" / "azure_by_load.yaml"
"""Of which model, cards, targets and the time that a start takes are."""

CONV, CODE = "AzureLLMInferenceTrace_conv.csv", "AzureLLMInferenceTrace_code.csv"
PHASES = "conversations", "code", "conversations"

#: So many workers at most have the traces as they were recorded.
_WORKERS_PER_COPY = 32
#: Prefill and decode workers of `_WORKERS_PER_COPY`: the most, and how many are there at first.
_MOST, _FIRST = (24, 8), (8, 3)
#: Of fixed sizes, as above.
_FIXED = (6, 2), (8, 3), (12, 4), (16, 5), (24, 8)
_FIXED_OF_LARGE = (8, 3), (12, 4), (16, 5)

LAW, PROPORTIONAL, ONE_AT_A_TIME = "the law", "proportional", "one at a time"
#: The law as it ships, but for one setting.
PATIENT, PATIENT_S = "the law, shrink_delay_s 600", 600.0
FLEXIBLE, NUM_FLEXIBLE = "the law, flexible 8", 8

_NUM_POINTS = 90
"""Of sizes over time."""


@dataclass(frozen=True, slots=True)
class Size:
    """Attributes:
    workers: of both pools together, at most.
    phase_s: of each trace.
    """

    workers: int
    phase_s: float

    @property
    def is_large(self) -> bool:
        """Of which fewer cases are simulated."""
        return self.workers >= _WORKERS_PER_COPY

    def of(self, pools: tuple[int, int]) -> tuple[int, int]:
        """These of `_WORKERS_PER_COPY`, of this size's."""
        prefill, decode = (max(1, round(num * self.workers / _WORKERS_PER_COPY)) for num in pools)
        return prefill, decode

    @property
    def fixed(self) -> list[tuple[int, int]]:
        return list(dict.fromkeys(self.of(pools) for pools in (_FIXED_OF_LARGE if self.is_large else _FIXED)))

    @property
    def laws(self) -> list[str]:
        return [LAW, *(() if self.is_large else (PATIENT, FLEXIBLE)), PROPORTIONAL, ONE_AT_A_TIME]


#: A simulation takes as long as there are requests.
SIZES = (Size(8, 600.0), Size(32, 600.0), Size(128, 240.0), Size(256, 180.0))


@dataclass(frozen=True, slots=True)
class Case:
    """`fixed`: prefill and decode workers; `None`: they follow their load by the law of this name."""

    size: Size
    name: str
    fixed: tuple[int, int] | None = None

    @property
    def key(self) -> str:
        return f"{self.size.workers}: {self.name}"


def cases_of(size: Size) -> Iterator[Case]:
    for name in size.laws:
        yield Case(size, name)
    for prefill, decode in size.fixed:
        yield Case(size, f"{prefill} + {decode}", (prefill, decode))


def load_of(size: Size, traces: Path, seed: int = 0) -> list[Arrival]:
    """The first `phase_s` of the conversations, of the code, and the conversations from where they were left; as many
    times as `_WORKERS_PER_COPY` go into the workers, or of fewer workers a part by chance. Raises `ConfigError`."""
    conversations, code = (load_trace(traces / name, key="--traces") for name in (CONV, CODE))
    phases = [
        _between(conversations, 0.0, size.phase_s),
        _between(code, 0.0, size.phase_s),
        _between(conversations, size.phase_s, 2 * size.phase_s),
    ]
    if not all(phases):
        raise ConfigError(f"the traces are shorter than the {size.phase_s:g} s that are wanted", key="--traces")
    found = recorded(phases, copies=max(1, size.workers // _WORKERS_PER_COPY), seed=seed)
    rng, share = random.Random(seed), min(1.0, size.workers / _WORKERS_PER_COPY)
    kept = [arrival for arrival in found if rng.random() < share]
    return [replace(arrival, number=number) for number, arrival in enumerate(kept)]


def _between(entries: Sequence[TraceEntry], from_s: float, to_s: float) -> list[TraceEntry]:
    """Times are from `from_s` on."""
    timed = [(entry, entry.arrival_s) for entry in entries if entry.arrival_s is not None]
    return [replace(entry, arrival_s=at_s - from_s) for entry, at_s in timed if from_s <= at_s < to_s]


def shape_of(case: Case, base: WorldShape) -> WorldShape:
    """The cluster at first, and by which settings its law goes."""
    pools, most = case.fixed or case.size.of(_FIRST), case.size.of(_MOST)

    def sized(pool: PoolShape, number: int) -> PoolShape:
        return replace(pool, num_workers=pools[number], bounds=None if case.fixed else Range(1, most[number]))

    shape = replace(base, prefill=sized(base.prefill, 0), decode=sized(base.decode, 1))
    if case.name == PATIENT:
        return replace(shape, settings=Settings(base.settings.utilisation, PATIENT_S))
    return replace(shape, flexible=NUM_FLEXIBLE if case.name == FLEXIBLE else 0)


def measured(case: Case, traces: Path) -> tuple[str, dict[str, Any]]:
    """Its key, and what was found: plain data."""
    began_s = time.process_time()
    found = compared(case, shape_of(case, read_scenario(SCENARIO).shape()), load_of(case.size, traces))
    return case.key, {**found, "cpu_s": round(time.process_time() - began_s, 1)}


def compared(case: Case, shape: WorldShape, load: Sequence[Arrival]) -> dict[str, Any]:
    """One case on a load."""
    latencies = Latencies()
    world = World(shape, latencies.note if case.name == PROPORTIONAL else lambda _: None)
    latencies.now_s = lambda: world.kernel.now_s
    if case.name == PROPORTIONAL:
        targets = {Role.PREFILL: shape.ttft_s, Role.DECODE: shape.tpot_s}
        world.scaler = Proportional(shape.ranges, latencies, targets)
    elif case.name == ONE_AT_A_TIME:
        world.scaler = OneAtATime(shape.ranges)
    outcomes = world.run(load)
    return {"workers": case.size.workers, "name": case.name, "is_fixed": bool(case.fixed), **_found(world, outcomes)}


def _found(world: World, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    shape, end_s = world.shape, max(outcome.last_token_s for outcome in outcomes)
    ttft = distribution([outcome.ttft_s for outcome in outcomes])
    tpot = distribution([outcome.tpot_s for outcome in outcomes if outcome.tpot_s is not None])
    assert ttft is not None
    assert tpot is not None
    return {
        "num_requests": len(outcomes),
        "hours": end_s / 3600,
        "kept_share": round(world.figures.num_kept / len(outcomes), 4),
        "ttft_kept_share": round(sum(outcome.ttft_s <= shape.ttft_s for outcome in outcomes) / len(outcomes), 4),
        "worker_hours": {role.value: round(worker_hours(world, role, end_s), 3) for role in WORKER_ROLES},
        "num_role_changes": len(world.role_changes),
        "num_changes": {role.value: sum(d.role is role for d in world.decisions) for role in WORKER_ROLES},
        "ttft_p90_s": round(ttft.p90, 3),
        "ttft_p99_s": round(ttft.p99, 3),
        "tpot_p90_s": round(tpot.p90, 4),
        "step_s": end_s / _NUM_POINTS,
        "sizes": {role.value: _sizes(world, role, end_s) for role in WORKER_ROLES},
    }


def _sizes(world: World, role: Role, end_s: float) -> list[int]:
    """Workers that start, serve or drain, in the middle of each part of the time."""
    lives = [life for life in world.fleet.lives if life.role is role]
    middles = ((number + 0.5) * end_s / _NUM_POINTS for number in range(_NUM_POINTS))
    return [
        sum(life.asked_s <= at_s and (life.gone_s is None or at_s < life.gone_s) for life in lives) for at_s in middles
    ]
