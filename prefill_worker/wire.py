"""Between prefill's own events and the wire; the rest is in `tandem.worker.wire`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from prefill_worker.events import Event, HandedOff, LinkChanged, PromptEnded, PromptStarted
from tandem.rpc.convert import by_name
from tandem.rpc.v1 import common_pb2 as pb
from tandem.rpc.v1 import prefill_pb2 as prefill_pb
from tandem.worker.cache_report import CacheNews
from tandem.worker.request import AttemptFailed, PromptPooled, PromptScored, TokenSampled
from tandem.worker.wire import cached_to_proto, failed_to_proto, fill_token, scored_to_proto, spans_to_proto


def make_events(
    events: Sequence[Event | pb.WorkerInfo], status: pb.WorkerStatus | None, num_commands: int | None
) -> prefill_pb.PrefillEvents:
    """One message to a router. A `WorkerInfo` is the hello that each session begins with.

    Args:
        status: `None`: as it was last told.
        num_commands: of this router, that `status` shows; `None` without one.
    """
    message = prefill_pb.PrefillEvents(status=status, num_commands=num_commands)
    for event in events:
        _fill(message.events.add(), event)
    return message


def _fill(message: prefill_pb.PrefillEvent, event: Event | pb.WorkerInfo) -> None:
    match event:
        case pb.WorkerInfo():
            message.hello.CopyFrom(event)
        case PromptStarted(key, num_cached_tokens):
            started = prefill_pb.PrefillStarted(**by_name(key), num_cached_tokens=num_cached_tokens)
            message.started.CopyFrom(started)
        case TokenSampled():
            fill_token(message.first_token, event)
        case PromptEnded(key, work, spans):
            ended = prefill_pb.PrefillEnded(**by_name(key), **by_name(work), spans=spans_to_proto(spans))
            message.ended.CopyFrom(ended)
        case HandedOff(key, stats, work, spans):
            facts = {**by_name(key), **by_name(stats), **by_name(work), "spans": spans_to_proto(spans)}
            message.handoff_done.CopyFrom(prefill_pb.HandoffDone(**facts))
        case LinkChanged():
            message.link.CopyFrom(prefill_pb.LinkChanged(**by_name(event)))
        case PromptScored():
            message.scored.CopyFrom(scored_to_proto(event))
        case PromptPooled(key, values):
            message.pooled.CopyFrom(prefill_pb.PromptPooled(**by_name(key), values=values))
        case CacheNews():
            message.cached.CopyFrom(cached_to_proto(event))
        case AttemptFailed():
            message.failed.CopyFrom(failed_to_proto(event))
        case _:
            assert_never(event)
