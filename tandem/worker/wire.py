"""Between the workers' own types and the wire: requests, tokens, handoff messages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from kvtransfer.layout import LayoutId
from kvtransfer.protocol.capability import is_seal_of, seal, split_seal
from kvtransfer.protocol.messages import AttemptKey, Commit, CommitPart, FirstToken, Grant, RefusalReason
from kvtransfer.wire import layout_from_proto, layout_to_proto
from tandem.core.errors import HandoffError, InvalidRequestError
from tandem.core.token_ids import TokenIds, token_ids
from tandem.rpc.convert import by_name, error_to_proto, sampling_from_proto
from tandem.rpc.v1 import common_pb2 as pb
from tandem.rpc.v1 import decode_pb2 as decode_pb
from tandem.rpc.v1 import prefill_pb2 as prefill_pb
from tandem.worker.cache_report import CacheNews
from tandem.worker.prompt_scoring import PromptScoring
from tandem.worker.request import AttemptFailed, AttemptSpec, ChoiceJournal, PromptScored, TokenSampled
from tandem.worker.sequence import FinishReason
from tandem.worker.spans import Span

# Of a message that is made of several: events at most, and those that go by themselves. Several steps of a large batch
# must fit in one, or a router that is behind stays behind.
_MOST_JOINED = 4096
_LONG = {"hello", "cached", "scored", "pooled"}

FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}


def spec_from_proto(message: decode_pb.Reserve | prefill_pb.StartPrefill) -> AttemptSpec:
    """Raises `InvalidRequestError` as `SamplingParams` does, and for more journals than choices."""
    num_choices = message.num_choices or 1
    if len(message.journal) > num_choices:  # before any is read: there may be very many
        raise InvalidRequestError(
            f"{len(message.journal)} journals of {num_choices} choices", field="n", request_id=message.request_id
        )
    return AttemptSpec(
        key=AttemptKey(message.request_id, message.attempt),
        priority=message.priority,
        prompt_ids=_token_ids(message.prompt_ids),
        params=sampling_from_proto(message.sampling),
        num_choices=num_choices,
        journal=tuple(ChoiceJournal(j.choice, tuple(j.token_ids), j.finished) for j in message.journal),
        age_s=message.age_s,
        scoring=_scoring_from_proto(message.scoring) if message.HasField("scoring") else None,
        cache_salt=message.cache_salt,
        pools=isinstance(message, prefill_pb.StartPrefill) and message.pools,
        slack_s=max(0.0, message.slack_s),
        tpot_s=(message.tpot_s if isinstance(message, decode_pb.Reserve) else 0.0) or math.inf,
    )


def _token_ids(repeated: Iterable[int]) -> TokenIds[int]:
    ids = token_ids()
    # numpy takes all of them at once, where an array would take one after the other.
    ids.frombytes(np.asarray(repeated, np.uint32).tobytes())
    return ids


def fill_token(message: pb.Token, sampled: TokenSampled) -> None:
    """Into an empty message. One that lies in another one already is neither allocated apart nor copied, which is most
    of what a token costs here; so only what is there is set."""
    key, token = sampled.key, sampled.token
    message.request_id = key.request_id
    message.attempt = key.attempt
    message.choice = sampled.choice
    message.index = sampled.index
    message.token_id = token.token_id
    if sampled.ended is not None:
        message.finish_reason = FINISH_REASONS[sampled.ended]
    if token.logprob is not None:
        message.logprob = token.logprob
    for token_id, logprob in token.top_logprobs:
        message.top_logprobs.add(token_id=token_id, logprob=logprob)


def _scoring_from_proto(message: pb.PromptScoring) -> PromptScoring:
    return PromptScoring(message.num_top, max(1, message.num_known))


def scored_to_proto(scored: PromptScored) -> pb.PromptScored:
    tokens = [
        pb.TokenScore(
            logprob=token.logprob,
            rank=token.rank,
            top_logprobs=[pb.TokenLogprob(token_id=i, logprob=p) for i, p in token.top_logprobs],
        )
        for token in scored.tokens
    ]
    return pb.PromptScored(**by_name(scored.key), first=scored.first, tokens=tokens)


def cached_to_proto(news: CacheNews) -> pb.CachedPages:
    return pb.CachedPages(
        is_first=news.is_first,
        came=b"".join(news.came),
        went=b"".join(news.went),
        tier_came=b"".join(news.tier_came),
        tier_went=b"".join(news.tier_went),
        near_came=b"".join(news.near_came),
        near_went=b"".join(news.near_went),
    )


def failed_to_proto(failed: AttemptFailed) -> pb.AttemptFailed:
    return pb.AttemptFailed(**by_name(failed.key), error=error_to_proto(failed.error, failed.key.request_id))


def grant_to_proto(grant: Grant) -> decode_pb.Grant:
    return decode_pb.Grant(
        grant_id=grant.grant_id,
        epoch=grant.epoch,
        request_id=grant.key.request_id,
        attempt=grant.key.attempt,
        receiver_incarnation=grant.receiver,
        pages=grant.pages,
        num_cached_pages=grant.first_page,
        lease_s=grant.lease_s,
        capability=grant.capability,
    )


def grant_from_proto(message: decode_pb.Grant, layout: LayoutId) -> Grant:
    """`layout` is the receiver's, agreed when the two workers paired."""
    return Grant(
        grant_id=message.grant_id,
        key=AttemptKey(message.request_id, message.attempt),
        epoch=message.epoch,
        receiver=message.receiver_incarnation,
        layout=layout,
        pages=tuple(message.pages),
        lease_s=message.lease_s,
        first_page=message.num_cached_pages,
        capability=message.capability,
    )


