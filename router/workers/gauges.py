"""What is read when Prometheus asks: the workers' last reports, so that one that left leaves no stale series, the
router's queue, its retry budget, and the calls that its control service refused."""

from __future__ import annotations

import math
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.policy.admission import Admission
from router.policy.retry_budget import RetryBudget
from router.workers.registry import WorkerRegistry
from router.workers.session import SessionState
from tandem.core.pages import PageState
from tandem.rpc import security
from tandem.rpc.convert import ROLE_FROM_PROTO
from tandem.rpc.guard import RoleGuard

# As the status calls them.
_TIER_EVENTS = ("read", "written", "evicted", "corrupt", "lost")
_TIER_OUTCOMES = ("fetched", "missed", "abandoned")


class RouterGauges(Collector):
    """The gauges and counters of one router that `RouterMetrics` does not keep."""

    def __init__(
        self, workers: WorkerRegistry, admission: Admission, budget: RetryBudget, guard: RoleGuard, name: str
    ) -> None:
        """`name`: of the router."""
        self._name = name
        self._workers = workers
        self._admission = admission
        self._budget = budget
        self._guard = guard

    def collect(self) -> Iterable[Metric]:
        yield from self._of_workers()
        yield from self._of_pools()
        yield self._of_certificates()
        yield self._of_links()
        yield from self._of_tiers()
        yield GaugeMetricFamily(
            "tandem_router_waiting_requests",
            "Requests that wait for their prompt's computation",
            value=self._admission.num_waiting,
        )
        yield GaugeMetricFamily(
            "tandem_colocated",
            "Whether decode workers compute all prompts, as the cluster has no prefill workers",
            value=self._workers.is_colocated,
        )
        yield GaugeMetricFamily(
            "tandem_known_pages",
            "Different pages of prompts that workers hold, as far as this router knows",
            value=len(self._workers.pages),
        )
        yield GaugeMetricFamily(
            "tandem_known_tier_pages",
            "Different pages of prompts that workers hold in tiers below their pools, as far as this router knows",
            value=self._workers.pages.num_stored,
        )
        yield GaugeMetricFamily(
            "tandem_retry_budget_retries", "Requests that may be tried again now", value=self._budget.num_left
        )
        yield CounterMetricFamily(
            "tandem_retry_budget_exhausted",
            "Requests that were not tried again: the retry budget was spent",
            value=self._budget.num_refused,
        )
        denied = CounterMetricFamily(
            "tandem_calls_denied",
            "Control calls that the caller's role may not make; role `none`: its certificate has no role",
            labels=["method", "role"],
        )
        for (method, role), num in list(self._guard.num_denied.items()):
            denied.add_metric([method, role or "none"], num)
        yield denied

    def _of_pools(self) -> Iterable[Metric]:
        workers = GaugeMetricFamily(
            "tandem_pool_workers",
            "Workers that a pool shall have: `wanted` now, `least` and `most` by its load, the same where it is fixed",
            labels=["role", "bound"],
        )
        changes = CounterMetricFamily(
            "tandem_pool_changes",
            "Changes of a pool's size by its load: `grown`, `shrunk`, `taken` from the other pool, or `refused`",
            labels=["role", "outcome"],
        )
        for pool in self._workers.pool_sizes:
            role = ROLE_FROM_PROTO[pool.role]
            for bound in ("wanted", "least", "most"):
                workers.add_metric([role, bound], getattr(pool, bound))
            for outcome in ("grown", "shrunk", "taken", "refused"):
                changes.add_metric([role, outcome], getattr(pool, f"num_{outcome}"))
        return workers, changes

    def _of_certificates(self) -> Metric:
        ends = GaugeMetricFamily(
            "tandem_certificate_expiry_timestamp_seconds",
            "When the certificate ends that a process has read at its start, in seconds since the epoch",
            labels=["process", "role"],
        )
        told = [
            (self._name or "router", "router", security.current().certificate_expires),
            ("supervisor", "supervisor", self._workers.supervisor_certificate_expires),
        ]
        told += [
            (session.key.worker_id, session.role, session.status.certificate_expires)
            for session in self._workers.sessions()
            if session.state is SessionState.OPEN
        ]
        for process, role, expires in told:
            if expires:
                ends.add_metric([process, role], expires)
        return ends

    def _of_links(self) -> Metric:
        rates = GaugeMetricFamily(
            "tandem_link_bytes_per_second",
            "What a link from a prefill to a decode worker has carried; 0: nothing arrives on it",
            labels=["prefill", "decode"],
        )
        for (prefill, decode), link in self._workers.links.items():
            if link.is_broken or math.isfinite(link.bytes_per_s):
                rates.add_metric([prefill.worker_id, decode.worker_id], 0.0 if link.is_broken else link.bytes_per_s)
        return rates

    def _of_tiers(self) -> list[Metric]:
        labels = ["worker", "role", "tier"]
        pages = GaugeMetricFamily("tandem_tier_pages", "KV pages in a tier below a worker's pool", labels=labels)
        num_bytes = GaugeMetricFamily("tandem_tier_bytes", "Bytes of these pages", labels=labels)
        events = CounterMetricFamily(
            "tandem_tier_page_events",
            "Pages of a tier that were read, written, evicted, corrupt and removed, or lost: they could not be written",
            labels=[*labels, "event"],
        )
        seconds = CounterMetricFamily(
            "tandem_tier_seconds", "Seconds that reading and writing pages of a tier took", labels=[*labels, "event"]
        )
        prompts = CounterMetricFamily(
            "tandem_tier_prompt_pages",
            "Pages of prompts that the pool lacked: fetched from a tier, missed there too, or abandoned as too slow",
            labels=["worker", "role", "outcome"],
        )
        for session in self._workers.sessions():
            if session.state is not SessionState.OPEN:
                continue
            worker, report = [session.key.worker_id, session.role], session.status.tiers
            for tier in report.tiers:
                names = [*worker, tier.name]
                pages.add_metric(names, tier.pages)
                num_bytes.add_metric(names, tier.bytes)
                for event in _TIER_EVENTS:
                    events.add_metric([*names, event], getattr(tier, event))
                seconds.add_metric([*names, "read"], tier.read_s)
                seconds.add_metric([*names, "written"], tier.write_s)
            if report.tiers:
                for outcome in _TIER_OUTCOMES:
                    prompts.add_metric([*worker, outcome], getattr(report, outcome))
        return [pages, num_bytes, events, seconds, prompts]

    def _of_workers(self) -> list[Metric]:
        labels = ["worker", "role"]
        pages = GaugeMetricFamily("tandem_kv_pages", "KV pages of a worker by state", labels=[*labels, "state"])
        unfilled = GaugeMetricFamily(
            "tandem_kv_unfilled_pages",
            "What of the pages that a worker's sequences are filling holds no token, in pages",
            labels=labels,
        )
        queue = GaugeMetricFamily("tandem_queue_length", "Requests that wait at a worker", labels=labels)
        running = GaugeMetricFamily("tandem_running_requests", "Requests in a worker's batch", labels=labels)
        for session in self._workers.sessions():
            if session.state is SessionState.OPEN:
                names = [session.key.worker_id, session.role]
                for state in PageState:
                    pages.add_metric([*names, state.value], getattr(session.status.pages, state.value))
                unfilled.add_metric(names, session.status.unfilled_slots / max(1, session.info.layout.page_size))
                queue.add_metric(names, session.status.num_queued)
                running.add_metric(names, session.status.num_running)
        return [pages, unfilled, queue, running]
