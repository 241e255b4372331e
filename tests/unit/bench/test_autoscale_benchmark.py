"""The laws that the law which ships is compared with, on which load, and the table and plot of the comparison."""

from __future__ import annotations

import json
import random
from itertools import groupby
from pathlib import Path

import pytest

from benchmarks.__main__ import AUTOSCALE_WORKERS, main
from benchmarks.autoscale import command
from benchmarks.autoscale.cases import (
    CODE,
    CONV,
    FLEXIBLE,
    LAW,
    PATIENT,
    SIZES,
    Size,
    cases_of,
    compared,
    load_of,
    shape_of,
)
from benchmarks.autoscale.command import of_same_settings
from benchmarks.autoscale.laws import Latencies, OneAtATime, Proportional
from benchmarks.autoscale.section import best_fixed, hours_of, plot, section
from kvtransfer.layout import KvFormat, LayoutId
from tandem.cluster.supervisor.autoscale import PoolSize, Range
from tandem.cluster.supervisor.demand import Asked, Held, Sample, Worked
from tandem.core.errors import ConfigError
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


TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:{second // 60:02}:{second % 60:02}.0000000,{{num_input}},{{num_output}}\n" for second in range(1800)
)


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    (tmp_path / CONV).write_text(TRACE.format(num_input=100, num_output=20))
    (tmp_path / CODE).write_text(TRACE.format(num_input=200, num_output=2))
    return tmp_path


@pytest.mark.parametrize(("workers", "per_s"), [(8, 0.25), (32, 1), (128, 4)])
def test_each_size_has_as_much_load_for_each_worker_of_conversations_then_code_then_conversations(
    workers: int, per_s: float, traces: Path
) -> None:
    load = load_of(Size(workers, 600.0), traces)
    assert len(load) == pytest.approx(1800 * per_s, rel=0.15)
    assert [arrival.number for arrival in load] == list(range(len(load)))
    assert load == sorted(load, key=lambda arrival: arrival.arrived_s)
    kinds = [(arrival.num_input, arrival.num_output) for arrival in load if 40 < arrival.arrived_s % 600 < 560]
    assert [kind for kind, _ in groupby(kinds)] == [(100, 20), (200, 2), (100, 20)]


def test_the_conversations_go_on_where_they_were_left(traces: Path) -> None:
    lines = (traces / CONV).read_text().splitlines()
    (traces / CONV).write_text("\n".join([*lines[:601], *(line.replace(",100,", ",101,") for line in lines[601:])]))
    load = load_of(Size(32, 600.0), traces)
    assert {arrival.num_input for arrival in load if arrival.arrived_s < 590} == {100}
    assert {arrival.num_input for arrival in load if arrival.arrived_s > 1210} == {101}


def test_a_trace_that_is_too_short_is_refused(traces: Path) -> None:
    with pytest.raises(ConfigError, match="shorter than the 1800 s"):
        load_of(Size(32, 1800.0), traces)


def test_all_sizes_can_be_asked_for() -> None:
    assert tuple(size.workers for size in SIZES) == AUTOSCALE_WORKERS
    assert all(case.fixed is None or sum(case.fixed) <= size.workers for size in SIZES for case in cases_of(size))


def test_the_law_of_a_case_is_the_one_that_ships_but_for_its_setting() -> None:
    base = shape()
    of_name = {case.name: shape_of(case, base) for case in cases_of(SIZES[0])}
    assert of_name[LAW].settings == base.settings
    assert of_name[LAW].ranges == {Role.PREFILL: Range(1, 6), Role.DECODE: Range(1, 2)}
    assert (of_name[PATIENT].settings.shrink_delay_s, of_name[FLEXIBLE].flexible) == (600.0, 8)
    assert not of_name["4 + 1"].ranges
    assert of_name["4 + 1"].prefill.num_workers == 4


def shape() -> WorldShape:
    limits = SchedulerLimits(8, 256, 64, 10_000, 0.75, saturating_tokens=64)
    return WorldShape(
        prefill=PoolShape(2, 200, limits),
        decode=PoolShape(2, 200, limits),
        kv_format=KvFormat(LayoutId("0" * 64, "bfloat16", 4, 2, 8, 16), "simulated"),
        times=Fitted(0.01, 0.0001),
        bytes_per_s=1e9, latency_s=0.002, message_s=0.001, report_s=0.05,
    )  # fmt: skip


