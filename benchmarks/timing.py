"""How long something takes, of several runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one run, over `num_runs` of them."""

    best_s: float
    median_s: float
    num_runs: int


def timed(
    work: Callable[[], object], budget_s: float, *, min_runs: int = 3, clock: Callable[[], float] = time.perf_counter
) -> Timing:
    """Run `work` once uncounted (it compiles and touches memory), then for `budget_s`, at least `min_runs` times."""
    work()
    runs_s: list[float] = []
    begin = clock()
    while len(runs_s) < min_runs or clock() - begin < budget_s:
        start = clock()
        work()
        runs_s.append(clock() - start)
    return Timing(min(runs_s), statistics.median(runs_s), len(runs_s))


def rates_in_turn(tasks: Sequence[tuple[float, Callable[[], object]]], rounds: int, num_threads: int) -> list[float]:
    """Work a second of each task, in its best round; a task is its work, and a function that does it on `num_threads`.

    Each round runs all of them, so that what slows the machine meets all. On one thread times are those that the
    thread computed, else those of the wall clock. A first round is not counted: it compiles and touches memory.
    """
    clock = time.thread_time if num_threads == 1 else time.perf_counter
    best = [0.0] * len(tasks)
    for number in range(1 + rounds):
        for index, (work, run) in enumerate(tasks):
            begin = clock()
            run()
            if number:
                best[index] = max(best[index], work / (clock() - begin))
    return best
