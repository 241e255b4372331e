"""Classes of requests in a simulation: what each asks for, which policies see it, and what became of it."""

from __future__ import annotations

import dataclasses
import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from router.request.tenant import Tenant
from tandem.cli import main
from tandem.core.errors import ConfigError, DeadlineError, UnmeetableDeadlineError
from tandem.core.identity import WorkerKey
from tandem.sim.faults import Death, FaultShape
from tandem.sim.load import Arrival, Following
from tandem.sim.outcome import Outcome
from tandem.sim.scenario import read_scenario
from tandem.sim.shape import KindShape, PoolShape, TenantShape, WorldShape
from tandem.sim.world import World
from tests.unit.sim.test_prefixes import KEEPS, asked
from tests.unit.sim.test_sim_tiers import MS, tiers
from tests.unit.sim.test_world import LIMITS, MESSAGE_S, SHAPE, STEP_S, TOKEN_S

MIXED = dataclasses.replace(
    SHAPE, decode=PoolShape(1, 200, dataclasses.replace(LIMITS, computes_prompts=True)), mixed_pool_tokens=1000
)


def of_kinds(shape: WorldShape, **kinds: KindShape) -> WorldShape:
    return dataclasses.replace(shape, kinds=kinds)


def check_empty(world: World) -> None:
    """Nothing of any request is left, neither at workers nor in what routers know of them."""
    assert world.figures.num_open == 0
    for router in world.routers:
        turns = router.turns
        assert (turns.num_waiting, turns._under_way.num_requests, turns._under_way.num_ahead) == (0, 0, 0)
    for machine in world.machines.values():
        machine.pool.check()
        if not machine.is_dead:
            counts = machine.pool.counts()
            assert counts.free + counts.cached == machine.pool.num_pages, (machine.key, counts)
            assert machine.is_empty, machine.key
            world._reports.tell(machine)
            world.kernel.run_all()
            for router in world.routers:
                load = machine.load(router.known.load(machine.key))
                assert (load.num_active, load.num_others, load.num_queued_tokens) == (0, 0, 0), machine.key


# --- deadlines


@pytest.mark.parametrize(
    ("timeout_s", "num_tokens"),
    [
        (MESSAGE_S / 2, 0),  # on its way to prefill
        (0.01, 0),  # being computed
        (0.032, 1),  # being sent
        (0.1, 7),  # generating
    ],
)
def test_a_request_whose_time_is_over_ends_wherever_it_is(timeout_s: float, num_tokens: int) -> None:
    shape = of_kinds(SHAPE, short=KindShape(timeout_s=timeout_s))
    for at_once in (True, False):
        world = World(shape, at_once=at_once)
        late, other = world.run([Arrival(0, 5.0, 100, 40, kind="short"), Arrival(1, 20.0, 100, 40)])
        assert (late.error, late.num_tokens) == (DeadlineError.code, num_tokens)
        assert (other.error, other.num_tokens) == ("", 40)
        check_empty(world)


def test_one_that_waits_for_its_turn_ends_too_and_nobody_waits_for_it() -> None:
    limits = dataclasses.replace(LIMITS, max_num_seqs=1)
    shape = of_kinds(dataclasses.replace(SHAPE, decode=PoolShape(1, 200, limits)), short=KindShape(timeout_s=1.0))
    long = [Arrival(number, 5.0, 100, 200) for number in range(6)]
    world = World(shape)
    outcomes = world.run([*long, Arrival(6, 5.1, 100, 2, kind="short"), Arrival(7, 5.2, 100, 2)])
    assert [one.error for one in outcomes] == [""] * 6 + [DeadlineError.code, ""]
    check_empty(world)


def test_requests_that_are_late_at_once_take_no_turn_of_each_other() -> None:
    """The end of one makes room for the next, whose time is over too."""
    limits = dataclasses.replace(LIMITS, max_num_seqs=1)
    world = World(
        of_kinds(dataclasses.replace(SHAPE, decode=PoolShape(1, 200, limits)), short=KindShape(timeout_s=1.0))
    )
    outcomes = world.run([Arrival(number, 5.0, 100, 200, kind="short") for number in range(10)])
    assert all(one.error == DeadlineError.code for one in outcomes)
    assert [one.prefill for one in outcomes] == ["prefill-0", *[""] * 9]
    check_empty(world)


def test_a_turn_that_is_late_ends_its_conversation() -> None:
    then = Following(Arrival(1, 0.0, 200, 2, conversation=0, turn=2))
    world = World(of_kinds(SHAPE, short=KindShape(timeout_s=0.01)))
    outcomes = world.run([Arrival(0, 5.0, 100, 40, kind="short", conversation=0, then=then)])
    assert len(outcomes) == 1
    assert world.num_unsent == 1


