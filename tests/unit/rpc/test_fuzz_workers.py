"""Bad bytes for a prefill and a decode worker that run for real: no crash, no hang, no page lost, and typed answers.

After each test both workers hold nothing, and the next request gets the tokens that the model's own implementation
gives. `Drain` is left out: any message at all is a valid one, and it would do what it says.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.transports.envelope import Envelope, unpack
from tandem.rpc.channel import make_channel
from tandem.rpc.convert import sampling_to_proto
from tandem.rpc.v1 import common_pb2 as pb
from tandem.rpc.v1 import control_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2
from tests.scenarios.worker_pair import CONFIG, SHARED_LOOP, VOCAB, Oracle, WorkerPair, prompt_of, running_pair
from tests.scenarios.worker_router import Ask, Router
from tests.unit.rpc.wire_fuzz import ANSWER_S, FUZZ, check_answer, messages, methods, payloads, send

pytest_plugins = ["tests.scenarios.worker_pair"]
pytestmark = SHARED_LOOP

DECODE = methods(decode_pb2.DESCRIPTOR.services_by_name["DecodeService"])
PREFILL = methods(prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"])
CONTROL = methods(control_pb2.DESCRIPTOR.services_by_name["WorkerControl"])
ALL = {
    f"{side} {name.rpartition('/')[2]}": (side, name, method)
    for side, own in (("decode", DECODE), ("prefill", PREFILL))
    for name, method in (own | CONTROL).items()
    if not name.endswith("/Drain")
}
NUM_TOKENS = 6
SETTLE_S = 8.0
SHORT_LEASE = {**CONFIG, "transport": {"lease_s": 1.0, "grace_s": 0.5}}

_PROMPTS = st.one_of(
    st.lists(st.integers(2, VOCAB - 1), min_size=1, max_size=70),
    st.sampled_from([[], [VOCAB], [(1 << 32) - 1], [2] * 511, [2] * 600]),
)
_PARAMS = Ask([]).params
_SAMPLING = st.one_of(st.just(sampling_to_proto(_PARAMS)), messages(pb.Sampling.DESCRIPTOR))
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


@pytest.fixture(scope="module")
def own_pair(worker_model_dir: Path) -> Iterator[WorkerPair]:
    with running_pair(worker_model_dir, config=SHORT_LEASE) as pair:
        yield pair


@pytest_asyncio.fixture(loop_scope="session")
async def fuzzed(own_pair: WorkerPair, oracle: Oracle) -> AsyncIterator[WorkerPair]:
    """The pair; afterwards it holds nothing and serves as ever."""
    own_pair.drop_caches()
    await serves(own_pair, oracle)
    yield own_pair
    await own_pair.settled(SETTLE_S)
    await serves(own_pair, oracle)
    await own_pair.settled(SETTLE_S)


async def serves(pair: WorkerPair, oracle: Oracle) -> None:
    prompt = prompt_of(40)
    async with Router(pair) as router:
        (outcome,) = await router.ask(Ask(prompt))
        assert outcome.ids() == oracle.greedy(prompt, _PARAMS.max_tokens)


def address(pair: WorkerPair, side: str) -> str:
    return str((pair.decode if side == "decode" else pair.prefill).info.address)


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
    target = st.one_of(st.just(fuzzed.decode.info), messages(pb.WorkerInfo.DESCRIPTOR))
    valid = messages(method.input_type, **_FIELDS, decode=target).map(lambda message: message.SerializeToString())
    commands = data.draw(st.lists(valid, max_size=4))
    await say(fuzzed, side, name, *commands, data.draw(payloads(method.input_type, **_FIELDS, decode=target)))


# -- very much of it

HUGE = (1 << 32) - 1


def huge_commands() -> dict[str, dict[str, Any]]:
    sampling = sampling_to_proto(_PARAMS)
    common = {"request_id": "huge", "attempt": 1, "prompt_ids": prompt_of(20), "sampling": sampling, "num_choices": 1}
    many = pb.Sampling()
    many.CopyFrom(sampling)
    many.stop_token_ids.extend(range(500_000))
    journal = [pb.ChoiceJournal(choice=n, token_ids=[5]) for n in range(100_000)]
    return {
        "a prompt of a million tokens": {**common, "prompt_ids": [2] * 1_000_000},
        "four billion choices": {**common, "num_choices": HUGE},
        "a hundred thousand journals": {**common, "journal": journal},
        "half a million stop tokens": {**common, "sampling": many},
        "a journal longer than the context": {**common, "journal": [pb.ChoiceJournal(token_ids=[5] * 600)]},
    }


@pytest.mark.parametrize("what", huge_commands())
@pytest.mark.parametrize("side", ["decode", "prefill"])
async def test_huge_requests_are_refused_or_served_and_hold_nobody_up(
    fuzzed: WorkerPair, oracle: Oracle, side: str, what: str
) -> None:
    command = huge_commands()[what]
    async with Router(fuzzed) as router:
        if side == "decode":
            await router.say("decode", reserve=decode_pb2.Reserve(**command))
        else:
            await router.say("prefill", start=prefill_pb2.StartPrefill(**command, decode=fuzzed.decode.info))
        async with asyncio.timeout(ANSWER_S):
            await serves(fuzzed, oracle)


async def test_huge_calls_are_refused(fuzzed: WorkerPair) -> None:
    layers = [decode_pb2.LayerDigests(xxh3=range(100_000)) for _ in range(10)]
    async with make_channel(fuzzed.decode.info.address) as channel:
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        commit = decode_pb2.CommitRequest(request_id="x", grant_id="x", pages=range(1_000_000), layers=layers)
        assert (await stub.Commit(commit, timeout=ANSWER_S)).error.code == "handoff"
        part = decode_pb2.CommitPartRequest(request_id="x", grant_id="x", first_index=HUGE, layers=layers)
        assert (await stub.CommitPart(part, timeout=ANSWER_S)).error.code == "handoff"


# -- handoff messages that are nearly right


def _changed(data: st.DataObject, message: Any, always: str) -> Any:
    """A copy of which `always`, and perhaps other fields, say something else."""
    copy = type(message)()
    copy.CopyFrom(message)
    names = [field.name for field in message.DESCRIPTOR.fields if field.name not in (always, "layout")]
    noise = data.draw(messages(message.DESCRIPTOR))
    for name in data.draw(st.lists(st.sampled_from(names), max_size=3, unique=True)):
        copy.ClearField(name)
        partial = type(message)()
        _copy_field(noise, partial, name)
        copy.MergeFrom(partial)
    right = getattr(message, always)
    wrong = st.binary(max_size=40) if isinstance(right, bytes) else st.text("abc/-0123456789", max_size=20)
    setattr(copy, always, data.draw(wrong.filter(lambda value: value != right)))
    return copy


def _copy_field(source: Message, target: Message, name: str) -> None:
    field = source.DESCRIPTOR.fields_by_name[name]
    value = getattr(source, name)
    if field.is_repeated:
        getattr(target, name).extend(value)
    else:
        setattr(target, name, value)


def _calls(pair: WorkerPair, grant: decode_pb2.Grant) -> dict[str, Any]:
    """What the grant's right writer would say."""
    who = {
        "request_id": grant.request_id,
        "attempt": grant.attempt,
        "grant_id": grant.grant_id,
        "sender_incarnation": pair.prefill.incarnation,
        "capability": grant.capability,
    }
    num_layers = pair.decode.layout.num_layers
    layers = [decode_pb2.LayerDigests(xxh3=[1] * len(grant.pages)) for _ in range(num_layers)]
    whose = {"epoch": grant.epoch, "receiver_incarnation": grant.receiver_incarnation, "sender_worker_id": "prefill-0"}
    return {
        "Attach": decode_pb2.AttachRequest(**who),
        "ConfirmIdle": decode_pb2.ConfirmIdleRequest(**who),
        "CommitPart": decode_pb2.CommitPartRequest(**who, **whose, layers=layers),
        "Commit": decode_pb2.CommitRequest(
            **who,
            **whose,
            layout=pair.decode.info.layout,
            pages=grant.pages,
            layers=layers,
            first_tokens=[decode_pb2.FirstToken(choice=0, token_id=5)],
        ),
    }


