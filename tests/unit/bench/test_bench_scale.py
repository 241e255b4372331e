"""What grows with the workers of a simulated cluster, and the section that tells of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.scale.command import ScaleSizes, decisions, run, scenario_of, simulated
from benchmarks.scale.section import FORMAT, section
from tandem.bench.report import json_file
from tandem.core.config_tree import build
from tandem.sim.scenario import Scenario

TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,10
2023-11-16 18:15:51.2220670,879,5
"""


@pytest.mark.long
def test_a_decision_costs_as_much_among_a_thousand_workers_as_among_a_few() -> None:
    """Each call of a function counts: a walk over all workers adds some for each of them."""
    few, many = decisions(26, 38), decisions(410, 614)
    assert many["choose"]["calls"] < 1.1 * few["choose"]["calls"]
    assert many["put"]["calls"] < 1.1 * few["put"]["calls"]


@pytest.mark.long
def test_what_a_simulation_took_is_told(tmp_path: Path) -> None:
    found = simulated(scenario_of(10, 2.0), tmp_path)
    assert found["workers"] == {"prefill": 4, "decode": 6}
    assert found["num_requests"] == 195
    assert found["rate"] == pytest.approx(98, rel=0.2)
    assert 0 < found["ttft_s"]["p50"] <= found["ttft_s"]["p99"] < found["end_s"]
    assert found["num_events"] > found["num_requests"]
    assert found["cpu_s"] > 0
    assert found["memory_bytes"] > 10 << 20


@pytest.mark.faults
@pytest.mark.processes
def test_parts_are_measured_one_by_one_into_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "AzureLLMInferenceTrace_conv.csv").write_text(TRACE)
    sizes, json = ScaleSizes(growth=(5, 10), growth_s=0.5, thousand=10, thousand_s=0.5), tmp_path / "scale.json"
    run(tmp_path, ("azure",), json, sizes)
    assert "What grows" not in capsys.readouterr().out
    run(tmp_path, ("growth", "thousand"), json, sizes)
    content = json_file.read_format(json, FORMAT, "a test")
    assert [case["num_requests"] for case in content["azure"]["cases"]] == [
        3,
        3 * content["azure"]["cases"][1]["copies"],
    ]
    assert [case["workers"] for case in content["growth"]["cases"]] == [
        {"prefill": 2, "decode": 3},
        {"prefill": 4, "decode": 6},
    ]
    text = "\n".join(section(content))
    assert "| drawn | 4 + 6 |" in text
    assert f"| Azure's conversations, each {content['azure']['cases'][1]['copies']} times | 16 + 24 |" in text
    assert "| 10 | 49 |" in text


def test_workers_have_as_much_to_do_in_a_cluster_of_any_size() -> None:
    assert scenario_of(1024, 60.0).load == build(Scenario, {"load": {"requests": 600_000, "rate": 10_000.0}}).load
    assert scenario_of(64, 60.0).load.rate == 625
