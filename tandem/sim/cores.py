"""Cores that the workers of a host share: steps that run at once slow down each other, and messages."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field
from enum import Enum

from tandem.core.config_tree import key
from tandem.core.identity import WorkerKey
from tandem.sim.kernel import Call, Kernel, Timer


class Kind(Enum):
    """Of work: what it mostly waits for decides how much a step takes from it."""

    PROMPTS = "prompts"  # a step of arithmetic
    DECODE = "decode"  # weights and pages to be read; it generates for some sequences, and may compute prompts besides
    MESSAGE = "message"  # no step: on its way it waits for cores, and hardly takes any
    PASSING = "passing"  # no step: a process works that passes tokens on

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
    """How much longer steps and messages take beside others on one host's cores; a section of a scenario.

    Of more than are computed at a time each has its share of the time. A step loses to other steps besides, so far as
    they are computed at a time with it; a message loses nothing but its turns.
    """

    prompts: Beside = field(default_factory=Beside)
    decode: Beside = field(default_factory=Beside)
    num_cores: int = key(
        0, "So many steps are computed at a time; of more each waits for its turns. 0: none waits.", minimum=0
    )
    step_us: float = key(
        0.0, "Of a core, that routers and whoever asks take on this host to pass on the tokens of a decode step, one "
        "step at a time; what comes from the same worker meanwhile is passed on together. A first token of prefill's "
        "is a message.", minimum=0,
    )  # fmt: skip
    token_us: float = key(0.0, "And for each of these tokens.", minimum=0)

    def turns(self, num: int) -> tuple[float, float]:
        """Of so many that are under way: how many times its time one takes since they take turns, and the share of the
        others that is computed at a time with it."""
        if not self.num_cores or num <= self.num_cores:
            return 1.0, 1.0
        return num / self.num_cores, (self.num_cores - 1) / (num - 1)

    def of(self, kind: Kind, num_prompts: int, num_decode: int, num_passing: int = 0) -> float:
        """How many times its time alone something takes while so many are under way: itself among them, unless it is a
        message."""
        num = num_prompts + num_decode + num_passing
        turns, share = self.turns(num + (kind is Kind.MESSAGE))
        if kind not in STEPS:
            return turns
        beside = self.prompts if kind is Kind.PROMPTS else self.decode
        num_others = num_prompts - (kind is Kind.PROMPTS), num_decode - (kind is Kind.DECODE)
        return turns * (1 + share * (beside.prompts * num_others[0] + beside.decode * num_others[1]))


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
        nums = [len(self._works[kind].heap) for kind in (*STEPS, Kind.PASSING)]
        soonest_s = None
        for kind, works in self._works.items():
            if works.heap:
                works.speed = 1 / self._slowdowns.of(kind, *nums)
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


class Passing:
    """What passes tokens on from workers to whoever asked, one step's at a time: a router, and a load generator on the
    same host. What a worker gives while it is busy goes together."""

    def __init__(self, cores: SharedCores, step_s: float, token_s: float) -> None:
        self._cores, self._step_s, self._token_s = cores, step_s, token_s
        # By worker, the one first whose oldest has waited longest; a call for each token.
        self._waiting: dict[WorkerKey, list[Call]] = {}
        self._is_busy = False

    def take(self, worker: WorkerKey, calls: list[Call]) -> None:
        """A step has ended: call these, one for each of its tokens, when they have been passed on."""
        self._waiting.setdefault(worker, []).extend(calls)
        if not self._is_busy:
            self._next()

    def _next(self) -> None:
        worker = next(iter(self._waiting))
        calls, self._is_busy = self._waiting.pop(worker), True
        seconds = self._step_s + len(calls) * self._token_s
        self._cores.run(Kind.PASSING, seconds, lambda: self._passed(calls))

    def _passed(self, calls: list[Call]) -> None:
        self._is_busy = False
        if self._waiting:
            self._next()
        for call in calls:
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
