"""The comparisons of Splitwise's paper: the searches, the objectives, the clusters, and the page that tells of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.__main__ import PAPER_SCENARIOS, PAPER_SYSTEMS, main
from benchmarks.paper.cases import Least, Throughput, cases_of
from benchmarks.paper.clusters import CLUSTERS, FOR_CODE, SCENARIOS, Cluster
from benchmarks.paper.command import Wanted
from benchmarks.paper.load import Lengths
from benchmarks.paper.search import frontier, hardest
from benchmarks.paper.section import FORMAT, section
from benchmarks.paper.slo import BOUNDS, PERCENTILES, Reference, missed
from benchmarks.paper.systems import SPLITWISE, SYSTEMS, TANDEM, TANDEM_ON_PROFILE, System
from benchmarks.splitwise_oracle.runs import Arrival, Times
from benchmarks.splitwise_oracle.times import Curve, Splitwise
from benchmarks.splitwise_oracle.world import OnEnd
from tandem.bench.report import json_file

# --- searches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [-3, 0, 7, 39, 100])
@pytest.mark.parametrize("num_passing", [0, 1, 2, 8, 20, 39, 40])
def test_the_hardest_that_passes_is_found_with_few_tries(num_passing: int, start: int) -> None:
    grid, tried = range(10, 410, 10), list[int]()

    def passes(rate: int) -> bool:
        tried.append(rate)
        return rate <= 10 * num_passing

    assert hardest(passes, grid, start) == (10 * num_passing or None)
    assert len(tried) == len(set(tried)) <= 12
    if abs(num_passing - 1 - start) <= 1 <= num_passing < len(grid):
        assert len(tried) <= 4, "near its start it takes few"


def test_the_frontier_has_all_pairs_of_which_none_can_be_less() -> None:
    rng = random.Random(1)
    for _ in range(200):
        most = rng.randint(1, 7), rng.randint(1, 7)
        # What passes: all that is as large as one of a few pairs.
        least = [(rng.randint(1, 8), rng.randint(1, 8)) for _ in range(rng.randint(0, 4))]
        tried: list[tuple[int, int]] = []

        def passes(*pair: int, least: Any = least, tried: Any = tried) -> bool:
            tried.append(pair)
            return any(pair[0] >= one[0] and pair[1] >= one[1] for one in least)

        everything = list(product(range(1, most[0] + 1), range(1, most[1] + 1)))
        passing = [pair for pair in everything if passes(*pair)]
        minimal = {
            pair for pair in passing if not {(pair[0] - 1, pair[1]), (pair[0], pair[1] - 1)}.intersection(passing)
        }
        tried.clear()
        found = frontier(passes, most)
        assert minimal <= set(found) <= set(passing)
        assert len(tried) == len(set(tried)) < sum(most)


def test_the_frontier_leaves_out_what_nobody_wants() -> None:
    """The cheapest is found though most of what passes is too expensive to try."""
    tried: list[tuple[int, int]] = []

    def passes(*pair: int) -> bool:
        tried.append(pair)
        return pair[0] >= 3 and pair[1] >= 4

    found = frontier(passes, (9, 9), lambda first, second: first + second < 8)
    assert found[-1] == (3, 4)
    assert all(sum(pair) < 8 for pair in tried)


# --- objectives -------------------------------------------------------------------------------------------------------

#: Binary fractions, so that what is exactly a bound is one.
ALONE = Reference(lambda num: num / 1024, lambda num: num / 16384)


def served(slowdowns: Sequence[tuple[float, ...] | None]) -> tuple[list[Arrival], list[Times | None]]:
    """Requests of 128 and 17 tokens that take so many times as long as alone: TTFT 1/8 s, TBT 1/128 s, E2E 1/4 s."""
    arrivals = [Arrival(number, float(number), 128, 17) for number in range(len(slowdowns))]
    return arrivals, [each and Times(each[0] / 8, each[1] / 128, each[2] / 4) for each in slowdowns]


def serving(times: Sequence[Times | None], arrivals: Sequence[Arrival]) -> Callable[[OnEnd], Sequence[Times | None]]:
    def serve(on_end: OnEnd) -> Sequence[Times | None]:
        for arrival, found in zip(arrivals, times, strict=True):
            if found is not None:
                on_end(arrival, found)
        return times

    return serve


def missed_of(slowdowns: Sequence[tuple[float, ...] | None]) -> list[str]:
    arrivals, times = served(slowdowns)
    return missed(arrivals, ALONE, serving(times, arrivals))


@pytest.mark.parametrize(
    ("slowdown", "lost"),
    [
        ((1.99, 1.24, 1.24), ""),
        ((2.0, 1.24, 1.24), "TTFT p50"),
        ((1.99, 1.25, 1.24), "TBT p50"),
        ((1.99, 1.24, 1.25), "E2E p50"),
    ],
)
def test_what_reaches_a_bound_has_failed(slowdown: tuple[float, float, float], lost: str) -> None:
    assert missed_of([slowdown]) == [lost] * bool(lost)
    middle = missed_of([(1.0, 1.0, 1.0), slowdown, (2.5, 1.3, 1.3)])
    assert middle[:1] == [lost] * bool(lost), "the middle one of three is p50"


def test_a_request_that_did_not_end_is_endlessly_slow() -> None:
    fine = (1.0, 1.0, 1.0)
    assert missed_of([fine] * 999 + [None]) == [], "one of a thousand lies beyond all percentiles"
    assert missed_of([fine] * 95 + [None] * 5)[0] == "TTFT p99"
    assert "TTFT p50" in missed_of([None, None])


@pytest.mark.long
def test_the_objectives_are_those_of_the_percentiles_however_early_they_are_lost() -> None:
    """Beside numpy's percentiles of the whole load; and a load that was given up would not have passed."""
    rng, num_early = random.Random(2), 0
    for _ in range(300):
        num, spread = rng.randint(1, 120), rng.uniform(0.0, 0.5)
        slowdowns = [tuple(rng.lognormvariate(0.1, spread) for _ in BOUNDS) for _ in range(num)]
        arrivals, times = served(slowdowns)
        each = [ALONE.slowdowns(*pair) for pair in zip(arrivals, times, strict=True)]
        wanted = {
            f"{metric.upper()} p{percentile}"
            for place, metric in enumerate(BOUNDS)
            for percentile, bound in zip(PERCENTILES, BOUNDS[metric], strict=True)
            if not np.percentile([one[place] for one in each], percentile) < bound
        }
        found = set(missed(arrivals, ALONE, serving(times, arrivals)))
        assert bool(found) == bool(wanted)
        assert found <= wanted
        num_early += bool(wanted) and found != wanted
    assert num_early > 10, "some were given up before the rest was known"


