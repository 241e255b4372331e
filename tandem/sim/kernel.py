"""Things that happen at their time, one after the other, in one thread; the time between them costs nothing."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import TypeVar

from tandem.core.clock import VirtualClock
from tandem.core.errors import InternalError

_T = TypeVar("_T")
Call = Callable[[], object]

MOST_IDLE_S = 3600.0
"""Where for so long nothing but calls that ask for themselves again has run, nothing else will come any more."""


class Kernel:
    """Runs calls in the order of their times; those of one time in the order in which they were asked for."""

    def __init__(self, start_s: float = 1000.0) -> None:
        self.clock = VirtualClock(start_s)
        self.num_run = 0
        self._numbers = itertools.count()
        self._heap: list[tuple[float, int, Call, bool]] = []
        self._num_due = 0  # of these, that are not endless
        self._done_s = start_s  # when the last one of those ran

    @property
    def now_s(self) -> float:
        return self.clock.now()

    def at(self, time_s: float, call: Call, *, endless: bool = False) -> None:
        """Run `call` at `time_s`; now, if that has passed. `endless`: while requests are there, such calls ask for one
        another for ever."""
        self._num_due += not endless
        heapq.heappush(self._heap, (max(time_s, self.now_s), next(self._numbers), call, endless))

    def after(self, delay_s: float, call: Call, *, endless: bool = False) -> None:
        self.at(self.now_s + delay_s, call, endless=endless)

    def run_all(self) -> None:
        """Until nothing is left to happen. Raises `InternalError` where nothing but endless calls goes on."""
        while self._heap:
            self._run_next()
            if not self._num_due and self._heap and self.now_s - self._done_s > MOST_IDLE_S:
                span = f"from {self._done_s:g} s to {self.now_s:g} s"
                raise InternalError(f"{span} nothing has come of what goes on by itself")

    def run(self, most: int) -> None:
        """Until nothing is left to happen. Raises `AssertionError` where more than `most` calls do not end it."""
        for _ in range(most):
            if not self._heap:
                return
            self._run_next()
        raise AssertionError(f"{most} calls have not ended it; {len(self._heap)} are due, now is {self.now_s}")

    def run_until(self, look: Callable[[], _T | None], most: int = 100_000) -> _T:
        """Until `look` gives something, which is returned."""
        for _ in range(most):
            if found := look():
                return found
            assert self._heap, "nothing is left to happen"
            self._run_next()
        raise AssertionError(f"{most} calls have not led to it; now is {self.now_s}")

    def run_near(self, within_s: float) -> None:
        """Until nothing follows within this time on what has happened."""
        while self._heap and self._heap[0][0] <= self.now_s + within_s:
            self._run_next()

    def _run_next(self) -> None:
        time_s, _, call, is_endless = heapq.heappop(self._heap)
        while self.now_s < time_s:  # a sum of floats may fall short of it
            self.clock.advance(time_s - self.now_s)
        self.num_run += 1
        if not is_endless:
            self._num_due -= 1
            self._done_s = self.now_s
        call()


class Timer:
    """One deadline that may be moved; `call` comes when it has passed."""

    def __init__(self, kernel: Kernel, call: Call) -> None:
        self._kernel = kernel
        self._call = call
        self.due_s: float | None = None
        self._number = 0  # of the newest deadline

    def set(self, due_s: float | None) -> None:
        if due_s == self.due_s:
            return
        self.due_s = due_s
        self._number += 1
        if due_s is not None:
            number = self._number
            self._kernel.at(due_s, lambda: self._ring(number))

    def _ring(self, number: int) -> None:
        if number == self._number:
            self.due_s = None
            self._call()
