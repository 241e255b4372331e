"""A simulated cluster: times that can be counted by hand, and what must hold whatever the load."""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.ledger import Attempt, Ledger
from kvtransfer.layout import KvFormat, LayoutId
from kvtransfer.protocol.messages import AttemptKey
from router.request.tenant import Tenant
from tandem.cluster.supervisor.autoscale import Decision, PoolSize, Range, Settings
from tandem.cluster.supervisor.demand import Sample
from tandem.core.errors import ConfigError, OverloadedError, RateLimitError
from tandem.core.identity import Role, WorkerKey
from tandem.core.pages import PagePool
from tandem.core.step_times import Fitted
from tandem.core.windows import Windows
from tandem.sim.faults import FaultShape, SlowLink
from tandem.sim.fleet import Life
from tandem.sim.load import Arrival, Lengths, drawn
from tandem.sim.outcome import Outcome
from tandem.sim.shape import PoolShape, TenantShape, WorldShape
from tandem.sim.world import World
from tandem.worker.batch import SchedulerLimits
from tandem.worker.scheduler import BatchScheduler

PAGE, TOKEN_BYTES = 16, 2 * 4 * 2 * 8 * 2
FORMAT = KvFormat(LayoutId("0" * 64, "bfloat16", num_layers=4, num_kv_heads=2, head_dim=8, page_size=PAGE), "simulated")
LIMITS = SchedulerLimits(8, 256, 64, 10_000, 0.75, saturating_tokens=64)
STEP_S, TOKEN_S, MESSAGE_S, LATENCY_S = 0.01, 0.0001, 0.001, 0.002
SHAPE = WorldShape(
    prefill=PoolShape(1, 200, LIMITS),
    decode=PoolShape(1, 200, LIMITS),
    kv_format=FORMAT,
    times=Fitted(STEP_S, TOKEN_S),
    bytes_per_s=1e9,
    latency_s=LATENCY_S,
    message_s=MESSAGE_S,
    report_s=0.05,
)


WINDOW = 40


def windowed(shape: WorldShape, window: int = WINDOW, num_windowed: int = 0) -> WorldShape:
    """As `shape`, of a model whose layers all have a window; with pages of a place for these beside one: a mixed one,
    of which a page has as many layers."""
    kept = {"window": window, "num_windowed": num_windowed}
    prefill, decode = (
        dataclasses.replace(pool, limits=dataclasses.replace(pool.limits, **kept))
        for pool in (shape.prefill, shape.decode)
    )
    kv_format = dataclasses.replace(shape.kv_format, layout=dataclasses.replace(FORMAT.layout, **kept))
    return dataclasses.replace(shape, prefill=prefill, decode=decode, kv_format=kv_format)


def simulated(shape: WorldShape, arrivals: list[Arrival]) -> tuple[World, list[Outcome]]:
    """All requests ended, and nothing is held."""
    ended: list[Outcome] = []
    world = World(shape, ended.append)
    outcomes = world.run(arrivals)
    assert sorted(one.arrival.number for one in ended) == [one.number for one in arrivals]
    for outcome in outcomes:
        assert outcome.num_tokens == outcome.arrival.num_output
        assert outcome.arrival.arrived_s < outcome.first_token_s <= outcome.last_token_s
        assert sum(outcome.parts.values()) == pytest.approx(outcome.e2e_s)
        assert min(outcome.parts.values()) >= 0
    for machine in world.machines.values():
        machine.pool.check()
        assert machine.pool.counts().free == machine.pool.num_pages
        assert not machine.choices
        assert machine.num_waiting == 0
    return world, outcomes


def test_of_one_request_every_moment_can_be_counted() -> None:
    _, (one,) = simulated(SHAPE, [Arrival(0, 5.0, 100, 11)])
    # Two chunks of 64 and 36 tokens.
    assert one.ttft_s == pytest.approx(MESSAGE_S + 2 * STEP_S + 100 * TOKEN_S)
    # The first chunk's pages left while the second was computed; the last chunk's leave behind it.
    sent_s = 36 * TOKEN_BYTES / 1e9 + LATENCY_S
    assert one.longest_gap_s == pytest.approx(sent_s + STEP_S + TOKEN_S)
    assert one.e2e_s == pytest.approx(one.ttft_s + sent_s + 10 * (STEP_S + TOKEN_S))
    assert (one.prefill, one.decode) == ("prefill-0", "decode-0")
    # As a router names them.
    assert list(one.parts) == ["waits for prefill", "prefill", "handoff", "decode"]
    parts = MESSAGE_S, 2 * STEP_S + 100 * TOKEN_S, sent_s, 10 * (STEP_S + TOKEN_S)
    assert list(one.parts.values()) == pytest.approx(parts)


