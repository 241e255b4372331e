"""Steps that share cores, by times that can be counted by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_world import LATENCY_S, MESSAGE_S, SHAPE, STEP_S, TOKEN_S, simulated

from tandem.core.config_tree import build
from tandem.core.errors import ConfigError
from tandem.core.identity import WorkerKey
from tandem.sim.cores import STEPS, Beside, Hops, Kind, Passing, SharedCores, Slowdowns
from tandem.sim.kernel import Kernel
from tandem.sim.load import Arrival, Lengths, drawn
from tandem.sim.outcome import Outcome
from tandem.sim.scenario import Scenario
from tandem.sim.shape import KindShape
from tandem.sim.world import World

# One core for all.
ONE_CORE = Slowdowns(Beside(1.0, 1.0), Beside(1.0, 1.0))


def test_a_step_is_slower_while_another_one_is_under_way() -> None:
    kernel = Kernel(0.0)
    cores, ends_s = SharedCores(kernel, Slowdowns(Beside(prompts=1.0), Beside())), dict[str, float]()
    cores.run(Kind.PROMPTS, 1.0, lambda: ends_s.update(long=kernel.now_s))
    kernel.at(0.5, lambda: cores.run(Kind.PROMPTS, 0.25, lambda: ends_s.update(short=kernel.now_s)))
    kernel.run_all()
    assert ends_s == {"short": 1.0, "long": 1.25}


def test_how_much_slower_depends_on_what_both_compute() -> None:
    """Of 1 s each: a prompt loses half beside what generates, which loses a fifth; of two that generate each has a
    quarter."""
    slowdowns = Slowdowns(Beside(decode=1.0), Beside(prompts=0.25, decode=3.0))
    kernel = Kernel(0.0)
    cores, ends_s = SharedCores(kernel, slowdowns), dict[str, float]()
    cores.run(Kind.PROMPTS, 1.0, lambda: ends_s.update(prompt=kernel.now_s))
    cores.run(Kind.DECODE, 1.0, lambda: ends_s.update(decode=kernel.now_s))
    kernel.run_all()
    assert ends_s == pytest.approx({"decode": 1.25, "prompt": 1.25 + (1 - 1.25 * 0.5)})
    began_s = kernel.now_s
    for name in ("one", "other"):
        cores.run(Kind.DECODE, 1.0, lambda name=name: ends_s.update({name: kernel.now_s - began_s}))
    kernel.run_all()
    assert (ends_s["one"], ends_s["other"]) == pytest.approx((4.0, 4.0))


def test_what_a_step_loses_to_others_adds_up() -> None:
    slowdowns = Slowdowns(Beside(0.5, 0.25), Beside(0.125, 2.0))
    assert slowdowns.of(Kind.PROMPTS, 1, 0) == 1.0
    assert slowdowns.of(Kind.PROMPTS, 3, 1) == 1 + 2 * 0.5 + 0.25
    assert slowdowns.of(Kind.DECODE, 0, 1) == 1.0
    assert slowdowns.of(Kind.DECODE, 2, 3) == 1 + 2 * 0.125 + 2 * 2.0
    assert slowdowns.of(Kind.MESSAGE, 2, 3) == 1.0


def test_more_than_there_are_cores_take_turns_and_lose_to_those_that_are_computed_beside_them() -> None:
    slowdowns = Slowdowns(Beside(0.5, 0.25), Beside(0.125, 2.0), num_cores=2)
    assert slowdowns.of(Kind.PROMPTS, 1, 1) == 1.25, "each has a core"
    assert slowdowns.of(Kind.PROMPTS, 3, 0) == 3 / 2 * (1 + 1 / 2 * 2 * 0.5), "of two others one is computed with it"
    assert slowdowns.of(Kind.DECODE, 2, 2) == pytest.approx(4 / 2 * (1 + 1 / 3 * (2 * 0.125 + 2.0)))
    assert slowdowns.of(Kind.DECODE, 0, 1, 2) == 3 / 2, "to what passes tokens on it loses its turns alone"
    assert Slowdowns(Beside(0.5, 0.5), num_cores=1).of(Kind.PROMPTS, 2, 2) == 4, "none is computed with it"


def test_a_message_waits_for_its_turns_and_takes_none() -> None:
    slowdowns = Slowdowns(Beside(9.0, 9.0), Beside(9.0, 9.0), num_cores=2)
    assert [slowdowns.of(Kind.MESSAGE, *others) for others in ((0, 0), (1, 0), (0, 1))] == [1.0] * 3, "a core is left"
    assert slowdowns.of(Kind.MESSAGE, 2, 3) == 6 / 2
    assert slowdowns.of(Kind.MESSAGE, 1, 1, 1) == 4 / 2
    assert slowdowns.of(Kind.PASSING, 2, 1, 1) == 4 / 2
    assert Slowdowns(Beside(1.0, 1.0)).of(Kind.MESSAGE, 2, 3) == 1.0
    kernel = Kernel(0.0)
    cores, ends_s = SharedCores(kernel, dataclasses.replace(slowdowns, num_cores=1)), dict[str, float]()
    hops = Hops(kernel, 1.0, cores)
    cores.run(Kind.PROMPTS, 1.0, lambda: ends_s.update(prompt=kernel.now_s))
    hops.send(lambda: ends_s.update(message=kernel.now_s))
    hops.take(2.5, 0.25, lambda: ends_s.update(handoff=kernel.now_s))
    kernel.run_all()
    assert ends_s == pytest.approx({"prompt": 1.0, "message": 1.5, "handoff": 2.75})


def test_tokens_are_passed_on_step_by_step_and_what_comes_meanwhile_from_one_worker_together() -> None:
    kernel, passed = Kernel(0.0), list[tuple[str, float]]()
    cores = SharedCores(kernel, Slowdowns(num_cores=1))
    passing = Passing(cores, step_s=1.0, token_s=0.25)

    def step(worker: WorkerKey, *names: str) -> None:
        def note(name: str) -> Callable[[], None]:
            return lambda: passed.append((name, kernel.now_s))

        passing.take(worker, [note(name) for name in names])

    a, b = WorkerKey("decode-0", "1"), WorkerKey("decode-1", "1")
    step(a, "a1", "a2")
    step(b, "b1")
    step(a, "a3")
    kernel.at(1.0, lambda: step(a, "a4"))
    kernel.run_all()
    assert passed == [("a1", 1.5), ("a2", 1.5), ("b1", 2.75), ("a3", 4.25), ("a4", 4.25)]
    step(b, "b2")
    cores.run(Kind.DECODE, 10.0, lambda: None)
    kernel.run_all()
    assert passed[-1] == ("b2", 4.25 + 2 * 1.25), "it has half of the core"


def test_a_message_between_hosts_takes_its_time() -> None:
    kernel, came_s = Kernel(1.0), list[float]()
    hops = Hops(kernel, 0.5, None)
    hops.send(lambda: came_s.append(kernel.now_s))
    hops.take(3.0, 0.25, lambda: came_s.append(kernel.now_s))
    kernel.run_all()
    assert came_s == [1.5, 3.25]


def sharing(num_cores: int, latency_s: float = LATENCY_S, **more: float) -> list[Outcome]:
    """Four requests, of which each finds the steps of those before it."""
    slowdowns = Slowdowns(decode=Beside(decode=1e-9), num_cores=num_cores, **more)
    arrivals = [Arrival(number, 5.0 + 0.02 * number, 100, 11) for number in range(4)]
    shape = dataclasses.replace(SHAPE, slowdowns=slowdowns, message_s=0.0, latency_s=latency_s)
    return simulated(shape, arrivals)[1]


def test_a_handoff_waits_for_cores() -> None:
    """Beside the steps of others it takes its turns; alone, as long as it takes."""
    for num_cores, least in ((0, 1.0), (1, 1.3)):
        with_it, without = (sharing(num_cores, latency_s) for latency_s in (0.03, 0.0))
        gaps_s = [max(one.second_token_s - one.first_token_s for one in found) for found in (with_it, without)]
        assert (gaps_s[0] - gaps_s[1]) / 0.03 > least - 0.1
        assert num_cores or gaps_s[0] - gaps_s[1] < 0.03 + STEP_S + 12 * TOKEN_S


def test_tokens_come_later_where_they_wait_to_be_passed_on_and_the_steps_lose_what_that_takes() -> None:
    at_once, passed = sharing(1), sharing(1, step_us=1000.0, token_us=500.0)
    for one, later in zip(at_once, passed, strict=True):
        assert later.num_tokens == one.num_tokens == 11
        assert later.last_token_s > one.last_token_s + 10 * 0.0015, "each of ten waits for what it takes itself"
    to_spare, passed = sharing(8), sharing(8, step_us=1000.0, token_us=500.0)
    for one, later in zip(to_spare, passed, strict=True):
        assert 0.0015 - 1e-9 <= later.last_token_s - one.last_token_s < 0.004, "the steps lose nothing"


def test_tokens_that_wait_to_be_passed_on_are_given_to_nobody_whose_request_is_over() -> None:
    slowdowns, errors = Slowdowns(num_cores=1, step_us=50_000.0), set[bool]()
    for timeout_s in np.arange(0.05, 0.4, 0.01):
        shape = dataclasses.replace(
            SHAPE, slowdowns=slowdowns, message_s=0.0, kinds={"short": KindShape(timeout_s=float(timeout_s))}
        )
        ended: list[Outcome] = []
        world = World(shape, on_end=ended.append)
        found = world.run([Arrival(number, 5.0 + 0.01 * number, 100, 11, kind="short") for number in range(3)])
        assert sorted(one.arrival.number for one in ended) == list(range(3)), "each ends once"
        for one in found:
            assert one.error or one.num_tokens == 11
            assert not one.num_tokens or one.last_token_s <= one.arrival.arrived_s + timeout_s
            errors.add(bool(one.error))
        assert all(machine.is_empty for machine in world.machines.values())
    assert errors == {True, False}


@pytest.mark.parametrize(
    ("tree", "named"),
    [
        ({"prompts": {"decode": -0.5}}, "prompts.decode is -0.5, must be at least 0"),
        ({"decode": {"router": 1.0}}, "unknown key decode.router"),
        ({"decode": [1.0]}, "decode must hold keys and values"),
    ],
)
def test_losses_that_cannot_be_are_named(tree: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        build(Slowdowns, tree)


def test_where_nothing_is_lost_each_worker_has_its_own_cores() -> None:
    assert build(Scenario, {"cores": {"prompts": {"decode": 0.0}}}).shape().slowdowns is None
    assert build(Scenario, {"cores": {"prompts": {"decode": 0.5}}}).shape().slowdowns == Slowdowns(Beside(decode=0.5))


@given(
    st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.001, 3.0), st.sampled_from(STEPS)), min_size=1, max_size=20)
)
def test_a_core_is_never_idle_while_there_are_steps(steps: list[tuple[float, float, Kind]]) -> None:
    """One core, of which each step has its share: all are done when a queue would have done them."""
    kernel = Kernel(0.0)
    cores, ends_s = SharedCores(kernel, ONE_CORE), list[float]()
    for begin_s, work_s, kind in steps:
        run = partial(cores.run, kind, work_s, lambda: ends_s.append(kernel.now_s))
        kernel.at(begin_s, run)
    kernel.run_all()
    free_s = 0.0
    for begin_s, work_s, _ in sorted(steps, key=lambda step: step[0]):
        free_s = max(free_s, begin_s) + work_s
    assert len(ends_s) == len(steps)
    assert max(ends_s) == pytest.approx(free_s)


def test_a_request_that_is_alone_takes_as_long_on_shared_cores() -> None:
    _, (one,) = simulated(dataclasses.replace(SHAPE, slowdowns=ONE_CORE), [Arrival(0, 5.0, 100, 11)])
    assert one.ttft_s == pytest.approx(MESSAGE_S + 2 * STEP_S + 100 * TOKEN_S)
    assert one.e2e_s - one.ttft_s == pytest.approx(10 * (STEP_S + TOKEN_S) + LATENCY_S, rel=0.01)


@pytest.mark.long
def test_cores_for_all_change_nothing_and_one_core_for_two_workers_does() -> None:
    arrivals = drawn(100, 15.0, Lengths(150, 0.5), Lengths(20, 0.5), seed=1)
    _, apart = simulated(SHAPE, arrivals)
    nothing_lost = Slowdowns()
    _, enough = simulated(dataclasses.replace(SHAPE, slowdowns=nothing_lost), arrivals)
    world, shared = simulated(dataclasses.replace(SHAPE, slowdowns=ONE_CORE), arrivals)
    assert [one.last_token_s for one in enough] == pytest.approx([one.last_token_s for one in apart])
    assert sum(one.e2e_s for one in shared) > 1.1 * sum(one.e2e_s for one in apart)
    busy_s = [machine.work.busy_s for machine in world.machines.values()]
    steps_s = sum(
        machine.work.num_steps * STEP_S + machine.work.num_tokens * TOKEN_S for machine in world.machines.values()
    )
    assert sum(busy_s) > 1.1 * steps_s, "a worker that waits for its cores is busy"
