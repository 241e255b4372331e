"""What crosses the wire comes back as it was: handoff messages, errors, sampling, journals."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtransfer.layout import LayoutId
from kvtransfer.protocol.capability import seal
from kvtransfer.protocol.messages import AttemptKey, Commit, CommitPart, FirstToken, Grant, RefusalReason
from kvtransfer.wire import layout_from_proto, layout_to_proto
from tandem.core import errors
from tandem.core.errors import HandoffError, InvalidRequestError, TandemError, TransportError, WorkerLostError
from tandem.core.pages import PageCounts
from tandem.core.sampling import SampledToken, SamplingParams
from tandem.core.token_ids import token_ids
from tandem.rpc.convert import (
    error_from_proto,
    error_from_rpc,
    error_to_proto,
    page_counts_to_proto,
    sampling_from_proto,
    sampling_to_proto,
)  # fmt: skip
from tandem.rpc.v1 import common_pb2 as pb
from tandem.rpc.v1 import decode_pb2
from tandem.worker.request import AttemptFailed, AttemptSpec, ChoiceJournal, TokenSampled
from tandem.worker.sequence import FinishReason
from tandem.worker.wire import (
    call_from_message,
    call_from_proto,
    call_to_message,
    call_to_proto,
    commit_from_proto,
    commit_to_proto,
    failed_to_proto,
    fill_token,
    grant_from_proto,
    grant_to_proto,
    join_events,
    part_from_proto,
    part_to_proto,
    refusal_from_proto,
    refusal_to_proto,
    spec_from_proto,
)  # fmt: skip

LAYOUT = LayoutId("ab" * 32, "bfloat16", 3, 2, 16, 32, digest="other")
KEY = AttemptKey("request", 4)


def tree(root: type[TandemError]) -> list[type[TandemError]]:
    return [root, *(cls for child in root.__subclasses__() for cls in tree(child))]


def test_layouts_and_grants() -> None:
    assert layout_from_proto(layout_to_proto(LAYOUT)) == LAYOUT
    grant = Grant("decode-0#1/12", KEY, 12, "decode-0#1", LAYOUT, (7, 3, 9), lease_s=2.5, first_page=4, capability=b"x")
    assert grant_from_proto(grant_to_proto(grant), LAYOUT) == grant


COMMIT = Commit(
    "g/1", KEY, 1, "decode-0#1", "prefill-0#1", LAYOUT, (7, 3), ((2**64 - 1, 0), (1, 2), (3, 4)),
    (FirstToken(0, 17), FirstToken(3, 0)), b"capability",
)  # fmt: skip
PART = CommitPart("g/1", KEY, 1, "decode-0#1", "prefill-0#1", 5, ((2**64 - 1, 0), (1, 2), (3, 4)), b"capability")


def test_commits() -> None:
    message = commit_to_proto(COMMIT, "prefill-0")
    assert message.sender_worker_id == "prefill-0"
    assert commit_from_proto(type(message).FromString(message.SerializeToString())) == COMMIT


def test_parts_of_commits() -> None:
    message = part_to_proto(PART, "prefill-0")
    assert message.sender_worker_id == "prefill-0"
    assert part_from_proto(type(message).FromString(message.SerializeToString())) == PART


@pytest.mark.parametrize("said", [COMMIT, PART])
def test_calls(said: Commit | CommitPart) -> None:
    call = call_to_proto(said, "prefill-0")
    assert call_from_proto(type(call).FromString(call.SerializeToString())) == said


def test_a_call_that_is_neither_is_none() -> None:
    opened = decode_pb2.CommitCall(opened=decode_pb2.CommitsOpened(sender_incarnation="x"))
    assert call_from_proto(opened) is call_from_proto(decode_pb2.CommitCall()) is None


@pytest.mark.parametrize("said", [COMMIT, PART])
def test_a_sealed_message_is_opened_with_its_capability_which_it_does_not_show(said: Commit | CommitPart) -> None:
    content = call_to_message(said, "prefill-0")
    assert said.capability not in content
    call = call_from_message(content)
    assert call.grant_id == "g/1"
    assert call.opened(said.capability) == said
    assert call.opened(b"another") is call.opened(b"") is call.opened(None) is None


@pytest.mark.parametrize("at", [0, 31, 32, 40, -1])
def test_a_sealed_message_that_was_changed_is_not_opened(at: int) -> None:
    content = bytearray(call_to_message(PART, "prefill-0"))
    content[at] ^= 1
    try:
        call = call_from_message(bytes(content))
    except ValueError:
        return
    assert call.opened(PART.capability) is None


def test_a_message_that_shows_a_capability_is_refused() -> None:
    """Else it would be on its way for all to see."""
    call = call_to_proto(PART, "prefill-0")
    with pytest.raises(ValueError, match="shows a capability"):
        call_from_message(seal(PART.capability, call.SerializeToString()))


@pytest.mark.parametrize(
    "content",
    [b"", b"short", bytes(31), bytes(32), bytes(32) + b"\xff junk",
     bytes(32) + decode_pb2.CommitCall(opened=decode_pb2.CommitsOpened()).SerializeToString()],
)  # fmt: skip
def test_what_is_no_sealed_message_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"seal|neither|no call"):
        call_from_message(content)


@given(st.one_of(st.binary(max_size=200), st.binary(max_size=200).map(lambda tail: bytes(32) + tail)))
@example(bytes(32) + decode_pb2.CommitCall(commit=decode_pb2.Commit()).SerializeToString())
def test_whatever_comes_as_a_message_is_a_call_or_refused_as_none(content: bytes) -> None:
    try:
        call = call_from_message(content)
    except ValueError:
        return
    assert call.opened(b"capability") is None


@pytest.mark.parametrize("reason", RefusalReason)
def test_refusals(reason: RefusalReason) -> None:
    message = refusal_to_proto(reason, "why", "request")
    assert (message.code, message.request_id, message.retryable) == ("handoff", "request", reason.retryable)
    found, text = refusal_from_proto(message)
    assert found is reason
    assert "why" in text


def test_a_refusal_of_a_newer_version_ends_the_attempt() -> None:
    reason, text = refusal_from_proto(pb.Error(code="handoff", reason="bad_weather", message="rain"))
    assert reason is RefusalReason.UNKNOWN_GRANT
    assert text == "bad_weather: rain"


# The HTTP face has classes of its own, which never travel.
@pytest.mark.parametrize(
    "cls", [c for c in tree(TandemError) if c.__module__ == errors.__name__], ids=lambda cls: cls.__name__
)
@pytest.mark.parametrize("retryable", [True, False])
def test_errors_of_every_class(cls: type[TandemError], retryable: bool) -> None:
    error = cls("what happened")
    error.request_id, error.retryable = "request", retryable
    if isinstance(error, HandoffError):
        error.reason = "digest_mismatch"
    if isinstance(error, InvalidRequestError):
        error.field = "prompt"
    back = error_from_proto(error_to_proto(error))
    assert type(back) is (cls if cls is not TandemError else errors.InternalError)
    assert (str(back), back.message, back.request_id, back.retryable) == (
        "what happened", "what happened", "request", retryable,
    )  # fmt: skip
    if isinstance(back, HandoffError):
        assert back.reason == "digest_mismatch"
    if isinstance(back, InvalidRequestError):
        assert back.field == "prompt"


def test_foreign_errors_and_unknown_codes() -> None:
    message = error_to_proto(KeyError("x"), "request")
    assert (message.code, message.message, message.request_id) == ("internal", "KeyError: 'x'", "request")
    assert type(error_from_proto(pb.Error(code="newer"))) is errors.InternalError


@pytest.mark.parametrize(
    ("code", "cls"),
    [
        ("UNAVAILABLE", WorkerLostError),
        ("DEADLINE_EXCEEDED", WorkerLostError),
        ("UNKNOWN", TransportError),
    ],
)
def test_failed_calls(code: str, cls: type[TandemError]) -> None:
    status = grpc.StatusCode[code]
    metadata = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(status, metadata, metadata, details="gone")
    found = error_from_rpc(error, "pairing with decode-0")
    assert type(found) is cls
    assert "decode-0" in str(found)
    assert "gone" in str(found)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(
            temperature=0.7, top_k=5, top_p=0.9, min_p=0.05, repetition_penalty=1.1, presence_penalty=-0.5,
            frequency_penalty=0.25, logit_bias=((3, -1.5), (9, 2.0)), seed=2**64 - 1, stop_token_ids=(5, 4),
            max_tokens=77, min_tokens=3, ignore_eos=True, num_logprobs=5,
        ),
        SamplingParams(num_logprobs=0),
    ],
)  # fmt: skip
def test_sampling(params: SamplingParams) -> None:
    message = sampling_to_proto(params)
    assert sampling_from_proto(pb.Sampling.FromString(message.SerializeToString())) == params


def test_sampling_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="max_tokens"):
        sampling_from_proto(pb.Sampling(top_p=1, repetition_penalty=1))


def test_page_counts_and_tokens() -> None:
    counts = page_counts_to_proto(PageCounts(1, 2, 3, 4, 5))
    assert (counts.free, counts.used, counts.reserved, counts.cached, counts.quarantined) == (1, 2, 3, 4, 5)
    token, plain = pb.Token(), pb.Token()
    fill_token(token, TokenSampled(KEY, 2, 9, SampledToken(17, -0.5, ((17, -0.5), (3, -1.0))), FinishReason.STOP))
    assert (token.request_id, token.attempt, token.choice, token.index, token.token_id) == ("request", 4, 2, 9, 17)
    assert token.finish_reason == pb.FINISH_REASON_STOP
    assert [(t.token_id, t.logprob) for t in token.top_logprobs] == [(17, -0.5), (3, -1.0)]
    fill_token(plain, TokenSampled(KEY, 0, 0, SampledToken(1), None))
    assert (plain.finish_reason, plain.logprob) == (pb.FINISH_REASON_UNSPECIFIED, 0.0)


def test_a_foreign_error_ends_an_attempt_as_internal() -> None:
    message = failed_to_proto(AttemptFailed(AttemptKey("r", 3), ValueError("x")))
    assert (message.request_id, message.attempt) == ("r", 3)
    assert (message.error.code, message.error.request_id) == ("internal", "r")


def test_a_request_comes_as_its_router_described_it() -> None:
    params = SamplingParams(temperature=0.5, seed=7, max_tokens=9, logit_bias=((3, 1.0),))
    message = decode_pb2.Reserve(
        request_id="request",
        attempt=4,
        priority=2,
        age_s=1.5,
        prompt_ids=[5, 6, 7],
        sampling=sampling_to_proto(params),
        num_choices=3,
        journal=[pb.ChoiceJournal(choice=1, token_ids=[8]), pb.ChoiceJournal(choice=2, finished=True)],
    )
    journal = (ChoiceJournal(1, (8,)), ChoiceJournal(2, (), finished=True))
    assert spec_from_proto(message) == AttemptSpec(KEY, 2, token_ids([5, 6, 7]), params, 3, journal, age_s=1.5)
    message.num_choices = 1
    with pytest.raises(InvalidRequestError, match="2 journals of 1 choices"):
        spec_from_proto(message)


# -- several messages as one


def tokens(*ids: int) -> list[decode_pb2.DecodeEvent]:
    return [decode_pb2.DecodeEvent(token=pb.Token(token_id=token_id)) for token_id in ids]


def test_events_that_are_joined_stay_in_order_under_the_newer_status() -> None:
    first = decode_pb2.DecodeEvents(events=tokens(1, 2), status=pb.WorkerStatus(num_running=3, steps=7), num_commands=4)
    later = decode_pb2.DecodeEvents(events=tokens(3), status=pb.WorkerStatus(num_running=0, steps=8), num_commands=5)
    assert join_events(first, later)
    assert [event.token.token_id for event in first.events] == [1, 2, 3]
    assert (first.status.num_running, first.status.steps, first.num_commands) == (0, 8, 5)
    assert join_events(first, decode_pb2.DecodeEvents(events=tokens(4)))
    assert (first.status.steps, first.num_commands, len(first.events)) == (8, 5, 4), "nobody has said anything newer"


@pytest.mark.parametrize(
    "event", [{"hello": pb.WorkerInfo()}, {"cached": pb.CachedPages()}, {"scored": pb.PromptScored()}]
)
def test_what_may_be_long_is_joined_with_nothing(event: dict[str, Any]) -> None:
    long = decode_pb2.DecodeEvents(events=[decode_pb2.DecodeEvent(**event)])
    short = decode_pb2.DecodeEvents(events=tokens(1))
    assert not join_events(long, short)
    assert not join_events(short, long)
    assert (len(long.events), len(short.events)) == (1, 1)


def test_what_heartbeats_alone_tell_is_not_lost_behind_a_newer_status() -> None:
    beat = decode_pb2.DecodeEvents(status=pb.WorkerStatus(num_running=1, links=pb.LinkReport()))
    step = decode_pb2.DecodeEvents(events=tokens(1), status=pb.WorkerStatus(num_running=2))
    assert not join_events(beat, step)
    assert join_events(step, beat)
    assert step.status.HasField("links")


def test_a_message_of_several_has_a_bound_that_many_steps_of_a_large_batch_fit_in() -> None:
    full, step = decode_pb2.DecodeEvents(), decode_pb2.DecodeEvents(events=tokens(*range(256)))
    num_joined = 0
    while join_events(full, step):
        num_joined += 1
        assert num_joined < 100
    assert num_joined == 16
