"""Scenario files: what they may say, and the errors for what they may not."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from router.policy.recovery import RecoveryLimits
from tandem.cli import main
from tandem.cluster.supervisor.autoscale import Range, Settings
from tandem.core.errors import ConfigError
from tandem.core.identity import Role
from tandem.core.step_times import Card, Fitted, ModelSize, Roofline, Terms
from tandem.core.time_model import OF_SIMULATIONS, TimeModel, read_time_model
from tandem.core.windows import Windows
from tandem.sim.faults import Death, SlowLink
from tandem.sim.load import APART_S
from tandem.sim.scenario import Scenario, arrivals, read_scenario
from tandem.sim.world import World

SCENARIOS = Path(__file__).parents[3] / "scenarios"

TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:48.6805900,396,0
"""


def scenario_file(directory: Path, text: str) -> Path:
    file = directory / "scenario.yaml"
    file.write_text(text)
    return file


@pytest.mark.parametrize("file", sorted(SCENARIOS.glob("*.yaml")), ids=lambda file: file.name)
def test_shipped_scenarios_can_be_read(file: Path) -> None:
    shape = read_scenario(file).shape()
    assert shape.prefill.num_workers >= 1 or shape.is_colocated
    assert shape.decode.limits.computes_prompts


@pytest.mark.long
@pytest.mark.parametrize("file", sorted(SCENARIOS.glob("*.yaml")), ids=lambda file: file.name)
def test_shipped_scenarios_run_to_their_end(file: Path) -> None:
    """With few requests; drawn ones where it names a trace, which does not lie beside it."""
    scenario = read_scenario(file)
    of_traces: dict[str, Any] = {"trace": "", "then": (), "limit": 0, "speed": 1.0, "copies": 1}
    load = replace(scenario.load, **of_traces, requests=60, conversations=min(10, scenario.load.conversations))
    scenario = replace(scenario, load=load)
    came = arrivals(scenario, SCENARIOS)
    outcomes = World(scenario.shape(came)).run(came)
    assert len(outcomes) == (sum(1 for first in came for _ in first.turns()) if load.conversations else 60)
    assert all(one.is_over for one in outcomes)


def test_a_scenario_is_a_time_model_too() -> None:
    """A simulated engine reads one, and has no use for the rest of it."""
    shared = {one.name for one in fields(TimeModel)}
    for file in SCENARIOS.glob("*.yaml"):
        scenario, model = read_scenario(file), read_time_model(file)
        assert all(getattr(model, name) == getattr(scenario, name) for name in shared)
    assert {one.name for one in fields(Scenario)} - shared == set(OF_SIMULATIONS)