def test_of_a_windowed_model_the_last_pages_alone_are_sent() -> None:
    """Of 100 tokens and a window of 40 the first three pages are seen by no output."""
    slow = dataclasses.replace(windowed(SHAPE), bytes_per_s=100 * TOKEN_BYTES)
    _, (one,) = simulated(slow, [Arrival(0, 5.0, 100, 11)])
    assert one.ttft_s == pytest.approx(MESSAGE_S + 2 * STEP_S + 100 * TOKEN_S)
    # Of them the first 16 are computed with the first chunk, and leave while the second one is.
    sent_s = (100 - 48) / 100 + LATENCY_S - (STEP_S + 36 * TOKEN_S)
    assert one.longest_gap_s == pytest.approx(sent_s + STEP_S + TOKEN_S)
    # Of 130 tokens and chunks of 64, all that are sent are of the second chunk and of the third one.
    _, (one,) = simulated(slow, [Arrival(0, 5.0, 130, 11)])
    assert one.longest_gap_s == pytest.approx((130 - 80) / 100 + LATENCY_S - (STEP_S + 2 * TOKEN_S) + STEP_S + TOKEN_S)


def test_of_a_mixed_model_what_some_layer_sees_is_sent() -> None:
    """Of 7 places all pages of the layers that see all, and of the last 4 two more each."""
    mixed = windowed(SHAPE, num_windowed=2)
    slow = dataclasses.replace(mixed, bytes_per_s=100 * TOKEN_BYTES)
    _, (one,) = simulated(slow, [Arrival(0, 5.0, 100, 11)])
    # The first six leave while the second chunk is computed.
    sent_s = (7 + 2 * 4) * PAGE / 100 + LATENCY_S - (STEP_S + 36 * TOKEN_S)
    assert one.longest_gap_s == pytest.approx(sent_s + STEP_S + TOKEN_S)
    _, (one,) = simulated(mixed, [Arrival(0, 5.0, 100, 11)])
    assert one.longest_gap_s == pytest.approx(9 * PAGE * TOKEN_BYTES / 1e9 + LATENCY_S + STEP_S + TOKEN_S)


@pytest.mark.parametrize("num_prefill", [0, 1])
def test_quiet_steps_of_a_mixed_model_are_steps_one_by_one(num_prefill: int) -> None:
    """With prompts that begin alike, and pools in which they get into each other's way."""
    pools = {
        name: PoolShape(num, 120, dataclasses.replace(LIMITS, computes_prompts=not num_prefill))
        for name, num in (("prefill", num_prefill), ("decode", 1))
    }
    shape = dataclasses.replace(windowed(dataclasses.replace(SHAPE, **pools), num_windowed=2), prefix_cache=True)
    if not num_prefill:
        shape = dataclasses.replace(shape, mixed_pool_tokens=math.inf)
    load = [
        Arrival(n, 0.02 * n, 100 + 20 * (n % 5), 150 + n, block_ids=(1, 2, 3, 10 + n % 3), block_size=32)
        for n in range(12)
    ]
    found = []
    for at_once in (True, False):
        world = World(shape, at_once=at_once)
        found.append([(one.first_token_s, one.last_token_s, one.num_cached) for one in world.run(load)])
        preempted = sum(machine.work.num_preemptions for machine in world.machines.values())
        assert preempted > 0
        for machine in world.machines.values():
            machine.pool.check()
            assert machine.pool.counts().used == machine.pool.counts().reserved == 0
    assert found[0] == [pytest.approx(one) for one in found[1]]
    assert any(num_cached for *_, num_cached in found[0])


