"""What is read when Prometheus asks: the workers' last reports, so that one that left leaves no stale series, the
router's queue, its retry budget, and whom its control service refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.policy.retry_budget import RetryBudget
from router.workers.session import SessionState, WorkerSession
from tandem.rpc.guard import RoleGuard


class BudgetGauges(Collector):
    """The retry budget: what is left of it, and how often it was spent."""

    def __init__(self, budget: RetryBudget) -> None:
        self._budget = budget

    def collect(self) -> Iterable[Metric]:
        left = GaugeMetricFamily("tandem_retry_budget_retries", "Requests that may be tried again now")
        left.add_metric([], self._budget.num_left)
        spent = CounterMetricFamily(
            "tandem_retry_budget_exhausted", "Requests that were not tried again: the retry budget was spent"
        )
        spent.add_metric([], self._budget.num_refused)
        return [left, spent]


class DeniedCalls(Collector):
    """Calls to the router's control service that the caller's certificate does not allow."""

    def __init__(self, guard: RoleGuard) -> None:
        self._guard = guard

    def collect(self) -> Iterable[Metric]:
        denied = CounterMetricFamily(
            "tandem_calls_denied",
            "Control calls that the caller's role may not make; role `none`: its certificate has no role",
            labels=["method", "role"],
        )
        for (method, role), num in list(self._guard.num_denied.items()):
            denied.add_metric([method, role or "none"], num)
        return [denied]


class WorkerGauges(Collector):
    """`tandem_kv_pages` and `tandem_queue_length` of all workers that are connected, and the router's own queue."""

    def __init__(self, sessions: Callable[[], list[WorkerSession]], num_waiting: Callable[[], int]) -> None:
        self._sessions = sessions
        self._num_waiting = num_waiting

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return self._families()

    def collect(self) -> Iterable[GaugeMetricFamily]:
        pages, queue, running, waiting = self._families()
        for session in self._sessions():
            if session.state is not SessionState.OPEN:
                continue
            labels = [session.key.worker_id, session.role]
            counts = session.status.pages
            for state in ("free", "used", "reserved", "cached", "quarantined"):
                pages.add_metric([*labels, state], getattr(counts, state))
            queue.add_metric(labels, session.status.num_queued)
            running.add_metric(labels, session.status.num_running)
        waiting.add_metric([], self._num_waiting())
        return [pages, queue, running, waiting]

    def _families(self) -> list[GaugeMetricFamily]:
        return [
            GaugeMetricFamily("tandem_kv_pages", "KV pages of a worker by state", labels=["worker", "role", "state"]),
            GaugeMetricFamily("tandem_queue_length", "Requests that wait at a worker", labels=["worker", "role"]),
            GaugeMetricFamily("tandem_running_requests", "Requests in a worker's batch", labels=["worker", "role"]),
            GaugeMetricFamily("tandem_router_waiting_requests", "Requests that wait for their prompt's computation"),
        ]
