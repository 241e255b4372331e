"""The border between a decode worker's events and the wire."""

from __future__ import annotations

from collections.abc import Sequence

from decode_worker.events import Admitted, ComputesHere, Event, GrantMade, WriterSuspected
from tandem.rpc.v1 import common_pb2 as pb
from tandem.rpc.v1 import decode_pb2 as decode_pb
from tandem.worker.request import AttemptFailed, TokenSampled
from tandem.worker.wire import failed_to_proto, grant_to_proto, token_to_proto


def event_to_proto(event: Event | pb.WorkerInfo) -> decode_pb.DecodeEvent:
    match event:
        case pb.WorkerInfo():
            return decode_pb.DecodeEvent(hello=event)
        case TokenSampled():
            return decode_pb.DecodeEvent(token=token_to_proto(event))
        case GrantMade():
            return decode_pb.DecodeEvent(granted=grant_to_proto(event.grant))
        case ComputesHere():
            local = decode_pb.ComputesHere(
                request_id=event.key.request_id,
                attempt=event.key.attempt,
                num_cached_tokens=event.num_cached_tokens,
                num_computed_tokens=event.num_computed_tokens,
            )
            return decode_pb.DecodeEvent(local=local)
        case Admitted():
            admitted = decode_pb.Admitted(
                request_id=event.key.request_id, attempt=event.key.attempt, admission_s=event.admission_s
            )
            return decode_pb.DecodeEvent(admitted=admitted)
        case AttemptFailed():
            return decode_pb.DecodeEvent(failed=failed_to_proto(event))
        case WriterSuspected():
            suspected = decode_pb.WriterSuspected(
                writer_worker_id=event.worker_id, writer_incarnation=event.incarnation
            )
            return decode_pb.DecodeEvent(writer_suspected=suspected)


def make_events(events: Sequence[Event | pb.WorkerInfo], status: pb.WorkerStatus) -> decode_pb.DecodeEvents:
    """One message to a router. A `WorkerInfo` is the hello that each session begins with."""
    return decode_pb.DecodeEvents(events=[event_to_proto(event) for event in events], status=status)
