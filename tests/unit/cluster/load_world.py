"""A simple world for the law of sizes: one pool of workers that compute what comes, in virtual time."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem.cluster.supervisor.autoscale import PoolLaw, PoolSize, Range, Settings
from tandem.cluster.supervisor.demand import Asked, Demand, Held, Sample, Worked
from tandem.core.identity import Role

PERIOD_S = 2.0
TOKENS_PER_S = 1000.0
"""Of prompts, that one worker computes."""


@dataclass
class PrefillWorld:
    """Requests queue for whichever worker is free; a worker computes `TOKENS_PER_S`, from its start on.

    Args:
        rate: requests a second at a time.
        tokens: of a prompt, on average; lengths are exponentially distributed.
        start_s: that a worker needs to start.
    """

    rate: Callable[[float], float]
    start_s: float
    bounds: Range
    tokens: float = 500.0
    seed: int = 0
    settings: Settings = field(default_factory=Settings)
    ttft_s: float = 2.0
    now_s: float = 0.0
    num_workers: int = 0
    coming: list[float] = field(default_factory=list)  # when they will be ready
    sizes: list[tuple[float, int]] = field(default_factory=list)  # after each change
    late: list[tuple[float, bool]] = field(default_factory=list)  # of each request, when it came and whether it waited
    _queue: deque[tuple[float, float]] = field(default_factory=deque)  # when each came, and its tokens that are left

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._demand = Demand(self.ttft_s, 0.1, self.settings.shrink_delay_s)
        self.law = PoolLaw(Role.PREFILL, self.bounds, self.settings)
        self.num_workers = self.num_workers or self.bounds.least
        self._numbers = self.num_workers
        self._next_s = 0.0
        self._lives = [f"life-{number}" for number in range(self.num_workers)]
        self._coming: list[tuple[float, str]] = []

    @property
    def wanted(self) -> int:
        return len(self._lives) + len(self._coming)

    def run(self, until_s: float) -> PrefillWorld:
        while self.now_s < until_s:
            self._pass()
        return self

    def _arrivals(self) -> list[tuple[float, float]]:
        """Of one period, by thinning: the rate may change within it."""
        found, at_s, most = [], self.now_s, max(1e-9, 1.01 * max(self.rate(self.now_s + s) for s in (0.0, 1.0, 2.0)))
        while (at_s := at_s + self._random.expovariate(most)) < self.now_s + PERIOD_S:
            if self._random.random() * most < self.rate(at_s):
                found.append((at_s, self._random.expovariate(1 / self.tokens)))
        return found

    def _pass(self) -> None:
        arrived = self._arrivals()
        self._queue.extend(arrived)
        room = len(self._lives) * TOKENS_PER_S * PERIOD_S
        computed, num_first, num_late = 0.0, 0, 0
        while self._queue and computed < room:
            came_s, left = self._queue.popleft()
            done = min(left, room - computed)
            computed += done
            if done < left:
                self._queue.appendleft((came_s, left - done))
                break
            begun_s = max(came_s, self.now_s + PERIOD_S * computed / room)
            num_first += 1
            is_late = begun_s + left / TOKENS_PER_S - came_s > self.ttft_s
            num_late += is_late
            self.late.append((came_s, is_late))
        self.now_s += PERIOD_S
        self._lives += [life for at_s, life in self._coming if at_s <= self.now_s]
        self._coming = [(at_s, life) for at_s, life in self._coming if at_s > self.now_s]
        asked = Asked(
            num_requests=len(arrived),
            prompt_tokens=sum(tokens for _, tokens in arrived),
            num_first=num_first,
            num_first_late=num_late,
        )
        work = Worked(num_steps=1, busy_s=computed / TOKENS_PER_S, prompt_tokens=computed)
        held = Held(waiting_tokens=sum(tokens for _, tokens in self._queue))
        self._demand.hear(Sample(asked, {Role.PREFILL: [work]}, held), self.now_s)
        size = PoolSize(self.wanted, frozenset(self._lives), frozenset(life for _, life in self._coming))
        decision = self.law.decide(self._demand.of(Role.PREFILL, len(self._lives)), size, self.now_s)
        assert self.bounds.least <= decision.wanted <= self.bounds.most
        assert decision.why
        if decision.wanted != decision.before:
            self.sizes.append((self.now_s, decision.wanted))
        for _ in range(decision.wanted - decision.before):
            self._numbers += 1
            self._coming.append((self.now_s + self.start_s, f"life-{self._numbers}"))
        if decision.wanted < decision.before:
            num_given = decision.before - decision.wanted
            assert num_given == 1 or num_given <= decision.before // 10, "a tenth at a time, or one"
            del self._lives[-num_given:]

    # -- what came of it

    def late_share(self, from_s: float, to_s: float) -> float:
        """Of the requests that came then."""
        found = [is_late for came_s, is_late in self.late if from_s <= came_s < to_s]
        return sum(found) / max(1, len(found))

    @property
    def turns(self) -> list[float]:
        """When it shrank after it had grown, or grew after it had shrunk."""
        found, before, direction = [], None, 0
        for at_s, size in self.sizes:
            if before is not None and (now := int(math.copysign(1, size - before))) != direction:
                if direction:
                    found.append(at_s)
                direction = now
            before = size
        return found

    def size_at(self, at_s: float) -> int:
        return max([(0.0, self.bounds.least), *(each for each in self.sizes if each[0] <= at_s)])[1]