@pytest.mark.parametrize("always", ["capability", "grant_id"])
@FUZZ
@given(data=st.data())
async def test_nobody_speaks_for_a_grant_that_was_not_given_to_him(
    fuzzed: WorkerPair, oracle: Oracle, always: str, data: st.DataObject
) -> None:
    prompt = prompt_of(data.draw(st.integers(17, 60)), seed=3)
    async with Router(fuzzed) as router, make_channel(fuzzed.decode.info.address) as channel:
        router.attaches = False
        ask = await router.begin(Ask(prompt))
        await router.heard(ask, "decode.granted")
        grant = router.outcomes[ask.key].grant
        assert grant is not None
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        for method in data.draw(
            st.lists(st.sampled_from(["Attach", "CommitPart", "Commit", "ConfirmIdle"]), max_size=3)
        ):
            forged = _changed(data, _calls(fuzzed, grant)[method], always)
            reply = await getattr(stub, method)(forged, timeout=ANSWER_S)
            if method != "ConfirmIdle":
                assert not reply.ok
                assert reply.error.code == "handoff"
                assert reply.error.reason
        await router.attach(ask)
        outcome = await router.finish(ask)
        assert outcome.ids() == oracle.greedy(prompt, _PARAMS.max_tokens)


@FUZZ
@given(data=st.data())
async def test_the_right_writer_saying_wrong_things_ends_its_own_attempt_at_most(
    fuzzed: WorkerPair, data: st.DataObject
) -> None:
    async with Router(fuzzed) as router, make_channel(fuzzed.decode.info.address) as channel:
        router.attaches = False
        ask = await router.begin(Ask(prompt_of(50, seed=4)))
        await router.heard(ask, "decode.granted")
        grant = router.outcomes[ask.key].grant
        assert grant is not None
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        calls = _calls(fuzzed, grant)
        assert (await stub.Attach(calls["Attach"], timeout=ANSWER_S)).ok
        always = data.draw(st.sampled_from(["receiver_incarnation", "sender_incarnation", "grant_id"]))
        method = data.draw(st.sampled_from(["Commit", "CommitPart"]))
        reply = await getattr(stub, method)(_changed(data, calls[method], always), timeout=ANSWER_S)
        assert not reply.ok
        assert reply.error.code == "handoff"
        reply = await stub.Commit(calls["Commit"], timeout=ANSWER_S)  # the digests are wrong in any case
        assert not reply.ok
        await stub.ConfirmIdle(calls["ConfirmIdle"], timeout=ANSWER_S)