def test_a_load_is_given_up_as_soon_as_an_objective_is_lost() -> None:
    arrivals, times = served([(9.0, 1.0, 1.0)] * 100)
    noted: list[int] = []

    def serve(on_end: OnEnd) -> Sequence[Times | None]:
        for arrival, found in zip(arrivals, times, strict=True):
            noted.append(arrival.number)
            assert found is not None
            on_end(arrival, found)
        return times

    assert missed(arrivals, ALONE, serve) == ["TTFT p99"]
    assert len(noted) == 2, "p99 of a hundred lies between the last two"


# --- clusters and loads -----------------------------------------------------------------------------------------------


def test_the_clusters_of_a_comparison_have_as_much_of_what_they_share() -> None:
    for (scenario, workload), clusters in CLUSTERS.items():
        split = [cluster for cluster in clusters if cluster.design != "Splitwise-HHcap"]
        base = next(cluster for cluster in clusters if cluster.design == "Baseline-H100")
        for cluster in split:
            ratio = cluster.power / base.power if scenario == "iso-power" else cluster.cost / base.cost
            assert 0.97 < ratio <= 1.001, (scenario, workload, cluster)


def test_machines_stand_in_the_order_of_the_original() -> None:
    def kinds(cluster: Cluster) -> list[tuple[int, str, str]]:
        return [(one.number, one.hardware, one.home) for one in cluster.machines()]

    assert kinds(Cluster("Baseline-A100", 2)) == [(0, "a100-80gb", "both"), (1, "a100-80gb", "both")]
    assert kinds(Cluster("Splitwise-HH", 1, 1)) == [(0, "h100-80gb", "prompt"), (1, "h100-80gb", "token")]
    assert kinds(Cluster("Splitwise-HA", 1, 1)) == [(0, "a100-80gb", "token"), (1, "h100-80gb", "prompt")]
    assert kinds(Cluster("Splitwise-HHcap", 1, 1)) == [(0, "h100-80gb-pcap", "token"), (1, "h100-80gb", "prompt")]