def test_a_deadline_that_cannot_be_met_is_refused_at_once() -> None:
    """Once it is known how fast prompts are computed: 2,000 tokens take 0.5 s."""
    shape = of_kinds(SHAPE, short=KindShape(timeout_s=0.5), long=KindShape(timeout_s=5.0))
    ahead = [Arrival(0, 0.0, 1000, 2), *(Arrival(n, 10.0, 2000, 2) for n in (1, 2, 3))]
    short, long = (Arrival(n, 10.01, 100, 2, kind=kind) for n, kind in ((4, "short"), (5, "long")))
    outcomes = World(shape).run([*ahead, short, long])
    assert [one.error for one in outcomes] == [*[""] * 4, UnmeetableDeadlineError.code, ""]
    assert not World(shape).run([*ahead, dataclasses.replace(short, arrived_s=20.0)])[4].error


def test_a_prompt_that_is_held_is_in_time_where_another_is_not() -> None:
    shape = of_kinds(KEEPS, short=KindShape(timeout_s=0.12))
    first = asked(0, 0.0, 1024, 2, *range(32))
    again, other = (dataclasses.replace(asked(n, 10.0 * n, 1024, 2, *ids), kind="short")
                    for n, ids in ((1, range(32)), (2, range(50, 82))))  # fmt: skip
    outcomes = World(shape).run([first, again, other])
    assert [one.error for one in outcomes] == ["", "", UnmeetableDeadlineError.code]


def test_decode_does_not_compute_what_it_has_read_for_nobody() -> None:
    """Its time is over while decode reads its pages from a disk, a page in 100 ms."""
    limits = dataclasses.replace(LIMITS, computes_prompts=True)
    shape = dataclasses.replace(
        KEEPS, prefill=PoolShape(0, 1, LIMITS), decode=PoolShape(1, 16, limits), mixed_pool_tokens=1000,
        tiers=tiers(disk_pages=100, disk=MS / 100), kinds={"short": KindShape(timeout_s=0.3)},
    )  # fmt: skip
    order = [1, 2, 3, 1]
    arrivals = [asked(n, 5.0 * n, 128, 2, *range(10 * who, 10 * who + 4)) for n, who in enumerate(order)]
    world = World(shape)
    *_, late = world.run([*arrivals[:3], dataclasses.replace(arrivals[3], kind="short")])
    assert late.error == DeadlineError.code
    assert world.machines[WorkerKey("decode-0", "1")].work.num_tokens == 3 * (128 + 1)
    check_empty(world)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_late_nothing_of_it_stays(seed: int) -> None:
    """Short of pages and of time, with and without prefix caches, mixed pools and deaths; steps by steps or at once."""
    rng = random.Random(seed)
    limits = dataclasses.replace(LIMITS, computes_prompts=True)
    deaths = (Death("decode-0", 1.0), Death("prefill-1", 2.0)) if seed % 2 else ()
    kinds = [KindShape(rng.choice([-1, 0, 3]), timeout_s=rng.choice([None, 0.1, 0.5, 1.0])) for _ in range(6)]
    shape = dataclasses.replace(
        KEEPS, prefill=PoolShape(2, 40, LIMITS), decode=PoolShape(2, 40, limits), start_s=0.3,
        mixed_pool_tokens=100 * (seed > 0), faults=FaultShape(deaths), prefix_cache=seed < 2,
        kinds={f"k{n}": kind for n, kind in enumerate(kinds)}, names_sessions=True,
        tenants={name: TenantShape(Tenant(name, name, name)) for name in ("one", "other")},
    )  # fmt: skip
    arrivals = [
        dataclasses.replace(
            asked(n, 2 * rng.random(), rng.randint(1, 300), rng.randint(1, 60), *rng.choices(range(4), k=10)),
            kind=f"k{rng.randrange(6)}",
            tenant=rng.choice(["one", "other"]),
            conversation=n % 9,
        )
        for n in range(60)
    ]
    found: list[list[tuple[str, str, str, int]]] = []
    for at_once in (True, False):
        world = World(shape, at_once=at_once)
        outcomes = world.run(arrivals)
        check_empty(world)
        found.append([(one.error, one.prefill, one.decode, one.num_tokens) for one in outcomes])
        for one in outcomes:
            timeout_s = shape.kinds[one.arrival.kind].timeout_s
            assert bool(one.error) is not one.is_over, one
            assert timeout_s is None or one.error or one.e2e_s <= timeout_s
    assert found[0] == found[1]
    assert Counter(error for error, *_ in found[0])[DeadlineError.code] > 3


# --- priorities and targets


def test_urgent_classes_go_first_and_no_decode_worker_computes_their_prompts() -> None:
    """Where each request has its turn while others wait."""
    shape = of_kinds(MIXED, urgent=KindShape(priority=-5), idle=KindShape(priority=5))
    long = [Arrival(number, 5.0, 1500, 4) for number in range(4)]
    some = [Arrival(10 + n, 5.01, 60, 4, kind=kind) for n, kind in enumerate(["idle", "", "urgent"] * 4)]
    outcomes = World(shape).run([*long, *some])

    def of(kind: str) -> Sequence[Outcome]:
        return [one for one in outcomes[4:] if one.arrival.kind == kind]

    assert all(one.prefill for one in of("urgent"))
    assert not all(one.prefill for one in [*of(""), *of("idle")])
    alone = World(of_kinds(SHAPE, urgent=KindShape(priority=-5), idle=KindShape(priority=5)))
    outcomes = alone.run([*long, *some])
    firsts = [max(one.first_token_s for one in of(kind)) for kind in ("urgent", "", "idle")]
    assert firsts == sorted(firsts)
    assert firsts[0] < min(one.first_token_s for one in of("idle"))


