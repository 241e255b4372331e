"""Between decode's own events and the wire; the rest is in `tandem.worker.wire`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from decode_worker.events import Admitted, ComputesHere, Event, GrantMade, PromptComputed, WriterSuspected
from tandem.rpc.convert import by_name
from tandem.rpc.v1 import common_pb2 as pb
from tandem.rpc.v1 import decode_pb2 as decode_pb
from tandem.worker.cache_report import CacheNews
from tandem.worker.request import AttemptFailed, PromptScored, TokenSampled
from tandem.worker.wire import (
    cached_to_proto,
    failed_to_proto,
    fill_token,
    grant_to_proto,
    scored_to_proto,
    spans_to_proto,
)


def make_events(
    events: Sequence[Event | pb.WorkerInfo], status: pb.WorkerStatus | None, num_commands: int | None
) -> decode_pb.DecodeEvents:
    """One message to a router. A `WorkerInfo` is the hello that each session begins with.

    Args:
        status: `None`: as it was last told.
        num_commands: of this router, that `status` shows; `None` without one.
    """
    message = decode_pb.DecodeEvents(status=status, num_commands=num_commands)
    for event in events:
        _fill(message.events.add(), event)
    return message


def _fill(message: decode_pb.DecodeEvent, event: Event | pb.WorkerInfo) -> None:
    match event:
        case TokenSampled():  # first, and in place: nearly all are
            fill_token(message.token, event)
        case pb.WorkerInfo():
            message.hello.CopyFrom(event)
        case GrantMade(grant):
            message.granted.CopyFrom(grant_to_proto(grant))
        case ComputesHere(key, num_cached, num_computed):
            local = decode_pb.ComputesHere(
                **by_name(key), num_cached_tokens=num_cached, num_computed_tokens=num_computed
            )
            message.local.CopyFrom(local)
        case PromptComputed(key, spans):
            message.computed.CopyFrom(decode_pb.PromptComputed(**by_name(key), spans=spans_to_proto(spans)))
        case Admitted(key, admission_s):
            message.admitted.CopyFrom(decode_pb.Admitted(**by_name(key), admission_s=admission_s))
        case PromptScored():
            message.scored.CopyFrom(scored_to_proto(event))
        case CacheNews():
            message.cached.CopyFrom(cached_to_proto(event))
        case AttemptFailed():
            message.failed.CopyFrom(failed_to_proto(event))
        case WriterSuspected(worker_id, incarnation):
            message.writer_suspected.writer_worker_id = worker_id
            message.writer_suspected.writer_incarnation = incarnation
        case _:
            assert_never(event)
