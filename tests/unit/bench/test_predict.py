"""Predictions and what they are held against."""

from __future__ import annotations

import dataclasses
import random
import xml.etree.ElementTree as ET

import pytest

from benchmarks.predict.curves import MEASURED, SAID, Span, curves, plot
from benchmarks.predict.loads import Load, calibration, predicted
from benchmarks.predict.measure import passing
from benchmarks.predict.real import Run
from benchmarks.predict.simulated import GOALS, Figures, Recorded, figures_of, is_met, off, outcomes
from tandem.bench.load.records import RequestRecord
from tandem.core.config_tree import build
from tandem.sim.load import Lengths
from tandem.sim.scenario import Scenario

SCENARIO = {"times": "fitted", "fitted": {"base_ms": 10}, "network": {"message_us": 1000, "latency_us": 0}}


def record(number: int, sent_s: float, num_input: int, num_output: int) -> RequestRecord:
    return RequestRecord(number, num_input, num_output, sent_s, 0.0, num_output=num_output)


def test_a_closed_load_is_asked_by_as_many_clients_whatever_times_were_recorded() -> None:
    load = Load("closed", 6, Lengths(10), Lengths(5), num_clients=2)
    asked = Recorded(load, [record(n, 99.0, 10 + n, 5) for n in range(6)])
    _, found = outcomes(build(Scenario, SCENARIO).shape(), asked)
    assert [one.arrival.num_input for one in found] == [10, 11, 12, 13, 14, 15]
    open_at = [sum(a.arrival.arrived_s <= b.arrival.arrived_s < a.last_token_s for a in found) for b in found]
    assert max(open_at) == 2
    assert max(one.last_token_s for one in found) < 1.0


def test_an_open_load_comes_when_it_was_sent() -> None:
    """Every prompt is handed off: what prefill is known to take would have later ones computed at decode."""
    handed_off = SCENARIO | {"tandem": {"scheduling": {"mixed_pool": False}}}
    load = Load("open", 3, Lengths(10), Lengths(5), rate=1.0)
    asked = Recorded(load, [record(n, 2.0 * n, 10, 5) for n in range(3)])
    _, found = outcomes(build(Scenario, handed_off).shape(), asked)
    assert [one.arrival.arrived_s for one in found] == [0.0, 2.0, 4.0]
    figures = figures_of(found)
    assert figures.output_tokens_per_s == pytest.approx(15 / found[-1].last_token_s)
    assert figures.ttft_p50_s == pytest.approx(0.011, rel=0.01)
    assert figures.tpot_s == pytest.approx(0.01, rel=0.01)
    closed = Recorded(Load("closed", 3, Lengths(10), Lengths(5), num_clients=2), asked.records)
    began_s, again = outcomes(build(Scenario, handed_off).shape(), asked, [closed, asked])
    assert began_s > found[-1].last_token_s
    assert [one.arrival.arrived_s - began_s for one in again] == pytest.approx([0.0, 2.0, 4.0])
    assert figures_of(again, began_s).as_json() == pytest.approx(figures.as_json())
    spans = [[Span.of_outcome(one, began) for one in each] for began, each in ((0.0, found), (began_s, again))]
    assert [dataclasses.astuple(span) for span in spans[1]] == [
        pytest.approx(dataclasses.astuple(span)) for span in spans[0]
    ]


def test_what_a_cluster_has_served_before_tells_it_how_much_to_place_at_once() -> None:
    """Of a burst that is the first load of all, not more is placed than keeps each worker busy with one prompt."""
    tree = {**SCENARIO, "tandem": {"scheduling": {"max_num_seqs": 32}}}
    shape, outputs = build(Scenario, tree).shape(), Lengths(5)
    burst = Recorded(Load("burst", 24, Lengths(40), outputs, burst=24), [record(n, 0.0, 40, 5) for n in range(24)])
    many = Recorded(Load("many", 8, Lengths(40), outputs, num_clients=2), [record(n, 0.0, 40, 5) for n in range(8)])
    _, cold = outcomes(shape, burst)
    began_s, warm = outcomes(shape, burst, [many])
    assert figures_of(warm, began_s).ttft_p50_s < figures_of(cold).ttft_p50_s


