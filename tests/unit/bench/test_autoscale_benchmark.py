"""The laws that the law which ships is compared with, and the table of the comparison."""

from __future__ import annotations

import random

import pytest

from benchmarks.autoscale.command import measure
from benchmarks.autoscale.laws import Latencies, OneAtATime, Proportional
from benchmarks.autoscale.section import section
from kvtransfer.layout import KvFormat, LayoutId
from tandem.cluster.supervisor.autoscale import PoolSize, Range
from tandem.cluster.supervisor.demand import Asked, Held, Sample, Worked
from tandem.core.identity import Role
from tandem.core.step_times import Fitted
from tandem.sim.load import Arrival
from tandem.sim.outcome import Outcome
from tandem.sim.shape import PoolShape, WorldShape
from tandem.worker.batch import SchedulerLimits

RANGES = {Role.PREFILL: Range(1, 10)}


def pool(num: int, num_starting: int = 0) -> dict[Role, PoolSize]:
    ready = frozenset(f"life-{number}" for number in range(num - num_starting))
    return {Role.PREFILL: PoolSize(num, ready), Role.DECODE: PoolSize(1, frozenset({"decode"}))}


def outcomes(ttft_s: float) -> list[Outcome]:
    return [Outcome(Arrival(n, 0.0, 10, 2), first_token_s=ttft_s, last_token_s=ttft_s, num_tokens=2) for n in range(20)]


NOTHING = Sample(Asked(), {Role.PREFILL: [], Role.DECODE: []}, Held())


@pytest.mark.parametrize(
    ("ttft_s", "num", "num_starting", "wanted"),
    [(2.0, 4, 0, 8), (1.05, 4, 0, 4), (10.0, 2, 0, 6), (9.0, 8, 0, 10), (2.0, 6, 4, 6)],
)
def test_proportional_wants_workers_times_p90_over_target(
    ttft_s: float, num: int, num_starting: int, wanted: int
) -> None:
    latencies = Latencies(lambda: 100.0)
    for outcome in outcomes(ttft_s):
        latencies.note(outcome)
    law = Proportional(RANGES, latencies, {Role.PREFILL: 1.0})
    (decision,) = law.decide(NOTHING, pool(num, num_starting), 100.0)
    assert decision.wanted == wanted
    assert not law.decide(NOTHING, pool(num), 101.0), "every 15 s"


def test_proportional_goes_down_to_the_most_that_was_wanted_in_five_minutes() -> None:
    now = [100.0]
    latencies = Latencies(lambda: now[0])
    law = Proportional(RANGES, latencies, {Role.PREFILL: 1.0})
    for ttft_s, at_s, wanted in ((1.0, 100, 8), (0.5, 200, 8), (0.25, 300, 8), (0.25, 405, 4), (0.25, 610, 2)):
        now[0] = at_s
        for outcome in outcomes(ttft_s):
            latencies.note(outcome)
        (decision,) = law.decide(NOTHING, pool(8), at_s)
        assert decision.wanted == wanted, at_s


@pytest.mark.parametrize(("busy_s", "wanted"), [(1.7, 4), (1.3, 3), (0.9, 2)])
def test_one_at_a_time_goes_by_fixed_marks(busy_s: float, wanted: int) -> None:
    law = OneAtATime(RANGES)
    work = {Role.PREFILL: [Worked(busy_s=busy_s)] * 3, Role.DECODE: []}
    decided = [each for at_s in range(2, 62, 2) for each in law.decide(Sample(Asked(), work, Held()), pool(3), at_s)]
    assert [decision.wanted for decision in decided] == [wanted]


def test_the_table_has_each_law_and_the_best_fixed_size() -> None:
    limits = SchedulerLimits(8, 256, 64, 10_000, 0.75, saturating_tokens=64)
    bounds, rng = Range(1, 4), random.Random(1)
    shape = WorldShape(
        prefill=PoolShape(2, 200, limits, bounds=bounds),
        decode=PoolShape(2, 200, limits, bounds=bounds),
        kv_format=KvFormat(LayoutId("0" * 64, "bfloat16", 4, 2, 8, 16), "simulated"),
        times=Fitted(0.01, 0.0001),
        bytes_per_s=1e9, latency_s=0.002, message_s=0.001, report_s=0.05,
    )  # fmt: skip
    arrivals = [Arrival(number, 0.1 * number, rng.randint(10, 200), rng.randint(2, 20)) for number in range(300)]
    told: list[str] = []
    found = measure(shape, arrivals, told.append, fixed=((2, 2), (4, 4)))
    names = [case["name"] for case in found["cases"]]
    assert names == told
    assert names[2:4] == ["the law, flexible 8", "the law, shrink_delay_s 600, flexible 8"]
    assert names[4:] == ["proportional", "one at a time", "fixed: 2 + 2", "fixed: 4 + 4"]
    assert found["cases"][-1]["worker_hours"]["prefill"] == pytest.approx(4 * found["hours"], rel=0.1)
    settings = {"scenario": "a.yaml", "start_s": 60.0, "copies": 1, "limit": 300}
    text = "\n".join(section({**found, "settings": settings, "code": {"digest": "d"}}))
    assert all(f"| {name} |" in text for name in names)
    assert "tried and keep at least as many requests as *the law* are 2 + 2; it takes" in text.replace("\n", " ")
    worse = [{**case, "kept_share": 0.0} for case in found["cases"][-2:]]
    cases = [{**found["cases"][0], "kept_share": 0.5}, *worse]
    text = "\n".join(section({**found, "cases": cases, "settings": settings, "code": {"digest": "d"}}))
    assert "No fixed size that was tried keeps as many requests as *the law*." in text