def test_the_priority_of_a_class_goes_before_that_of_a_tenant() -> None:
    shape = dataclasses.replace(
        SHAPE, kinds={"late": KindShape(priority=9)}, tenants={"it": TenantShape(priority=-9), "they": TenantShape()}
    )
    long = [Arrival(number, 5.0, 1500, 4, tenant="they") for number in range(4)]
    some = [Arrival(4, 5.01, 900, 4, tenant="it", kind="late"), Arrival(5, 5.02, 900, 4, tenant="they")]
    *_, late, other = World(shape).run([*long, *some])
    assert other.first_token_s < late.first_token_s
    *_, soon, other = World(shape).run([*long, dataclasses.replace(some[0], kind=""), some[1]])
    assert soon.first_token_s < other.first_token_s


def test_each_request_is_measured_by_its_own_targets() -> None:
    kinds = {"strict": KindShape(ttft_ms=20.0), "slow": KindShape(tpot_ms=5.0), "lax": KindShape(ttft_ms=40.0)}
    world = World(of_kinds(SHAPE, **kinds))
    outcomes = world.run([Arrival(n, 5.0 * n, 100, 11, kind=kind) for n, kind in enumerate([*kinds, ""])])
    assert all(one.ttft_s == pytest.approx(MESSAGE_S + 2 * STEP_S + 100 * TOKEN_S) for one in outcomes)
    assert [one.kept for one in outcomes] == [False, False, True, True]
    assert world.figures.num_kept == 2


def test_chunks_beside_a_sequence_leave_it_the_time_that_its_class_wants() -> None:
    """In a colocated cluster: a target above the cluster's own has others' prompts computed in larger chunks, and one
    below has none give way for more than the cluster's."""
    limits = dataclasses.replace(LIMITS, computes_prompts=True, chunk_size=512, max_num_batched_tokens=1024)
    shape = dataclasses.replace(
        SHAPE, prefill=PoolShape(0, 1, LIMITS), decode=PoolShape(1, 400, limits), mixed_pool_tokens=10_000,
        tpot_s=0.025, kinds={"lax": KindShape(tpot_ms=50.0), "strict": KindShape(tpot_ms=11.0)},
    )  # fmt: skip
    gaps = {}
    for kind in ("lax", "", "strict"):
        warm = [Arrival(n, 0.5 * n, 200, 20) for n in range(8)]
        one = Arrival(8, 10.0, 16, 200, kind=kind)
        gaps[kind] = World(shape).run([*warm, one, Arrival(9, 11.0, 2000, 2)])[8].longest_gap_s
    assert gaps["lax"] > gaps[""] == pytest.approx(gaps["strict"])


# --- the file


def test_what_became_of_each_class_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "classes.yaml").write_text(
        "load: {requests: 60, rate: 30, input_median: 600, output_median: 5}\n"
        "classes:\n"
        "  - {name: people, share: 2, slo: {ttft_ms: 1, tpot_ms: 30}}\n"
        "  - {name: programs, priority: 1, timeout: 0.05}\n"
    )
    assert main(["sim", "run", str(tmp_path / "classes.yaml"), "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    people, programs = found["classes"]
    assert people["num_requests"] + programs["num_requests"] == 60
    assert 25 < people["num_requests"] < 55
    assert people["slo"] == {"ttft_s": 0.001, "tpot_s": 0.03}
    assert programs["slo"] == {"ttft_s": 1.0, "tpot_s": 0.05}
    assert (people["kept_share"], people["num_timed_out"]) == (0.0, 0)
    assert programs["num_timed_out"] + programs["num_unmeetable"] > 0
    assert found["num_timed_out"] + found["num_unmeetable"] == programs["num_timed_out"] + programs["num_unmeetable"]
    assert found["num_failed"] == 0
    assert Counter(one["class"] for one in found["requests"])["people"] == people["num_requests"]
    said = capsys.readouterr().out
    assert "programs" in said
    assert "the targets of their classes" in " ".join(said.split())
    assert "refused as they could not be met" in " ".join(said.split())


@pytest.mark.parametrize("classes", ["[{share: 1}]", "[{name: a}, {name: a}]", "[{name: a, share: 0}]"])
def test_classes_have_names_and_shares(classes: str, tmp_path: Path) -> None:
    (tmp_path / "classes.yaml").write_text(f"classes: {classes}")
    with pytest.raises(ConfigError) as refused:
        read_scenario(tmp_path / "classes.yaml")
    assert refused.value.key == "classes"
