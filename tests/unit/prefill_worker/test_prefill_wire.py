"""What prefill says of its prompts, as routers read it."""

from __future__ import annotations

from kvtransfer.protocol.messages import AttemptKey
from prefill_worker.events import Event, HandedOff, HandoffStats, PromptEnded, PromptStarted, PromptWork
from prefill_worker.wire import make_events
from tandem.core.errors import DrainingError
from tandem.core.sampling import SampledToken
from tandem.rpc.v1 import common_pb2 as pb
from tandem.rpc.v1 import prefill_pb2 as prefill_pb
from tandem.worker.request import AttemptFailed, TokenSampled
from tandem.worker.sequence import FinishReason
from tandem.worker.spans import Span

KEY = AttemptKey("request", 2)
WORK = PromptWork(compute_s=0.5, num_computed_tokens=7, num_cached_tokens=4)
STATS = HandoffStats(
    num_bytes=640, num_extents=6, num_descriptors=3, handoff_s=0.25, exposed_s=0.125, answer_s=0.0625, spans=()
)


def test_a_message_has_all_events_in_order_and_the_status() -> None:
    hello, status = pb.WorkerInfo(worker_id="prefill-0"), pb.WorkerStatus(num_running=3)
    events: list[Event | pb.WorkerInfo] = [
        hello,
        PromptStarted(KEY, 4),
        TokenSampled(KEY, 1, 0, SampledToken(17, -0.5), FinishReason.STOP),
        PromptEnded(KEY, WORK, (Span("chunk", 0.5, 0.25, 7),)),
        HandedOff(KEY, STATS, WORK, (Span("chunk", 0.5, 0.25, 7),)),
        AttemptFailed(KEY, DrainingError("it drains")),
    ]
    message = make_events(events, status, 7)
    assert (message.status, message.num_commands) == (status, 7)
    name = {"request_id": "request", "attempt": 2}
    work = {"compute_s": 0.5, "num_computed_tokens": 7, "num_cached_tokens": 4}
    spans = [pb.WorkSpan(name="chunk", begin_s=0.5, end_s=0.25, count=7)]
    assert list(message.events[:5]) == [
        prefill_pb.PrefillEvent(hello=hello),
        prefill_pb.PrefillEvent(started=prefill_pb.PrefillStarted(**name, num_cached_tokens=4)),
        prefill_pb.PrefillEvent(
            first_token=pb.Token(**name, choice=1, token_id=17, finish_reason=pb.FINISH_REASON_STOP, logprob=-0.5)
        ),
        prefill_pb.PrefillEvent(ended=prefill_pb.PrefillEnded(**name, **work, spans=spans)),
        prefill_pb.PrefillEvent(
            handoff_done=prefill_pb.HandoffDone(
                **name,
                **work,
                num_bytes=640,
                num_extents=6,
                num_descriptors=3,
                handoff_s=0.25,
                exposed_s=0.125,
                answer_s=0.0625,
                spans=spans,
            )
        ),
    ]
    failed = message.events[5].failed
    assert (failed.request_id, failed.attempt, failed.error.code) == ("request", 2, "draining")


def test_events_may_go_without_a_status() -> None:
    message = make_events([PromptStarted(KEY, 4)], None, None)
    assert message.events[0].started.num_cached_tokens == 4
    assert not message.HasField("status")
    assert not message.HasField("num_commands")
