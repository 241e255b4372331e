"""Decides what follows when an attempt has ended: the plan of the next attempt, or the error that ends the request.

    what happened                     the next attempt                                   counts against
    prefill lost                      same decode, asked first: it may compute the       attempts, budget
                                      rest by itself, else another prefill
    decode lost                       same prefill, which kept the pages, another decode attempts, budget
    failed between two that live      others than both, where there are                  attempts, budget
    their connection broke            same prefill, which kept the pages, another decode attempts, budget
                                      where there is one; else it is made anew meanwhile
    overloaded                        not that one before its `retry_after_s`            attempts, budget
    refused, since the worker leaves  another one for it                                 nothing
    moved, since decode leaves        same prefill, another decode                       nothing
    a worker left by plan             as if it were lost                                 nothing
    silent before it began            the other one stays                                attempts, budget
    granted, and no prefill is ready  same decode, when there is a prefill               nothing

A worker is "lost" when it died or fell silent. Where two workers died during one request, the request may be the cause,
and is not tried again; where two are lost that may have died, it waits until more is known (`router.policy.losses`).
The decision is pure: an end comes in, a plan goes out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum

from router.policy.losses import Fate, Losses
from router.policy.retry_budget import RetryBudget
from router.policy.route import Route, Wishes
from tandem.core.errors import (
    DrainingError,
    HandoffError,
    OverloadedError,
    TandemError,
    WorkerLostError,
    WorkersDiedError,
)
from tandem.core.identity import WorkerKey


class Fault(Enum):
    """What ended an attempt."""

    DIED = "died"  # a worker died or fell silent
    FAILED = "failed"  # something between two workers that live
    LINK_BROKEN = "link_broken"  # the connection between two workers that live
    OVERLOADED = "overloaded"  # a worker's queue is full
    REFUSED = "refused"  # a worker takes no new work, since it leaves
    MOVED = "moved"  # nothing: its decode worker leaves, and another takes over
    LEFT = "left"  # a worker left by plan before the request had ended there
    SILENT = "silent"  # a worker has said nothing of the attempt, and is silent: it may be stopped or cut off
    UNSERVED = "unserved"  # decode granted pages, and no prefill worker is ready to fill them


#: Nobody's failure: no limit on attempts counts them. Each takes a worker out that never comes back, so they end.
PLANNED = frozenset({Fault.REFUSED, Fault.MOVED, Fault.LEFT, Fault.UNSERVED})


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """How an attempt ended.

    Attributes:
        worker: whose fault it is.
        is_exit_proven: another worker saw its process end; the router's own stream may not have broken yet.
        prefill: of the attempt; `None` where decode was to do without.
        decode: of the attempt; `None` where a prompt was pooled.
    """

    fault: Fault
    worker: WorkerKey
    error: TandemError
    prefill: WorkerKey | None
    decode: WorkerKey | None
    is_exit_proven: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """How the next attempt looks.

    Attributes:
        rest_until_s: overloaded workers, and until when they get no attempt.
    """

    wishes: Wishes = field(default_factory=Wishes)
    rest_until_s: Mapping[WorkerKey, float] = field(default_factory=dict)

    def rests_until_s(self, route: Route) -> float:
        """When both workers of a route may be asked; 0 where neither rests."""
        keys = (route.prefill, route.decode)
        return max((until for key, until in self.rest_until_s.items() if key in keys), default=0.0)


FIRST = Plan()


@dataclass(frozen=True, slots=True)
class RecoveryLimits:
    max_attempts: int  # planned ends do not count
    local_prefill_tokens: int  # 0: decode never computes the missing tokens itself
    max_rest_s: float  # longest time that an overloaded worker gets no attempt


class Recovery:
    """Knows the failures of one request, and decides what follows."""

    def __init__(self, limits: RecoveryLimits, budget: RetryBudget) -> None:
        self._limits = limits
        self._budget = budget
        self.num_failures = 0
        self.losses = Losses()
        self._avoid: set[WorkerKey] = set()
        self._exclude: set[WorkerKey] = set()
        self._rest_until_s: dict[WorkerKey, float] = {}

    def learn(self, end: AttemptEnd, now_s: float) -> None:
        """Remember what an attempt's end says about its workers."""
        match end.fault:
            case Fault.SILENT if end.worker == end.decode:  # it had granted nothing, so no death of it counts
                self._avoid.add(end.worker)
            case Fault.DIED | Fault.SILENT:
                self.losses.note_lost(end.worker)
                self._avoid.add(end.worker)
                if end.is_exit_proven:
                    self.losses.note_ended(end.worker)
                    self._exclude.add(end.worker)
            case Fault.FAILED:  # either may be the cause
                self._avoid.update(key for key in (end.prefill, end.decode) if key is not None)
            case Fault.LINK_BROKEN if end.decode is not None:  # neither is to blame, but prefill has the pages
                self._avoid.add(end.decode)
            case Fault.OVERLOADED:
                wanted_s = end.error.retry_after_s if isinstance(end.error, OverloadedError) else 0.0
                self._rest_until_s[end.worker] = now_s + min(wanted_s, self._limits.max_rest_s)
            case Fault.REFUSED | Fault.MOVED | Fault.LEFT:
                self._exclude.add(end.worker)
            case Fault.UNSERVED | Fault.LINK_BROKEN:
                pass

    def after(self, end: AttemptEnd) -> Plan:
        """The next attempt, after an end that was learnt.

        Raises:
            TandemError: the attempt's own error, where no retry makes sense, is left, or is paid for.
        """
        if end.fault not in PLANNED:
            self._count(end)
        return self._plan(end)

    def _count(self, end: AttemptEnd) -> None:
        """Count the failure. Raises where the request ends with it."""
        self.num_failures += 1
        if not end.error.retryable or self.num_failures >= self._limits.max_attempts:
            raise end.error
        if not self._budget.draw():
            error = copy.copy(end.error)
            error.message += "; not tried again: the cluster's retry budget is spent (limits.retry_budget)"
            raise error

    def must_wait(self, fate_of: Callable[[WorkerKey], Fate], cause: TandemError) -> bool:
        """Whether nobody may get the request before more is known of workers that were lost with it.

        Raises:
            WorkersDiedError: nobody may ever get it, since two have died.
        """
        self.losses.learn(fate_of)
        if self.losses.are_too_many:
            raise WorkersDiedError(
                f"{_names(self.losses.died)} died while they held this request; it is not tried again ({cause.message})"
            ) from cause
        return self.losses.may_be_too_many

    def nothing_was_heard(self, waited_s: float, cause: TandemError) -> WorkerLostError:
        """The error of a request that has waited long enough for word of those that were lost with it."""
        return WorkerLostError(
            f"{_names(self.losses.died | self.losses.missing)} were lost while they held this request, and for "
            f"{waited_s:g} s nothing has told whether they died or cannot be reached ({cause.message})"
        )

    def may_leave_early(self) -> bool:
        """Whether the request may leave a worker that is silent, and not lost yet: only where that cannot end it."""
        is_unharmed = not self.losses.died and not self.losses.missing
        return is_unharmed and self.num_failures + 1 < self._limits.max_attempts and self._budget.num_left >= 1

    def wishes_without(self, worker: WorkerKey) -> Wishes:
        """Wishes for an attempt away from this worker, which is leaving or silent."""
        return Wishes(avoid=frozenset(self._avoid), exclude=frozenset(self._exclude | {worker}))

    def _plan(self, end: AttemptEnd) -> Plan:
        """Keep the worker that has not failed: it holds pages of the request, or room for them."""
        prefill: WorkerKey | None = None
        decode: WorkerKey | None = None
        local = 0
        if end.fault is Fault.UNSERVED:
            decode = end.decode
        elif end.fault is Fault.FAILED:
            pass
        elif end.fault is Fault.LINK_BROKEN or end.worker == end.decode:
            prefill = end.prefill
        else:
            decode = end.decode
            local = self._limits.local_prefill_tokens if end.fault in (Fault.DIED, Fault.LEFT) else 0
        avoid = frozenset(self._avoid) | self._rest_until_s.keys()
        wishes = Wishes(prefill, decode, local, avoid, frozenset(self._exclude))
        return Plan(wishes, dict(self._rest_until_s))


