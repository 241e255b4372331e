"""How long something takes, by the wall clock, of several runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
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
