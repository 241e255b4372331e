"""Cores that the workers of a host share: steps that run at once slow each other down."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

from tandem.sim.kernel import Call, Kernel, Timer


class SharedCores:
    """Runs steps, each at the speed that all which are under way leave to each.

    Args:
        speeds: of a step while so many are under way (the first: one alone), relative to the one whose time the model
            of steps says. More than these share what is left.
    """

    def __init__(self, kernel: Kernel, speeds: Sequence[float]) -> None:
        self._kernel, self._speeds = kernel, speeds
        self._timer = Timer(kernel, self._ends)
        self._numbers = itertools.count()
        self._steps: list[tuple[float, int, Call]] = []  # a heap, by how much is done when each ends
        self._done_s = 0.0  # of a step that would have been under way for ever
        self._at_s = kernel.now_s  # when that was so much

    def run(self, work_s: float, call: Call) -> None:
        """Call when a step has ended which would take `work_s` at speed 1."""
        self._advance()
        heapq.heappush(self._steps, (self._done_s + work_s, next(self._numbers), call))
        self._plan()

    def _speed(self) -> float:
        num, most = len(self._steps), len(self._speeds)
        return self._speeds[num - 1] if num <= most else self._speeds[-1] * most / num

    def _advance(self) -> None:
        now_s = self._kernel.now_s
        if self._steps:
            self._done_s += (now_s - self._at_s) * self._speed()
        self._at_s = now_s

    def _plan(self) -> None:
        self._timer.set(self._kernel.now_s + max(0.0, self._steps[0][0] - self._done_s) / self._speed())

    def _ends(self) -> None:
        self._advance()
        self._done_s, _, call = heapq.heappop(self._steps)  # sums of floats may have fallen short of it
        if self._steps:
            self._plan()
        call()
