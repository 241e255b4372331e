"""Page tiers of simulated workers: what is read when, what that takes, and what a router knows of it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from router.policy.prefix import HeldPrefix
from tandem.cli import main
from tandem.core.identity import WorkerKey
from tandem.sim.conversations import ConversationPlan, drawn_conversations
from tandem.sim.faults import Death, FaultShape
from tandem.sim.load import Lengths
from tandem.sim.outcome import Outcome
from tandem.sim.scenario import read_scenario
from tandem.sim.shape import PoolShape
from tandem.sim.tiers import TierShape, VirtualTier
from tandem.sim.world import World
from tests.unit.sim.test_prefixes import KEEPS, asked
from tests.unit.sim.test_world import LIMITS, MESSAGE_S, PAGE, STEP_S, TOKEN_BYTES, TOKEN_S

PAGE_BYTES = PAGE * TOKEN_BYTES
MS = PAGE_BYTES * 1e3
"""Bytes a second: a page in a millisecond. To compute one takes four times as long."""
PREFILL = WorkerKey("prefill-0", "1")
SMALL = dataclasses.replace(KEEPS, prefill=PoolShape(1, 16, LIMITS))


def again(shape: TierShape | None, *more: int) -> tuple[World, Outcome]:
    """Three prompts of eight pages, of which the pool has room for two; then the first one once more, of which the last
    page is computed in any case, and then `more` of them. The last one's outcome."""
    world = World(dataclasses.replace(SMALL, tiers=shape))
    order = [1, 2, 3, 1, *more]
    outcomes = world.run([asked(n, 5.0 * n, 128, 1, *range(10 * who, 10 * who + 4)) for n, who in enumerate(order)])
    assert [one.num_cached for one in outcomes[:3]] == [0, 0, 0]
    return world, outcomes[-1]


def tiers(*, host_pages: int = 0, disk_pages: int = 0, host: float = MS, disk: float = MS / 2) -> TierShape:
    return TierShape(host_pages * PAGE_BYTES, disk_pages * PAGE_BYTES, host, disk)


@pytest.mark.parametrize(
    ("shape", "page_s"),
    [
        (tiers(host_pages=100), 0.001),
        (tiers(disk_pages=100), 0.002),
        (tiers(host_pages=100, disk_pages=100), 0.001),
    ],
    ids=["host", "disk", "both"],
)
def test_what_the_pool_has_forgotten_is_read(shape: TierShape, page_s: float) -> None:
    world, one = again(shape)
    assert one.num_cached == 112
    assert one.ttft_s == pytest.approx(MESSAGE_S + 7 * page_s + STEP_S + PAGE * TOKEN_S)
    found = world.machines[PREFILL].tiers
    assert found is not None
    assert (found.counters.num_fetched, found.counters.num_missed) == (7, 21)
    assert found.stores[0].counters.num_read == 7
    assert all(store.held()[0] == 24 for store in found.stores)


@pytest.mark.parametrize(
    ("shape", "more"),
    [(None, ()), (tiers(), ()), (tiers(disk_pages=100, disk=MS / 10), (2,))],
    ids=["no tiers", "no room", "slow"],
)
def test_what_is_nowhere_or_known_to_be_slow_is_computed(shape: TierShape | None, more: tuple[int, ...]) -> None:
    _, one = again(shape, *more)
    assert one.num_cached == 0
    assert one.ttft_s == pytest.approx(MESSAGE_S + 2 * STEP_S + 128 * TOKEN_S)


def test_the_router_learns_what_each_tier_holds_and_costs() -> None:
    world, _ = again(tiers(host_pages=100, disk_pages=100))
    tokens_per_s = world.routers[0].known.snapshot().prefill_tokens_per_s
    near, _ = world.routers[0].known.snapshot().read_costs(PREFILL)
    assert near == pytest.approx(0.001 / PAGE * tokens_per_s)
    _, far = _learnt_from(tiers(disk_pages=100))
    assert far == pytest.approx(0.002 / PAGE * tokens_per_s, rel=0.05)


def _learnt_from(shape: TierShape) -> tuple[float, float]:
    world, _ = again(shape)
    return world.routers[0].known.snapshot().read_costs(PREFILL)


def test_the_router_hears_of_tiers_with_the_next_report() -> None:
    world, _ = again(tiers(host_pages=100, disk_pages=100))
    prefixes = world.routers[0].known._prefixes
    assert prefixes is not None
    other = asked(9, 0.0, 128, 1, *range(20, 24))  # the second prompt, whose pages the pool has given up
    held: HeldPrefix[WorkerKey] = prefixes.held(world.page_keys(other), 128)
    assert (held.num_ready(PREFILL), held.num_stored(PREFILL), held.num_near(PREFILL)) == (0, 112, 112)
    alone, _ = again(tiers(disk_pages=100))
    prefixes = alone.routers[0].known._prefixes
    assert prefixes is not None
    held = prefixes.held(alone.page_keys(other), 128)
    assert (held.num_stored(PREFILL), held.num_near(PREFILL)) == (112, 0)


