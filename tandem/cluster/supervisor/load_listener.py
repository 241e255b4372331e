"""Hears routers and workers for the laws of sizes, as far as routers tell: silence is no time without load. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from statistics import fmean

from tandem.cluster.supervisor.demand import Demand, PoolLoad
from tandem.cluster.supervisor.load_figures import LoadFigures, RouterReport, WorkerReport
from tandem.core.identity import Role

SILENT_BEATS = 3
"""A router that has told nothing for more heartbeats is silent: one that misses a single one is heard after three at
the latest (it is waited for as long as a heartbeat, and asked again after another one)."""


class Heard(Enum):
    """What a look at the reports brought."""

    NEWS = "news"
    NOTHING_NEW = "nothing new"
    SILENCE = "silence"


class LoadListener:
    """Of both pools.

    Args:
        beat_s: a heartbeat, after which routers tell anew.
    """

    def __init__(self, demand: Demand, figures: LoadFigures, beat_s: float) -> None:
        self._demand, self._figures, self._beat_s = demand, figures, beat_s
        self._told_s: dict[str, float] = {}  # by incarnation, of the reports that were heard last
        self._is_silent = True

    def hear(self, workers: Sequence[WorkerReport], routers: Sequence[RouterReport], now_s: float) -> Heard:
        """To be called each heartbeat.

        Counts are taken once each router has told anew, and are of the time between what they told: before, what a
        router that is late counts would be missing, and would come twice with its next report. A law that hears
        `NOTHING_NEW` is not to decide: nothing has changed.
        """
        if not routers:
            self._demand.pause()
            self._is_silent = True
            return Heard.SILENCE
        if any(each.told_s <= self._told_s.get(each.incarnation, -math.inf) for each in routers):
            self._is_silent = now_s - min(each.told_s for each in routers) > SILENT_BEATS * self._beat_s
            return Heard.SILENCE if self._is_silent else Heard.NOTHING_NEW
        self._told_s = {each.incarnation: each.told_s for each in routers}
        self._is_silent = False
        self._demand.hear(self._figures.sample(workers, routers), fmean(each.told_s for each in routers))
        return Heard.NEWS

    def of(self, role: Role, num_ready: int) -> PoolLoad | None:
        """What is asked of one pool; `None`: that is not known now. `num_ready`: of its workers."""
        return None if self._is_silent else self._demand.of(role, num_ready)