def test_keys_of_tandem_yaml_reach_the_schedulers(tmp_path: Path) -> None:
    file = scenario_file(
        tmp_path,
        "tandem: {scheduling: {chunk_size: 256, max_num_seqs: 17, mixed_step_tokens: 12}, cache: {page_size: 64}}\n"
        "decode: {workers: 3, tokens: 6400}\n",
    )
    shape = read_scenario(file).shape()
    assert (shape.decode.num_workers, shape.decode.num_pages, shape.kv_format.layout.page_size) == (3, 100, 64)
    assert (shape.decode.limits.chunk_size, shape.decode.limits.max_num_seqs) == (256, 17)
    assert [pool.limits.computes_prompts for pool in (shape.prefill, shape.decode)] == [False, True]
    assert shape.decode.limits.paced_tokens == 12


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("prefil: {}", "unknown key prefil; did you mean prefill"),
        ("decode: {workers: 0}", "decode.workers is 0, must be at least 1"),
        ("load: {input_spread: 1000}", "load.input_spread is 1000.0, must be at most 10"),
        ("prefill: {workers: 9}\npools: {prefill: {max: 4}}", "prefill.workers is 9, and pools.prefill goes from 9 to"),
        ("times: guessed", "times is 'guessed', must be one of roofline, fitted"),
        (
            "load: {then: [more.csv]}",
            "load.then is of traces, and these requests are drawn; name a trace with load.trace",
        ),
        ("load: {input_median: 1.0e+308}", "load.input_median is 1e.308, must be at most 100000000"),
        ("load: {conversations: 3, turns: 1.0e+300}", "load.turns is 1e.300, must be at most 1000"),
        ("load: {rate: often}", "load.rate must be a number"),
        ("prefill: {workers: 0}\npools: {prefill: {max: 4}}", "prefill.workers is 0, and pools.prefill goes up to 4"),
        ("faults: [decode-0@1=0.5]", "a slow way out of 'decode-0', and must name a prefill worker .*: prefill-0$"),
        ("faults: [prefill-0@1=2]", "faults has 'prefill-0@1=2', and must have"),
        ("tandem: {scheduling: {chunk_size: 100}}", "scheduling.chunk_size is 100, must be a multiple"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_scenario(scenario_file(tmp_path, text)).shape()


def test_a_trace_lies_beside_its_scenario_and_may_be_played_faster(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(TRACE)
    scenario = read_scenario(scenario_file(tmp_path, "load: {trace: trace.csv, speed: 4}"))
    first, second = arrivals(scenario, tmp_path)
    assert (first.arrived_s, first.num_input, first.num_output) == (0.0, 374, 44)
    assert (second.arrived_s, second.num_input, second.num_output) == (0.5, 396, 1)


def test_traces_follow_each_other_and_each_request_comes_several_times(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(TRACE)
    text = "load: {trace: trace.csv, then: [trace.csv, trace.csv], copies: 4}"
    found = arrivals(read_scenario(scenario_file(tmp_path, text)), tmp_path)
    assert len(found) == 2 * 3 * 4
    times = [one.arrived_s for one in found]
    assert times == sorted(times)
    assert {0.0, 2.0, 4.0, 6.0} <= set(times), "as they were recorded, one after the other"
    assert max(times) <= 6.0 + APART_S
    assert [one.number for one in found] == list(range(24))


def test_a_window_reaches_steps_pages_and_handoffs(tmp_path: Path) -> None:
    file = tmp_path / "scenario.yaml"
    file.write_text("model: {layers: 32, window: 4096}\n")
    shape = read_scenario(file).shape()
    kept = {pool.limits.window for pool in (shape.prefill, shape.decode)} | {shape.kv_format.layout.window}
    assert kept == {4096 + 256}, "GPUs read whole blocks"
    assert shape.times.windows == Windows(4096, 32)
    file.write_text("model: {layers: 62, window: 1024, full_layers: 10}\n")
    shape = read_scenario(file).shape()
    assert {pool.limits.window for pool in (shape.prefill, shape.decode)} | {shape.kv_format.layout.window} == {0}
    assert shape.times.windows == Windows(1024, 52, 10)
    assert shape.decode.num_pages == 100_000 // 32


def test_on_cpus_pages_of_some_layers_leave_behind_their_window(tmp_path: Path) -> None:
    """In pages of 32 tokens and of the ten layers that see all, the same memory has 62 for each ten."""
    file = tmp_path / "scenario.yaml"
    model = "model: {layers: 62, window: 1024, full_layers: 10}\ncard: {is_cpu: true}\nprefill: {tokens: 50000}\n"
    file.write_text(model)
    shape = read_scenario(file).shape()
    layout = shape.kv_format.layout
    assert (layout.num_layers, layout.window, layout.num_windowed) == (10, 1024, 6)
    for pool, num_tokens in ((shape.prefill, 50_000), (shape.decode, 100_000)):
        assert (pool.limits.window, pool.limits.num_windowed) == (1024, 6)
        assert pool.num_pages == num_tokens * 62 // 320
        assert pool.num_pages * layout.page_bytes <= num_tokens * 2 * 62 * 8 * 128 * 2
    assert shape.prefill.limits.max_num_seqs == 50_000 * 62 // 320 // 7 * 32 // 256, "texts within the window"
    file.write_text(f"{model}tandem: {{cache: {{mixed_windows: false}}}}\n")
    shape = read_scenario(file).shape()
    assert (shape.kv_format.layout.num_windowed, shape.decode.limits.window) == (0, 0)
    assert shape.decode.num_pages == 100_000 // 32


def test_no_copies_are_kept_of_pages_of_a_mixed_model(tmp_path: Path) -> None:
    file = tmp_path / "scenario.yaml"
    for is_cpu in (True, False):
        file.write_text(
            f"model: {{layers: 62, window: 1024, full_layers: 10}}\ncard: {{is_cpu: {str(is_cpu).lower()}}}\n"
            "tandem: {cache: {host_bytes: 1000000000}}\n"
        )
        assert (read_scenario(file).shape().tiers is None) is is_cpu


def test_bounds_of_pools_and_the_law_s_settings_reach_the_world(tmp_path: Path) -> None:
    text = (
        "prefill: {workers: 2}\npools: {prefill: {min: 1, max: 6}, start_s: 45}\n"
        "tandem: {pools: {utilisation: 0.6, shrink_delay_s: 300}, slo: {ttft_ms: 700}, transport: {lease_s: 25}}"
    )
    shape = read_scenario(scenario_file(tmp_path, text)).shape()
    assert shape.ranges == {Role.PREFILL: Range(1, 6)}
    assert (shape.start_s, shape.settings, shape.ttft_s, shape.tpot_s) == (45, Settings(0.6, 300.0), 0.7, 0.05)
    assert shape.look_s == 5.0, "a fifth of the lease"


def test_deaths_and_what_routers_may_do_about_them_reach_the_world(tmp_path: Path) -> None:
    text = (
        "faults: [decode-0@1.5, prefill-1@30]\n"
        "tandem: {limits: {max_attempts: 2, retry_budget: 0.5, wait_for_worker_s: 7}, scheduling: {max_num_seqs: 4}}\n"
    )
    faults = read_scenario(scenario_file(tmp_path, text)).shape().faults
    assert faults.deaths == (Death("decode-0", 1.5), Death("prefill-1", 30.0))
    assert faults.limits == RecoveryLimits(max_attempts=2, local_prefill_tokens=512, max_rest_s=7.0)
    assert (faults.retry_share, faults.retry_burst, faults.wait_for_worker_s) == (0.5, 10, 7.0)


def test_the_command_tells_of_who_went_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "load: {requests: 20, rate: 20}\ndecode: {workers: 2}\nfaults: [decode-0@1]\n"
    file = scenario_file(tmp_path, text)
    assert main(["sim", "run", str(file), "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["num_recovered"] == sum(one["num_recoveries"] > 0 for one in found["requests"]) > 0
    assert found["num_failed"] == 0
    assert f"{found['num_recovered']} requests whose workers died; 0 failed" in capsys.readouterr().out


@pytest.mark.parametrize(("option", "name"), [("--json", "found.json"), ("--timeline", "found.html")])
def test_what_cannot_be_written_is_told_before_anything_is_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, name: str
) -> None:
    file = scenario_file(tmp_path, "load: {requests: 20}")
    assert main(["sim", "run", str(file), option, f"/proc/{name}"]) == 1
    said = capsys.readouterr()
    assert f"/proc/{name} cannot be written" in said.err
    assert not said.out


def test_without_prefill_workers_a_scenario_is_colocated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = scenario_file(tmp_path, "prefill: {workers: 0}\ndecode: {workers: 2}\nload: {requests: 20}")
    assert read_scenario(file).shape().is_colocated
    assert main(["sim", "run", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "20, 20 of them by decode alone" in shown
    pools = [line.split()[:2] for line in shown.splitlines() if line.split()[0] in ("prefill", "decode")]
    assert pools[-1] == ["decode", "2"], "of a pool without workers there is nothing to tell"
    assert pools[-2] == ["decode", pools[-2][1]], "the part of a request's time"


@pytest.mark.long
def test_tenants_and_refusals_reach_the_world(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        "load: {requests: 400, rate: 100, input_median: 2000}\nrefuses: true\n"
        "tenants: [{name: many, share: 9}, {name: few, weight: 2, priority: -1}]\n"
        "tandem: {scheduling: {max_queued_requests: 40, priority_ageing_s: 3}}"
    )
    file = scenario_file(tmp_path, text)
    shape = read_scenario(file).shape()
    assert (shape.max_waiting, shape.ageing_s) == (40, 3.0)
    assert {name: (who.tenant.weight, who.priority) for name, who in shape.tenants.items()} == {
        "many": (1.0, 0), "few": (2.0, -1)
    }  # fmt: skip
    assert main(["sim", "run", str(file), "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    many, few = found["tenants"]
    assert many["num_requests"] + few["num_requests"] == 400
    assert many["num_requests"] == pytest.approx(360, abs=30)
    assert found["num_refused"] == many["num_refused"] + few["num_refused"] > 100
    assert found["num_failed"] == 0
    shares = [each["num_refused"] / each["num_requests"] for each in (many, few)]
    assert shares[1] < shares[0] - 0.2, "it has its share of the queue, whatever the other does"
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["refused", str(found["num_refused"])] in [words[:2] for words in shown]
    assert [words[:3] for words in shown[-2:]] == [
        [each["name"], f"{each['weight']:g}", str(each["num_requests"])] for each in (many, few)
    ]


def test_limits_of_tenants_reach_the_world_and_what_they_refuse_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        "load: {requests: 40, rate: 20, input_median: 100, output_median: 4}\n"
        "tenants: [{name: free}, {name: bound, requests_per_minute: 6, tokens_per_minute: 90000}]\n"
    )
    file = scenario_file(tmp_path, text)
    bound = read_scenario(file).shape().tenants["bound"].tenant
    assert (bound.requests_per_minute, bound.tokens_per_minute) == (6, 90000)
    assert main(["sim", "run", str(file), "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    free, bound_found = found["tenants"]
    assert (free["num_over_limits"], bound_found["num_over_limits"]) == (0, bound_found["num_requests"] - 6)
    assert found["num_over_limits"] == bound_found["num_over_limits"] > 5
    assert (found["num_failed"], found["num_refused"]) == (0, 0)
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["over", "limits", str(found["num_over_limits"])] in [words[:3] for words in shown]
    assert shown[-1][3] == str(bound_found["num_over_limits"]), "among what was refused"


@pytest.mark.parametrize(
    ("tenants", "said"),
    [
        ("[{name: a}, {name: a}]", "give each its own"),
        ("[{share: 1}]", "give each its own"),
        ("[{name: a, share: 0}]", "give one some"),
        ("[{name: a, wait: 1}]", "tenants[0].wait"),
        ("[a]", "tenants[0] must hold keys and values"),
        ("{name: a}", "must be a list of sections"),
    ],
)
def test_tenants_that_make_no_sense_are_named(tmp_path: Path, tenants: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        read_scenario(scenario_file(tmp_path, f"tenants: {tenants}"))


def test_slow_ways_reach_the_world(tmp_path: Path) -> None:
    text = "prefill: {workers: 2}\nfaults: [prefill-1@3=0.2]\nnetwork: {tells_links: false}"
    faults = read_scenario(scenario_file(tmp_path, text)).shape().faults
    assert (faults.slow_links, faults.deaths, faults.tells_links) == ((SlowLink("prefill-1", 3.0, 0.2),), (), False)
    assert [faults.link_share("prefill-1", at_s) for at_s in (2.9, 3.0)] == [1.0, 0.2]
    assert faults.link_share("prefill-0", 3.0) == 1.0


def test_a_trace_that_is_not_there_is_named(tmp_path: Path) -> None:
    scenario = read_scenario(scenario_file(tmp_path, "load: {trace: none.csv}"))
    with pytest.raises(
        ConfigError, match=r"none\.csv: No such file or directory; name an existing file with load\.trace"
    ):
        arrivals(scenario, tmp_path)
    (tmp_path / "none.csv").write_text("hello")
    with pytest.raises(ConfigError, match=r"looks like none of azure, mooncake, sharegpt; name one with load\.trace"):
        arrivals(scenario, tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("long.csv", f'TIMESTAMP,ContextTokens,GeneratedTokens\n"{"x" * 200_000}",1,1\n', "azure trace: Error: field"),
        (
            "late.jsonl",
            f'{{"timestamp": 1{"0" * 400}, "input_length": 1, "output_length": 1, "hash_ids": [1]}}\n',
            "mooncake trace: .*timestamp must be a number of milliseconds",
        ),
        ("deep.json", f'[{{"conversations": {"[" * 100_000}{"]" * 100_000}}}]', "sharegpt trace: .*recursion"),
    ],
)
def test_a_trace_that_is_out_of_all_bounds_is_named(tmp_path: Path, name: str, content: str, said: str) -> None:
    (tmp_path / name).write_text(content)
    counted = ", characters_per_token: 4" if name == "deep.json" else ""
    scenario = read_scenario(scenario_file(tmp_path, f"load: {{trace: {name}{counted}}}"))
    with pytest.raises(ConfigError, match=f"{name} is no {said}"):
        arrivals(scenario, tmp_path)


def test_when_nothing_is_left_what_made_it_fail_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "load: {requests: 5}\nclasses: [{name: hurried, timeout: 0.0001}]\n"
    assert main(["sim", "run", str(scenario_file(tmp_path, text))]) == 1
    assert "all requests failed (5 × deadline" in capsys.readouterr().err


def test_what_is_drawn_has_the_rate_and_the_lengths_that_were_asked_for(tmp_path: Path) -> None:
    text = "load: {requests: 4000, rate: 20, input_median: 300, input_spread: 0.5, output_median: 50}"
    found = arrivals(read_scenario(scenario_file(tmp_path, text)), tmp_path)
    assert found[-1].arrived_s == pytest.approx(200, rel=0.1)
    assert sorted(one.num_input for one in found)[2000] == pytest.approx(300, rel=0.05)
    assert sorted(one.num_output for one in found)[2000] == pytest.approx(50, rel=0.1)
    again = arrivals(read_scenario(scenario_file(tmp_path, f"{text}\nseed: 1")), tmp_path)
    assert again != found


def test_the_command_prints_and_writes_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = scenario_file(tmp_path, "load: {requests: 20}\ntandem: {scheduling: {mixed_pool: false}}")
    assert main(["sim", "run", str(file), "--json", str(tmp_path / "found.json")]) == 0
    shown = capsys.readouterr().out
    assert "TTFT" in shown
    assert "20, 0 of them by decode alone" in shown
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["format"], found["kind"], found["is_simulated"]) == ("tandem-bench/1", "run", True)
    assert len(found["requests"]) == 20
    assert found["runs"][0]["figures"]["ttft_s"]["p50"] > 0
    assert found["slo"]["kept_share"] == 1.0
    assert found["worker_hours"]["decode"] == pytest.approx(found["simulated_s"] / 3600)
    assert found["pools"]["prefill"]["sizes"] == [[0.0, 1, 1]]


def test_the_command_names_the_file_that_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = scenario_file(tmp_path, "prefil: {}")
    assert main(["sim", "run", str(file)]) == 1
    assert f"tandem sim: {file}: unknown key prefil" in capsys.readouterr().err


def test_a_roofline_is_bound_by_whichever_takes_longer() -> None:
    size = ModelSize(8e9, 16e9, 131_072, 32, 4096)
    model = Roofline(size, Card(989e12, 3.35e12, 0.5, 0.8, 0.001))
    # One token of a context of 1,000: weights and context are read.
    one = Terms(num_tokens=1, num_rows=1, num_read=1000, num_pairs=1000)
    assert model.seconds(one) == pytest.approx(0.001 + (16e9 + 1000 * 131_072) / (3.35e12 * 0.8))
    # A prompt of 4,000: it is computed, two operations a parameter, four a pair, layer and number.
    prompt = Terms(num_tokens=4000, num_rows=0, num_read=4000, num_pairs=4000 * 4001 / 2)
    flops = 2 * 8e9 * 4000 + 4 * 32 * 4096 * 4000 * 4001 / 2
    assert model.seconds(prompt) == pytest.approx(0.001 + flops / (989e12 * 0.5))


def test_a_fitted_model_is_a_sum() -> None:
    model = Fitted(1.0, of_token_s=0.1, of_row_s=0.01, of_read_s=0.001, of_pair_s=0.0001)
    assert model.seconds(Terms(2, 3, 4, 5.0)) == pytest.approx(1 + 0.2 + 0.03 + 0.004 + 0.0005)
