"""Several routers over one simulated cluster: each decides by what it has sent and by what workers have told it."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.policy.gate import UnderWay
from router.policy.worker_load import WorkerLoad
from router.request.tenant import Tenant
from tandem.core.errors import DeadlineError, InternalError, RateLimitError
from tandem.core.identity import WorkerKey
from tandem.sim import kernel
from tandem.sim.command import run
from tandem.sim.faults import Death
from tandem.sim.load import Arrival, Lengths, drawn
from tandem.sim.outcome import Outcome
from tandem.sim.router import Router
from tandem.sim.scenario import Scenario
from tandem.sim.shape import KindShape, PoolShape, TenantShape, WorldShape
from tandem.sim.world import World
from tests.unit.sim.test_classes import check_empty
from tests.unit.sim.test_prefixes import asked
from tests.unit.sim.test_sim_faults import dying
from tests.unit.sim.test_sim_faults import simulated as with_deaths
from tests.unit.sim.test_world import LIMITS, MESSAGE_S, SHAPE, STEP_S, TOKEN_S, of_tenant, simulated

DECODE = WorkerKey("decode-0", "1")


def of_routers(num: int, shape: WorldShape = SHAPE, **others: object) -> WorldShape:
    return dataclasses.replace(shape, num_routers=num, **others)  # type: ignore[arg-type]


requests = st.lists(st.tuples(st.floats(0, 1), st.integers(1, 400), st.integers(1, 40)), min_size=1, max_size=30)


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(requests, st.sampled_from((2, 4)), st.integers(40, 80), st.integers(1, 3), st.booleans(), st.booleans())
def test_whatever_comes_to_whichever_router_ends_and_leaves_nothing_behind(
    each: list[tuple[float, int, int]], num: int, num_pages: int, num_workers: int, mixes: bool, has_tenants: bool
) -> None:
    """Also where pages are so few that sequences are preempted and reservations wait."""
    shape = of_routers(
        num,
        prefill=PoolShape(num_workers, num_pages, LIMITS),
        decode=PoolShape(num_workers, num_pages, dataclasses.replace(LIMITS, computes_prompts=mixes)),
        mixed_pool_tokens=200 if mixes else 0,
        tenants={name: of_tenant(name) for name in "ab"} if has_tenants else {},
    )
    tenants = ("a", "b") if has_tenants else ("", "")
    world, outcomes = simulated(
        shape, [Arrival(number, *one, tenant=tenants[number % 2]) for number, one in enumerate(each)]
    )
    came = Counter(one.router for one in outcomes)
    for router in world.routers:
        assert router.num_requests == router.num_placed == came[router.number]
    placed = sum((machine.num_commands for machine in world.machines.values()), Counter[int]())
    by_decode = Counter(one.router for one in outcomes if not one.prefill)
    assert placed == Counter({number: 2 * num - by_decode[number] for number, num in came.items()})
    check_empty(world)


@pytest.mark.long
@pytest.mark.parametrize("num", [2, 4])
def test_whoever_dies_all_end_or_fail_at_each_router(num: int) -> None:
    deaths = Death("decode-0", 0.2), Death("prefill-1", 0.35), Death("decode-1", 0.5)
    shape = of_routers(num, dying(2, 2, *deaths))
    world, outcomes = with_deaths(shape, [Arrival(n, 0.01 * n, 100 + n, 20) for n in range(80)])
    assert len({one.router for one in outcomes if one.num_recoveries}) == num
    assert sum(router.num_placed for router in world.routers) == 80 + sum(one.num_recoveries for one in outcomes)
    check_empty(world)


@pytest.mark.long
def test_the_seed_says_which_router_a_request_comes_to_and_all_that_follows() -> None:
    arrivals = drawn(100, 40.0, Lengths(100, 0.5), Lengths(10, 0.5), seed=0)

    def ran(seed: int) -> list[Outcome]:
        tenants = {"": TenantShape(), "a": of_tenant("a")}
        return World(of_routers(4, seed=seed, tenants=tenants)).run(arrivals)

    first = ran(1)
    assert first == ran(1)
    other = ran(2)
    assert [one.router for one in first] != [one.router for one in other]
    for outcomes in (first, other):
        assert min(Counter(one.router for one in outcomes).values()) > 10
        assert len({one.router for one in outcomes}) == 4


def until(world: World, time_s: float) -> None:
    come: list[float] = []
    world.kernel.at(time_s, lambda: come.append(time_s))
    world.kernel.run_until(lambda: come)


def come_to(world: World, routers: Sequence[int]) -> None:
    """Requests come to these in turn, and not by chance."""
    numbers = itertools.cycle(routers)
    world._whom.randrange = lambda _: next(numbers)  # type: ignore[method-assign,assignment,misc]


def seen(world: World, router: Router, worker: WorkerKey = DECODE) -> WorkerLoad:
    return world.machines[worker].load(router.known.load(worker))


def test_a_router_sees_its_own_requests_at_once_and_those_of_others_once_their_worker_has_told() -> None:
    world = World(of_routers(2))
    outcome = world.ask(Arrival(0, 0.0, 100, 5))
    until(world, MESSAGE_S / 2)
    own, other = world.routers[outcome.router], world.routers[1 - outcome.router]
    assert (seen(world, own).num_active, seen(world, other).num_active) == (1, 0)
    until(world, MESSAGE_S * 1.5)  # the worker has it, and its word is on the way
    assert (seen(world, own).num_active, seen(world, other).num_active) == (1, 0)
    until(world, MESSAGE_S * 2.5)
    assert (seen(world, own).num_active, seen(world, other).num_active) == (1, 1)
    assert (seen(world, own).num_others, seen(world, other).num_others) == (0, 1)
    world.kernel.run_all()
    for router in world.routers:
        assert (seen(world, router).num_active, seen(world, router).num_others) == (0, 0)


def test_all_hear_of_a_request_that_is_given_up_also_from_a_worker_that_has_nothing_else() -> None:
    world = World(of_routers(2, kinds={"short": KindShape(timeout_s=0.05)}))
    outcome = world.ask(Arrival(0, 0.0, 600, 5, kind="short"))
    until(world, 0.04)
    workers = list(world.machines)
    assert [seen(world, router, worker).num_active for router in world.routers for worker in workers] == 4 * [1]
    until(world, 0.05 + STEP_S + 64 * TOKEN_S + 3 * MESSAGE_S)  # prefill ends its step first
    assert outcome.error == DeadlineError.code
    assert [seen(world, router, worker).num_active for router in world.routers for worker in workers] == 4 * [0]


def test_routers_that_know_nothing_of_each_other_choose_different_workers_of_those_that_are_equal() -> None:
    """Four requests come at one time: of four idle workers each gets one where they come to four routers."""
    shape = of_routers(4, prefill=PoolShape(4, 200, LIMITS), decode=PoolShape(4, 200, LIMITS))
    world = World(shape)
    outcomes = [world.ask(Arrival(n, 0.0, 100, 5)) for n in range(40)]
    until(world, MESSAGE_S / 2)
    first = {one.router: one for one in reversed(outcomes)}
    assert len(first) == 4
    assert len({one.prefill for one in first.values()}) == len({one.decode for one in first.values()}) == 4


def test_one_router_hears_of_changes_as_several_do_where_that_is_asked() -> None:
    """Of a prompt that has begun it knows then how much of it is left, before the first step has ended."""
    known = {}
    for tells in (False, True):
        world = World(dataclasses.replace(SHAPE, tells_changes=tells))
        world.ask(Arrival(0, 0.0, 64, 5))
        until(world, MESSAGE_S + STEP_S / 2)
        known[tells] = seen(world, world.routers[0], WorkerKey("prefill-0", "1")).num_queued_tokens
    assert known == {False: 0, True: 64}


@pytest.mark.parametrize("num", [1, 2, 4])
def test_a_tenant_s_limit_is_divided_among_routers(num: int) -> None:
    bound = TenantShape(Tenant("bound", "bound", "", requests_per_minute=8))
    world = World(of_routers(num, tenants={"bound": bound}))
    outcomes = world.run([Arrival(n, 0.001 * n, 16, 2, tenant="bound") for n in range(200)])
    let_in = Counter(one.router for one in outcomes if not one.error)
    assert {one.error for one in outcomes} == {"", RateLimitError.code}
    assert let_in == dict.fromkeys(range(num), 8 // num)


def test_the_queue_and_the_retries_are_divided_among_routers() -> None:
    world = World(of_routers(4, max_waiting=10, decode=PoolShape(2, 200, LIMITS)))
    for router in world.routers:
        assert router._admission is not None
        assert router._admission.max_waiting == 3, "its share of 10, rounded up"
        assert router.known.room().num_routers == 4
        assert router._budget.num_left == 256 / 4


@pytest.mark.parametrize("comes_to", [(0,), (0, 1)])
def test_routers_share_the_places_and_use_those_that_others_leave(comes_to: tuple[int, ...]) -> None:
    """More requests than there are places come to one of two routers, or to both."""
    world, most = World(of_routers(2, decode=PoolShape(1, 400, LIMITS))), LIMITS.max_num_seqs
    come_to(world, comes_to)
    for number in range(4 * most):
        world.ask(Arrival(number, 0.0, 16, 400))
    until(world, 2.0)
    held = [router.known.load(DECODE).num_sequences for router in world.routers]
    assert sum(held) >= most, "all places are taken"
    assert [router.known.num_places for router in world.routers] == [most if comes_to == (0,) else most / 2, most / 2]
    assert held[1] == 0 if comes_to == (0,) else abs(held[0] - held[1]) <= 2
    world.kernel.run_all()
    check_empty(world)


@pytest.mark.long
def test_tenants_with_a_backlog_get_what_their_weights_say_wherever_their_requests_come() -> None:
    """All of one come to the first router, and all of the other, which has twice its weight, to the second."""
    tenants = {"one": of_tenant("one"), "two": of_tenant("two", weight=2.0)}
    world = World(of_routers(2, tenants=tenants))
    come_to(world, (0, 1))
    outcomes = world.run([Arrival(n, n * 1e-4, 64, 16, tenant=("one", "two")[n % 2]) for n in range(400)])
    half_s = sorted(one.last_token_s for one in outcomes)[200]
    got = Counter(one.arrival.tenant for one in outcomes if one.last_token_s <= half_s)
    assert got["two"] / got["one"] == pytest.approx(2.0, rel=0.2), got


def test_each_router_hears_of_pages_wherever_they_were_computed() -> None:
    shape = of_routers(2, prefix_cache=True, prefill=PoolShape(2, 200, LIMITS), decode=PoolShape(2, 200, LIMITS))
    arrivals = [asked(n, 0.5 * n, 128, 3, 1, 2, 3, 4) for n in range(12)]
    outcomes = World(shape).run(arrivals)
    assert {one.router for one in outcomes[1:]} == {0, 1}
    assert [one.num_cached for one in outcomes] == [0] + 11 * [112]
    assert len({one.prefill for one in outcomes}) == 1


@pytest.mark.long
def test_a_scenario_has_as_many_routers_as_its_cluster_s_configuration_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Scenario().shape().num_routers == 1
    file, found = tmp_path / "few.yaml", tmp_path / "found.json"
    file.write_text("{load: {requests: 30, rate: 20}, tandem: {pools: {routers: 3}}}")
    run(file, found)
    content = json.loads(found.read_text())
    assert [one["name"] for one in content["routers"]] == ["router-0", "router-1", "router-2"]
    for name in ("num_requests", "num_placed"):
        assert sum(one[name] for one in content["routers"]) == 30
    assert Counter(one["router"] for one in content["requests"]) == {
        one["name"]: one["num_requests"] for one in content["routers"]
    }
    assert "3; each placed " in capsys.readouterr().out


@pytest.mark.parametrize(
    "num_requests", [pytest.param(1_600, marks=pytest.mark.long), pytest.param(10_000, marks=pytest.mark.faults)]
)
def test_of_64_workers_and_8_routers_no_request_costs_more_than_of_8(num_requests: int) -> None:
    """Events of a request, which are what a simulation takes, and what is left behind in each router."""

    def ran(num_workers: int, num_requests: int) -> World:
        half = num_workers // 2
        shape = of_routers(8, prefill=PoolShape(half, 400, LIMITS), decode=PoolShape(half, 400, LIMITS))
        load = drawn(num_requests, 8.0 * num_workers, Lengths(200, 0.5), Lengths(12, 0.5), seed=3)
        world, _ = simulated(shape, load)
        return world

    small, large = ran(8, num_requests // 8), ran(64, num_requests)
    of_small, of_large = (
        world.kernel.num_run / sum(router.num_requests for router in world.routers) for world in (small, large)
    )
    assert of_large < 1.2 * of_small
    for router in large.routers:
        assert not router._jobs
        assert not router._placeless
        for key in large.machines:
            assert router.known.load(key).num_sequences == 0
    assert min(router.num_requests for router in large.routers) > num_requests / 10


def test_requests_that_nobody_lets_go_on_are_told_and_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """While any waits routers tell each other whose turn it is, which brings nothing here."""
    monkeypatch.setattr(kernel, "MOST_IDLE_S", 60.0)
    monkeypatch.setattr(UnderWay, "may_follow", lambda *_: False)
    world = World(of_routers(2))
    with pytest.raises(InternalError, match="nothing has come of what goes on by itself"):
        world.run([Arrival(0, 0.0, 100, 5)])
