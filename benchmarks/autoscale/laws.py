"""Other laws than the one that ships, to compare it with: what the field does. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tandem.cluster.supervisor.autoscale import Decision, Most, PoolSize, Range
from tandem.cluster.supervisor.demand import Sample
from tandem.core.identity import Role
from tandem.sim.outcome import Outcome


@dataclass
class Latencies:
    """TTFT and TPOT of the requests that ended in the last minute."""

    now_s: Callable[[], float] = lambda: 0.0
    _ended: deque[tuple[float, Outcome]] = field(default_factory=deque)

    WINDOW_S = 60.0

    def note(self, outcome: Outcome) -> None:
        self._ended.append((self.now_s(), outcome))

    def p90(self, role: Role) -> float | None:
        """Seconds; `None`: nothing ended."""
        while self._ended and self._ended[0][0] < self.now_s() - self.WINDOW_S:
            self._ended.popleft()
        of_role = (one.ttft_s if role is Role.PREFILL else one.tpot_s for _, one in self._ended)
        values = sorted(value for value in of_role if value is not None)
        return values[math.ceil(0.9 * len(values)) - 1] if values else None


class Proportional:
    """As the Horizontal Pod Autoscaler of Kubernetes, with its defaults: every 15 s workers × P90 ÷ target, unless the
    two differ by a tenth or less; at most twice as many, or four more, in one step; downwards the most that was wanted
    in the last five minutes.

    Source: kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale, algorithm details and default behaviour.
    """

    PERIOD_S, TOLERANCE, STABLE_S, MOST_NEW = 15.0, 0.1, 300.0, 4

    def __init__(self, ranges: Mapping[Role, Range], latencies: Latencies, targets: Mapping[Role, float]) -> None:
        self._ranges, self._latencies, self._targets = ranges, latencies, targets
        self._wanted = {role: Most(self.STABLE_S) for role in ranges}
        self._begun: set[Role] = set()
        self._next_s = 0.0

    def decide(self, _sample: Sample, sizes: Mapping[Role, PoolSize], now_s: float) -> list[Decision]:
        if now_s < self._next_s:
            return []
        self._next_s = now_s + self.PERIOD_S
        return [self._of(role, sizes[role], now_s) for role in self._ranges]

    def _of(self, role: Role, size: PoolSize, now_s: float) -> Decision:
        num, measured = size.wanted, self._latencies.p90(role)
        if role not in self._begun:  # the size at which it begins counts as wanted then
            self._begun.add(role)
            self._wanted[role].note(now_s, num)
        wanted = num
        if measured is not None and abs(measured / self._targets[role] - 1) > self.TOLERANCE:
            wanted = math.ceil(len(size.ready) * measured / self._targets[role])  # of the ready ones, as it does
        wanted = min(wanted, max(2 * num, num + self.MOST_NEW))
        self._wanted[role].note(now_s, wanted)
        if wanted < num:
            wanted = min(num, round(self._wanted[role].most))
        bounds = self._ranges[role]
        wanted = min(max(wanted, bounds.least), bounds.most)
        return Decision(role, now_s, num, wanted, f"P90 is {measured}")


class OneAtATime:
    """One worker more where the pool was busier than `HIGH` over a period, one less where it was below `LOW`. Prefill
    is as busy as its time, decode as its KV."""

    PERIOD_S, HIGH, LOW = 60.0, 0.8, 0.5

    def __init__(self, ranges: Mapping[Role, Range]) -> None:
        self._ranges = ranges
        self._shares: dict[Role, list[float]] = {role: [] for role in ranges}
        self._next_s, self._heard_s = self.PERIOD_S, 0.0

    def decide(self, sample: Sample, sizes: Mapping[Role, PoolSize], now_s: float) -> list[Decision]:
        passed_s, self._heard_s = now_s - self._heard_s, now_s
        busy_s, held = sum(work.busy_s for work in sample.worked[Role.PREFILL]), sample.held
        capacity = max(1, len(sizes[Role.DECODE].ready)) * held.kv_capacity
        shares = {
            Role.PREFILL: busy_s / passed_s / max(1, len(sizes[Role.PREFILL].ready)),
            Role.DECODE: (held.kv_tokens + held.waiting_kv_tokens) / capacity if capacity else 0.0,
        }
        for role, known in self._shares.items():
            known.append(shares[role])
        if now_s < self._next_s:
            return []
        self._next_s = now_s + self.PERIOD_S
        return [self._of(role, sizes[role].wanted, now_s) for role in self._ranges]

    def _of(self, role: Role, num: int, now_s: float) -> Decision:
        known, self._shares[role] = self._shares[role], []
        mean, bounds = sum(known) / len(known), self._ranges[role]
        wanted = min(max(num + (mean > self.HIGH) - (mean < self.LOW), bounds.least), bounds.most)
        return Decision(role, now_s, num, wanted, f"it was busy at {mean:.0%}")
