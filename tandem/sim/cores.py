"""Cores that the workers of a host share: steps that run at once slow down each other, and messages."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field
from enum import Enum

from tandem.core.config_tree import key
from tandem.sim.kernel import Call, Kernel, Timer


class Kind(Enum):
    """Of work: what it mostly waits for decides how much a step takes from it."""

    PROMPTS = "prompts"  # a step of arithmetic
    DECODE = "decode"  # weights and pages to be read; it generates for some sequences, and may compute prompts besides
    MESSAGE = "message"  # no step: each process on its way waits for a core

    @classmethod
    def of(cls, num_rows: int) -> Kind:
        """Of a step that generates for so many sequences."""
        return cls.DECODE if num_rows else cls.PROMPTS


STEPS = (Kind.PROMPTS, Kind.DECODE)


@dataclass(frozen=True)
class Beside:
    """What is lost to each other step that is under way, as a share of the time alone; a section of a scenario."""

    prompts: float = key(0.0, "To each other that computes prompts.", minimum=0)
    decode: float = key(0.0, "To each other that generates.", minimum=0)


@dataclass(frozen=True)
class Slowdowns:
    """How much longer steps of both kinds, and messages, take beside steps on one host's cores; a section of a
    scenario. What steps lose to messages is in what they lose to the steps that these come from."""

    prompts: Beside = field(default_factory=Beside)
    decode: Beside = field(default_factory=Beside)
    message: Beside = field(default_factory=Beside)
    num_cores: int = key(
        0, "Of the host: a message loses nothing while fewer steps than these are under way. 0: it loses to each.",
        minimum=0,
    )  # fmt: skip

    def of(self, kind: Kind, num_prompts: int, num_decode: int) -> float:
        """How many times its time alone a step, or a message, takes while so many steps are under way. A step is one
        of them."""
        if kind is Kind.PROMPTS:
            return 1 + self.prompts.prompts * (num_prompts - 1) + self.prompts.decode * num_decode
        if kind is Kind.DECODE:
            return 1 + self.decode.prompts * num_prompts + self.decode.decode * (num_decode - 1)
        num = num_prompts + num_decode
        num_in_the_way = num - max(0, self.num_cores - 1)
        if num_in_the_way <= 0:
            return 1.0
        return 1 + (self.message.prompts * num_prompts + self.message.decode * num_decode) * num_in_the_way / num


@dataclass(slots=True)
class _Works:
    """Those of a kind that are under way."""

    heap: list[tuple[float, int, Call]] = field(default_factory=list)  # by how much is done when each ends
    done_s: float = 0.0  # of one that would have been under way for ever
    speed: float = 1.0


class SharedCores:
    """Runs steps and messages, each at the speed that all steps which are under way leave to it."""

    def __init__(self, kernel: Kernel, slowdowns: Slowdowns) -> None:
        self._kernel, self._slowdowns = kernel, slowdowns
        self._timer = Timer(kernel, self._ends)
        self._numbers = itertools.count()
        self._works = {kind: _Works() for kind in Kind}
        self._at_s = kernel.now_s  # when so much was done
        self._next = self._works[Kind.DECODE]  # whose first one ends first

    def run(self, kind: Kind, work_s: float, call: Call) -> None:
        """Call when a step or a message has ended which would take `work_s` alone."""
        self._advance()
        works = self._works[kind]
        heapq.heappush(works.heap, (works.done_s + work_s, next(self._numbers), call))
        self._plan()

    def _advance(self) -> None:
        now_s = self._kernel.now_s
        for works in self._works.values():
            works.done_s += (now_s - self._at_s) * works.speed
        self._at_s = now_s

    def _plan(self) -> None:
        num_prompts, num_decode = (len(self._works[kind].heap) for kind in STEPS)
        soonest_s = None
        for kind, works in self._works.items():
            if works.heap:
                works.speed = 1 / self._slowdowns.of(kind, num_prompts, num_decode)
                in_s = max(0.0, works.heap[0][0] - works.done_s) / works.speed
                if soonest_s is None or in_s < soonest_s:
                    soonest_s, self._next = in_s, works
        self._timer.set(self._kernel.now_s + soonest_s if soonest_s is not None else None)

    def _ends(self) -> None:
        self._advance()
        works = self._next
        works.done_s, _, call = heapq.heappop(works.heap)  # sums of floats may have fallen short of it
        self._plan()
        call()


class Hops:
    """What goes from one process to another for a request: in a time that is known, or as the steps on shared cores let
    it. Of what processes tell each other besides, such as reports of loads, the time is always known."""

    def __init__(self, kernel: Kernel, message_s: float, cores: SharedCores | None) -> None:
        self._kernel, self._message_s, self._cores = kernel, message_s, cores

    def send(self, call: Call) -> None:
        """A message; `call` comes with it."""
        self.take(self._kernel.now_s, self._message_s, call)

    def take(self, from_s: float, seconds: float, call: Call) -> None:
        """Call what takes so long alone, and begins at `from_s`."""
        if (cores := self._cores) is None:
            self._kernel.at(from_s + seconds, call)
        elif from_s <= self._kernel.now_s:
            cores.run(Kind.MESSAGE, seconds, call)
        else:
            self._kernel.at(from_s, lambda: cores.run(Kind.MESSAGE, seconds, call))