def test_the_router_hears_what_tiers_have_given_up() -> None:
    """Of three prompts of eight pages a tier of ten keeps the last one, and a part of others."""
    world, _ = again(tiers(host_pages=10))
    prefixes, found = world.routers[0].known._prefixes, world.machines[PREFILL].tiers
    assert prefixes is not None
    assert found is not None
    known, there = [], []
    for who in (1, 2, 3):
        keys = world.page_keys(asked(9, 0.0, 128, 1, *range(10 * who, 10 * who + 4)))[:7]
        known.append(prefixes.held(keys, 128).tiers.num_pages(PREFILL))
        there.append(next((n for n, key in enumerate(keys) if not found.stores[0].has(key)), 7))
    assert known == there
    assert sum(there) <= 10 < 3 * 7


def test_decode_reads_what_it_computes_by_itself_then() -> None:
    limits = dataclasses.replace(LIMITS, computes_prompts=True)
    shape = dataclasses.replace(
        KEEPS, prefill=PoolShape(0, 1, LIMITS), decode=PoolShape(1, 16, limits), mixed_pool_tokens=1000,
        tiers=tiers(host_pages=100),
    )  # fmt: skip
    order = [1, 2, 3, 1]
    arrivals = [asked(n, 5.0 * n, 128, 2, *range(10 * who, 10 * who + 4)) for n, who in enumerate(order)]
    world = World(shape)
    *_, one = world.run(arrivals)
    assert one.num_cached == 112
    machine = world.machines[WorkerKey("decode-0", "1")]
    assert machine.tiers is not None
    assert machine.tiers.counters.num_fetched == 7
    assert machine.is_empty


def test_a_prompt_that_nobody_waits_for_any_more_is_not_computed_when_it_has_been_read() -> None:
    """Its decode worker dies meanwhile; the next attempt takes what was read."""
    slow = dataclasses.replace(
        SMALL, tiers=tiers(disk_pages=100, disk=MS / 100), faults=FaultShape((Death("decode-0", 15.3),)), start_s=0.1
    )
    world = World(slow)
    order = [1, 2, 3, 1]
    *_, one = world.run([asked(n, 5.0 * n, 128, 2, *range(10 * who, 10 * who + 4)) for n, who in enumerate(order)])
    assert (one.num_recoveries, one.error, one.decode) == (1, "", "decode-1")
    assert 15.7 < one.first_token_s < 15.8
    assert world.machines[PREFILL].work.num_tokens == 3 * 128 + PAGE
    assert world.machines[PREFILL].is_empty


@pytest.mark.parametrize("deaths", [(), (Death("decode-0", 4.0), Death("prefill-1", 9.0), Death("decode-1", 14.0))])
def test_whatever_comes_no_page_is_lost(deaths: tuple[Death, ...]) -> None:
    limits = dataclasses.replace(LIMITS, computes_prompts=True)
    shape = dataclasses.replace(
        KEEPS, prefill=PoolShape(2, 40, LIMITS), decode=PoolShape(2, 40, limits), mixed_pool_tokens=200, start_s=1.0,
        tiers=tiers(host_pages=60, disk_pages=200), faults=FaultShape(deaths),
    )  # fmt: skip
    plan = ConversationPlan(
        25, Lengths(4, 0.4), Lengths(60, 0.5), Lengths(12, 0.5), think_s=1.0, rate=3.0, num_common=40, most_tokens=400
    )
    world = World(shape)
    outcomes = world.run(drawn_conversations(plan, seed=2))
    assert sum(bool(one.error) for one in outcomes) <= len(deaths)
    read = 0
    for machine in world.machines.values():
        machine.pool.check()
        assert machine.tiers is not None
        for store in machine.tiers.stores:
            assert isinstance(store, VirtualTier)
            store._index.check()
        read += machine.tiers.counters.num_fetched
        if not machine.is_dead:
            counts = machine.pool.counts()
            assert counts.free + counts.cached == machine.pool.num_pages, (machine.key, counts)
            assert machine.is_empty
    assert read > 50


@pytest.mark.long
def test_a_file_says_what_tiers_lie_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        "prefill: {tokens: 8192}\ndecode: {tokens: 8192}\nnode: {host_gb_per_s: 10, disk_gb_per_s: 2}\n"
        "load: {conversations: 8, turns: 2, concurrency: 8, think_time_s: 5, input_median: 1500, output_median: 4}\n"
    )
    (tmp_path / "none.yaml").write_text(text)
    (tmp_path / "both.yaml").write_text(
        text + "tandem: {cache: {host_bytes: 1000000000, disk_path: /pages, disk_bytes: 2000000000}}\n"
    )
    assert read_scenario(tmp_path / "none.yaml").shape().tiers is None
    assert read_scenario(tmp_path / "both.yaml").shape().tiers == TierShape(10**9, 2 * 10**9, 10e9, 2e9)
    shares = []
    for name in ("none", "both"):
        assert main(["sim", "run", str(tmp_path / f"{name}.yaml"), "--json", str(tmp_path / "found.json")]) == 0
        found = json.loads((tmp_path / "found.json").read_text())
        shares.append(found["num_cached_tokens"] / found["num_input_tokens"])
        assert (found["tiers"] is None) is (name == "none")
        assert ("page tiers" in capsys.readouterr().out) is (name == "both")
    assert set(found["tiers"]["tiers"]) == {"host", "disk"}
    assert found["tiers"]["num_fetched"] > 0
    assert shares[1] > shares[0]