def test_a_text_of_a_windowed_model_may_be_longer_than_the_pools() -> None:
    pools = {name: PoolShape(1, 12, LIMITS) for name in ("prefill", "decode")}
    small = dataclasses.replace(SHAPE, **pools)
    _, (one,) = simulated(windowed(small), [Arrival(0, 0.0, 1000, 500)])
    # Decode does not begin before all pages that it holds have come: three or four.
    assert one.longest_gap_s == pytest.approx(STEP_S + TOKEN_S + LATENCY_S + 40 * TOKEN_BYTES / 1e9, rel=1e-3)
    with pytest.raises(ConfigError, match=r"1000 \+ 500 tokens, and a worker has room for 192"):
        World(small).run([Arrival(0, 0.0, 1000, 500)])
    with pytest.raises(ConfigError, match=r"1000 \+ 500 tokens, of which 240 tokens are kept at a time, and a worker"):
        World(windowed(small, 70)).run([Arrival(0, 0.0, 1000, 500)])
    with pytest.raises(ConfigError, match=r"of which 109 pages are kept at a time, and a worker has room for 12;"):
        World(windowed(small, 70, 1)).run([Arrival(0, 0.0, 1000, 500)])


def test_a_slow_way_out_is_shared_by_all_that_use_it() -> None:
    slow = dataclasses.replace(SHAPE, bytes_per_s=100 * TOKEN_BYTES)  # a prompt a second
    _, outcomes = simulated(slow, [Arrival(number, 0.0, 100, 2) for number in range(4)])
    second_tokens = sorted(one.last_token_s for one in outcomes)
    assert [later - sooner for sooner, later in pairwise(second_tokens)] == pytest.approx([1.0] * 3, abs=0.02)


def test_an_output_of_one_token_needs_no_decode() -> None:
    world, (one,) = simulated(SHAPE, [Arrival(0, 0.0, 40, 1)])
    assert one.tpot_s is None
    parts = {"waits for prefill": MESSAGE_S, "prefill": STEP_S + 40 * TOKEN_S, "decode": 0.0}
    assert one.parts == pytest.approx(parts)
    assert [machine.work.num_steps for machine in world.machines.values() if machine.role is Role.DECODE] == [0]


def test_decode_computes_short_prompts_where_prefill_is_busy() -> None:
    limits = dataclasses.replace(LIMITS, computes_prompts=True)
    mixed = dataclasses.replace(SHAPE, decode=dataclasses.replace(SHAPE.decode, limits=limits), mixed_pool_tokens=64)
    arrivals = [Arrival(0, 0.0, 2000, 4), *(Arrival(number, 0.01 * number, 32, 4) for number in range(1, 6))]
    world, outcomes = simulated(mixed, arrivals)
    alone = [one for one in outcomes if not one.prefill]
    assert alone
    assert all(one.arrival.num_input == 32 for one in alone)
    assert {tuple(one.parts) for one in alone} == {("waits for prefill", "prefill", "decode")}
    computed = sum(machine.work.num_tokens for machine in world.machines.values() if machine.role is Role.DECODE)
    assert computed == 32 * len(alone) + 3 * len(outcomes), "their prompts, and three more tokens of each"
    _, outcomes = simulated(SHAPE, arrivals)
    assert all(one.prefill for one in outcomes)


@pytest.mark.long
def test_more_workers_take_more_and_each_its_part() -> None:
    arrivals = drawn(200, 40.0, Lengths(200, 0.5), Lengths(20, 0.5), seed=1)
    _, few = simulated(SHAPE, arrivals)
    wide = dataclasses.replace(
        SHAPE,
        prefill=dataclasses.replace(SHAPE.prefill, num_workers=4),
        decode=dataclasses.replace(SHAPE.decode, num_workers=4),
    )
    world, many = simulated(wide, arrivals)
    assert sum(one.ttft_s for one in many) < sum(one.ttft_s for one in few) / 4
    busy = [machine.work.num_tokens for machine in world.machines.values() if machine.role is Role.PREFILL]
    assert min(busy) > 0.5 * max(busy)


@pytest.mark.long
def test_prompts_that_lose_their_pages_at_prefill_are_computed_again_and_sent_once() -> None:
    """Decode grants late, and those to whom it does go before the others."""
    num_preempted = 0
    for seed in range(12):
        shape = dataclasses.replace(
            SHAPE, prefill=PoolShape(2, 40, LIMITS), decode=PoolShape(2, 30, LIMITS), bytes_per_s=2000 * TOKEN_BYTES
        )
        rng = random.Random(seed)
        arrivals = [Arrival(n, rng.random(), rng.randint(1, 400), rng.randint(1, 40)) for n in range(60)]
        world, outcomes = simulated(shape, arrivals)
        num_preempted += sum(m.work.num_preemptions for m in world.machines.values() if m.role is Role.PREFILL)
        computed = sum(m.work.num_tokens for m in world.machines.values() if m.role is Role.DECODE)
        assert computed >= sum(one.num_tokens - 1 for one in outcomes), "each token but the first is of a decode step"
    assert num_preempted > 20


