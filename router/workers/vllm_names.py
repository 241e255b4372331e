"""Tandem's figures under the names that vLLM gives them, for boards, autoscalers and load generators made for it.

Only what means the same is there. Source: docs.vllm.ai, "Production metrics".
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router.policy.admission import Admission
from router.workers.registry import WorkerRegistry
from router.workers.session import SessionState
from tandem.core.identity import Role
from tandem.core.metrics import RouterMetrics

_LABELS = ["model_name", "engine"]
_ENGINE = "0"  # the cluster as a whole


class VllmNames(Collector):
    """Reads the metrics of one router when it is asked for them."""

    def __init__(self, metrics: RouterMetrics, workers: WorkerRegistry, admission: Admission, model: str) -> None:
        self._metrics, self._workers, self._admission = metrics, workers, admission
        self._values = [model, _ENGINE]

    def collect(self) -> Iterable[Metric]:
        metrics = self._metrics
        yield from self._gauges()
        yield self._counter("prompt_tokens", "Prompt tokens of requests", metrics.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens given out", metrics.output_tokens)
        yield self._counter("num_preemptions", "Requests that lost their pages for a while", metrics.preemptions)
        yield self._counter("prefix_cache_hits", "Prompt tokens found in a cache", metrics.prompt_tokens_cached)
        yield self._counter("spec_decode_num_draft_tokens", "Tokens proposed", metrics.guesses)
        yield self._counter("spec_decode_num_accepted_tokens", "Proposed tokens that came", metrics.right_guesses)
        both = (metrics.prompt_tokens_cached, metrics.prompt_tokens_computed)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked for in a cache", *both)
        ended = CounterMetricFamily(
            "vllm:request_success", "Choices that ended, by reason", labels=[*_LABELS, "finished_reason"]
        )
        for reason, number in _by_label(metrics.finished_choices).items():
            ended.add_metric([*self._values, reason], number)
        yield ended
        for name, about, histogram, phase in (
            ("time_to_first_token_seconds", "Arrival of a request to its first token", metrics.ttft_s, None),
            ("inter_token_latency_seconds", "Gap between two tokens", metrics.itl_s, None),
            ("time_per_output_token_seconds", "Gap between two tokens", metrics.itl_s, None),
            ("e2e_request_latency_seconds", "Arrival of a request to its end", metrics.request_s, None),
            ("request_queue_time_seconds", "Time in the queue", metrics.phase_s, "queued"),
            ("request_prefill_time_seconds", "Computation of the prompt", metrics.phase_s, "prefilling"),
            ("request_decode_time_seconds", "Generation after the first token", metrics.phase_s, "decoding"),
        ):
            yield self._histogram(name, about, histogram, phase)

    def _gauges(self) -> Iterable[Metric]:
        decode = [s for s in self._workers.sessions() if s.state is SessionState.OPEN and s.role is Role.DECODE]
        pages = [session.status.pages for session in decode]
        used = sum(p.used + p.reserved + p.quarantined for p in pages)
        total = used + sum(p.free + p.cached for p in pages)
        for name, about, value in (
            ("num_requests_running", "Sequences in batches", sum(s.status.num_running for s in decode)),
            ("num_requests_waiting", "Requests whose prompt waits", self._admission.num_waiting),
            (
                "kv_cache_usage_perc",
                "Share of the pages at decode that is used; 1 is all",
                used / total if total else 0,
            ),
        ):
            family = GaugeMetricFamily(f"vllm:{name}", about, labels=_LABELS)
            family.add_metric(self._values, value)
            yield family

    def _counter(self, name: str, about: str, *counters: Counter) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", about, labels=_LABELS)
        family.add_metric(self._values, sum(sum(_by_label(counter).values()) for counter in counters))
        return family

    def _histogram(self, name: str, about: str, histogram: Collector, phase: str | None) -> Metric:
        family = HistogramMetricFamily(f"vllm:{name}", about, labels=_LABELS)
        buckets, total = [], 0.0
        for sample in next(iter(histogram.collect())).samples:
            if phase is not None and sample.labels.get("phase") != phase:
                continue
            if sample.name.endswith("_bucket"):
                buckets.append((sample.labels["le"], sample.value))
            elif sample.name.endswith("_sum"):
                total = sample.value
        if buckets:
            family.add_metric(self._values, buckets, total)
        return family


def _by_label(counter: Counter) -> dict[str, float]:
    """The values of a counter, by those of its labels."""
    samples = next(iter(counter.collect())).samples
    return {",".join(s.labels.values()): s.value for s in samples if s.name.endswith("_total")}
