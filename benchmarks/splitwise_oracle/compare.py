"""Where a simulated run and its reference part, and whether that is within bounds. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.splitwise_oracle.runs import RoleChange, Run, Times
from benchmarks.splitwise_oracle.world import Outcome

#: By how much a time of a request, or of a role change, may differ. The references are rounded to 1 ns.
REQUEST_BOUND_S = 1e-6
#: By which share a percentile of a run may differ.
PERCENTILE_BOUND = 0.02
PERCENTILES = (50, 90, 99)
METRICS = ("ttft_s", "tbt_s", "e2e_s")


@dataclass(frozen=True)
class Worst:
    """The time that differs most; `diff_s` is infinite for a request that did not end."""

    diff_s: float
    request: int
    metric: str
    wanted_s: float

    def __str__(self) -> str:
        name = self.metric.removesuffix("_s").upper()
        if self.diff_s == float("inf"):
            return f"request {self.request} did not end"
        return f"{name} of request {self.request}, {self.diff_s:.3g} s of {self.wanted_s:.6f} s"


@dataclass(frozen=True)
class Comparison:
    """Of a run with its reference.

    Attributes:
        num_missed: requests with a time that is off by more than the bound.
        first_missed: of those the one whose reference shows the first wrong event.
        percentile: the largest share by which one differs, and which one.
        num_role_changes: of the reference.
        first_role: the first change that one of the two lacks, or has at another time.
    """

    name: str
    num_requests: int
    num_missed: int
    worst: Worst
    first_missed: int | None
    percentile: tuple[float, str]
    num_role_changes: int
    first_role: RoleChange | None

    @property
    def is_exact(self) -> bool:
        """Each request within its bound, and roles the same."""
        return not self.num_missed and self.first_role is None

    @property
    def is_within(self) -> bool:
        return self.is_exact and self.percentile[0] <= PERCENTILE_BOUND

    def line(self) -> str:
        """In one line: verdict, worst request, percentiles, roles."""
        share, which = self.percentile
        parts = [f"{self.num_requests - self.num_missed} of {self.num_requests} requests within", f"worst {self.worst}"]
        if self.first_missed is not None:
            parts.append(f"first to part is {self.first_missed}")
        parts.append(f"percentiles within {share:.2%}" + (f" ({which})" if share > PERCENTILE_BOUND else ""))
        if self.first_role is not None:
            change = self.first_role
            parts.append(f"roles part at {change.time_s:.6f} s (machine {change.machine} to {change.after})")
        elif self.num_role_changes:
            parts.append(f"{self.num_role_changes} role changes the same")
        return f"{self.name:<24} {'ok    ' if self.is_within else 'MISSED'}  {'; '.join(parts)}"


def compare(run: Run, outcome: Outcome) -> Comparison:
    diffs = [_worst(arrival.number, *pair) for arrival, pair in zip(run.arrivals, _pairs(run, outcome), strict=True)]
    missed = [
        (arrival.time_s + _first_wrong_s(wanted, got), arrival.number)
        for arrival, diff, (wanted, got) in zip(run.arrivals, diffs, _pairs(run, outcome), strict=True)
        if diff.diff_s > REQUEST_BOUND_S
    ]
    return Comparison(
        run.name,
        len(run.arrivals),
        len(missed),
        max(diffs, key=lambda diff: diff.diff_s),
        min(missed)[1] if missed else None,
        _percentile(run.times, outcome.times),
        len(run.role_changes),
        _first_role(run.role_changes, outcome.role_changes),
    )


def _pairs(run: Run, outcome: Outcome) -> Sequence[tuple[Times, Times | None]]:
    return list(zip(run.times, outcome.times, strict=True))


def _worst(number: int, wanted: Times, got: Times | None) -> Worst:
    if got is None:
        return Worst(float("inf"), number, METRICS[-1], wanted.e2e_s)
    diffs = [(abs(getattr(got, metric) - getattr(wanted, metric)), metric) for metric in METRICS]
    diff_s, metric = max(diffs)
    return Worst(diff_s, number, metric, getattr(wanted, metric))


def _first_wrong_s(wanted: Times, got: Times | None) -> float:
    """After its arrival, the reference's first time that is not met."""
    ttft_is_met = got is not None and abs(got.ttft_s - wanted.ttft_s) <= REQUEST_BOUND_S
    return wanted.e2e_s if ttft_is_met else wanted.ttft_s


def _percentile(wanted: Sequence[Times], got: Sequence[Times | None]) -> tuple[float, str]:
    ended = [times for times in got if times is not None]
    if not ended:
        return float("inf"), "no request ended"
    found = []
    for metric in METRICS:
        ours = np.percentile([getattr(times, metric) for times in ended], PERCENTILES)
        theirs = np.percentile([getattr(times, metric) for times in wanted], PERCENTILES)
        for percentile, our, their in zip(PERCENTILES, ours, theirs, strict=True):
            found.append((float(abs(our - their) / their), f"{metric.removesuffix('_s').upper()} p{percentile}"))
    return max(found)


def _first_role(wanted: Sequence[RoleChange], got: Sequence[RoleChange]) -> RoleChange | None:
    for want, have in zip(wanted, got, strict=False):
        if want.what != have.what or abs(want.time_s - have.time_s) > REQUEST_BOUND_S:
            return want
    if len(wanted) == len(got):
        return None
    return (wanted if len(wanted) > len(got) else got)[min(len(wanted), len(got))]