def test_requests_come_at_random_and_their_lengths_apart() -> None:
    drawn = Lengths([10, 1000], [1, 500]).drawn(50, 100.0, seed=3)
    assert len(drawn) == pytest.approx(5000, rel=0.06)
    assert all(0 < one.time_s < two.time_s < 100.0 for one, two in pairwise(drawn))
    gaps = [two.time_s - one.time_s for one, two in pairwise(drawn)]
    assert np.std(gaps) == pytest.approx(np.mean(gaps), rel=0.1), "exponential"
    pairs = [(each.num_prompt, each.num_output) for each in drawn]
    assert set(pairs) == {(10, 2), (10, 500), (1000, 2), (1000, 500)}, "and two tokens at least are generated"
    assert all(pairs.count(pair) == pytest.approx(1250, rel=0.15) for pair in set(pairs))
    assert drawn == Lengths([10, 1000], [1, 500]).drawn(50, 100.0, seed=3)
    assert drawn != Lengths([10, 1000], [1, 500]).drawn(50, 100.0, seed=4)


# --- systems ----------------------------------------------------------------------------------------------------------

_CURVES = Splitwise(Curve((128, 1152), (0.1, 0.3)), Curve((128, 1152), (0.04, 0.05)))
PROFILE = dict.fromkeys(("a100-80gb", "h100-80gb", "h100-80gb-pcap"), _CURVES)


@pytest.mark.parametrize("system", [SPLITWISE, TANDEM, TANDEM_ON_PROFILE])
@pytest.mark.parametrize("cluster", [Cluster("Baseline-A100", 2), Cluster("Splitwise-HA", 1, 1)], ids=str)
def test_each_system_serves_a_lone_request_about_as_fast_as_its_reference(system: str, cluster: Cluster) -> None:
    arrivals = [Arrival(0, 1.0, 640, 21)]
    ended: list[int] = []
    (times,) = System(system, PROFILE).times(cluster, arrivals, lambda arrival, _: ended.append(arrival.number))
    assert times is not None
    assert ended == [0]
    slowdowns = System(system, PROFILE).reference.slowdowns(arrivals[0], times)
    assert all(0.25 < slowdown < 1.5 for slowdown in slowdowns), slowdowns
    assert times.tbt_s * 21 == pytest.approx(times.e2e_s - times.ttft_s), "through all tokens, the first one too"


def test_a_capped_machine_computes_prompts_more_slowly_and_tokens_as_fast() -> None:
    arrivals = [Arrival(0, 1.0, 2000, 21)]
    ours = System(TANDEM, PROFILE)
    (capped,) = ours.times(Cluster("Splitwise-HHcap", 1, 1), arrivals)
    (plain,) = ours.times(Cluster("Splitwise-HH", 1, 1), arrivals)
    assert capped == plain, "where it only generates"


# --- the whole --------------------------------------------------------------------------------------------------------


