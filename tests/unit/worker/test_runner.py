"""What the runner does between two steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from tandem.core.pages import PagePool
from tandem.core.slices import take_short_slices
from tandem.worker.batch import SchedulerLimits
from tandem.worker.pacing import Pacing
from tandem.worker.runner import Runner
from tandem.worker.scheduler import BatchScheduler
from tandem.worker.step import StepHooks
from tests.support.slices import SHORT_NS, in_a_thread, needs_slices, slice_ns

WAIT_S = 60.0


class Patient(Pacing):
    """The first step begins later, so many times."""

    def __init__(self, num_times: int, while_it_waits: Callable[[int], None]) -> None:
        self._num_left, self._num_times = num_times, num_times
        self._while_it_waits = while_it_waits

    def give_way(self, *, has_work: bool) -> bool:
        assert not has_work
        if not self._num_left:
            return False
        self._num_left -= 1
        self._while_it_waits(self._num_times - self._num_left)
        return True


class Idler:
    """A role with nothing to compute."""

    def __init__(self, told: list[str]) -> None:
        self._told = told
        self.idle = threading.Event()

    def before_schedule(self) -> None:
        self._told.append("schedule")

    def going_idle(self) -> None:
        self.idle.set()


def runner_with(pacing: Pacing) -> Runner:
    scheduler = BatchScheduler(PagePool(4, 16), SchedulerLimits(4, 64, 16, 4), salt=b"")
    failures: list[BaseException] = []
    engine = cast(Any, SimpleNamespace(computes_apart=False))
    return Runner(engine, scheduler, name="runner", on_fatal=failures.append, pacing=pacing)


def test_what_comes_in_each_time_that_a_step_begins_later_counts_for_it() -> None:
    told: list[str] = []

    def while_it_waits(number: int) -> None:
        runner.submit(lambda: told.append(f"admission {number}"))

    runner, role = runner_with(Patient(2, while_it_waits)), Idler(told)
    runner.start(cast(StepHooks, role))
    assert role.idle.wait(WAIT_S)
    runner.stop()
    assert told[:3] == ["admission 1", "admission 2", "schedule"]


def test_a_runner_that_is_to_stop_waits_no_more() -> None:
    told: list[str] = []
    waits = threading.Event()
    runner = runner_with(Patient(1_000_000_000, lambda _: waits.set()))
    runner.start(cast(StepHooks, Idler(told)))
    assert waits.wait(WAIT_S)
    runner.stop(WAIT_S)
    assert not told


@needs_slices
def test_its_thread_has_the_usual_slices_also_where_one_with_short_ones_starts_it() -> None:
    told: list[int] = []
    runner, role = runner_with(Pacing()), Idler([])
    runner.submit(lambda: told.append(slice_ns()))

    def start() -> int:
        take_short_slices()
        runner.start(cast(StepHooks, role))
        return slice_ns()

    assert in_a_thread(start) == SHORT_NS
    assert role.idle.wait(WAIT_S)
    runner.stop()
    assert told == [in_a_thread(slice_ns)]
    assert told[0] > SHORT_NS
