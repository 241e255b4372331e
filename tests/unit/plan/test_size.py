"""The search for pools: the cheapest of all, wherever the edge lies; and one whole search over the simulator."""

from __future__ import annotations

import json
import math
import multiprocessing
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tandem.cli import main
from tandem.core.errors import ConfigError
from tandem.core.layer_groups import LayerGroups
from tandem.core.worker_types import TypeSpec
from tandem.plan.calculators import kv_room
from tandem.plan.files import check_before, write_files
from tandem.plan.plan_file import Plan, read_plan
from tandem.plan.report import report
from tandem.plan.search import Pair, cheapest, most_speed, pairs, price, within
from tandem.plan.simulate import Kept, Means, Pools, _load, _shape, mean_lengths, simulate
from tandem.plan.size import Found, size
from tandem.sim.scenario import LoadSpec
from tests.support.waiting import nothing, wait_until

MOST = 12


def kept(both: float) -> Kept:
    return Kept(both, both, both, is_whole=True, busy_prefill=0.5, decode_batch=1.0, rate=1.0)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[dict[str, TypeSpec], list[int]]:
    """Prices, and for each number of prefill workers (from 0) the fewest decode workers that keep the targets."""
    prices = st.floats(0.5, 9)
    types = {"p": TypeSpec(price=draw(prices)), "d": TypeSpec(price=draw(prices))}
    edge = sorted(draw(st.lists(st.integers(1, MOST + 4), min_size=MOST, max_size=MOST)), reverse=True)
    return types, [MOST + 99, *edge]


@pytest.mark.long
@given(worlds())
def test_the_cheapest_pools_are_found_wherever_the_edge_lies(world: tuple[dict[str, TypeSpec], list[int]]) -> None:
    types, edge = world
    plan, pair, asked = Plan(most=MOST), Pair("p", "d", 1, 1, ""), set()

    def evaluate(pools: Pools) -> Kept:
        asked.add(pools)
        return kept(float(pools.num_decode >= edge[pools.num_prefill]))

    found = cheapest(plan, types, pair, evaluate)
    every = [pair.pools(p, d) for p in range(1, MOST + 1) for d in range(1, MOST + 1) if d >= edge[p]]
    if not every:
        assert found is None
        return
    assert found is not None
    assert price(plan, types, found) == pytest.approx(min(price(plan, types, pools) for pools in every))
    assert len(asked) <= 4 * MOST, "no more than a few for each number of prefill workers"


def test_a_run_that_was_ended_early_keeps_nothing() -> None:
    types = {"a": TypeSpec()}
    ended = replace(kept(0.99), is_whole=False)
    assert cheapest(Plan(most=3), types, Pair("a", "a", 1, 1, ""), lambda _: ended) is None


def test_a_load_whose_turns_wait_for_answers_is_refused() -> None:
    """It cannot be asked for more in a second."""
    with pytest.raises(ConfigError, match="turns wait for answers"):
        mean_lengths(Plan(load=LoadSpec(conversations=2, turns=3)))
    assert mean_lengths(Plan(load=LoadSpec(conversations=2, turns=1))).rate > 0


def test_a_budget_is_spent_on_decode_for_each_number_of_prefill_workers() -> None:
    types = {"p": TypeSpec(price=4.0), "d": TypeSpec(price=1.5)}
    found = list(within(Plan(budget=13.0), types, Pair("p", "d", 1, 1, "")))
    assert [(one.num_prefill, one.num_decode) for one in found] == [(1, 6), (2, 3)]


@pytest.mark.parametrize("limit", [0.3, 1.0, 1.4, 37.0])
def test_the_speed_at_which_targets_break_is_found(limit: float) -> None:
    found = most_speed(lambda speed: speed <= limit)
    assert found <= limit
    assert found == pytest.approx(limit, rel=0.06)
    assert most_speed(lambda _: False) == 0.0


# -- files