def test_the_command_knows_all_scenarios_and_systems() -> None:
    assert PAPER_SCENARIOS == SCENARIOS
    assert PAPER_SYSTEMS == SYSTEMS
    for scenario in SCENARIOS:
        assert {case.system for case in cases_of(scenario)} <= set(SYSTEMS)


def test_what_two_scenarios_need_is_simulated_once_and_what_the_file_has_not_again() -> None:
    shared = {case.key for case in cases_of("iso-power")} & {case.key for case in cases_of("iso-cost")}
    assert "throughput: conv, Baseline-H100 40, splitwise" in shared
    wanted = Wanted(("iso-power", "iso-cost"), (SPLITWISE,))
    assert len(wanted.cases([])) == 24 - sum(key.endswith(SPLITWISE) for key in shared)
    assert replace(wanted, goes_on=True).cases(shared).keys() == wanted.cases([]).keys() - shared
    assert wanted.cases(shared).keys() == wanted.cases([]).keys()


def write_inputs(directory: Path) -> Path:
    """Traces of a few lengths, and a profile of two sizes in which an H100 is twice as fast."""
    traces = directory / "azure"
    traces.mkdir()
    for workload, lengths in {"conv": [(300, 20), (900, 60)], "code": [(1500, 5), (2000, 9)]}.items():
        rows = [f"2023-11-16 18:15:4{n}.0000000,{prompt},{output}" for n, (prompt, output) in enumerate(lengths)]
        name = f"AzureLLMInferenceTrace_{workload}.csv"
        (traces / name).write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    lines = ["model,hardware,prompt_size,batch_size,tensor_parallel,prompt_time,token_time"]
    for hardware, factor in {"a100-80gb": 2, "h100-80gb": 1, "h100-80gb-pcap": 1}.items():
        lines += [f"bloom-176b,{hardware},{size},1,8,{size * factor / 10},{20 * factor}" for size in (128, 4096)]
    (directory / "splitwise").mkdir()
    (directory / "splitwise" / "perf_model.csv").write_text("\n".join(lines))
    return traces


@pytest.mark.processes
def test_scenarios_are_compared_into_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json = tmp_path / "paper.json"
    arguments = ["paper", "--traces", str(write_inputs(tmp_path)), "--quick", "--json", str(json)]
    assert main([*arguments, "--only", "batch"]) == 0
    assert "within a step" not in capsys.readouterr().out
    assert main([*arguments, "--go-on", "--only", "batch", "iso-throughput"]) == 0
    told = capsys.readouterr()
    assert "15 of 15: " in told.err
    content = json_file.read_format(json, FORMAT, "a test")
    cases = content["cases"]
    assert len(cases) == 4 + 15, "those of before stay"
    least = cases["least: conv, Baseline-H100, splitwise"]["least"]
    assert least["cost"] == least["power"] == least["machines"]
    assert "### The least for 10 requests/s" in told.out
    assert "### Clusters of as much cost that are overloaded" in told.out
    assert "| throughput | conversations | power, HHcap over H100 | 0.75 † | " in told.out


def test_figures_of_other_sizes_are_not_mixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json = tmp_path / "paper.json"
    json_file.write(json, {"format": FORMAT, "settings": {"seconds": 600.0}, "cases": {}})
    assert main(["paper", "--traces", str(write_inputs(tmp_path)), "--quick", "--json", str(json)]) == 1
    assert "has figures of other sizes" in capsys.readouterr().err


def test_a_trace_that_is_not_there_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traces = write_inputs(tmp_path)
    (traces / "AzureLLMInferenceTrace_code.csv").unlink()
    assert main(["paper", "--traces", str(traces), "--quick"]) == 1
    assert "AzureLLMInferenceTrace_code.csv" in capsys.readouterr().err
    (tmp_path / "splitwise" / "perf_model.csv").unlink()
    assert main(["paper", "--traces", str(traces), "--quick"]) == 1
    assert "perf_model.csv" in capsys.readouterr().err


