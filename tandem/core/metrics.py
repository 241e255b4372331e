"""The metrics that the router exports: names, labels, units and buckets, in one place.

One registry for each router, never the library's global one, so that several live in one process.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from tandem.core.identity import WORKER_ROLES

CONTENT_TYPE = CONTENT_TYPE_LATEST

_FAST_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_SLOW_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)


#: How a request may end.
OUTCOMES = ("finished", "cancelled", "deadline", "overloaded", "rate_limited", "no_worker", "invalid", "failed")


class RouterMetrics:
    """Counters and histograms of one router. `router.workers.gauges` adds what is read when it is asked for."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(name, help, labels, registry=registry)

        def histogram(name: str, help: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(name, help, labels, buckets=buckets, registry=registry)

        # -- requests, as clients see them
        self.requests = counter("tandem_requests_total", "Requests that ended, by outcome", "outcome")
        self.prompt_tokens = counter("tandem_prompt_tokens_total", "Prompt tokens of requests whose prompt was begun")
        self.output_tokens = counter("tandem_output_tokens_total", "Tokens that were given out")
        self.finished_choices = counter(
            "tandem_finished_choices_total", "Choices that ended by themselves, by finish reason", "reason"
        )
        self.ttft_s = histogram("tandem_ttft_seconds", "Arrival of a request to its first token", _SLOW_S)
        self.itl_s = ManyDurations("tandem_itl_seconds", "Gap between two tokens of one choice", _FAST_S)
        registry.register(self.itl_s)
        self.second_token_s = histogram(
            "tandem_second_token_seconds", "First to second token of a choice, which may wait for a place", _SLOW_S
        )
        self.request_s = histogram("tandem_request_seconds", "Arrival of a request to its end", _SLOW_S)
        self.phase_s = histogram(
            "tandem_request_phase_seconds", "Time of a request in each phase; the phases add up", _SLOW_S, "phase"
        )
        self.retries = counter("tandem_retries_total", "Attempts begun anew after a failure, by its code", "reason")
        self.moves = counter(
            "tandem_moves_total", "Attempts begun anew since a worker was leaving; not failures", "reason"
        )
        self.recovery_s = histogram(
            "tandem_recovery_seconds", "A fault that ends an attempt to the next token given out", _SLOW_S
        )
        self.disagreements = counter(
            "tandem_journal_disagreements_total", "Tokens that came twice with another id; the first one stands"
        )
        self.dropped_tokens = counter(
            "tandem_journal_dropped_tokens_total", "Tokens that were not given out, by why", "reason"
        )
        # -- tenants: those that have names, some of those that have none, and `other`
        self.tenant_requests = counter(
            "tandem_tenant_requests_total", "Requests of a tenant that ended, by outcome", "tenant", "outcome"
        )
        self.tenant_tokens = counter(
            "tandem_tenant_tokens_total",
            "Tokens of a tenant's requests that ended, of prompts and of outputs",
            "tenant",
            "kind",
        )
        # -- by when tokens are wanted
        self.slo_requests = counter(
            "tandem_slo_requests_total",
            "Requests of a tenant that were let in and served, or failed, by whether they kept their targets",
            "tenant",
            "ttft",
            "tpot",
        )
        self.slo_target_s = Gauge(
            "tandem_slo_target_seconds",
            "The cluster's targets: to the first token, and for each further one on average",
            ["target"],
            registry=registry,
        )
        # -- handoffs
        self.handoff_s = histogram("tandem_handoff_seconds", "First post of a page to decode's ack", _FAST_S)
        self.exposed_s = histogram(
            "tandem_exposed_transfer_seconds", "End of a prompt's computation to decode's acknowledgement", _FAST_S
        )
        self.admission_s = histogram(
            "tandem_admission_seconds",
            "From when decode takes up a commit to its request's place in the batch",
            _FAST_S,
        )
        self.prefill_compute_s = histogram(
            "tandem_prefill_compute_seconds", "First chunk of a prompt to its last logits", _SLOW_S
        )
        self.handoffs_refused = counter(
            "tandem_handoffs_refused_total", "What workers refused of each other in handoffs, by reason", "reason"
        )
        # -- sums of what the workers report; they never go back, whichever incarnation counted
        self.kv_transfer_bytes = counter(
            "tandem_kv_transfer_bytes_total", "Bytes of KV pages written to decode workers", "transport"
        )
        self.prompt_tokens_computed = counter(
            "tandem_prompt_tokens_computed_total", "Prompt tokens that were computed", "role"
        )
        self.prompt_tokens_cached = counter(
            "tandem_prompt_tokens_cached_total", "Prompt tokens found in a prefix cache", "role"
        )
        self.prompt_tokens_recomputed = counter(
            "tandem_prompt_tokens_recomputed_total", "Prompt tokens that attempts after the first computed"
        )
        self.local_prefills = counter(
            "tandem_local_prefills_total",
            "Prompts that a decode worker computed by itself: new ones, all of a colocated cluster, or what was "
            "missing after a worker was lost",
            "reason",
        )
        self.decode_tokens = counter("tandem_decode_tokens_total", "Tokens that decode workers generated")
        self.preemptions = counter("tandem_preemptions_total", "Requests that lost their pages for a while")
        self.guesses = counter(
            "tandem_guessed_tokens_total", "Tokens that decode workers computed in case they come next", "source"
        )
        self.right_guesses = counter("tandem_guessed_tokens_right_total", "Of these, that came", "source")
        self.mixed_steps = counter(
            "tandem_mixed_steps_total", "Steps of decode workers in which they computed prompts beside their batch"
        )
        self.mixed_step_s = counter("tandem_mixed_step_seconds_total", "What these took")
        self.masks = counter("tandem_grammar_masks_total", "Tokens that were chosen by a grammar", "role")
        self.mask_s = counter(
            "tandem_grammar_mask_seconds_total", "What their masks took, made beside the forwards", "role"
        )
        self.late_masks = counter(
            "tandem_grammar_late_masks_total", "Outputs that a step went on without, as their masks were late", "role"
        )
        self.slow_grammars = counter(
            "tandem_grammars_too_slow_total", "How often a grammar took too much, which ends its output", "role"
        )
        # -- grammars
        self.grammar_compile_s = histogram(
            "tandem_grammar_compile_seconds", "What a router took to check a grammar that it did not know", _FAST_S
        )
        self.grammars_refused = counter("tandem_grammars_refused_total", "Requests whose grammar was refused")
        # -- the control plane
        self.workers_lost = counter("tandem_workers_lost_total", "Worker connections that broke or fell silent", "role")
        self.worker_deaths = counter(
            "tandem_worker_deaths_total", "Workers that were lost without a plan, once for each incarnation", "role"
        )
        self.writers_suspected = counter(
            "tandem_writers_suspected_total", "Writers that decode workers found silent beyond lease and grace"
        )
        # A series that begins with its first event hides it: Prometheus sees no increase from nothing to 1.
        for outcome in OUTCOMES:
            self.requests.labels(outcome)
        for role in WORKER_ROLES:
            self.workers_lost.labels(role)
            self.worker_deaths.labels(role)

    def exposition(self, router: str = "") -> bytes:
        """All metrics in Prometheus' text format; its type is `CONTENT_TYPE`.

        Args:
            router: its name, which each sample gets as the label `router`; empty: it has none.
        """
        return generate_latest(_Labelled(self.registry, router) if router else self.registry)


class ManyDurations(Collector):
    """A histogram without labels that one thread tells many durations at a time: the library's own finds a bucket and
    takes two locks for each. Bounds are in seconds."""

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        self._name, self._help, self._bounds = name, help, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum_s = 0.0

    def observe(self, durations_s: Sequence[float]) -> None:
        counts, bounds = self._counts, self._bounds
        for each in durations_s:
            counts[bisect_left(bounds, each)] += 1
        self._sum_s += sum(durations_s)

    def collect(self) -> Iterable[Metric]:
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        family = HistogramMetricFamily(self._name, self._help)
        family.add_metric([], list(zip(bounds, accumulate(self._counts), strict=True)), self._sum_s)
        yield family


class _Labelled(Collector):
    """Everything in a registry with one more label."""

    def __init__(self, registry: CollectorRegistry, router: str) -> None:
        self._registry, self._router = registry, router

    def collect(self) -> Iterable[Metric]:
        for metric in self._registry.collect():
            metric.samples = [s._replace(labels={"router": self._router, **s.labels}) for s in metric.samples]
            yield metric