def plan_file(directory: Path, **changes: Any) -> Path:
    tree = {
        "model": {"name": "llama-3-8b"},
        "load": {"requests": 60, "rate": 12},
        "slo": {"ttft_ms": 800, "tpot_ms": 40},
        "types": {"h100": {"price": 4.0, "instance": "p5.48xlarge", "workers_of_node": 8}},
        "most": 8,
        **changes,
    }
    file = directory / "plan.yaml"
    file.write_text(yaml.safe_dump({name: value for name, value in tree.items() if value is not None}))
    return file


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"types": None}, "types must name one type"),
        ({"types": {"a": {"card": "none"}}}, "none is no card"),
        ({"types": {"a": 3}}, r"types\.a must hold keys and values, as \{card: h100, price: 4.0\}, not 3"),
        ({"load": {"copies": 2}}, r"load\.copies is of traces, and these requests are drawn"),
        ({"types": {"a": {"prize": 1}}}, r"unknown key types\.a\.prize; did you mean price"),
        ({"types": {"a": {"card": "l4"}}, "model": {"name": "llama-3-70b"}}, r"types\.a: its memory has no room"),
        ({"types": {"a": {"roles": "decode"}}}, "no type may serve as prefill"),
        ({"model": {"name": "none"}}, "known: llama-2-7b"),
        ({"goal": "most_goodput"}, "needs a budget above 0"),
        ({"slow": 1}, "unknown key slow; did you mean slo"),
    ],
)
def test_what_is_wrong_in_a_plan_is_named(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    file = plan_file(tmp_path, **changes)
    with pytest.raises(ConfigError, match=named) as caught:
        read_plan(file)
    assert str(file) in caught.value.message


@pytest.mark.parametrize("file", sorted((Path(__file__).parents[3] / "plans").glob("*.yaml")), ids=lambda f: f.name)
def test_shipped_plans_can_be_read(file: Path) -> None:
    _, types = read_plan(file)
    assert types


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_a_whole_search_finds_pools_says_why_and_writes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "cluster.yaml"
    base.write_text(
        "cluster_name: mine\navailable_node_types: {head: {max_workers: 0}, decode: {node_config: {A: 1}}}\n"
    )
    line = ["plan", "size", str(plan_file(tmp_path, tandem={"scheduling": {"max_num_seqs": 4}})), "--processes", "1"]
    files = ["--json", str(tmp_path / "found.json"), "--out", str(tmp_path / "out"), "--cluster", str(base)]
    assert main([*line, *files]) == 0
    shown = capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    best = found["best"]
    assert f"{best['num_prefill']} prefill (h100), {best['num_decode']} decode (h100)" in shown
    assert found["kept"]["both"] >= 0.9
    assert found["kept"]["is_whole"]
    # With 4 places twelve requests a second of 200 tokens are more than one decode worker takes.
    assert best["num_decode"] > 1
    fewer = found["fewer"]["one decode worker less"]
    assert fewer["both"] < 0.9
    assert "with one decode worker less" in shown
    assert set(found["changed"]) == {f"{what} {sign}25 %" for what in ("rate", "prompts", "outputs") for sign in "+-"}
    tandem = yaml.safe_load((tmp_path / "out/tandem.yaml").read_text())
    assert tandem["pools"]["decode"] == {"workers": best["num_decode"], "gpus": 1}
    assert tandem["scheduling"] == {"max_num_seqs": 4}
    cluster = yaml.safe_load((tmp_path / "out/cluster.yaml").read_text())
    assert cluster["cluster_name"] == "mine"
    decode = cluster["available_node_types"]["decode"]
    assert decode["min_workers"] == math.ceil(best["num_decode"] / 8)
    assert decode["node_config"] == {"A": 1, "InstanceType": "p5.48xlarge"}
    assert "head" in cluster["available_node_types"]


def test_prompts_that_decode_computes_are_no_sequences_of_its_batch(tmp_path: Path) -> None:
    """Two requests a second of 4,096 tokens, each alone: as nobody is at decode, it computes most of them."""
    lengths = {"input_median": 4096, "input_spread": 0.0, "output_median": 20, "output_spread": 0.0}
    load = {"requests": 8, "rate": 2, **lengths}
    kept = simulate(*read_plan(plan_file(tmp_path, load=load)), Pools("h100", 1, "h100", 1), whole=True)
    assert kept.decode_batch < 8


def test_what_a_trace_says_prompts_share_is_computed_once(tmp_path: Path) -> None:
    """All prompts at prefill, by which that is seen."""

    def found(name: str, blocks: Callable[[int], list[int]], **cache: Any) -> tuple[Kept, Means]:
        rows = [
            {"timestamp": 500 * number, "input_length": 4096, "output_length": 20, "hash_ids": blocks(number)}
            for number in range(8)
        ]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        tandem = {"scheduling": {"mixed_pool": False}, "cache": cache}
        plan, types = read_plan(plan_file(tmp_path, load={"trace": name}, tandem=tandem))
        return simulate(plan, types, Pools("h100", 1, "h100", 1), whole=True), mean_lengths(plan)

    alike, of_alike = found("alike", lambda _: list(range(8)))
    other, of_other = found("other", lambda number: list(range(8 * number, 8 * number + 8)))
    assert alike.busy_prefill < 0.5 * other.busy_prefill
    assert of_alike.num_input == of_other.num_input == of_other.num_computed == 4096
    assert of_alike.num_computed == (4096 + 7) / 8, "of a prompt that was seen its last token is computed"
    without, of_without = found("alike", lambda _: list(range(8)), prefix_cache=False)
    assert without.busy_prefill == pytest.approx(other.busy_prefill)
    assert of_without == of_other


@pytest.mark.processes
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"slo": {"tpot_ms": 1}}, r"no type for decode can generate a token in slo\.tpot_ms \(1 ms\), even for one"),
        ({"load": {"requests": 3, "input_median": 9e5, "input_spread": 0}}, "has room for the K and V of the longest"),
        ({"goal": "most_goodput", "budget": 7}, "less than a worker of each role costs: 8; raise it"),
        (
            {"slo": {"ttft_ms": 1}, "most": 1, "load": {"requests": 9}},
            r"with 1 prefill \(h100\), 1 decode \(h100\), until too many had missed, 0% kept slo\.ttft_ms, 100% slo",
        ),
    ],
)
def test_why_nothing_is_found_is_said(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    plan, types = read_plan(plan_file(tmp_path, **changes))
    with pytest.raises(ConfigError, match=named):
        size(plan, types, processes=1)


def test_a_type_without_room_for_the_longest_request_is_left_out(tmp_path: Path) -> None:
    """An L4 has room for the mean ones: it would be in the way of those that come after."""
    load = {"requests": 40, "input_median": 8000, "output_median": 20}
    of_types = {"l4": {"card": "l4"}, "h100": {}}
    plan, types = read_plan(plan_file(tmp_path, load=load, slo={"tpot_ms": 200}, types=of_types))
    means = mean_lengths(plan)
    assert means.num_input < 15_000 < 40_000 < means.longest
    assert {(pair.prefill_type, pair.decode_type) for pair in pairs(plan, types, means)} == {("h100", "h100")}
    short = means._replace(longest=10_000)
    assert len(list(pairs(plan, types, short))) == 4


@pytest.mark.long
def test_texts_longer_than_the_pages_are_planned_where_all_layers_have_a_window(tmp_path: Path) -> None:
    """An L4 has room for 54,000 tokens beside Mistral 7B."""

    def found(name: str) -> Kept:
        load = {"requests": 3, "input_median": 80_000, "input_spread": 0, "output_median": 20}
        types = {"l4": {"card": "l4"}}
        plan, specs = read_plan(plan_file(tmp_path, model={"name": name}, load=load, types=types))
        return simulate(plan, specs, Pools("l4", 1, "l4", 1), whole=True)

    with pytest.raises(ConfigError, match="a worker has room for 54"):
        found("mistral-7b")
    assert found("mistral-7b-v0.1").is_whole


def test_texts_are_planned_that_fit_once_some_layers_give_back_what_they_do_not_see(tmp_path: Path) -> None:
    """A CPU has room for 1,254,536 tokens in all layers of Gemma 3 27B, and once five of six see 1,024 for more."""
    load = {"requests": 2, "input_median": 2_000_000, "input_spread": 0, "output_median": 20}
    model = {"name": "gemma-3-27b"}

    def planned(**cache: Any) -> tuple[Plan, dict[str, TypeSpec]]:
        types = {"epyc": {"card": "epyc-9654"}}
        slo, tandem = {"tpot_ms": 100_000}, {"cache": {"page_size": 512, **cache}}
        return read_plan(plan_file(tmp_path, model=model, load=load, types=types, slo=slo, tandem=tandem))

    plan, types = planned()
    (pair,) = pairs(plan, types, mean_lengths(plan))
    with pytest.raises(ConfigError, match="has room for the K and V of the longest request"):
        list(pairs(*planned(mixed_windows=False), mean_lengths(plan)))
    said = list(map(str, report(plan, types, Found(pair.pools(1, 1), kept(1.0), pair, 1.0, [], []))))
    why = next(index for index, line in enumerate(said) if "Why:" in line)
    assert "workers on CPUs give back 6 of the 7 pages of 10 layers that each 512 tokens have" in said[why + 1]


def test_types_that_keep_other_pages_are_no_pair(tmp_path: Path) -> None:
    types = {"epyc": {"card": "epyc-9654", "roles": "decode"}, "h200": {"card": "h200"}}
    slo = {"tpot_ms": 10_000}

    def found(name: str, types: dict[str, Any], **cache: Any) -> set[tuple[str, str]]:
        tandem = {"cache": cache}
        plan, specs = read_plan(plan_file(tmp_path, model={"name": name}, types=types, slo=slo, tandem=tandem))
        return {(pair.prefill_type, pair.decode_type) for pair in pairs(plan, specs, mean_lengths(plan))}

    assert found("gemma-2-9b", types) == found("mistral-7b-v0.1", types) == {("h200", "h200")}
    both = {("h200", "h200"), ("h200", "epyc")}
    assert found("gemma-2-9b", types, mixed_windows=False) == found("mistral-7b", types) == both
    with pytest.raises(ConfigError, match="keep other pages than those on GPUs"):
        found("gemma-2-9b", {**types, "h200": {"card": "h200", "roles": "prefill"}})


@pytest.mark.long
def test_a_plan_of_a_mixed_model_is_simulated_as_its_workers_keep_pages(tmp_path: Path) -> None:
    load = {"requests": 3, "input_median": 3000, "output_median": 20}
    types = {"epyc": {"card": "epyc-9654", "overhead_ms": 0.5}}
    plan, specs = read_plan(plan_file(tmp_path, model={"name": "gpt-oss-20b"}, load=load, types=types))
    assert simulate(plan, specs, Pools("epyc", 1, "epyc", 1), whole=True).is_whole
    shape = _shape(plan, specs, Pools("epyc", 1, "epyc", 1), _load(plan.load, plan.directory, plan.seed))
    assert shape.kv_format.layout.groups == plan.served.kept(on_cpu=True).groups == LayerGroups(32, 128, 1)
    assert shape.decode.limits.num_windowed == 1
    room = kv_room(plan.served, specs["epyc"].machine)
    assert shape.decode.num_pages == plan.served.kept(on_cpu=True).num_pages(room) == room * 2 // 32


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--json", "/proc/found.json"), "/proc/found.json cannot be written"),
        (("--out", "/proc/cluster"), "cannot write to /proc/cluster"),
        (("--out", "OUT", "--cluster", "/none.yaml"), "cannot read /none.yaml"),
    ],
)
def test_what_cannot_be_written_is_told_before_anything_is_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], named: str
) -> None:
    given = [str(tmp_path) if option == "OUT" else option for option in options]
    assert main(["plan", "size", str(plan_file(tmp_path)), *given]) == 1
    said = capsys.readouterr()
    assert named in said.err
    assert not said.out, "nothing has been found"


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_ctrl_c_ends_a_search_and_what_it_simulates(tmp_path: Path) -> None:
    plan, types = read_plan(plan_file(tmp_path))
    told: list[int] = []

    def interrupt_first(num: int) -> None:
        told.append(num)
        if num == 1:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        size(plan, types, 1, interrupt_first)
    assert len(told) <= 2, "the whole search takes ten simulations or more"
    assert not multiprocessing.active_children()


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_a_search_that_is_killed_leaves_no_processes(tmp_path: Path) -> None:
    file = plan_file(tmp_path, load={"requests": 20_000, "rate": 40.0})
    command = [sys.executable, "-m", "tandem.cli", "plan", "size", str(file), "--processes", "1"]
    with subprocess.Popen(command) as search:
        own = psutil.Process(search.pid)
        # One keeps track of semaphores, the other one simulates.
        children = wait_until(own.children, "two processes", wanted=lambda seen: len(seen) == 2)
        search.kill()
    wait_until(lambda: [child for child in children if child.is_running()], "their ends", wanted=nothing)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"types": {"h100": {"cards": 2}}}, r"types\.h100\.cards is 2, and a worker serves on one GPU"),
        ({"types": {"h100": {"card": "epyc-9654"}}}, r"types\.h100 is a CPU \(epyc-9654\), and files are for GPUs"),
        ({"model": {"name": "llama-3-8b", "kv_dtype": "float32"}}, "GPUs serve 16 bits of both"),
    ],
)
def test_no_files_are_written_for_what_is_not_served(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    plan, types = read_plan(plan_file(tmp_path, **changes))
    pair = Pair("h100", "h100", 1, 1, "")
    found = Found(pair.pools(1, 1), kept(1.0), pair, 1.0, [], [])
    with pytest.raises(ConfigError, match=named):
        write_files(tmp_path / "out", {}, plan, types, found)
    with pytest.raises(ConfigError, match=named):  # also before a search
        check_before(tmp_path / "out", {}, plan, types)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("base", "named"),
    [
        ({"available_node_types": 3}, "available_node_types of the cluster.yaml must hold keys and values, not 3"),
        ({"available_node_types": {"prefill": 3}}, r"available_node_types\.prefill of the cluster.yaml must"),
        ({"available_node_types": {"decode": {"node_config": "x"}}}, r"decode\.node_config of the cluster.yaml must"),
    ],
)
def test_what_is_no_cluster_file_is_told_before_a_search(tmp_path: Path, base: dict[str, Any], named: str) -> None:
    plan, types = read_plan(plan_file(tmp_path))
    with pytest.raises(ConfigError, match=named):
        check_before(tmp_path / "out", base, plan, types)


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_a_budget_gives_the_most_goodput_and_too_small_a_one_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = plan_file(tmp_path, goal="most_goodput", budget=8.5)
    assert main(["plan", "size", str(file), "--processes", "1", "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["best"]["num_prefill"], found["best"]["num_decode"]) == (1, 1)
    assert found["speed"] > 0.5
    assert main(["plan", "size", str(plan_file(tmp_path, goal="most_goodput", budget=7.0))]) == 1
    assert "less than a worker of each role costs" in capsys.readouterr().err
