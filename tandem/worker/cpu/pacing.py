"""Pacing on a CPU host: workers that rest lend their cores, steps wait for each other, pages are made ready ahead."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from tandem.engine.cpu.threads import borrow_from
from tandem.worker.cpu.core_shares import CoreShares
from tandem.worker.cpu.handoff_wait import ExpectedHandoffs, StepDelayBudget
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
        self._pids: dict[str, int] = {}
        self._step_began_s = 0.0
        if shares is not None:
            borrow_from(shares)

    def start(self) -> None:
        self._pages_ahead.start()

    def met(self, incarnation: str, pid: int) -> None:
        self._pids[incarnation] = pid

    def left(self, incarnation: str) -> None:
        self._pids.pop(incarnation, None)

    def step_begins(self, first_untouched_page: int) -> None:
        self._step_began_s = time.monotonic()
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
        # Of the decode workers of the step that was just computed, those on these cores: first steps counted so far.
        self._counts: dict[int, int] = {}
        # Who goes first until it has computed so many first steps, or until that time of the monotonic clock.
        self._go_first: dict[int, int] = {}
        self._go_first_until_s = 0.0

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
    """A step begins a little later where one more handoff is about to be admitted.

    Args:
        most_of_all: share of the time of all steps that all waits may take; 0: none.
    """

    def __init__(self, shares: CoreShares | None, pages_ahead: PagesAhead, most_of_all: float) -> None:
        super().__init__(shares, pages_ahead)
        self._expected = ExpectedHandoffs()
        self._budget = StepDelayBudget(most_of_all)
        self._num_ended = 0  # of the handoffs, as last looked at

    @property
    def has_spare_threads(self) -> bool:
        return self._shares is not None and self._shares.num_spare() > 0

    def give_way(self, *, has_work: bool) -> bool:
        expected, budget, num_ended = self._expected, self._budget, self._num_ended
        self._num_ended = expected.num_ended
        if self._num_ended != num_ended:  # after the runner last looked into its inbox, it may be
            return True
        due = expected.next_within(budget.left_s)
        if due is None or not has_work:
            return False
        began_s, pid = time.monotonic(), self._pids.get(due.sender)
        if self._shares is not None and pid is not None and self._shares.first_steps(pid) is not None:
            self._shares.rest(gives_way=True)  # it gains by that, if anybody does
        expected.wait(num_ended, budget.left_s)
        waited_s = time.monotonic() - began_s
        budget.waited(waited_s)
        self.waited_s += waited_s
        return True

    def step_ended(self) -> None:
        self._budget.stepped(time.monotonic() - self._step_began_s)

    def first_steps_taken(self, number: int) -> None:
        if number and self._shares is not None:
            self._shares.took_first_steps(number)

    def foresee(self, dues: Sequence[tuple[float, str]]) -> None:
        self._expected.foresee(dues)

    def handoff_ended(self) -> None:
        self._expected.ended()
