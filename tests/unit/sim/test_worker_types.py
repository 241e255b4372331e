"""Workers of several types in one simulation: their times, their room, and what they cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.cli import main
from tandem.core.cards import CARDS
from tandem.core.errors import ConfigError
from tandem.core.identity import Role, WorkerKey
from tandem.core.step_times import Roofline
from tandem.core.time_model import read_time_model
from tandem.core.worker_types import Power
from tandem.plan.plan_file import Plan
from tandem.plan.simulate import Pools, _shape
from tandem.sim.costs import costs
from tandem.sim.fleet import Life
from tandem.sim.load import Arrival, Lengths, drawn
from tandem.sim.scenario import Scenario, read_scenario
from tandem.sim.world import World

TYPES = """
types:
  fast: {card: h100, price: 4.0, watts: 1000, idle_watts: 100}
  cheap: {card: a100, price: 2.0}
"""
TWO = TYPES + "prefill: {workers: 2, type: fast}\ndecode: {workers: 3, type: cheap}\n"


def scenario_of(directory: Path, text: str) -> Scenario:
    file = directory / "scenario.yaml"
    file.write_text(text)
    return read_scenario(file)


def test_each_pool_has_the_steps_and_the_room_of_its_type(tmp_path: Path) -> None:
    shape = scenario_of(tmp_path, TWO).shape()
    for pool, card in ((shape.prefill, "h100"), (shape.decode, "a100")):
        assert isinstance(pool.times, Roofline)
        assert pool.times.card == CARDS[card].times(1, 0.6, 0.8, 0.002)
        # 72 GB of 80 less 16 of weights, 131,072 bytes a token, pages of 32.
        assert pool.num_pages == (72_000_000_000 - 16_000_000_000) // 131_072 // 32
    assert (shape.prefill.type.price, shape.prefill.type.power) == (4.0, Power(1000, 100))
    assert shape.decode.type.power == Power(400, 400), "the data sheet's; idle as much where nothing is said"


def test_a_scenario_and_a_plan_have_the_same_workers_of_a_type(tmp_path: Path) -> None:
    scenario = scenario_of(tmp_path, TWO)
    of_plan = _shape(Plan(), dict(scenario.types), Pools("fast", 2, "cheap", 3), [])
    shape = scenario.shape()
    for pool, other in ((shape.prefill, of_plan.prefill), (shape.decode, of_plan.decode)):
        assert isinstance(pool.times, Roofline)
        assert isinstance(other.times, Roofline)
        assert pool.times.card == other.times.card
        # The plan's model has 8.03 billion parameters, the scenario's 8.
        assert pool.num_pages == pytest.approx(other.num_pages, rel=0.01)


def test_a_simulated_engine_takes_the_times_of_its_pool(tmp_path: Path) -> None:
    scenario_of(tmp_path, TWO)
    model = read_time_model(tmp_path / "scenario.yaml")
    for role, flops in ((Role.PREFILL, 989e12), (Role.DECODE, 312e12)):
        times = model.step_times(model.pool(role).type)
        assert isinstance(times, Roofline)
        assert times.card.flops == flops


def test_a_pool_may_have_groups_of_types(tmp_path: Path) -> None:
    text = TYPES + "prefill: {type: fast, others: [{workers: 2, type: cheap}]}\ndecode: {type: cheap}\n"
    world = World(scenario_of(tmp_path, text).shape())
    outcomes = world.run(drawn(120, 30.0, Lengths(1000), Lengths(20), 0))
    assert [(life.key.worker_id, life.type) for life in world.fleet.lives] == [
        ("prefill-0", "fast"), ("prefill-1", "cheap"), ("prefill-2", "cheap"), ("decode-0", "cheap"),
    ]  # fmt: skip
    assert all(one.is_over for one in outcomes)
    per_token_s = [
        work.busy_s / work.num_tokens
        for work in (world.machines[life.key].work for life in world.fleet.lives)
        if work.num_tokens
    ][:3]
    assert per_token_s[1] == pytest.approx(per_token_s[2], rel=0.2)
    assert per_token_s[1] > 2 * per_token_s[0], "an A100 has a third of the operations"


def test_a_worker_keeps_its_card_in_the_other_role_and_in_its_successor(tmp_path: Path) -> None:
    text = TWO + "faults: [decode-0@1]\ntandem: {pools: {flexible: 1}}\n"
    world = World(scenario_of(tmp_path, text).shape())
    world.fleet.give(Role.PREFILL, Role.DECODE, instead=False)
    world.kernel.after(0.5, world.fleet.look)
    world.kernel.run_all()
    changed = next(life for life in world.fleet.lives if life.role is not life.seat)
    successor = world.fleet.lives[-1]
    assert (changed.role, changed.type) == (Role.DECODE, "fast")
    shape = world.shape.worker(Role.DECODE, "fast")
    assert isinstance(shape.times, Roofline)
    assert shape.times.card.flops == 989e12
    assert (shape.limits.computes_prompts, shape.type.price) == (True, 4.0)
    assert (successor.key.worker_id, successor.type) == ("decode-4", "cheap")


def test_costs_are_hours_times_prices_and_watts_by_what_was_computed(tmp_path: Path) -> None:
    world = World(scenario_of(tmp_path, TWO).shape())
    world.run([Arrival(0, 0.0, 1000, 51)])
    found = costs(world, 3600.0, 1_000_000, 200_000)
    assert found is not None
    assert found["price"] == pytest.approx(2 * 4.0 + 3 * 2.0)
    assert found["price_per_hour"] == pytest.approx(14.0)
    assert found["price_per_million_tokens"] == pytest.approx(14.0)
    assert found["price_per_million_output_tokens"] == pytest.approx(70.0)
    busy_h = sum(machine.work.busy_s for machine in world.machines.values() if machine.role is Role.PREFILL) / 3600
    assert busy_h > 0
    assert found["watt_hours"] == pytest.approx(2 * 100 + busy_h * 900 + 3 * 400)
    assert found["watts"] == pytest.approx(found["watt_hours"])
    assert found["watt_hours_per_million_output_tokens"] == pytest.approx(5 * found["watt_hours"])
    assert [(group["role"], group["type"], group["price"]) for group in found["groups"]] == [
        ("prefill", "fast", pytest.approx(8.0)), ("decode", "cheap", pytest.approx(6.0)),
    ]  # fmt: skip


@pytest.mark.long
def test_the_command_tells_what_a_cluster_costs_where_it_has_types(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario_of(tmp_path, TWO + "load: {requests: 20}\n")
    out = tmp_path / "found.json"
    assert main(["sim", "run", str(tmp_path / "scenario.yaml"), "--json", str(out)]) == 0
    found, shown = json.loads(out.read_text()), capsys.readouterr().out
    assert found["costs"]["price_per_hour"] == pytest.approx(14.0)
    assert {one["name"]: one["type"] for one in found["workers"]}["decode-2"] == "cheap"
    assert "14.00 an hour; a million tokens" in shown
    lines = [line.split()[:2] for line in shown.splitlines()]
    assert ["prefill", "fast"] in lines
    assert ["decode", "cheap"] in lines
    scenario_of(tmp_path, "load: {requests: 20}\n")
    assert main(["sim", "run", str(tmp_path / "scenario.yaml"), "--json", str(out)]) == 0
    assert json.loads(out.read_text())["costs"] is None
    assert "an hour" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("prefill: {type: h100}", r"prefill\.type is 'h100', which is none of types; add types: \{h100: \{card: h100"),
        (TYPES + "prefill: {type: fasst}\ndecode: {type: fast}", r"prefill\.type is 'fasst'.*did you mean fast\?"),
        (TYPES + "prefill: {type: fast}", r"decode\.type is missing, and there are types: name one of fast, cheap"),
        ("types: {a: {card: h1000}}", r"types\.a: h1000 is no card .* did you mean h100\?"),
        ("types: {a: {prise: 3}}", r"unknown key types\.a\.prise; did you mean price"),
        ("types: [a]", r"types must hold names, each with keys and values, as \{card: h100, price: 4\.0\}"),
        ("types: {a: {watts: 100, idle_watts: 200}}", r"types\.a\.idle_watts is 200, more than the 100"),
        (
            "types: {a: {roles: decode}}\nprefill: {type: a}\ndecode: {type: a}",
            r"prefill\.type is 'a', which serves as decode alone",
        ),
        (TWO + "card: {tflops: 3}", "card says something of all workers, and these have types"),
        (TWO + "times: fitted", "times: fitted is of all workers, and these are of types with other cards"),
        (
            "types: {a: {card: l4}}\nprefill: {type: a}\ndecode: {type: a}\nmodel: {parameters: 7.0e+10}",
            r"types\.a: its memory has no room for the weights of the model \(140 GB\)",
        ),
        ("prefill: {others: [{workers: 2}]}", r"prefill\.others\[0\]\.type is missing"),
    ],
)
def test_types_that_make_no_sense_are_named(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        scenario_of(tmp_path, text).shape()


WINDOWS = "model: {parameters: 1.0e+9, layers: 12, kv_heads: 2, window: 64, full_layers: 3}\n"


def test_workers_on_cpus_are_those_whose_type_has_such_a_card(tmp_path: Path) -> None:
    """They keep no pages behind a window, and have the limits of CPUs."""
    cpus = WINDOWS + "types: {cpu: {card: epyc-9654}}\nprefill: {type: cpu}\ndecode: {type: cpu}\n"
    gpus = cpus.replace("epyc-9654", "h100")
    on_cpu, on_gpu = (scenario_of(tmp_path, text).shape() for text in (cpus, gpus))
    assert (on_cpu.decode.limits.window, on_gpu.decode.limits.window) == (64, 0)
    assert on_cpu.decode.limits.saturating_tokens < on_gpu.decode.limits.saturating_tokens


def test_workers_that_keep_other_pages_are_no_cluster(tmp_path: Path) -> None:
    text = "types: {cpu: {card: epyc-9654}, gpu: {card: h100}}\nprefill: {type: gpu}\ndecode: {type: cpu}\n"
    with pytest.raises(ConfigError, match="keep other pages of this model behind its windows"):
        scenario_of(tmp_path, WINDOWS + text).shape()
    assert scenario_of(tmp_path, text).shape().decode.num_pages > 0, "without windows they do not"
    alone = "types: {cpu: {card: epyc-9654}}\nprefill: {workers: 0}\ndecode: {type: cpu}\n"
    assert scenario_of(tmp_path, WINDOWS + alone).shape().decode.limits.window == 64, "of whom there are none count not"


def test_nobody_pays_for_a_worker_that_was_asked_for_behind_the_end() -> None:
    life = Life(WorkerKey("decode-0", "1"), Role.DECODE, 5.0, Role.DECODE)
    assert life.worked_s(4.0) == 0.0
    life.gone_s = 9.0
    assert (life.worked_s(8.0), life.worked_s(10.0)) == (3.0, 4.0)