def granted_in_turn(prompts: list[int], num_pages: int) -> list[list[int]]:
    """By the ledger that ships, each time somebody gets pages, who does: the oldest grant is handed off, then others
    may get some."""
    ledger = Ledger[Attempt](BatchScheduler(PagePool(num_pages, PAGE), LIMITS, salt=b""), bound=100)
    for number, num_tokens in enumerate(prompts):
        key = AttemptKey(str(number), 1)
        ledger.push(Attempt(key=key, turn=0.0, arrival=number, num_tokens=num_tokens, num_running=1, page_keys=()))
    rounds, granted = list[list[int]](), list[Attempt]()
    while taken := list(iter(ledger.take, None)):
        rounds.append([attempt.arrival for attempt in taken])
        granted += taken
        ledger.admit(granted.pop(0))
    return rounds


def test_one_large_reservation_holds_back_the_next_and_short_ones_pass_as_the_ledger_says() -> None:
    """A quarter of the pool may be reserved at a time, beside one reservation that is larger."""
    prompts = [336, 336, 64]
    in_turn = granted_in_turn(prompts, 80)
    assert in_turn == [[0, 2], [1]]
    shape = dataclasses.replace(SHAPE, prefill=PoolShape(3, 200, LIMITS), decode=PoolShape(1, 80, LIMITS))
    _, outcomes = simulated(shape, [Arrival(number, 0.0, num, 3) for number, num in enumerate(prompts)])
    assert len({one.prefill for one in outcomes}) == 3
    first_s, second_s, short_s = (one.handed_off_s or 0.0 for one in outcomes)
    assert short_s == pytest.approx(outcomes[2].first_token_s + 64 * TOKEN_BYTES / 1e9 + LATENCY_S)
    assert first_s > short_s + STEP_S
    # Both long ones are computed at the same time, and there is room for both.
    assert outcomes[1].first_token_s == pytest.approx(outcomes[0].first_token_s)
    assert second_s == pytest.approx(first_s + MESSAGE_S + 336 * TOKEN_BYTES / 1e9 + LATENCY_S)


def test_requests_wait_behind_the_router_s_gate_and_short_prompts_overtake_long_ones() -> None:
    """Once it is known how fast prompts are computed."""
    long = [Arrival(number, 1.0, 1000, 2) for number in range(1, 21)]
    world = World(SHAPE)
    at_prefill: list[int] = []
    for at_s in (1.1, 2.0, 3.0):
        world.kernel.at(at_s, lambda: at_prefill.append(len(world.machines[WorkerKey("prefill-0", "1")].choices)))
    outcomes = world.run([Arrival(0, 0.0, 1000, 2), *long, Arrival(21, 1.1, 32, 2)])
    assert max(at_prefill) <= 4, "one is computed, one may be on its way out, and two wait for it"
    assert outcomes[-1].ttft_s < 0.7
    assert max(one.ttft_s for one in outcomes) > 5


def test_what_the_router_knows_of_an_idle_worker_is_that_it_is_idle() -> None:
    arrivals = [Arrival(number, 0.1 * number, 100, 1 + number % 2) for number in range(20)]
    world, _ = simulated(SHAPE, arrivals)
    for machine in world.machines.values():
        load = machine.load(world.routers[0].known.load(machine.key))
        assert (load.num_active, load.num_queued_tokens, load.num_stepping) == (0, 0, 0)
        assert load.num_available_pages == machine.pool.num_pages


@pytest.mark.long
def test_an_overload_waits_and_is_not_lost() -> None:
    _, outcomes = simulated(SHAPE, drawn(1500, 1000.0, Lengths(60), Lengths(4), seed=1))
    assert max(one.ttft_s for one in outcomes) > 10


@pytest.mark.long
def test_the_same_scenario_gives_the_same() -> None:
    arrivals = drawn(100, 30.0, Lengths(150, 0.8), Lengths(30, 0.8), seed=3)
    first, second = (simulated(SHAPE, arrivals)[1] for _ in range(2))
    assert [dataclasses.asdict(one) for one in first] == [dataclasses.asdict(one) for one in second]


