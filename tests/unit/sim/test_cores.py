"""Steps that share cores, by times that can be counted by hand."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_world import LATENCY_S, MESSAGE_S, SHAPE, STEP_S, TOKEN_S, simulated

from tandem.sim.cores import SharedCores
from tandem.sim.kernel import Kernel
from tandem.sim.load import Arrival, Lengths, drawn


def test_a_step_is_slower_while_another_one_is_under_way() -> None:
    kernel = Kernel(0.0)
    cores, ends_s = SharedCores(kernel, (1.0, 0.5)), dict[str, float]()
    cores.run(1.0, lambda: ends_s.update(long=kernel.now_s))
    kernel.at(0.5, lambda: cores.run(0.25, lambda: ends_s.update(short=kernel.now_s)))
    kernel.run_all()
    assert ends_s == {"short": 1.0, "long": 1.25}


@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.001, 3.0)), min_size=1, max_size=20))
def test_whole_cores_are_never_idle_while_there_are_steps(steps: list[tuple[float, float]]) -> None:
    """Two cores: what is beyond one step each is shared."""
    kernel = Kernel(0.0)
    cores, ends_s = SharedCores(kernel, (1.0, 1.0)), list[float]()
    for begin_s, work_s in steps:
        kernel.at(begin_s, lambda work_s=work_s: cores.run(work_s, lambda: ends_s.append(kernel.now_s)))
    kernel.run_all()
    assert len(ends_s) == len(steps)
    work_s = sum(work_s for _, work_s in steps)
    first_s = min(begin_s for begin_s, _ in steps)
    assert max(ends_s) >= max(begin_s + work_s for begin_s, work_s in steps) - 1e-6
    assert max(ends_s) >= first_s + work_s / 2 - 1e-6
    assert max(ends_s) <= max(begin_s for begin_s, _ in steps) + work_s + 1e-6


def test_a_request_that_is_alone_takes_as_long_on_shared_cores() -> None:
    _, (one,) = simulated(dataclasses.replace(SHAPE, speeds=(1.0, 0.5)), [Arrival(0, 5.0, 100, 11)])
    assert one.ttft_s == pytest.approx(MESSAGE_S + 2 * STEP_S + 100 * TOKEN_S)
    assert one.e2e_s - one.ttft_s == pytest.approx(10 * (STEP_S + TOKEN_S) + LATENCY_S, rel=0.01)


@pytest.mark.long
def test_cores_for_all_change_nothing_and_one_core_for_two_workers_does() -> None:
    arrivals = drawn(100, 15.0, Lengths(150, 0.5), Lengths(20, 0.5), seed=1)
    _, apart = simulated(SHAPE, arrivals)
    _, enough = simulated(dataclasses.replace(SHAPE, speeds=(1.0, 1.0)), arrivals)
    world, shared = simulated(dataclasses.replace(SHAPE, speeds=(1.0, 0.5)), arrivals)
    assert [one.last_token_s for one in enough] == pytest.approx([one.last_token_s for one in apart])
    assert sum(one.e2e_s for one in shared) > 1.1 * sum(one.e2e_s for one in apart)
    busy_s = [machine.work.busy_s for machine in world.machines.values()]
    steps_s = sum(
        machine.work.num_steps * STEP_S + machine.work.num_tokens * TOKEN_S for machine in world.machines.values()
    )
    assert sum(busy_s) > 1.1 * steps_s, "a worker that waits for its cores is busy"
