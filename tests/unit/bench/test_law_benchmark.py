"""The law of prompts beside decode, held against constants in the simulator, and the page that says so."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from benchmarks.docs import with_law
from benchmarks.law.command import MODELS, NONE, OUTPUTS, PROMPTS, measure
from benchmarks.law.loads import Kind, by_chance, closed
from benchmarks.law.section import GOAL, plot, ratios, section
from tandem.sim.scenario import read_scenario

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.timeout(900)  # of a hundred simulations, on cores that others want: `make test-faults`

#: Of the points below, those that the law is known to miss by a little: docs/performance.md lists them.
MISSED = {"h200": {"2,048/64, 16 clients"}}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Two points of the grid: bound by prompts, and between prompts and tokens."""
    points = [(1024, 16, 16), (2048, 64, 16)]
    measured = measure(lambda _: None, grid=points, kinds=[Kind(512, 64)])
    return {"code": {"digest": "d1"}, **measured}


@pytest.mark.faults
def test_the_law_is_as_good_as_constants_that_know_the_load(found: dict[str, Any]) -> None:
    for model in found["models"]:
        ratio = {one.case: one.law for one in ratios(model, "tokens_per_s", ("closed", "open", "changing"))}
        assert len(ratio) == 4
        missed = {case: reached for case, reached in ratio.items() if reached < GOAL}
        assert missed.keys() <= MISSED.get(model["name"], set()), missed
        assert min(ratio.values()) >= 0.9, ratio


@pytest.mark.faults
def test_computing_prompts_at_decode_is_what_helps_where_they_dominate(found: dict[str, Any]) -> None:
    """Else the simulation would show nothing."""
    for model in found["models"]:
        (case,) = [one for one in model["cases"] if (one["how"], one["name"]) == ("closed", "1,024/16, 16 clients")]
        assert case["law"]["tokens_per_s"] >= 1.3 * case["constants"][NONE]["tokens_per_s"]
        assert case["law"]["by_decode_share"] > 0.3


@pytest.mark.faults
def test_the_page_says_what_was_reached_and_what_was_missed(found: dict[str, Any]) -> None:
    page = "\n".join(section({**found, "format": "", "date": ""}))
    assert "| two H200 | clients that ask again | output tokens/s | 2 |" in page
    case = found["models"][0]["cases"][0]
    worse = {**case, "law": {**case["law"], "tokens_per_s": 0.5 * case["law"]["tokens_per_s"]}}
    models = [{**found["models"][0], "cases": [worse]}]
    assert f"| {case['name']} | clients that ask again | output tokens/s |" in "\n".join(
        section({**found, "models": models})
    )
    begun = (ROOT / "docs/performance.md").read_text()
    once = with_law(begun, found)
    assert with_law(once, found) == once
    assert page in once


@pytest.mark.faults
def test_the_plot_has_two_dots_for_each_point(found: dict[str, Any]) -> None:
    root = ET.fromstring(plot(found))
    titles = [one.text for one in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 2 * sum(len(model["cases"]) for model in found["models"])


def test_a_client_asks_again_when_it_is_answered() -> None:
    shape = read_scenario(ROOT / f"scenarios/{MODELS[0].name}.yaml").shape()
    outcomes = closed(shape, Kind(32, 8), 3, 20)
    assert len(outcomes) == 20
    ends = sorted(one.last_token_s for one in outcomes)
    for one in outcomes[3:]:
        assert one.arrival.arrived_s in ends
    assert max(sum(one.arrival.arrived_s <= at < one.last_token_s for one in outcomes) for at in ends) <= 3


def test_lengths_vary_around_their_kind_and_are_the_same_each_time() -> None:
    shape = read_scenario(ROOT / f"scenarios/{MODELS[0].name}.yaml").shape()
    lengths = [
        [(one.arrival.num_input, one.arrival.num_output) for one in closed(shape, Kind(32, 8), 3, 60, varying=True)]
        for _ in range(2)
    ]
    assert lengths[0] == lengths[1]
    assert {16 <= num_input <= 48 and 4 <= num_output <= 12 for num_input, num_output in lengths[0]} == {True}
    assert len(set(lengths[0])) > 20


@pytest.mark.faults
def test_lengths_that_vary_are_measured_too(found: dict[str, Any]) -> None:
    """Most of all with few clients, who go in step where all lengths are the same."""
    for model in found["models"]:
        ratio = {one.case: one.law for one in ratios(model, "tokens_per_s", ("varying",))}
        assert len(ratio) == 2
        assert min(ratio.values()) >= 0.92, ratio
        assert sum(ratio.values()) / len(ratio) >= 0.97, ratio


def test_kinds_follow_each_other_at_their_rates() -> None:
    found = by_chance([(PROMPTS, 10.0, 30.0), (OUTPUTS, 2.0, 50.0)], seed=3)
    prompts = [one for one in found if one.num_input == PROMPTS.num_input]
    outputs = [one for one in found if one.num_input == OUTPUTS.num_input]
    assert all(one.arrived_s < 30 for one in prompts)
    assert all(30 <= one.arrived_s < 80 for one in outputs)
    assert len(prompts) == pytest.approx(300, rel=0.2)
    assert len(outputs) == pytest.approx(100, rel=0.3)
    assert [one.number for one in found] == list(range(len(found)))
