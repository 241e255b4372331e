"""Pacing on a CPU host: workers that rest lend their cores, prefill gives way to decode, pages are made ready ahead."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable

from tandem.engine.cpu.lending import borrow_from
from tandem.worker.cpu.core_shares import CoreShares
from tandem.worker.cpu.pages_ahead import PagesAhead
from tandem.worker.pacing import Pacing

# How long decode goes first after a step, at most: in times of that step, so that prompts take half as long again at
# worst, and in seconds, which are many steps of decode.
_MOST_OF_A_STEP, _LONGEST_REST_S = 0.5, 0.25


class CpuPacing(Pacing):
    """What both roles do.

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


class PrefillPacing(CpuPacing):
    """Prompts wait while decode has the cores for the first step with what it was just handed.

    Other handoffs to the same decode worker may end the rest too early: earlier ones whose first step is still due,
    those whose grant came after their step, and those of other prefill workers. It is a matter of time alone.
    """

    def __init__(self, shares: CoreShares | None, pages_ahead: PagesAhead) -> None:
        super().__init__(shares, pages_ahead)
        self._pids: dict[str, int] = {}  # of decode workers on this host
        self._step_began_s = 0.0
        # Of the decode workers of the step that was just computed, those on these cores: first steps counted so far.
        self._counts: dict[int, int] = {}
        # Who goes first until it has computed so many first steps, or until that time of the monotonic clock.
        self._go_first: dict[int, int] = {}
        self._go_first_until_s = 0.0

    def met(self, incarnation: str, pid: int) -> None:
        self._pids[incarnation] = pid

    def left(self, incarnation: str) -> None:
        self._pids.pop(incarnation, None)

    def step_begins(self, first_untouched_page: int) -> None:
        self._step_began_s = time.monotonic()
        super().step_begins(first_untouched_page)

    def give_way(self, *, has_work: bool) -> bool:
        if self._shares is None or not self._go_first or not has_work:
            return False
        for neighbour, number in self._go_first.items():
            self._shares.give_way(neighbour, number, self._go_first_until_s)
        self._go_first.clear()
        return True

    def before_handoffs(self, receivers: Collection[str]) -> None:
        pids = {self._pids[receiver] for receiver in receivers if receiver in self._pids}
        counts = {pid: self._shares.first_steps(pid) for pid in pids} if self._shares is not None else {}
        self._counts = {pid: count for pid, count in counts.items() if count is not None}

    def after_handoffs(self, receivers: Iterable[str]) -> None:
        now_s = time.monotonic()
        self._go_first_until_s = now_s + min(_LONGEST_REST_S, _MOST_OF_A_STEP * (now_s - self._step_began_s))
        numbers = Counter(self._pids[receiver] for receiver in receivers if receiver in self._pids)
        self._go_first = {pid: count + numbers[pid] for pid, count in self._counts.items() if numbers[pid]}


class DecodePacing(CpuPacing):
    """Decode tells prefill of its first steps."""

    def first_steps_taken(self, number: int) -> None:
        if number and self._shares is not None:
            self._shares.took_first_steps(number)
