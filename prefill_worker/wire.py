"""Between prefill's own types and the wire, for what only prefill says; the rest is in `tandem.worker.wire`."""

from __future__ import annotations

from collections.abc import Sequence

from prefill_worker.events import Event, HandedOff, PromptEnded, PromptStarted
from tandem.rpc.v1 import common_pb2 as pb
from tandem.rpc.v1 import prefill_pb2 as prefill_pb
from tandem.worker.request import AttemptFailed, TokenSampled
from tandem.worker.wire import failed_to_proto, token_to_proto


def make_events(events: Sequence[Event | pb.WorkerInfo], status: pb.WorkerStatus) -> prefill_pb.PrefillEvents:
    """One message to a router. A `WorkerInfo` is the hello that each session begins with."""
    return prefill_pb.PrefillEvents(events=[event_to_proto(event) for event in events], status=status)


def event_to_proto(event: Event | pb.WorkerInfo) -> prefill_pb.PrefillEvent:
    match event:
        case pb.WorkerInfo():
            return prefill_pb.PrefillEvent(hello=event)
        case PromptStarted():
            return prefill_pb.PrefillEvent(started=_started_to_proto(event))
        case TokenSampled():
            return prefill_pb.PrefillEvent(first_token=token_to_proto(event))
        case PromptEnded():
            return prefill_pb.PrefillEvent(ended=_ended_to_proto(event))
        case HandedOff():
            return prefill_pb.PrefillEvent(handoff_done=_handed_off_to_proto(event))
        case AttemptFailed():
            return prefill_pb.PrefillEvent(failed=failed_to_proto(event))


def _started_to_proto(started: PromptStarted) -> prefill_pb.PrefillStarted:
    return prefill_pb.PrefillStarted(
        request_id=started.key.request_id,
        attempt=started.key.attempt,
        num_cached_tokens=started.num_cached_tokens,
    )


def _ended_to_proto(ended: PromptEnded) -> prefill_pb.PrefillEnded:
    return prefill_pb.PrefillEnded(
        request_id=ended.key.request_id,
        attempt=ended.key.attempt,
        compute_s=ended.work.compute_s,
        num_computed_tokens=ended.work.num_computed_tokens,
        num_cached_tokens=ended.work.num_cached_tokens,
    )


def _handed_off_to_proto(handed_off: HandedOff) -> prefill_pb.HandoffDone:
    stats, work = handed_off.stats, handed_off.work
    return prefill_pb.HandoffDone(
        request_id=handed_off.key.request_id,
        attempt=handed_off.key.attempt,
        num_bytes=stats.num_bytes,
        num_extents=stats.num_extents,
        num_descriptors=stats.num_descriptors,
        handoff_s=stats.handoff_s,
        exposed_s=stats.exposed_s,
        compute_s=work.compute_s,
        num_computed_tokens=work.num_computed_tokens,
        num_cached_tokens=work.num_cached_tokens,
        answer_s=stats.answer_s,
    )
