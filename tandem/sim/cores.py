"""Cores that the workers of a host share: steps that run at once slow each other down."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field
from enum import Enum

from tandem.core.config_tree import key
from tandem.sim.kernel import Call, Kernel, Timer


class Kind(Enum):
    """Of a step: what it mostly waits for decides how much another one takes from it."""

    PROMPTS = "prompts"  # arithmetic
    DECODE = "decode"  # weights and pages to be read; it generates for some sequences, and may compute prompts besides

    @classmethod
    def of(cls, num_rows: int) -> Kind:
        """Of a step that generates for so many sequences."""
        return cls.DECODE if num_rows else cls.PROMPTS


@dataclass(frozen=True)
class Beside:
    """What a step loses to each other one that is under way, as a share of its time alone; a section of a scenario."""

    prompts: float = key(0.0, "To each other that computes prompts.", minimum=0)
    decode: float = key(0.0, "To each other that generates.", minimum=0)


@dataclass(frozen=True)
class Slowdowns:
    """How much longer steps of both kinds take beside each other on one host's cores; a section of a scenario."""

    prompts: Beside = field(default_factory=Beside)
    decode: Beside = field(default_factory=Beside)

    def of(self, kind: Kind, num_prompts: int, num_decode: int) -> float:
        """How many times its time alone a step takes while so many are under way, of which it is one."""
        if kind is Kind.PROMPTS:
            return 1 + self.prompts.prompts * (num_prompts - 1) + self.prompts.decode * num_decode
        return 1 + self.decode.prompts * num_prompts + self.decode.decode * (num_decode - 1)


@dataclass(slots=True)
class _Steps:
    """Those of a kind that are under way."""

    heap: list[tuple[float, int, Call]] = field(default_factory=list)  # by how much is done when each ends
    done_s: float = 0.0  # of a step that would have been under way for ever
    speed: float = 1.0


class SharedCores:
    """Runs steps, each at the speed that all which are under way leave to each."""

    def __init__(self, kernel: Kernel, slowdowns: Slowdowns) -> None:
        self._kernel, self._slowdowns = kernel, slowdowns
        self._timer = Timer(kernel, self._ends)
        self._numbers = itertools.count()
        self._steps = {kind: _Steps() for kind in Kind}
        self._at_s = kernel.now_s  # when so much was done
        self._next = self._steps[Kind.DECODE]  # whose first step ends first

    def run(self, kind: Kind, work_s: float, call: Call) -> None:
        """Call when a step has ended which would take `work_s` alone."""
        self._advance()
        steps = self._steps[kind]
        heapq.heappush(steps.heap, (steps.done_s + work_s, next(self._numbers), call))
        self._plan()

    def _advance(self) -> None:
        now_s = self._kernel.now_s
        for steps in self._steps.values():
            steps.done_s += (now_s - self._at_s) * steps.speed
        self._at_s = now_s

    def _plan(self) -> None:
        num_prompts, num_decode = (len(steps.heap) for steps in self._steps.values())
        soonest_s = None
        for kind, steps in self._steps.items():
            if steps.heap:
                steps.speed = 1 / self._slowdowns.of(kind, num_prompts, num_decode)
                in_s = max(0.0, steps.heap[0][0] - steps.done_s) / steps.speed
                if soonest_s is None or in_s < soonest_s:
                    soonest_s, self._next = in_s, steps
        self._timer.set(self._kernel.now_s + soonest_s if soonest_s is not None else None)

    def _ends(self) -> None:
        self._advance()
        steps = self._next
        steps.done_s, _, call = heapq.heappop(steps.heap)  # sums of floats may have fallen short of it
        self._plan()
        call()
