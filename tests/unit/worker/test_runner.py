"""What the runner does between two steps."""

from __future__ import annotations

import threading
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


class Idler:
    """A role with nothing to compute."""

    def __init__(self) -> None:
        self.idle = threading.Event()

    def before_schedule(self) -> None:
        """Nothing waits."""

    def going_idle(self) -> None:
        self.idle.set()


def make_runner() -> Runner:
    scheduler = BatchScheduler(PagePool(4, 16), SchedulerLimits(4, 64, 16, 4), salt=b"")
    failures: list[BaseException] = []
    engine = cast(Any, SimpleNamespace(computes_apart=False))
    return Runner(engine, scheduler, name="runner", on_fatal=failures.append, pacing=Pacing())


@needs_slices
def test_its_thread_has_the_usual_slices_also_where_one_with_short_ones_starts_it() -> None:
    told: list[int] = []
    runner, role = make_runner(), Idler()
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