def commit_to_proto(commit: Commit, sender_worker_id: str) -> decode_pb.Commit:
    return decode_pb.Commit(
        **_about_to_proto(commit, sender_worker_id),
        layout=layout_to_proto(commit.layout),
        pages=commit.pages,
        first_tokens=[decode_pb.FirstToken(choice=t.choice, token_id=t.token_id) for t in commit.first_tokens],
    )


def commit_from_proto(message: decode_pb.Commit) -> Commit:
    return Commit(
        **_about_from_proto(message),
        layout=layout_from_proto(message.layout),
        pages=tuple(message.pages),
        first_tokens=tuple(FirstToken(t.choice, t.token_id) for t in message.first_tokens),
    )


def part_to_proto(part: CommitPart, sender_worker_id: str) -> decode_pb.CommitPart:
    return decode_pb.CommitPart(**_about_to_proto(part, sender_worker_id), first_index=part.first_index)


def part_from_proto(message: decode_pb.CommitPart) -> CommitPart:
    return CommitPart(**_about_from_proto(message), first_index=message.first_index)


def _about_to_proto(said: Commit | CommitPart, sender_worker_id: str) -> dict[str, Any]:
    """What a commit and a part of it have in common."""
    return {
        **by_name(said.key),
        "grant_id": said.grant_id,
        "epoch": said.epoch,
        "receiver_incarnation": said.receiver,
        "sender_worker_id": sender_worker_id,
        "sender_incarnation": said.sender,
        "layers": [decode_pb.LayerDigests(xxh3=digests) for digests in said.digests],
        "capability": said.capability,
    }


def _about_from_proto(message: decode_pb.Commit | decode_pb.CommitPart) -> dict[str, Any]:
    return {
        "grant_id": message.grant_id,
        "key": AttemptKey(message.request_id, message.attempt),
        "epoch": message.epoch,
        "receiver": message.receiver_incarnation,
        "sender": message.sender_incarnation,
        "digests": tuple(tuple(layer.xxh3) for layer in message.layers),
        "capability": message.capability,
    }


def call_to_proto(said: Commit | CommitPart, sender_worker_id: str) -> decode_pb.CommitCall:
    if isinstance(said, Commit):
        return decode_pb.CommitCall(commit=commit_to_proto(said, sender_worker_id))
    return decode_pb.CommitCall(part=part_to_proto(said, sender_worker_id))


def call_from_proto(call: decode_pb.CommitCall) -> Commit | CommitPart | None:
    """`None`: neither."""
    match call.WhichOneof("call"):
        case "commit":
            return commit_from_proto(call.commit)
        case "part":
            return part_from_proto(call.part)
    return None


def call_to_message(said: Commit | CommitPart, sender_worker_id: str) -> bytes:
    """The call for a channel that does not prove who speaks: it is sealed with the capability and does not carry it."""
    call = call_to_proto(said, sender_worker_id)
    (call.commit if isinstance(said, Commit) else call.part).ClearField("capability")
    return seal(said.capability, call.SerializeToString())


@dataclass(frozen=True, slots=True)
class SealedCall:
    """A call that came as a message, from whomever."""

    _said: Commit | CommitPart
    _seal: bytes
    _body: bytes

    @property
    def grant_id(self) -> str:
        """The grant that it claims to be about."""
        return self._said.grant_id

    def opened(self, capability: bytes | None) -> Commit | CommitPart | None:
        """The call with `capability`, if it is sealed with that; else `None`."""
        if capability is None or not is_seal_of(capability, self._seal, self._body):
            return None
        return replace(self._said, capability=capability)


def call_from_message(content: bytes) -> SealedCall:
    """Raises `ValueError` for what is neither a part nor a commit, or shows a capability."""
    found, body = split_seal(content)
    try:
        said = call_from_proto(decode_pb.CommitCall.FromString(body))
    except DecodeError as error:
        raise ValueError(f"{len(body)} bytes are no call: {error}") from error
    if said is None:
        raise ValueError("it is neither a part nor a commit")
    if said.capability:
        raise ValueError("it shows a capability")
    return SealedCall(said, found, body)


def refusal_to_proto(reason: RefusalReason, detail: str, request_id: str) -> pb.Error:
    text = f"decode refused the handoff: {reason.value}" + (f" ({detail})" if detail else "")
    error = HandoffError(text, reason=reason.value, request_id=request_id)
    error.retryable = reason.retryable
    return error_to_proto(error)


def refusal_from_proto(message: pb.Error) -> tuple[RefusalReason, str]:
    """A reason that this version does not know becomes UNKNOWN_GRANT, which ends the attempt too."""
    try:
        return RefusalReason(message.reason), message.message
    except ValueError:
        return RefusalReason.UNKNOWN_GRANT, f"{message.reason}: {message.message}"


def spans_to_proto(spans: Iterable[Span]) -> list[pb.WorkSpan]:
    return [pb.WorkSpan(**by_name(span)) for span in spans]


def join_events(events: Any, later: Any) -> bool:
    """Add what came later to a message for a router that is behind: events in order, under the newer status. Whether
    they may go as one: nothing joins what begins with something long, and what is long joins nothing; what heartbeats
    alone tell, the links, stays.

    Args:
        events, later: `DecodeEvents`, or `PrefillEvents`.
    """
    if len(events.events) + len(later.events) > _MOST_JOINED or _is_long(events.events[:1]) or _is_long(later.events):
        return False
    has_status = later.HasField("status")
    if has_status and events.status.HasField("links") and not later.status.HasField("links"):
        return False
    events.events.extend(later.events)
    if has_status:
        events.status.CopyFrom(later.status)
    if later.HasField("num_commands"):
        events.num_commands = later.num_commands
    return True


def _is_long(events: Sequence[Any]) -> bool:
    return any(event.WhichOneof("event") in _LONG for event in events)
