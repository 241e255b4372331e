"""Between decode's own events and the wire; the rest is in `tandem.worker.wire`."""

from __future__ import annotations

from collections.abc import Sequence

from decode_worker.events import Admitted, ComputesHere, Event, GrantMade, PromptComputed, WriterSuspected
from tandem.rpc.convert import by_name
from tandem.rpc.v1 import common_pb2 as pb
from tandem.rpc.v1 import decode_pb2 as decode_pb
from tandem.worker.cache_report import CacheNews
from tandem.worker.request import AttemptFailed, PromptScored, TokenSampled
from tandem.worker.wire import (
    cached_to_proto,
    failed_to_proto,
    grant_to_proto,
    scored_to_proto,
    spans_to_proto,
    token_to_proto,
)


def make_events(
    events: Sequence[Event | pb.WorkerInfo], status: pb.WorkerStatus, num_commands: int
) -> decode_pb.DecodeEvents:
    """One message to a router. A `WorkerInfo` is the hello that each session begins with.

    Args:
        num_commands: of this router, that `status` shows.
    """
    messages = [_event_to_proto(event) for event in events]
    return decode_pb.DecodeEvents(events=messages, status=status, num_commands=num_commands)


def _event_to_proto(event: Event | pb.WorkerInfo) -> decode_pb.DecodeEvent:
    match event:
        case pb.WorkerInfo():
            return decode_pb.DecodeEvent(hello=event)
        case TokenSampled():
            return decode_pb.DecodeEvent(token=token_to_proto(event))
        case GrantMade(grant):
            return decode_pb.DecodeEvent(granted=grant_to_proto(grant))
        case ComputesHere(key, num_cached, num_computed):
            local = decode_pb.ComputesHere(
                **by_name(key), num_cached_tokens=num_cached, num_computed_tokens=num_computed
            )
            return decode_pb.DecodeEvent(local=local)
        case PromptComputed(key, spans):
            computed = decode_pb.PromptComputed(**by_name(key), spans=spans_to_proto(spans))
            return decode_pb.DecodeEvent(computed=computed)
        case Admitted(key, admission_s):
            return decode_pb.DecodeEvent(admitted=decode_pb.Admitted(**by_name(key), admission_s=admission_s))
        case PromptScored():
            return decode_pb.DecodeEvent(scored=scored_to_proto(event))
        case CacheNews():
            return decode_pb.DecodeEvent(cached=cached_to_proto(event))
        case AttemptFailed():
            return decode_pb.DecodeEvent(failed=failed_to_proto(event))
        case WriterSuspected(worker_id, incarnation):
            suspected = decode_pb.WriterSuspected(writer_worker_id=worker_id, writer_incarnation=incarnation)
            return decode_pb.DecodeEvent(writer_suspected=suspected)
