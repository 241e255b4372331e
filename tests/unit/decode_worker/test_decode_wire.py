"""Events of a decode worker on the wire."""

from __future__ import annotations

from decode_worker.events import PromptComputed
from decode_worker.wire import make_events
from kvtransfer.protocol.messages import AttemptKey
from tandem.rpc.v1 import common_pb2 as pb
from tandem.rpc.v1 import decode_pb2 as decode_pb
from tandem.worker.spans import Span


def test_chunks_travel_with_the_prompt_that_is_computed() -> None:
    computed = PromptComputed(AttemptKey("r", 2), (Span("chunk", 0.5, 0.25, 7),))
    (event,) = make_events([computed], pb.WorkerStatus(), 0).events
    spans = [pb.WorkSpan(name="chunk", begin_s=0.5, end_s=0.25, count=7)]
    assert event == decode_pb.DecodeEvent(computed=decode_pb.PromptComputed(request_id="r", attempt=2, spans=spans))