# -- peers that are not what they say


@contextmanager
def stranger() -> Iterator[int]:
    """The pid of a process that has nothing to do with it."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        yield process.pid
    finally:
        process.kill()
        process.communicate()


def bad_metadata(good: bytes) -> st.SearchStrategy[bytes]:
    envelope, blob = unpack(good, "ucx")
    odd = st.one_of(
        st.none(), st.booleans(), st.integers(-1, 1 << 70), st.text(max_size=5), st.lists(st.none(), max_size=2)
    )

    def with_field(name: str, value: Any) -> bytes:
        fields = {"transport": "ucx", "agent_name": "x", "address": 0, "num_bytes": 1, "device": "cpu", name: value}
        return Envelope(**fields).pack(blob)

    names = st.sampled_from(["transport", "agent_name", "address", "num_bytes", "device"])
    return st.one_of(
        st.binary(max_size=60),
        st.builds(lambda n: good[:n], st.integers(0, len(good) - 1)),
        st.builds(
            lambda n, b: good[:n] + bytes([b]) + good[n + 1 :], st.integers(0, len(good) - 1), st.integers(0, 255)
        ),
        st.builds(with_field, names, odd),
        st.builds(lambda b: envelope.pack(b), st.binary(max_size=60)),
        st.just(b"TNDM1" + b"\xff\xff\xff\xff" + b"[" * 50_000),
    )


@FUZZ
@given(data=st.data())
async def test_no_description_of_a_peer_breaks_decode(fuzzed: WorkerPair, data: st.DataObject) -> None:
    """Layouts, sizes, pids and metadata that make no sense: paired or refused, but answered."""
    good = fuzzed.prefill.info
    info = pb.WorkerInfo()
    info.CopyFrom(good)
    info.incarnation = data.draw(st.sampled_from(["", "stranger-1", "stranger-2", good.incarnation]))
    noise = data.draw(messages(pb.WorkerInfo.DESCRIPTOR))
    changeable = ["worker_id", "address", "num_pages", "max_context", "vocab_size", "transport", "host_id", "version"]
    for name in data.draw(st.lists(st.sampled_from(changeable), max_size=3, unique=True)):
        setattr(info, name, getattr(noise, name))
    if data.draw(st.booleans()):
        info.layout.CopyFrom(noise.layout)
    info.transport_metadata = data.draw(
        st.one_of(st.just(good.transport_metadata), bad_metadata(good.transport_metadata))
    )
    info.pid = data.draw(st.sampled_from([0, 1, 2, os.getpid(), 1 << 22, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]))
    if info.incarnation == good.incarnation:
        info.pid = good.pid  # its pid proves its end: whoever has its certificate and name is believed
    async with make_channel(fuzzed.decode.info.address) as channel:
        reply = await decode_pb2_grpc.DecodeServiceStub(channel).Pair(
            decode_pb2.PairRequest(prefill=info), timeout=ANSWER_S
        )
    assert reply.decode.incarnation == fuzzed.decode.incarnation
    if info.incarnation != good.incarnation:
        assert reply.error.code in ("incompatible", "transport", "worker_lost"), reply.error


async def test_the_death_of_a_stranger_is_nobodys_but_his_own(fuzzed: WorkerPair) -> None:
    """A peer that gives another's metadata for its own is refused: its end would take that other one's place away."""
    with stranger() as pid:
        info = pb.WorkerInfo()
        info.CopyFrom(fuzzed.prefill.info)
        info.incarnation, info.pid = "stranger-3", pid
        async with make_channel(fuzzed.decode.info.address) as channel:
            stub = decode_pb2_grpc.DecodeServiceStub(channel)
            reply = await stub.Pair(decode_pb2.PairRequest(prefill=info), timeout=ANSWER_S)
    assert reply.error.code == "transport"
    assert "stranger-3" in reply.error.message


@FUZZ
@given(data=st.data())
async def test_no_description_of_a_target_breaks_prefill(fuzzed: WorkerPair, data: st.DataObject) -> None:
    """A router that names a decode worker which is not there, or another one: the attempt fails, and says why."""
    target = data.draw(messages(pb.WorkerInfo.DESCRIPTOR))
    if data.draw(st.booleans()):
        target.incarnation = data.draw(st.sampled_from(["decode-x", "", fuzzed.decode.incarnation]))
        target.address = fuzzed.decode.info.address
    async with Router(fuzzed) as router:
        ask = router.name(Ask(prompt_of(20)))
        await router.say("prefill", start=prefill_pb2.StartPrefill(**router._common(ask), decode=target))
        grant = decode_pb2.Grant(
            grant_id=f"{target.incarnation}/1",
            request_id=ask.request_id,
            attempt=ask.attempt,
            receiver_incarnation=target.incarnation,
            pages=data.draw(st.lists(st.sampled_from([0, 1, 127, 128, HUGE]), max_size=3)),
            lease_s=data.draw(st.sampled_from([0.0, -1.0, 10.0, float("nan"), float("inf")])),
        )
        await router.attach(ask, grant)
        await router.heard(ask, "prefill.failed")
        assert router.outcomes[ask.key].failures["prefill"].code in (
            "worker_lost",
            "transport",
            "incompatible",
            "handoff",
        )
