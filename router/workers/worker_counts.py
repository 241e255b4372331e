"""What a worker counts, in the metrics of its router: the sums grow by what is new in each of its reports."""

from __future__ import annotations

from operator import attrgetter

from prometheus_client import Counter

from tandem.core.identity import Role
from tandem.core.metrics import RouterMetrics
from tandem.rpc.v1.common_pb2 import WorkerStatus

#: In the order of `_counters`.
_counts_of = attrgetter(
    "decode_tokens", "preemptions", "mixed_steps", "mixed_s", "prompt_tokens_computed", "prompt_tokens_cached", "masks",
    "mask_s", "late_masks", "slow_grammars", "guesses", "right_guesses", "drafts", "right_drafts", "transfer_bytes",
)  # fmt: skip


def _counters(metrics: RouterMetrics, role: Role, transport: str) -> tuple[Counter, ...]:
    """Each is exported from now on."""
    of_role = (
        metrics.prompt_tokens_computed, metrics.prompt_tokens_cached, metrics.masks, metrics.mask_s, metrics.late_masks,
        metrics.slow_grammars,
    )  # fmt: skip
    both = (metrics.guesses, metrics.right_guesses)
    guesses = [counter.labels(source) for source in ("lookup", "draft") for counter in both]
    return (
        metrics.decode_tokens, metrics.preemptions, metrics.mixed_steps, metrics.mixed_step_s,
        *(counter.labels(role) for counter in of_role), *guesses, metrics.kv_transfer_bytes.labels(transport),
    )  # fmt: skip


class WorkerCounts:
    """Of one incarnation of a worker."""

    def __init__(self, metrics: RouterMetrics, role: Role, transport: str) -> None:
        self._counters = _counters(metrics, role, transport)
        self._refused = metrics.handoffs_refused
        self._last = WorkerStatus()

    def take(self, status: WorkerStatus) -> WorkerStatus:
        """Enter what is new in a report. Returns the one before."""
        last, self._last = self._last, status
        for counter, now, then in zip(self._counters, _counts_of(status), _counts_of(last), strict=True):
            if now > then:
                counter.inc(now - then)
        for reason, number in status.refused.items() if status.refused else ():
            if number > last.refused.get(reason, 0):
                self._refused.labels(reason).inc(number - last.refused.get(reason, 0))
        return last