@pytest.mark.long
@pytest.mark.parametrize("token_us", [0.0, 150.0])
def test_what_it_takes_to_pass_tokens_on_is_found_from_whole_answers(token_us: float) -> None:
    """From those of a simulation of which it is known."""
    cores = {"prompts": {"prompts": 0.1, "decode": 0.1}, "decode": {"prompts": 0.1, "decode": 0.1}, "num_cores": 1}
    times, network = {"base_ms": 2, "token_us": 50}, {"message_us": 3000, "latency_us": 2000}
    tree = {"times": "fitted", "fitted": times, "network": network, "cores": cores}
    rng, load = random.Random(1), Load("by chance", 100, Lengths(150), Lengths(10), rate=50.0)
    asked = [record(n, 0.02 * (n + rng.random()), rng.randrange(50, 300), rng.randrange(4, 20)) for n in range(100)]
    known = {**tree, "cores": {**cores, "step_us": 4 * token_us, "token_us": token_us}}
    began_s, found = outcomes(build(Scenario, known).shape(), Recorded(load, asked), [Recorded(load, asked)])
    said = passing(tree, Run(load, asked, figures_of(found, began_s), 0.0, 0.0))
    if not token_us:
        assert not said
        return
    assert said["token_us"] == pytest.approx(token_us, rel=0.1)
    assert said["step_us"] == 4 * said["token_us"]


def test_a_figure_is_met_within_its_goal_or_the_spread_of_the_runs() -> None:
    assert off(1.1, [0.9, 1.1]) == pytest.approx(0.1)
    assert is_met("e2e_s", 1.04, [1.0, 1.0])
    assert not is_met("e2e_s", 1.06, [1.0, 1.0])
    assert is_met("e2e_s", 1.09, [0.9, 1.1])
    assert not is_met("e2e_s", 1.11, [0.9, 1.1])
    assert set(GOALS) == {field.name for field in dataclasses.fields(Figures)}


def test_loads_differ_and_those_that_are_asked_about_are_not_fitted_to() -> None:
    loads = [*calibration(1.0, 1000, 3.0), *predicted(1.0, 1000, 3.0)]
    assert len({load.name for load in loads}) == len(loads) == 7
    assert {load.shape.name for load in loads} == {"closed", "poisson", "trace"}
    for load in loads:
        entries = load.entries(1, 1000)
        assert entries == load.entries(1, 1000)
        assert max(max(entry.num_input, entry.num_output) for entry in entries) <= 1000
    bursts = loads[-1].entries(1, 1000)
    assert [entry.arrival_s for entry in bursts[6:10]] == [0.0, 0.0, loads[-1].every_s, loads[-1].every_s]


def test_a_run_and_its_simulation_are_drawn_at_the_same_moments() -> None:
    real = RequestRecord(0, 10, 5, 1.0, 9.0, event_s=(2.0, 3.0, 9.0), num_output=5)
    asked = Recorded(Load("open", 1, Lengths(10), Lengths(5), rate=1.0), [real])
    _, (outcome,) = outcomes(build(Scenario, SCENARIO).shape(), asked)
    said, measured = Span.of_outcome(outcome), Span.of_record(real)
    assert measured == Span(1.0, 2.0, 9.0, 5)
    assert (said.sent_s, said.num_tokens) == (1.0, 5)
    found = curves([said], [measured])
    assert found["at_s"][-1] == 9.0
    assert found[MEASURED]["tokens"][-1] == found[SAID]["tokens"][-1] == 5
    at = {name: found["at_s"].index(moment) for name, moment in (("before", 0.9), ("amid", 4.5))}
    assert [found[MEASURED]["running"][at[name]] for name in ("before", "amid")] == [0, 1]
    assert found[SAID]["running"][at["amid"]] == 0, "it took a tenth of a second"
    assert found[MEASURED]["tokens"][at["amid"]] == pytest.approx(1 + 4 * 2.5 / 7, abs=0.06)
    for who in (MEASURED, SAID):
        assert found[who]["tokens"] == sorted(found[who]["tokens"])
    text = plot({"models": {"m": {"loads": [{"load": "open", "curves": found}]}}})
    lines = list(ET.fromstring(text).iter("{http://www.w3.org/2000/svg}polyline"))
    assert len(lines) == 4
