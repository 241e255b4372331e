"""One simulation of a study, and the figures that are taken of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from tandem.bench.report.summary import distribution
from tandem.core.identity import Role
from tandem.sim.machine import Machine, SchedulerMaker
from tandem.sim.outcome import Outcome
from tandem.sim.scenario import Scenario, arrivals
from tandem.sim.world import World

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"

SAMPLE_S = 1.0
"""Between two looks at the workers."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A cluster at a moment.

    Attributes:
        tokens_per_s: that decode workers generated since the sample before.
        num_under_way: requests that have come, and not ended.
        num_running: sequences in the batches of decode workers that live.
        taken_share: of their pages, whoever has them.
        held_share: of the slots in their pages: a token's KV is there.
    """

    at_s: float
    tokens_per_s: float
    num_under_way: int
    num_running: int
    taken_share: float
    held_share: float


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one simulation; seconds, shares of 1. All but latencies and counts are means over its time.

    Attributes:
        gap_p99_s: of the longest time between two tokens of each request.
        kept_per_s: requests that kept both targets, a second: goodput.
        handoff_p50_s, handoff_p99_s: from the end of a prompt to its pages at decode; 0: no prompt was handed off.
        by_decode_share: of the requests: no prefill worker computed the prompt.
        cached_share: of the tokens of all prompts: a worker had them in its cache.
        taken_share, held_share, num_running: as of `Sample`.
    """

    num_requests: int
    tokens_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    gap_p99_s: float
    kept_share: float
    kept_per_s: float
    handoff_p50_s: float
    handoff_p99_s: float
    by_decode_share: float
    cached_share: float
    taken_share: float
    held_share: float
    num_running: float
    num_preemptions: int
    samples: tuple[Sample, ...]

    def as_json(self, of_samples: Sequence[str] = ()) -> dict[str, Any]:
        """`of_samples`: what is wanted of each sample, beside its time."""
        names = (one.name for one in fields(self) if one.name != "samples")
        found: dict[str, Any] = {name: _rounded(getattr(self, name)) for name in names}
        if of_samples:
            wanted = ("at_s", *of_samples)
            found["samples"] = {name: [_rounded(getattr(one, name)) for one in self.samples] for name in wanted}
        return found


def _rounded(value: float) -> float:
    """To what a page shows of it and a little more."""
    return float(f"{value:.5g}") if isinstance(value, float) else value


def simulated(scenario: Scenario, make_scheduler: SchedulerMaker | None) -> Figures:
    """Raises `ConfigError` where its load cannot be read, or does not fit."""
    load = arrivals(scenario, SCENARIOS)
    world = World(scenario.shape(load), make_scheduler=make_scheduler)
    sampler = _Sampler(world)
    outcomes = world.run(load)
    return _figures(world, outcomes, sampler.samples)


@dataclass(slots=True)
class _Sampler:
    """Looks at decode workers until all requests have ended."""

    world: World
    samples: list[Sample] = field(default_factory=list)
    _num_tokens: int = 0  # by the last look

    def __post_init__(self) -> None:
        self.world.kernel.after(SAMPLE_S, self._look)

    def _look(self) -> None:
        world = self.world
        if not world.figures.num_open:
            return
        machines = list(world.fleet.machines(Role.DECODE))
        running = [len(machine.scheduler.running) for machine in machines]
        num_tokens = sum(machine.work.num_rows for machine in world.machines.values())
        self.samples.append(
            Sample(
                at_s=world.kernel.now_s,
                tokens_per_s=(num_tokens - self._num_tokens) / SAMPLE_S,
                num_under_way=0,
                num_running=sum(running),
                taken_share=fmean([_taken_share(machine) for machine in machines] or [0.0]),
                held_share=fmean([_held_share(machine) for machine in machines] or [0.0]),
            )
        )
        self._num_tokens = num_tokens
        world.kernel.after(SAMPLE_S, self._look)


def _taken_share(machine: Machine) -> float:
    counts = machine.pool.counts()
    return (counts.used + counts.reserved) / machine.pool.num_pages


def _held_share(machine: Machine) -> float:
    page_size = machine.pool.page_size
    held = (one.num_computed - one.num_hidden * page_size for one in machine.scheduler.running)
    return sum(held) / (machine.pool.num_pages * page_size)


def _figures(world: World, outcomes: Sequence[Outcome], samples: Sequence[Sample]) -> Figures:
    end_s = max(one.last_token_s for one in outcomes)
    ttft_s = distribution([one.ttft_s for one in outcomes])
    tpot_s = distribution([one.tpot_s for one in outcomes if one.tpot_s is not None])
    gap_s = distribution([one.longest_gap_s for one in outcomes if one.num_tokens > 1])
    handoff_s = distribution([one.handed_off_s - one.first_token_s for one in outcomes if one.handed_off_s is not None])
    assert ttft_s is not None
    assert tpot_s is not None
    assert gap_s is not None
    return Figures(
        num_requests=len(outcomes),
        tokens_per_s=sum(one.num_tokens for one in outcomes) / end_s,
        ttft_p50_s=ttft_s.p50,
        ttft_p99_s=ttft_s.p99,
        tpot_p50_s=tpot_s.p50,
        tpot_p99_s=tpot_s.p99,
        gap_p99_s=gap_s.p99,
        kept_share=world.figures.num_kept / len(outcomes),
        kept_per_s=world.figures.num_kept / end_s,
        handoff_p50_s=handoff_s.p50 if handoff_s is not None else 0.0,
        handoff_p99_s=handoff_s.p99 if handoff_s is not None else 0.0,
        by_decode_share=sum(not one.prefill for one in outcomes) / len(outcomes),
        cached_share=sum(one.num_cached or 0 for one in outcomes) / sum(one.arrival.num_input for one in outcomes),
        taken_share=fmean(one.taken_share for one in samples),
        held_share=fmean(one.held_share for one in samples),
        num_running=fmean(one.num_running for one in samples),
        num_preemptions=sum(machine.work.num_preemptions for machine in world.machines.values()),
        samples=tuple(replace(one, num_under_way=_num_under_way(outcomes, one.at_s)) for one in samples),
    )


def _num_under_way(outcomes: Sequence[Outcome], at_s: float) -> int:
    return sum(one.arrival.arrived_s <= at_s < one.last_token_s for one in outcomes)