@pytest.mark.long
def test_the_table_and_the_plot_have_each_law_and_the_best_fixed_size() -> None:
    rng = random.Random(1)
    load = [Arrival(number, 0.6 * number, rng.randint(10, 200), rng.randint(2, 20)) for number in range(300)]
    found = {case.key: {**compared(case, shape_of(case, shape()), load), "code": "d"} for case in cases_of(SIZES[0])}
    law, most = found["8: the law"], found["8: 6 + 2"]
    assert most["worker_hours"]["prefill"] == pytest.approx(6 * most["hours"], rel=0.1)
    assert law["num_changes"]["prefill"]
    assert law["sizes"]["prefill"][0] == 2
    assert law["sizes"]["prefill"][-1] == 1
    assert most["sizes"]["decode"] == [2] * 90
    settings = {"scenario": "a.yaml", "start_s": 60.0, "ttft_s": 5.0, "tpot_s": 0.1}
    settings |= {"sizes": [{"workers": 8, "phase_s": 600.0}]}
    larger = {f"32{key[1:]}": {**case, "workers": 32} for key, case in found.items()}
    content = {"cases": {**found, **larger}, "settings": settings, "code": {"digest": "d"}}
    text = " ".join(section(content))
    assert "of the same sources" not in text
    assert all(f"| {workers} | {name} |" in text for workers in (8, 32) for name in SIZES[0].laws)
    assert all(f"| 8 | fixed: {fixed} |" in text for fixed in ("2 + 1", "6 + 2"))
    best = best_fixed(law, list(found.values()))
    assert best is not None
    assert f"*the law* takes {hours_of(law) / hours_of(best):.2f} times the worker-hours of {best['name']}" in text
    drawn = plot(content)
    assert all(f">{name}</text>" in drawn for name in (LAW, "one at a time", "proportional", "32"))
    assert best_fixed({"kept_share": 1.1}, list(found.values())) is None


def test_sizes_of_which_a_law_is_missing_are_not_told() -> None:
    size = SIZES[0]
    load = [Arrival(number, 0.1 * number, 10, 2) for number in range(20)]
    case = next(cases_of(size))
    settings = {"scenario": "a.yaml", "start_s": 60.0, "ttft_s": 5.0, "tpot_s": 0.1}
    settings |= {"sizes": [{"workers": 8, "phase_s": 600.0}]}
    found = {case.key: {**compared(case, shape_of(case, shape()), load), "code": "d"}}
    content = {"cases": found, "settings": settings, "code": {"digest": "d"}}
    assert "| 8 |" not in " ".join(section(content))
    assert plot(content).endswith("</svg>\n")


def test_cases_of_other_sources_are_said_and_those_of_other_settings_are_not_kept() -> None:
    settings = {"scenario": "a.yaml", "start_s": 60.0, "ttft_s": 5.0, "tpot_s": 0.1}
    settings |= {"sizes": [{"workers": 8, "phase_s": 600.0}]}
    about = {"settings": settings, "code": {"digest": "new"}}
    cases = {"8: a": {"workers": 8, "name": "a", "code": "old"}, "8: b": {"workers": 8, "name": "b", "code": "new"}}
    assert "**Not all is of the same sources**: 8: a were simulated" in " ".join(section({**about, "cases": cases}))
    assert of_same_settings({**about, "cases": cases}, about) == cases
    assert not of_same_settings({"settings": {**settings, "start_s": 30.0}, "cases": cases}, about)


@pytest.mark.processes
@pytest.mark.long
def test_what_goes_on_simulates_again_what_is_of_other_sources(
    traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, file = Size(8, 60.0), tmp_path / "found.json"
    monkeypatch.setattr(command, "SIZES", (size,))
    command.run(traces, file)
    first = json.loads(file.read_text())
    assert {case["code"] for case in first["cases"].values()} == {first["code"]["digest"]}
    marked = {key: {**case, "kept_share": -1.0} for key, case in first["cases"].items()}
    marked["8: the law"]["code"] = "older"
    file.write_text(json.dumps({**first, "cases": marked}))
    command.run(traces, file, goes_on=True)
    again = json.loads(file.read_text())["cases"]
    assert again["8: the law"] == {**first["cases"]["8: the law"], "cpu_s": again["8: the law"]["cpu_s"]}
    assert all(case["kept_share"] == -1 for key, case in again.items() if key != "8: the law")


@pytest.mark.parametrize("option", [["--workers", "8"], ["--go-on"], ["--processes", "2"]])
def test_a_live_run_takes_no_options_of_the_traces(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["autoscale", "--live", *option]) == 1
    assert f"{option[0]} is for --traces: leave it out with --live" in capsys.readouterr().err
