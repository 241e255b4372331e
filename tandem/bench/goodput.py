"""Goodput: the highest Poisson rate at which nearly all requests keep their SLO (DistServe, OSDI 2024)."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from tandem.bench.load.records import Objective, RequestRecord
from tandem.bench.rate_search import RateSearch
from tandem.bench.report.results import Run
from tandem.bench.session import Session, Shape, Watcher


@dataclass(frozen=True)
class ProbeLength:
    """How many requests a probe sends: at least so many, and over at least so many seconds, but never too many."""

    least: int
    least_s: float
    most: int

    def num(self, rate: float) -> int:
        """At `rate` requests a second."""
        return min(self.most, max(self.least, math.ceil(self.least_s * rate)))


@dataclass
class GoodputSearch:
    """What was found.

    Attributes:
        length: of a probe; `None`: it sends the whole workload.
        max_s: no probe begins when those before have taken so long together, and none, but the first, whose requests
            alone would come for longer than that. It bounds how well a limit is known: while no rate was too high, the
            search goes on.
    """

    slo: Objective
    share: float  # of the requests that must keep it
    rates: RateSearch
    length: ProbeLength | None = None
    max_s: float = math.inf
    probes: list[Run] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        if self.rates.is_done or not self.probes:
            return self.rates.is_done
        if self.rates.worst == math.inf:
            return False
        spent_s = math.fsum(probe.load.duration_s for probe in self.probes)
        next_s = 0.0 if self.length is None else self.length.num(self.rates.rate) / self.rates.rate
        return max(spent_s, next_s) >= self.max_s

    def num_allowed(self, num_requests: int) -> int:
        """So many of them may miss the SLO."""
        return math.floor(num_requests * (1 - self.share) + 1e-9)

    def as_json(self) -> dict[str, Any]:
        """Rates in requests a second; `None` where there was none."""
        return {
            **self.slo.as_json(),
            "share": self.share,
            "goodput_per_s": self.rates.best or None,
            "failed_from_per_s": None if self.rates.worst == math.inf else self.rates.worst,
        }


async def _at_once() -> None:
    """Nothing to wait for."""


async def search_goodput(
    session: Session,
    search: GoodputSearch,
    show: Callable[[str, int], AbstractContextManager[Watcher]],
    *,
    ready: Callable[[], Awaitable[None]] = _at_once,
) -> None:
    """Probe until the search is done or interrupted. A probe begins when `ready` says that the server is, and `show`
    gives it its progress bar, of so many requests.

    A probe ends as soon as too many requests have missed the SLO: waiting for the others would change nothing.
    """
    while not search.is_done:
        rate, num_all = search.rates.rate, len(session.workload.entries)
        num_requests = num_all if search.length is None else min(num_all, search.length.num(rate))
        num_allowed, num_missed = search.num_allowed(num_requests), 0
        await ready()
        if session.was_interrupted:
            return
        with show(f"{rate:.3f} /s", num_requests) as bar:

            def watch(record: RequestRecord, bar: Watcher = bar, num_allowed: int = num_allowed) -> bool:
                nonlocal num_missed
                num_missed += not search.slo.is_met_by(record)
                return bar(record) and num_missed <= num_allowed

            number = len(search.probes)
            load = await session.measure(Shape(rate=rate), number=number, limit=num_requests, watch=watch)
        search.probes.append(Run.of(Shape(rate=rate), load, search.slo))
        if session.was_interrupted:
            return
        search.rates.tell(went_well=num_missed <= num_allowed)