def test_a_request_that_fits_nowhere_is_named() -> None:
    with pytest.raises(ConfigError, match=r"request 1 has 3000 \+ 300 tokens, and a worker has room for 3200"):
        World(SHAPE).run([Arrival(0, 0.0, 10, 1), Arrival(1, 0.0, 3000, 300)])


requests = st.lists(st.tuples(st.floats(0, 2), st.integers(1, 400), st.integers(1, 40)), min_size=1, max_size=30)
windows = st.sampled_from((0, 0, 20, 150))


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(requests, st.integers(40, 80), st.integers(30, 60), st.integers(1, 3), st.booleans(), windows)
def test_whatever_comes_ends_and_leaves_nothing_behind(
    asked: list[tuple[float, int, int]],
    prefill_pages: int,
    decode_pages: int,
    num_workers: int,
    mixes: bool,
    window: int,
) -> None:
    """Also where pages are so few that sequences are preempted and reservations wait."""
    shape = dataclasses.replace(
        SHAPE,
        prefill=PoolShape(num_workers, prefill_pages, LIMITS),
        decode=PoolShape(num_workers, decode_pages, dataclasses.replace(LIMITS, computes_prompts=mixes)),
        mixed_pool_tokens=200 if mixes else 0,
    )
    simulated(windowed(shape, window), [Arrival(number, *one) for number, one in enumerate(asked)])


def of_tenant(name: str, weight: float = 1.0, priority: int = 0) -> TenantShape:
    return TenantShape(Tenant(name, name, name, weight=weight), priority)


@pytest.mark.long
def test_tenants_with_a_backlog_get_what_their_weights_say() -> None:
    tenants = {"one": of_tenant("one"), "two": of_tenant("two", weight=2.0)}
    shape = dataclasses.replace(SHAPE, tenants=tenants)
    arrivals = [Arrival(n, n * 1e-4, 64, 16, tenant=("one", "two")[n % 2]) for n in range(400)]
    _, outcomes = simulated(shape, arrivals)
    half_s = sorted(one.last_token_s for one in outcomes)[200]  # after that one has none left
    got = Counter(one.arrival.tenant for one in outcomes if one.last_token_s <= half_s)
    assert got["two"] / got["one"] == pytest.approx(2.0, rel=0.15), got


@pytest.mark.long
def test_answers_count_for_tenants_as_prompts_do() -> None:
    """One asks for five times as many tokens with each request: it has so many turns less."""
    shape = dataclasses.replace(SHAPE, tenants={name: of_tenant(name) for name in ("long", "short")})
    lengths = {"long": (32, 120), "short": (16, 8)}
    names = ["long" if n % 7 == 0 else "short" for n in range(350)]
    outcomes = World(shape).run([Arrival(n, n * 1e-4, *lengths[who], tenant=who) for n, who in enumerate(names)])
    half_s = max(one.last_token_s for one in outcomes) / 2
    got = Counter[str]()
    for one in outcomes:
        got[one.arrival.tenant] += (one.arrival.num_input + one.num_tokens) * (one.last_token_s <= half_s)
    assert got["long"] == pytest.approx(got["short"], rel=0.25)


def test_an_answer_counts_while_it_is_generated() -> None:
    """Of two tenants that wait for one of two places the one that has the other place gets fewer turns there."""
    decode = PoolShape(1, 200, dataclasses.replace(LIMITS, max_num_seqs=2))
    shape = dataclasses.replace(SHAPE, decode=decode, tenants={name: of_tenant(name) for name in ("has", "lacks")})
    short = [Arrival(1 + n, 0.05, 16, 8, tenant=("has", "lacks")[n % 2]) for n in range(80)]
    long, *others = World(shape).run([Arrival(0, 0.0, 16, 300, tenant="has"), *short])
    got = Counter(one.arrival.tenant for one in others if one.last_token_s <= long.last_token_s)
    assert got["lacks"] > 1.5 * got["has"] > 0


