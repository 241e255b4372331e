"""Goodput: the highest Poisson rate at which nearly all requests keep their SLO (DistServe, OSDI 2024)."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from tandem.bench.load.records import RequestRecord, Slo
from tandem.bench.rate_search import RateSearch
from tandem.bench.report.results import Run
from tandem.bench.session import Session, Shape, Watcher


@dataclass
class GoodputSearch:
    """What was found."""

    slo: Slo
    share: float  # of the requests that must keep it
    rates: RateSearch
    probes: list[Run] = field(default_factory=list)

    def as_json(self) -> dict[str, float | None]:
        """Rates in requests a second; `None` where there was none."""
        return {
            "slo_ttft_s": self.slo.ttft_s,
            "slo_tpot_s": self.slo.tpot_s,
            "share": self.share,
            "goodput_per_s": self.rates.best or None,
            "failed_from_per_s": None if self.rates.worst == math.inf else self.rates.worst,
        }


async def search_goodput(
    session: Session, search: GoodputSearch, show: Callable[[str], AbstractContextManager[Watcher]]
) -> None:
    """Probe until the search is done or interrupted; `show` gives each probe its progress bar.

    A probe ends as soon as too many requests have missed the SLO: waiting for the others would change nothing.
    """
    num_requests = len(session.workload.entries)
    num_allowed = math.floor(num_requests * (1 - search.share) + 1e-9)
    while not search.rates.is_done:
        rate = search.rates.rate
        num_missed = 0
        with show(f"{rate:.3f} /s") as bar:

            def watch(record: RequestRecord, bar: Watcher = bar) -> bool:
                nonlocal num_missed
                num_missed += not search.slo.is_met_by(record)
                return bar(record) and num_missed <= num_allowed

            load = await session.measure(Shape(rate=rate), number=len(search.probes), watch=watch)
        search.probes.append(Run.of(Shape(rate=rate), load, search.slo))
        if session.was_interrupted:
            return
        search.rates.tell(went_well=num_missed <= num_allowed)
