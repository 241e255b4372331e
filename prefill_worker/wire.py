"""Between prefill's own events and the wire; the rest is in `tandem.worker.wire`."""

from __future__ import annotations

from collections.abc import Sequence

from prefill_worker.events import Event, HandedOff, LinkChanged, PromptEnded, PromptStarted
from tandem.rpc.convert import by_name
from tandem.rpc.v1 import common_pb2 as pb
from tandem.rpc.v1 import prefill_pb2 as prefill_pb
from tandem.worker.cache_report import CacheNews
from tandem.worker.request import AttemptFailed, PromptPooled, PromptScored, TokenSampled
from tandem.worker.wire import cached_to_proto, failed_to_proto, scored_to_proto, spans_to_proto, token_to_proto


def make_events(
    events: Sequence[Event | pb.WorkerInfo], status: pb.WorkerStatus, num_commands: int
) -> prefill_pb.PrefillEvents:
    """One message to a router. A `WorkerInfo` is the hello that each session begins with.

    Args:
        num_commands: of this router, that `status` shows.
    """
    messages = [_event_to_proto(event) for event in events]
    return prefill_pb.PrefillEvents(events=messages, status=status, num_commands=num_commands)


def _event_to_proto(event: Event | pb.WorkerInfo) -> prefill_pb.PrefillEvent:
    match event:
        case pb.WorkerInfo():
            return prefill_pb.PrefillEvent(hello=event)
        case PromptStarted(key, num_cached_tokens):
            started = prefill_pb.PrefillStarted(**by_name(key), num_cached_tokens=num_cached_tokens)
            return prefill_pb.PrefillEvent(started=started)
        case TokenSampled():
            return prefill_pb.PrefillEvent(first_token=token_to_proto(event))
        case PromptEnded(key, work, spans):
            ended = prefill_pb.PrefillEnded(**by_name(key), **by_name(work), spans=spans_to_proto(spans))
            return prefill_pb.PrefillEvent(ended=ended)
        case HandedOff(key, stats, work, spans):
            facts = {**by_name(key), **by_name(stats), **by_name(work), "spans": spans_to_proto(spans)}
            done = prefill_pb.HandoffDone(**facts)
            return prefill_pb.PrefillEvent(handoff_done=done)
        case LinkChanged():
            return prefill_pb.PrefillEvent(link=prefill_pb.LinkChanged(**by_name(event)))
        case PromptScored():
            return prefill_pb.PrefillEvent(scored=scored_to_proto(event))
        case PromptPooled(key, values):
            return prefill_pb.PrefillEvent(pooled=prefill_pb.PromptPooled(**by_name(key), values=values))
        case CacheNews():
            return prefill_pb.PrefillEvent(cached=cached_to_proto(event))
        case AttemptFailed():
            return prefill_pb.PrefillEvent(failed=failed_to_proto(event))