def _names(workers: Collection[WorkerKey]) -> str:
    return " and ".join(sorted(map(str, workers)))


def failure(
    error: TandemError,
    worker: WorkerKey,
    prefill: WorkerKey | None,
    decode: WorkerKey | None,
    *,
    leaving: Collection[WorkerKey] = (),
) -> AttemptEnd:
    """What the failure that `worker` reports says about both workers of the attempt.

    On one host each worker sees the other's process end, often before the router's stream to it breaks. The end of a
    worker in `leaving` is no death.
    """
    reason = error.reason if isinstance(error, HandoffError) else ""

    def exited(key: WorkerKey) -> AttemptEnd:
        lost = WorkerLostError(f"worker {key} has exited, seen by {worker}")
        fault = Fault.LEFT if key in leaving else Fault.DIED
        return AttemptEnd(fault, key, lost, prefill, decode, is_exit_proven=True)

    if reason == "writer_exited" and worker == decode and prefill is not None:
        return exited(prefill)
    if reason == "receiver_exited" and worker == prefill and decode is not None:
        return exited(decode)
    if isinstance(error, DrainingError):
        return AttemptEnd(Fault.REFUSED, worker, error, prefill, decode)
    if reason == "draining" and decode is not None:  # prefill passes on what decode said
        return AttemptEnd(Fault.REFUSED, decode, error, prefill, decode)
    if reason == "link_broken" and worker == prefill:
        return AttemptEnd(Fault.LINK_BROKEN, worker, error, prefill, decode)
    fault = Fault.OVERLOADED if isinstance(error, OverloadedError) else Fault.FAILED
    return AttemptEnd(fault, worker, error, prefill, decode)
