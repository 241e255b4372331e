"""Where the wire contract meets the router's own words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from router.request.events import (
    Admitted,
    AttemptFailed,
    Event,
    Granted,
    HandoffDone,
    LocalPrefillStarted,
    PrefillEnded,
    PrefillStarted,
)
from router.request.journal import Journal
from router.request.request import Request, TokenGiven
from tandem.core.identity import WorkerKey
from tandem.rpc.convert import error_from_proto, sampling_to_proto
from tandem.rpc.v1 import common_pb2, decode_pb2, prefill_pb2

_FINISH_REASONS = {
    common_pb2.FINISH_REASON_UNSPECIFIED: None,
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
}


def reserve(
    request: Request, journal: Journal, *, age_s: float, max_local_tokens: int = 0
) -> decode_pb2.DecodeCommand:
    """Ask decode for pages; it may compute up to `max_local_tokens` of the prompt by itself instead."""
    reserve = decode_pb2.Reserve(**_spec(request, journal, age_s), max_local_tokens=max_local_tokens)
    return decode_pb2.DecodeCommand(reserve=reserve)


def start_prefill(
    request: Request, journal: Journal, decode: common_pb2.WorkerInfo, *, age_s: float
) -> prefill_pb2.PrefillCommand:
    start = prefill_pb2.StartPrefill(**_spec(request, journal, age_s), decode=decode)
    return prefill_pb2.PrefillCommand(start=start)


def _spec(request: Request, journal: Journal, age_s: float) -> dict[str, Any]:
    """What both roles are told of an attempt, alike; `tandem.worker.wire.spec_from_proto` reads it."""
    return {
        "request_id": request.request_id,
        "attempt": journal.attempt,
        "priority": request.priority,
        "prompt_ids": request.prompt_ids,
        "sampling": sampling_to_proto(request.sampling),
        "num_choices": request.num_choices,
        "journal": _journal_to_proto(journal),
        "age_s": age_s,
    }


def attach_grant(request_id: str, granted: Granted) -> prefill_pb2.PrefillCommand:
    attach = prefill_pb2.AttachGrant(request_id=request_id, attempt=granted.attempt, grant=granted.grant)
    return prefill_pb2.PrefillCommand(attach=attach)


def release(request_id: str) -> prefill_pb2.PrefillCommand:
    return prefill_pb2.PrefillCommand(release=prefill_pb2.Release(request_id=request_id))


def cancel(request_id: str, attempt: int, reason: str) -> common_pb2.Cancel:
    return common_pb2.Cancel(request_id=request_id, attempt=attempt, reason=reason)


def _journal_to_proto(journal: Journal) -> Iterable[common_pb2.ChoiceJournal]:
    """What the client has; choices without a token are left out."""
    return [
        common_pb2.ChoiceJournal(choice=number, token_ids=choice.token_ids, finished=choice.is_finished)
        for number, choice in enumerate(journal.choices)
        if choice.token_ids
    ]


def token_from_proto(token: common_pb2.Token) -> TokenGiven:
    return TokenGiven(
        token.attempt,
        token.choice,
        token.index,
        token.token_id,
        _FINISH_REASONS[token.finish_reason],
        token.logprob,
        tuple((top.token_id, top.logprob) for top in token.top_logprobs),
    )


def decode_event(event: decode_pb2.DecodeEvent, worker: WorkerKey) -> tuple[str, Event] | None:
    """The request that an event of a decode worker concerns, and what happened; `None` where it concerns none."""
    kind = event.WhichOneof("event")
    if kind == "token":
        return event.token.request_id, token_from_proto(event.token)
    if kind == "granted":
        return event.granted.request_id, Granted(event.granted.attempt, event.granted)
    if kind == "admitted":
        return event.admitted.request_id, Admitted(event.admitted.attempt)
    if kind == "local":
        return event.local.request_id, LocalPrefillStarted(event.local.attempt, event.local.num_cached_tokens)
    if kind == "failed":
        return event.failed.request_id, _failed(event.failed, worker)
    return None


def prefill_event(event: prefill_pb2.PrefillEvent, worker: WorkerKey) -> tuple[str, Event] | None:
    """As `decode_event`, for a prefill worker."""
    kind = event.WhichOneof("event")
    if kind == "first_token":
        return event.first_token.request_id, token_from_proto(event.first_token)
    if kind == "started":
        return event.started.request_id, PrefillStarted(event.started.attempt, event.started.num_cached_tokens)
    if kind == "handoff_done":
        return event.handoff_done.request_id, HandoffDone(event.handoff_done.attempt)
    if kind == "ended":
        return event.ended.request_id, PrefillEnded(event.ended.attempt)
    if kind == "failed":
        return event.failed.request_id, _failed(event.failed, worker)
    return None


def _failed(failed: common_pb2.AttemptFailed, worker: WorkerKey) -> AttemptFailed:
    return AttemptFailed(failed.attempt, worker, error_from_proto(failed.error))
