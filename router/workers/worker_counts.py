"""What a worker counts, in the metrics of its router: the sums grow by what is new in each of its reports."""

from __future__ import annotations

from operator import attrgetter

from prometheus_client import Counter

from tandem.core.identity import Role
from tandem.core.metrics import RouterMetrics
from tandem.rpc.v1.common_pb2 import WorkerStatus


def _counters(metrics: RouterMetrics, role: Role, transport: str) -> dict[str, Counter]:
    """By the status' field that counts the same; each is exported from now on."""
    return {
        "decode_tokens": metrics.decode_tokens,
        "preemptions": metrics.preemptions,
        "mixed_steps": metrics.mixed_steps,
        "mixed_s": metrics.mixed_step_s,
        "prompt_tokens_computed": metrics.prompt_tokens_computed.labels(role),
        "prompt_tokens_cached": metrics.prompt_tokens_cached.labels(role),
        "masks": metrics.masks.labels(role),
        "mask_s": metrics.mask_s.labels(role),
        "late_masks": metrics.late_masks.labels(role),
        "slow_grammars": metrics.slow_grammars.labels(role),
        "guesses": metrics.guesses.labels("lookup"),
        "right_guesses": metrics.right_guesses.labels("lookup"),
        "drafts": metrics.guesses.labels("draft"),
        "right_drafts": metrics.right_guesses.labels("draft"),
        "transfer_bytes": metrics.kv_transfer_bytes.labels(transport),
    }


class WorkerCounts:
    """Of one incarnation of a worker."""

    def __init__(self, metrics: RouterMetrics, role: Role, transport: str) -> None:
        counters = _counters(metrics, role, transport)
        self._counters, self._counts_of = tuple(counters.values()), attrgetter(*counters)
        self._refused = metrics.handoffs_refused
        self._last = WorkerStatus()

    def take(self, status: WorkerStatus) -> WorkerStatus:
        """Enter what is new in a report. Returns the one before."""
        last, self._last = self._last, status
        for counter, now, then in zip(self._counters, self._counts_of(status), self._counts_of(last), strict=True):
            if now > then:
                counter.inc(now - then)
        for reason, number in status.refused.items() if status.refused else ():
            if number > last.refused.get(reason, 0):
                self._refused.labels(reason).inc(number - last.refused.get(reason, 0))
        return last
