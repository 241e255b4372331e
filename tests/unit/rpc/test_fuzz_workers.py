"""Bad bytes for a prefill and a decode worker that run for real: no crash, no hang, no page lost, and typed answers.

After each test both workers hold nothing, and the next request gets the tokens that the model's own implementation
gives. `Drain` is left out: any message at all is a valid one, and it would do what it says.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.rpc.channel import make_channel
from tandem.rpc.convert import sampling_to_proto
from tandem.rpc.v1 import common_pb2 as pb
from tandem.rpc.v1 import control_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2
from tests.support.scripted_router import Router, ask_commits
from tests.support.worker_pair import SHARED_LOOP, VOCAB, Oracle, WorkerPair, prompt_of
from tests.unit.rpc.fuzz_pair import PARAMS, serves
from tests.unit.rpc.wire_fuzz import ANSWER_S, FUZZ, check_answer, messages, methods, payloads, send

pytest_plugins = ["tests.support.worker_pair", "tests.unit.rpc.fuzz_pair"]
pytestmark = [SHARED_LOOP, pytest.mark.processes]

DECODE = methods(decode_pb2.DESCRIPTOR.services_by_name["DecodeService"])
PREFILL = methods(prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"])
CONTROL = methods(control_pb2.DESCRIPTOR.services_by_name["WorkerControl"])
ALL = {
    f"{side} {name.rpartition('/')[2]}": (side, name, method)
    for side, own in (("decode", DECODE), ("prefill", PREFILL))
    for name, method in (own | CONTROL).items()
    if not name.endswith("/Drain")
}

_PROMPTS = st.one_of(
    st.lists(st.integers(2, VOCAB - 1), min_size=1, max_size=70),
    st.sampled_from([[], [VOCAB], [(1 << 32) - 1], [2] * 511, [2] * 600]),
)
_SAMPLING = st.one_of(st.just(sampling_to_proto(PARAMS)), messages(pb.Sampling.DESCRIPTOR))
_CHOICES = st.sampled_from([0, 1, 2, 3, 16, 17, 1 << 31, (1 << 32) - 1])
_IDS = st.sampled_from(["", "a", "b", "c/d", "\x00"])
_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "prompt_ids": _PROMPTS,
    "sampling": _SAMPLING,
    "num_choices": _CHOICES,
    "request_id": _IDS,
    "attempt": st.integers(0, 3),
    "max_local_tokens": st.sampled_from([0, 64, (1 << 32) - 1]),
}


def address(pair: WorkerPair, side: str) -> str:
    return str((pair.decode if side == "decode" else pair.prefill).parts.info.address)


async def say(pair: WorkerPair, side: str, name: str, *payload: bytes) -> None:
    """Send and check the answer. Of a stream the last payload says how it must end."""
    method = ALL[f"{side} {name.rpartition('/')[2]}"][2]
    async with make_channel(address(pair, side)) as channel:
        answer = await send(channel, name, method, payload, max_replies=100)
    check_answer(method, payload[-1], answer)


# -- anything at all, at every method


@pytest.mark.parametrize("which", [which for which in ALL if not which.endswith("Session")])
@FUZZ
@given(data=st.data())
async def test_whatever_is_sent_is_answered(fuzzed: WorkerPair, which: str, data: st.DataObject) -> None:
    side, name, method = ALL[which]
    await say(fuzzed, side, name, data.draw(payloads(method.input_type, **_FIELDS)))


@pytest.mark.parametrize("which", ["decode Session", "prefill Session"])
@FUZZ
@given(data=st.data())
async def test_whatever_a_router_says_its_stream_ends_in_order(
    fuzzed: WorkerPair, which: str, data: st.DataObject
) -> None:
    side, name, method = ALL[which]
    target = st.one_of(st.just(fuzzed.decode.parts.info), messages(pb.WorkerInfo.DESCRIPTOR))
    valid = messages(method.input_type, **_FIELDS, decode=target).map(lambda message: message.SerializeToString())
    commands = data.draw(st.lists(valid, max_size=4))
    await say(fuzzed, side, name, *commands, data.draw(payloads(method.input_type, **_FIELDS, decode=target)))


# -- very much of it

HUGE = (1 << 32) - 1


def huge_commands() -> dict[str, dict[str, Any]]:
    """By what is huge in them; the request's id is the test's to add."""
    sampling = sampling_to_proto(PARAMS)
    common = {"attempt": 1, "prompt_ids": prompt_of(20), "sampling": sampling, "num_choices": 1}
    many = pb.Sampling()
    many.CopyFrom(sampling)
    many.stop_token_ids.extend(range(500_000))
    journal = [pb.ChoiceJournal(choice=n, token_ids=[5]) for n in range(20_000)]
    return {
        "a prompt of a million tokens": {**common, "prompt_ids": [2] * 1_000_000},
        "four billion choices": {**common, "num_choices": HUGE},
        "twenty thousand journals": {**common, "journal": journal},
        "half a million stop tokens": {**common, "sampling": many},
        "a journal longer than the context": {**common, "journal": [pb.ChoiceJournal(token_ids=[5] * 600)]},
    }


@pytest.mark.parametrize("what", huge_commands())
@pytest.mark.parametrize("side", ["decode", "prefill"])
async def test_huge_requests_are_refused_or_served_and_hold_nobody_up(
    fuzzed: WorkerPair, oracle: Oracle, side: str, what: str
) -> None:
    command = {**huge_commands()[what], "request_id": f"huge: {what}"}
    async with Router(fuzzed) as router:
        if side == "decode":
            await router.say("decode", reserve=decode_pb2.Reserve(**command))
        else:
            await router.say("prefill", start=prefill_pb2.StartPrefill(**command, decode=fuzzed.decode.parts.info))
        async with asyncio.timeout(ANSWER_S):
            await serves(fuzzed, oracle)


async def test_huge_calls_are_refused(fuzzed: WorkerPair) -> None:
    layers = [decode_pb2.LayerDigests(xxh3=range(100_000)) for _ in range(10)]
    async with make_channel(fuzzed.decode.parts.info.address) as channel:
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        commit = decode_pb2.Commit(request_id="x", grant_id="x", pages=range(1_000_000), layers=layers)
        part = decode_pb2.CommitPart(request_id="x", grant_id="x", first_index=HUGE, layers=layers)
        calls = [decode_pb2.CommitCall(commit=commit), decode_pb2.CommitCall(part=part)]
        assert [answer.error.code for answer in await ask_commits(stub, *calls)] == ["handoff", "handoff"]
