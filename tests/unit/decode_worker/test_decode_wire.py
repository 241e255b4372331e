"""Events of a decode worker on the wire."""

from __future__ import annotations

from decode_worker.events import PromptComputed
from decode_worker.wire import make_events
from kvtransfer.protocol.messages import AttemptKey
from tandem.core.sampling import SampledToken
from tandem.rpc.v1 import common_pb2 as pb
from tandem.rpc.v1 import decode_pb2 as decode_pb
from tandem.worker.request import TokenSampled
from tandem.worker.spans import Span


def test_chunks_travel_with_the_prompt_that_is_computed() -> None:
    computed = PromptComputed(AttemptKey("r", 2), (Span("chunk", 0.5, 0.25, 7),))
    (event,) = make_events([computed], pb.WorkerStatus(), 0).events
    spans = [pb.WorkSpan(name="chunk", begin_s=0.5, end_s=0.25, count=7)]
    assert event == decode_pb.DecodeEvent(computed=decode_pb.PromptComputed(request_id="r", attempt=2, spans=spans))


def test_events_may_go_without_a_status() -> None:
    token = TokenSampled(AttemptKey("r", 1), 0, 3, SampledToken(7), None)
    message = make_events([token], None, None)
    assert message.events[0].token.token_id == 7
    assert not message.HasField("status")
    assert not message.HasField("num_commands")
    told = make_events([], pb.WorkerStatus(), 0)
    assert told.HasField("status"), "of which nothing is other than 0"
    assert told.HasField("num_commands")
