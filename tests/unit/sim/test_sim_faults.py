"""Workers of a simulation that die: what follows is counted by hand, and nothing is left behind."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tandem.core.errors import ConfigError
from tandem.core.identity import Role
from tandem.sim.faults import Death, FaultShape, parse_fault
from tandem.sim.load import Arrival
from tandem.sim.outcome import Outcome
from tandem.sim.shape import PoolShape, WorldShape
from tandem.sim.world import World
from tests.unit.sim.test_world import LATENCY_S, LIMITS, MESSAGE_S, SHAPE, STEP_S, TOKEN_BYTES, TOKEN_S

ONE = Arrival(0, 0.0, 100, 11)
FIRST_S = MESSAGE_S + 2 * STEP_S + 100 * TOKEN_S  # two chunks, of 64 and 36 tokens
HANDED_OFF_S = FIRST_S + 36 * TOKEN_BYTES / 1e9 + LATENCY_S


def dying(num_prefill: int, num_decode: int, *deaths: Death) -> WorldShape:
    """New workers come a second after one has died."""
    return dataclasses.replace(
        SHAPE,
        prefill=PoolShape(num_prefill, 200, LIMITS),
        decode=PoolShape(num_decode, 200, LIMITS),
        start_s=1.0,
        faults=FaultShape(deaths),
    )


def simulated(shape: WorldShape, arrivals: list[Arrival]) -> tuple[World, list[Outcome]]:
    """All requests have ended or failed, and no worker that lives holds anything."""
    ended: list[Outcome] = []
    world = World(shape, ended.append)
    outcomes = world.run(arrivals)
    assert len(ended) == len(outcomes)
    for one in outcomes:
        assert one.error or one.num_tokens == one.arrival.num_output
    for machine in world.machines.values():
        if not machine.is_dead:
            machine.pool.check()
            counts = machine.pool.counts()
            assert counts.free + counts.cached == machine.pool.num_pages
            assert shape.prefix_cache or not counts.cached
            assert machine.is_empty
    return world, outcomes


def computed(world: World, role: Role) -> int:
    return sum(machine.work.num_tokens for machine in world.machines.values() if machine.role is role)


def test_what_a_client_has_is_kept_when_decode_dies_and_prefill_computes_nothing_again() -> None:
    died_s = HANDED_OFF_S + 4.5 * (STEP_S + TOKEN_S)  # five tokens are given, the first by prefill
    world, (one,) = simulated(dying(1, 2, Death("decode-0", died_s)), [ONE])
    assert (one.prefill, one.decode, one.num_recoveries) == ("prefill-0", "decode-1", 1)
    assert computed(world, Role.PREFILL) == 100
    # The router hears of it, asks both, and prefill hears of the grant; all pages are sent again.
    again_s = died_s + 3 * MESSAGE_S + 100 * TOKEN_BYTES / 1e9 + LATENCY_S
    # Five tokens are computed in one step, which gives the sixth; five follow.
    assert one.last_token_s == pytest.approx(again_s + STEP_S + 5 * TOKEN_S + 5 * (STEP_S + TOKEN_S))
    assert one.first_token_s == pytest.approx(FIRST_S)
    assert sum(one.parts.values()) == pytest.approx(one.e2e_s)


def test_decode_computes_a_short_prompt_by_itself_when_prefill_dies() -> None:
    died_s = FIRST_S - 0.5 * STEP_S
    _, (one,) = simulated(dying(2, 1, Death("prefill-0", died_s)), [ONE])
    assert (one.prefill, one.decode, one.num_recoveries) == ("", "decode-0", 1)
    first_s = died_s + 2 * MESSAGE_S + 2 * STEP_S + 100 * TOKEN_S
    assert one.first_token_s == pytest.approx(first_s)
    assert one.last_token_s == pytest.approx(first_s + 10 * (STEP_S + TOKEN_S))


def test_a_long_prompt_goes_to_another_prefill_worker_and_has_its_first_token_once() -> None:
    long = Arrival(0, 0.0, 600, 3)
    slow = dataclasses.replace(dying(2, 1, Death("prefill-0", 0.3)), bytes_per_s=2000 * TOKEN_BYTES)
    world, (one,) = simulated(slow, [long])
    first_s = MESSAGE_S + 10 * STEP_S + 600 * TOKEN_S
    assert one.first_token_s == pytest.approx(first_s), "it was given before the death, while pages were on their way"
    assert first_s < 0.3
    assert (one.prefill, one.num_recoveries, one.num_tokens) == ("prefill-1", 1, 3)
    assert [machine.work.num_tokens for machine in world.machines.values() if machine.role is Role.PREFILL][:2] == [
        600,
        600,
    ]


def test_a_request_under_which_two_workers_died_is_not_given_to_a_third() -> None:
    deaths = Death("prefill-0", 0.01), Death("decode-0", 0.02)
    _, (one, other) = simulated(dying(1, 1, *deaths), [ONE, Arrival(1, 5.0, 100, 2)])
    assert one.error == "workers_died"
    assert (other.error, other.prefill, other.decode) == ("", "prefill-1", "decode-1")


def test_who_finds_no_worker_waits_for_a_new_one_but_not_for_ever() -> None:
    late = dataclasses.replace(dying(1, 1, Death("prefill-0", 0.5)), start_s=20.0)
    _, (one, other) = simulated(late, [Arrival(0, 1.0, 100, 2), Arrival(1, 12.0, 100, 2)])
    assert one.error == "no_worker"
    assert other.first_token_s == pytest.approx(20.5 + FIRST_S)
    assert other.num_recoveries == 0


def test_a_death_of_nobody_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"no worker decode-3 is there at 0\.1 s to die; .* prefill-0 and decode-0 on"
    ):
        World(dying(1, 1, Death("decode-3", 0.1))).run([ONE])
    with pytest.raises(ConfigError, match=r"decode-0@30"):
        parse_fault("decode-0")
    assert parse_fault("decode-0@1.5") == Death("decode-0", 1.5)


requests = st.lists(st.tuples(st.floats(0, 1), st.integers(1, 700), st.integers(1, 60)), min_size=1, max_size=20)
deaths = st.lists(st.tuples(st.sampled_from(["prefill", "decode"]), st.floats(0.01, 1.5)), max_size=6)


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(requests, deaths, st.integers(60, 120), st.booleans(), st.booleans())
@example(  # one fails while prefill computes its last chunk
    [(0.49, 697, 16), (0.106, 418, 34), (0.803, 264, 39)],
    [("prefill", 0.061), ("prefill", 0.381), ("decode", 0.395), ("decode", 0.498)],
    107,
    True,
    False,
)
def test_whoever_dies_all_end_or_fail_and_nothing_is_left_behind(
    asked: list[tuple[float, int, int]], when: list[tuple[str, float]], num_pages: int, mixes: bool, keeps: bool
) -> None:
    """Also where pages are few. Each time the first of its role dies that was there at the beginning and lives."""
    numbers = {"prefill": iter(range(9)), "decode": iter(range(9))}
    dead = [Death(f"{role}-{next(numbers[role])}", at_s) for role, at_s in sorted(when, key=lambda one: one[1])]
    shape = dying(6, 6, *dead)
    limits = dataclasses.replace(LIMITS, computes_prompts=mixes)
    shape = dataclasses.replace(
        shape,
        prefill=dataclasses.replace(shape.prefill, num_pages=num_pages),
        decode=PoolShape(6, num_pages, limits),
        mixed_pool_tokens=200 if mixes else 0,
        prefix_cache=keeps,
    )
    blocks = [tuple(number % (2 + place) for place in range(30)) for number in range(len(asked))]
    simulated(shape, [Arrival(number, *one, blocks[number], 32) for number, one in enumerate(asked)])
