"""Pacing on a CPU host: workers that rest lend their cores, and pages are made ready ahead."""

from __future__ import annotations

from tandem.engine.cpu.lending import borrow_from
from tandem.worker.cpu.core_shares import CoreShares
from tandem.worker.cpu.pages_ahead import PagesAhead
from tandem.worker.pacing import Pacing


class CpuPacing(Pacing):
    """Lends cores at rest, and has pages made ready.

    Args:
        shares: this worker's place among those of its node; `None`: it shares no cores.
        pages_ahead: makes pages resident before they are used.
    """

    def __init__(self, shares: CoreShares | None, pages_ahead: PagesAhead) -> None:
        self._shares = shares
        self._pages_ahead = pages_ahead
        if shares is not None:
            borrow_from(shares)

    def start(self) -> None:
        self._pages_ahead.start()

    def step_begins(self, first_untouched_page: int) -> None:
        self._pages_ahead.used(first_untouched_page)

    def rest(self) -> None:
        if self._shares is not None:
            self._shares.rest()
        self._pages_ahead.rest()

    def close(self) -> None:
        if self._pages_ahead.has_started:
            self._pages_ahead.stop()
        if self._shares is not None:
            borrow_from(None)
            self._shares.leave()