# --- the page ---------------------------------------------------------------------------------------------------------


def content(rates: dict[tuple[str, str], int | None], **cases: dict[str, Any]) -> dict[str, Any]:
    """Of conversations on iso-power clusters; each fails ten requests a second higher."""
    found: dict[str, Any] = {}
    for (design, system), rate in rates.items():
        cluster = next(one for one in CLUSTERS["iso-power", "conv"] if one.design == design)
        tried = [{"rate": (rate or 0) + 10, "seconds": 600.0, "missed": ["TBT p50", "E2E p50"]}]
        case = {"rate": rate, "seconds": 600.0, "short_rate": 130, "tried": tried}
        found[Throughput(system, "conv", cluster).key] = case
    sizes = {"seconds": 600.0, "short_s": 30.0, "rates": {"first": 10, "last": 400, "step": 10}}
    return {"code": {"digest": "d"}, "settings": sizes, "cases": {**found, **cases}}


def page(*arguments: Any, **cases: dict[str, Any]) -> str:
    return "\n".join(section(content(*arguments, **cases)))


def test_a_ratio_that_one_step_reaches_is_within_it() -> None:
    rates = {("Splitwise-AA", SPLITWISE): 110, ("Baseline-A100", SPLITWISE): 50, ("Splitwise-AA", TANDEM): 60}
    text = page(rates)
    assert "| power | conversations | throughput, AA over A100 | 2.15 | 2.20 | yes |  |  |" in text
    assert "AA over H100 | 1.40" not in text, "one of the two was not simulated"
    assert "| Splitwise-AA 45P 25T | 0.81 | 0.99 | 110 | TBT p50 | 130 | 60 | TBT p50 |  |" in text


def test_a_ratio_that_is_missed_is_told_with_what_stops_both() -> None:
    text = page({("Splitwise-AA", SPLITWISE): 60, ("Baseline-A100", SPLITWISE): 50, ("Splitwise-AA", TANDEM): 60})
    assert "| 2.15 | 1.20 | **no**: 1.00 to 1.50 |" in text
    assert "- as much power, conversations: Splitwise-AA 45P 25T serves 60 requests/s, and 70 fail by TBT p50, " in text


def test_a_cluster_that_passes_at_no_rate_has_no_ratio() -> None:
    text = page({("Splitwise-AA", SPLITWISE): 60, ("Baseline-A100", SPLITWISE): None})
    assert "over A100" not in text
    assert "| Baseline-A100 70 | 0.81 | 0.99 | none | TBT p50 |" in text


def test_machines_are_one_step_of_the_least_that_does() -> None:
    def least(*nums: int) -> dict[str, Any]:
        return {"least": {"power": nums, "cost": nums}, "rate": 70, "seconds": 120.0}

    cases = {Least(SPLITWISE, "conv", "Splitwise-HHcap").key: least(13, 8)}
    cases[Least(SPLITWISE, "conv", "Baseline-H100").key] = least(25, 0)
    text = page({}, **cases)
    assert "| throughput | conversations | power, HHcap over H100 | 0.75 † | 0.74 | yes |" in text
    assert "| Splitwise-HHcap | 13P 8T | 13P 8T |" in text
    assert "| Baseline-H100 | 25 | 25 |" in text


def test_clusters_for_code_are_held_against_those_for_conversations() -> None:
    rates = {("Splitwise-HA", SPLITWISE): 140}
    of_code = next(one for one in FOR_CODE if one.design == "Splitwise-HA")
    case = {"rate": 130, "seconds": 600.0, "short_rate": 130, "tried": []}
    text = page(rates, **{Throughput(SPLITWISE, "conv", of_code).key: case})
    assert "| power, for code | conversations | throughput, HA over that for conversations | 0.93 | 0.93 | yes" in text