def test_limits_a_minute_hold() -> None:
    """Two requests a second come for a minute, each of 16 tokens and 8 of an answer."""
    kinds = {
        "free": of_tenant("free"),
        "requests": TenantShape(Tenant("requests", "requests", "", requests_per_minute=30)),
        "tokens": TenantShape(Tenant("tokens", "tokens", "", tokens_per_minute=24 * 40)),
    }
    world = World(dataclasses.replace(SHAPE, tenants=kinds))
    outcomes = world.run([Arrival(n, 0.5 * (n // 3), 16, 8, tenant=list(kinds)[n % 3]) for n in range(3 * 120)])
    let_in = Counter(one.arrival.tenant for one in outcomes if not one.error)
    assert {one.error for one in outcomes} == {"", RateLimitError.code}
    assert let_in["free"] == 120
    assert let_in["requests"] == pytest.approx(30 + 30, abs=1), "as many at once, and as many within the minute"
    assert let_in["tokens"] == pytest.approx(40 + 40, abs=2)


def test_who_is_more_urgent_goes_first() -> None:
    tenants = {"slow": of_tenant("slow"), "urgent": of_tenant("urgent", priority=-1)}
    shape = dataclasses.replace(SHAPE, tenants=tenants, ageing_s=100.0)
    arrivals = [Arrival(n, n * 1e-4, 64, 16, tenant="urgent" if n >= 100 else "slow") for n in range(120)]
    _, outcomes = simulated(shape, arrivals)
    latest_s = max(one.last_token_s for one in outcomes[100:])
    assert sum(one.first_token_s > latest_s for one in outcomes[:100]) > 50


@pytest.mark.long
def test_an_overload_is_refused_and_a_burst_is_not() -> None:
    shape = dataclasses.replace(SHAPE, max_waiting=40)
    ended: list[Outcome] = []
    world = World(shape, ended.append)
    world.run([Arrival(n, 1.0, 64, 16) for n in range(40)])
    assert not any(one.error for one in ended), "as many as may wait"
    arrivals = [Arrival(n, n * 1e-3, 64, 16) for n in range(2_000)]
    waiting, refusing = World(SHAPE), World(shape)
    all_wait, some_refused = waiting.run(arrivals), refusing.run(arrivals)
    served = [one for one in some_refused if not one.error]
    assert {one.error for one in some_refused} == {"", OverloadedError.code}
    assert len(served) + sum(one.error == OverloadedError.code for one in some_refused) == 2_000
    assert max(one.ttft_s for one in served) < 0.2 * max(one.ttft_s for one in all_wait)
    assert refusing.figures.num_open == 0


def by_load(prefill: Range, decode: Range) -> WorldShape:
    return dataclasses.replace(
        SHAPE,
        prefill=dataclasses.replace(SHAPE.prefill, num_workers=prefill.least, bounds=prefill),
        decode=dataclasses.replace(SHAPE.decode, num_workers=decode.least, bounds=decode),
        start_s=20.0,
        ttft_s=1.0,
        tpot_s=0.5,
    )


def waves(seconds: float) -> list[Arrival]:
    """Much for two minutes, little for five, and again."""
    rng, now_s, found = random.Random(5), 0.0, []
    while now_s < seconds:
        now_s += rng.expovariate(40.0 if now_s % 420 < 120 else 1.0)
        found.append(Arrival(len(found), now_s, rng.randint(50, 350), rng.randint(1, 20)))
    return found


@pytest.mark.long
def test_pools_follow_their_load_by_the_law_that_ships() -> None:
    arrivals = waves(415)
    shape = by_load(Range(1, 8), Range(4, 4))
    world, outcomes = simulated(shape, arrivals)
    wanted = [decision.wanted for decision in world.decisions]
    assert {decision.role for decision in world.decisions} == {Role.PREFILL}
    assert max(wanted) > 2
    assert wanted[-1] < max(wanted), "it shrinks again"
    grown = [life for life in world.fleet.lives if life.asked_s > 0]
    assert all(life.ready_s is None or life.ready_s == pytest.approx(life.asked_s + 20.0) for life in grown)
    assert any(life.gone_s is not None and life.machine is not None for life in grown), "some have served and are gone"
    late = [one.ttft_s > 1.0 for one in outcomes if one.arrival.arrived_s > 60]
    assert sum(late) < 0.3 * len(late), "one worker alone serves half of what comes in the busy minutes"


def prompts_then_outputs(each_s: float) -> list[Arrival]:
    """Prompts of which prefill has much, then outputs of which decode has, and back."""
    rng, now_s, found = random.Random(7), 0.0, []
    while now_s < 3 * each_s:
        are_outputs = each_s <= now_s < 2 * each_s
        now_s += rng.expovariate(4.5 if are_outputs else 33.0)
        lengths = (rng.randint(5, 40), rng.randint(300, 500)) if are_outputs else (rng.randint(100, 300), 2)
        found.append(Arrival(len(found), now_s, *lengths))
    return found


@pytest.mark.faults
def test_workers_change_their_role_with_the_load_by_the_law_that_ships() -> None:
    each_s = 100.0
    shape = dataclasses.replace(by_load(Range(1, 3), Range(1, 3)), start_s=1e6, flexible=2, change_s=1.0)
    shape = dataclasses.replace(
        shape,
        prefill=dataclasses.replace(shape.prefill, num_workers=2),
        decode=dataclasses.replace(shape.decode, num_workers=2),
        settings=Settings(shrink_delay_s=1e6),  # so none is given up, and none that is asked for ever comes
    )
    world, outcomes = simulated(shape, prompts_then_outputs(each_s))
    assert outcomes
    ways = [(change.giver, at_s > each_s) for at_s, change in world.role_changes]
    assert (Role.PREFILL, True) in ways, "decode gets one for the outputs"
    assert (Role.DECODE, True) in ways or (Role.DECODE, False) in ways, "and prefill for the prompts"
    changed = [life for life in world.fleet.lives if life.seat is not life.role]
    assert changed
    for life in changed:
        (before,) = (each for each in world.fleet.lives if each.heir is life)
        assert before.gone_s is not None
        assert life.asked_s == before.gone_s
        assert life.ready_s == pytest.approx(before.gone_s + 1.0)
    away = max(sum(life.is_ready(at_s) for life in changed) for at_s in range(0, int(3 * each_s), 5))
    assert 1 <= away <= 2


@pytest.mark.long
def test_none_changes_where_none_is_flexible() -> None:
    shape = dataclasses.replace(by_load(Range(1, 3), Range(1, 3)), start_s=20.0)
    world, _ = simulated(shape, prompts_then_outputs(20.0))
    assert not world.role_changes
    assert world.decisions


@pytest.mark.long
def test_who_drains_gets_nothing_new_and_ends_what_it_has() -> None:
    class Shrinks:
        """After four seconds."""

        def decide(self, _sample: Sample, sizes: Mapping[Role, PoolSize], now_s: float) -> list[Decision]:
            num = sizes[Role.DECODE].wanted
            return [Decision(Role.DECODE, now_s, num, 1 if now_s > 4 else num, "it shall")]

    shape = dataclasses.replace(SHAPE, decode=dataclasses.replace(SHAPE.decode, num_workers=3))
    arrivals = [Arrival(number, 0.1 * number, 100, 200) for number in range(100)]
    ended: list[Outcome] = []
    world = World(shape, ended.append, Shrinks())
    outcomes = world.run(arrivals)
    assert len(ended) == len(outcomes) == 100
    left = [life for life in world.fleet.lives if life.left_s is not None]
    assert len(left) == 2
    for life in left:
        assert life.gone_s is not None
        last_s = max(one.last_token_s for one in outcomes if one.decode == life.key.worker_id)
        assert life.left_s is not None
        assert life.left_s < last_s <= life.gone_s
        assert all(one.arrival.arrived_s <= life.left_s for one in outcomes if one.decode == life.key.worker_id)


def test_worker_hours_count_from_the_order_to_the_end() -> None:
    life = Life(WorkerKey("prefill-0", "1"), Role.PREFILL, 100.0, Role.PREFILL)
    assert life.worked_s(400.0) == 300.0
    life.ready_s, life.left_s, life.gone_s = 160.0, 250.0, 300.0
    assert life.worked_s(400.0) == 200.0
    assert [life.is_ready(at_s) for at_s in (100, 160, 249, 250)] == [False, True, True, False]


@pytest.mark.long
@settings(deadline=None, max_examples=8)
@given(
    st.integers(0, 10_000),
    st.floats(1, 40),
    st.integers(60, 400),
    st.sampled_from((0.0, 0.004, 0.05)),
    st.booleans(),
    windows,
)
def test_steps_taken_at_once_change_nothing(
    seed: int, rate: float, num_pages: int, report_s: float, keeps_prefixes: bool, window: int
) -> None:
    """Whether the simulation takes the steps of a decode worker one by one or several at a time."""
    pools = {
        "prefill": dataclasses.replace(SHAPE.prefill, num_pages=num_pages),
        "decode": PoolShape(2, num_pages, dataclasses.replace(LIMITS, computes_prompts=True)),
    }
    shape = dataclasses.replace(
        SHAPE,
        **pools,
        report_s=report_s,
        mixed_pool_tokens=60,
        times=Fitted(STEP_S, TOKEN_S, 1e-4, 1e-6, windows=Windows(window, 4)),
        prefix_cache=keeps_prefixes,
    )
    shape = windowed(shape, window)
    load = drawn(60, rate, Lengths(100, 0.8), Lengths(40, 1.0), seed)
    load = [
        dataclasses.replace(
            one, num_input=min(500, one.num_input), num_output=min(400, one.num_output), block_ids=blocks, block_size=32
        )
        for one in load
        for blocks in [tuple(one.number % (3 + place) for place in range(16))]
    ]
    found = []
    for at_once in (True, False):
        world = World(shape, at_once=at_once)
        outcomes = world.run(load)
        works = [(key.worker_id, machine.work) for key, machine in world.machines.items()]
        found.append((outcomes, works))
    (several, works), (single, other_works) = found
    for one, other in zip(several, single, strict=True):
        assert (one.prefill, one.decode, one.num_tokens) == (other.prefill, other.decode, other.num_tokens)
        assert one.num_cached == other.num_cached
        for name in ("first_token_s", "last_token_s", "longest_gap_s"):
            assert getattr(one, name) == pytest.approx(getattr(other, name), abs=1e-9)
    for (_, work), (_, other_work) in zip(works, other_works, strict=True):
        assert dataclasses.asdict(work) == pytest.approx(dataclasses.asdict(other_work), abs=1e-9)


# -- colocated


COLOCATED = dataclasses.replace(SHAPE, prefill=dataclasses.replace(SHAPE.prefill, num_workers=0, num_pages=1))


def test_without_prefill_workers_decode_computes_all_of_a_prompt_in_chunks_of_full_size() -> None:
    world, (one,) = simulated(COLOCATED, [Arrival(0, 5.0, 100, 11)])
    assert [machine.role for machine in world.machines.values()] == [Role.DECODE]
    # 64 tokens, then 36; nothing is sent but the request.
    assert one.first_token_s == pytest.approx(5.0 + MESSAGE_S + 2 * STEP_S + 100 * TOKEN_S)
    assert one.last_token_s == pytest.approx(one.first_token_s + 10 * (STEP_S + TOKEN_S))
    assert one.prefill == ""


def test_without_prefill_workers_a_text_of_a_windowed_model_may_be_longer_than_the_pool() -> None:
    small = dataclasses.replace(COLOCATED, decode=PoolShape(1, 12, LIMITS))
    _, (one,) = simulated(windowed(small), [Arrival(0, 0.0, 1000, 500)])
    assert one.e2e_s == pytest.approx(MESSAGE_S + 16 * STEP_S + 1000 * TOKEN_S + 499 * (STEP_S + TOKEN_S))


def test_colocated_workers_share_the_requests() -> None:
    two = dataclasses.replace(COLOCATED, decode=dataclasses.replace(SHAPE.decode, num_workers=2))
    _, outcomes = simulated(two, drawn(60, 8.0, Lengths(150, 0.5), Lengths(30, 0.5), seed=3))
    by_worker = [sum(one.decode == worker for one in outcomes) for worker in {one.decode for one in outcomes}]
    assert len(by_worker) == 2
    assert min(by_worker) > 20


# -- ways


@pytest.mark.long
def test_a_slow_way_is_avoided_once_it_is_known_and_tried_again_later() -> None:
    two = dataclasses.replace(SHAPE, prefill=dataclasses.replace(SHAPE.prefill, num_workers=2))
    arrivals = [Arrival(number, 0.5 * number, 200, 2) for number in range(200)]
    shape = dataclasses.replace(two, bytes_per_s=20_000 * TOKEN_BYTES)
    by_slow = {}
    for tells in (True, False):
        faults = FaultShape(slow_links=(SlowLink("prefill-0", 20.0, 0.02),), tells_links=tells)
        outcomes = World(dataclasses.replace(shape, faults=faults)).run(arrivals)
        by_slow[tells] = [one.arrival.arrived_s for one in outcomes if one.prefill == "prefill-0"]
    assert sum(at_s > 21 for at_s in by_slow[True]) <= 6, "once in 30 s"
    assert any(at_s > 45 for at_s in by_slow[True]), "it is tried again"
    assert sum(at_s > 21 for at_s in by_slow[False]) > 50
