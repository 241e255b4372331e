"""Sends the way of each request that has ended to a collector of OpenTelemetry, by OTLP over HTTP.

The spans are made after the end, from the stamps that the router keeps anyway: a token costs nothing here. Their names
and attributes follow OpenTelemetry's conventions for generative AI. The SDK batches, sends and retries in a thread of
its own; where the collector does not keep up, spans are dropped, never requests held up.

Source: opentelemetry.io/docs/specs/semconv/gen-ai, www.w3.org/TR/trace-context.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from router.observe.trace import Trace
from tandem.core.errors import ConfigError
from tandem.core.version import version

_log = logging.getLogger(__name__)

_FAREWELL_S = 3.0
_OPERATIONS = {"completion": "text_completion"}
_ENDPOINT = "/v1/traces"


class Exporter:
    """Sends to one collector."""

    def __init__(self, endpoint: str, share: float, model: str, router: str, now_s: Callable[[], float]) -> None:
        """Args:
            endpoint: URL of the collector's OTLP receiver, such as http://collector:4318.
            share: of the requests that are sent, where no caller's `traceparent` decides.
            now_s: the clock of the traces.

        Raises:
            ConfigError: the packages of the extra `otel` are missing.
        """
        try:
            from opentelemetry import trace as api
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(
                f"tracing needs packages that are not here ({error}): pip install 'tandem-serving[otel]'",
                key="tracing.otlp_endpoint",
            ) from error
        self._api, self._now_s, self._model = api, now_s, model
        self._propagator = TraceContextTextMapPropagator()
        resource = Resource.create(
            {"service.name": "tandem", "service.version": version(), "service.instance.id": router or "router"}
        )
        self._provider = TracerProvider(
            sampler=ParentBasedTraceIdRatio(share), resource=resource, shutdown_on_exit=False
        )
        url = endpoint if endpoint.rstrip("/").endswith(_ENDPOINT) else endpoint.rstrip("/") + _ENDPOINT
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
        self._tracer = self._provider.get_tracer("tandem.router", version())

    def export(self, trace: Trace) -> None:
        """Queue the spans of a request that has ended."""
        assert trace.ended_s is not None
        # The traces' clock does not know the time of day.
        begin_ns = time.time_ns() - round((self._now_s() - trace.arrived_s) * 1e9)

        def at(seconds: float) -> int:
            return begin_ns + round(seconds * 1e9)

        api, operation = self._api, _OPERATIONS.get(trace.kind, trace.kind or "chat")
        whole = self._tracer.start_span(
            f"{operation} {self._model}",
            context=self._propagator.extract(trace.parent),
            kind=api.SpanKind.SERVER,
            start_time=begin_ns,
            attributes={"gen_ai.operation.name": operation, **self._attributes(trace)},
        )
        inside = api.set_span_in_context(whole)
        for span in trace.spans(trace.ended_s):
            part = self._tracer.start_span(
                span.name, context=inside, start_time=at(span.begin_s), attributes={"tandem.attempt": span.attempt}
            )
            part.end(end_time=at(span.end_s))
        for work in trace.work:
            done: dict[str, str | int] = {"tandem.worker": work.worker, "tandem.count": work.count}
            part = self._tracer.start_span(work.name, context=inside, start_time=at(work.begin_s), attributes=done)
            part.end(end_time=at(work.end_s))
        for note in trace.attempts:
            facts = {"tandem.prefill": note.prefill or "", "tandem.decode": note.decode or "", "tandem.why": note.why}
            whole.add_event(f"attempt {note.number}", facts, timestamp=at(note.began_s - trace.arrived_s))
        if trace.outcome != "finished":
            whole.set_attribute("error.type", trace.outcome)
            whole.set_status(api.Status(api.StatusCode.ERROR, trace.error))
        whole.end(end_time=at(trace.ended_s - trace.arrived_s))

    def _attributes(self, trace: Trace) -> Mapping[str, str | int | float]:
        known: dict[str, str | int | float | None] = {
            "gen_ai.provider.name": "tandem",
            "gen_ai.request.model": self._model,
            "gen_ai.response.id": trace.client_id,
            "gen_ai.request.choice.count": trace.num_choices,
            "gen_ai.usage.input_tokens": trace.num_prompt_tokens,
            "gen_ai.usage.output_tokens": trace.num_output_tokens,
            "gen_ai.usage.cache_read.input_tokens": trace.num_cached_tokens,
            "gen_ai.server.time_to_first_token": round(trace.ticks[0], 6) if trace.ticks else None,
            "tandem.request_id": trace.request_id,
            "tandem.prompt_computed_by": trace.computed_by,
        }
        return {name: value for name, value in known.items() if value is not None}

    def close(self) -> None:
        """Send what is queued. Blocks, but not for long: a collector that is away must not keep the router."""
        closing = threading.Thread(target=self._provider.shutdown, name="spans", daemon=True)
        closing.start()
        closing.join(_FAREWELL_S)
        if closing.is_alive():
            _log.warning("the last spans were not sent: the collector did not take them within %g s", _FAREWELL_S)
