"""Spans of requests at a receiver of OTLP over HTTP, which reads them by OpenTelemetry's own schema."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.support.router_site import Site, in_background
from tests.support.scripted_worker import ScriptedDecode
from tests.support.waiting import wait_until

PARENT, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Receiver(ThreadingHTTPServer):
    """Keeps every span with its service's name."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[tuple[str, Span]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def named(self, name: str) -> list[Span]:
        return [span for _, span in self.spans if span.name == name]


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        assert self.path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = next(a.value.string_value for a in resource.resource.attributes if a.key == "service.name")
            self.server.spans += [(service, span) for scope in resource.scope_spans for span in scope.spans]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(ExportTraceServiceResponse().SerializeToString())

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def attributes(span: Span) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


@pytest.mark.long
def test_a_request_becomes_a_span_with_its_parts_under_its_callers(
    make_site: Callable[..., Site], receiver: Receiver
) -> None:
    site = make_site({"tracing.otlp_endpoint": receiver.url})
    with site.http(headers={"traceparent": f"00-{PARENT}-{CALLER}-01", "x-request-id": "mine"}) as client:
        body = {"model": "toy", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
        assert client.post("/v1/chat/completions", json=body).status_code == 200
    wait_until(lambda: receiver.named("chat toy"), "the span of the request", 20)
    (whole,) = receiver.named("chat toy")
    assert {service for service, _ in receiver.spans} == {"tandem"}
    assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (PARENT, CALLER)
    assert whole.kind == Span.SPAN_KIND_SERVER
    told = attributes(whole)
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.usage.output_tokens"] == 4
    assert told["gen_ai.response.id"] == "mine"
    assert 0 < told["gen_ai.server.time_to_first_token"] < (whole.end_time_unix_nano - whole.start_time_unix_nano) / 1e9
    (event,) = whole.events
    assert event.name == "attempt 1"
    inside = [span for _, span in receiver.spans if span.parent_span_id == whole.span_id]
    inside.sort(key=lambda span: span.start_time_unix_nano)
    work = [span for span in inside if "tandem.worker" in attributes(span)]
    assert {span.name for span in work} >= {"admission"}
    parts = [span for span in inside if span not in work]
    assert [parts[0].name, parts[-1].name] == ["waits for router", "send"]
    assert parts[0].start_time_unix_nano == whole.start_time_unix_nano
    assert sum(s.end_time_unix_nano - s.start_time_unix_nano for s in parts) == pytest.approx(
        whole.end_time_unix_nano - whole.start_time_unix_nano, abs=1000 * len(parts)
    )


@pytest.mark.long
def test_what_failed_says_so_and_each_attempt_is_an_event(make_site: Callable[..., Site], receiver: Receiver) -> None:
    site = make_site({"tracing.otlp_endpoint": f"{receiver.url}/v1/traces", "limits.max_attempts": 1})
    site.decode.held_back.clear()
    under_way = in_background(site)
    site.decode.wait_for("attach")
    site.add(ScriptedDecode("decode-1"))
    site.decode.kill()
    assert under_way.result().status_code == 502
    wait_until(lambda: receiver.named("text_completion toy"), "the span of the request", 20)
    (whole,) = receiver.named("text_completion toy")
    assert whole.status.code == Status.STATUS_CODE_ERROR
    assert "decode-0" in whole.status.message
    assert attributes(whole)["error.type"] == "failed"


@pytest.mark.long
@pytest.mark.parametrize(("flags", "is_sent"), [("01", True), ("00", False)])
def test_the_caller_decides_whether_its_request_is_sent(
    make_site: Callable[..., Site], receiver: Receiver, flags: str, is_sent: bool
) -> None:
    site = make_site({"tracing.otlp_endpoint": receiver.url, "tracing.sample": 0.0 if is_sent else 1.0})
    with site.http() as client:
        for headers in ({"traceparent": f"00-{PARENT}-{CALLER}-{flags}"}, {}):  # the other one goes by `sample`
            body = {"model": "toy", "prompt": "x", "max_tokens": 2}
            assert client.post("/v1/completions", json=body, headers=headers).status_code == 200
    site.server.stop(drain_s=5.0)  # what is queued is sent before it ends
    (whole,) = receiver.named("text_completion toy")
    assert (whole.trace_id.hex() == PARENT) == is_sent


@pytest.mark.long
def test_a_collector_that_is_away_holds_nothing_up(make_site: Callable[..., Site]) -> None:
    site = make_site({"tracing.otlp_endpoint": "http://127.0.0.1:1"})
    assert site.post(prompt="x", max_tokens=2).status_code == 200
    site.server.stop(drain_s=0.2)
    assert site.server.wait_closed(0)


def test_a_header_that_is_none_begins_a_trace_of_its_own(make_site: Callable[..., Site], receiver: Receiver) -> None:
    site = make_site({"tracing.otlp_endpoint": receiver.url})
    with site.http(headers={"traceparent": "nonsense"}) as client:
        assert client.post("/v1/completions", json={"model": "toy", "prompt": "x"}).status_code == 200
    wait_until(lambda: receiver.named("text_completion toy"), "the span of the request", 20)
    assert not receiver.named("text_completion toy")[0].parent_span_id
