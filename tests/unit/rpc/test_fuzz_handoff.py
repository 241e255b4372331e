"""Handoff messages that are nearly right, and peers that are not what they say, for workers that run for real.

A forged or broken message costs at most the attempt of whoever sent it; see `test_fuzz_workers` for what must hold
after each test.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import Message
from grpc import aio
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.transports.envelope import Envelope, unpack
from kvtransfer.transports.registry import create_transport
from tandem.rpc.channel import make_channel
from tandem.rpc.v1 import common_pb2 as pb
from tandem.rpc.v1 import control_pb2, control_pb2_grpc, decode_pb2, decode_pb2_grpc, prefill_pb2
from tests.support.scripted_router import Ask, Router, ask_commits
from tests.support.waiting import until
from tests.support.worker_pair import SHARED_LOOP, Oracle, WorkerPair, prompt_of
from tests.unit.rpc.fuzz_pair import FEW, PARAMS
from tests.unit.rpc.wire_fuzz import ANSWER_S, FUZZ, messages

pytest_plugins = ["tests.support.worker_pair", "tests.unit.rpc.fuzz_pair"]
pytestmark = [SHARED_LOOP, pytest.mark.processes]

HUGE = (1 << 32) - 1


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
        "sender_incarnation": pair.prefill.parts.incarnation,
        "capability": grant.capability,
    }
    num_layers = pair.decode.parts.layout.num_layers
    layers = [decode_pb2.LayerDigests(xxh3=[1] * len(grant.pages)) for _ in range(num_layers)]
    whose = {"epoch": grant.epoch, "receiver_incarnation": grant.receiver_incarnation, "sender_worker_id": "prefill-0"}
    return {
        "Attach": decode_pb2.AttachRequest(**who),
        "ConfirmIdle": decode_pb2.ConfirmIdleRequest(**who),
        "part": decode_pb2.CommitPart(**who, **whose, layers=layers),
        "commit": decode_pb2.Commit(
            **who,
            **whose,
            layout=pair.decode.parts.info.layout,
            pages=grant.pages,
            layers=layers,
            first_tokens=[decode_pb2.FirstToken(choice=0, token_id=5)],
        ),
    }


async def _ask(channel: aio.Channel, method: str, message: Any) -> Any:
    stub = decode_pb2_grpc.DecodeServiceStub(channel)
    if method in ("commit", "part"):
        (answer,) = await ask_commits(stub, decode_pb2.CommitCall(**{method: message}))
        return answer
    return await getattr(stub, method)(message, timeout=ANSWER_S)


@pytest.mark.parametrize("always", ["capability", "grant_id"])
@FEW
@given(data=st.data())
async def test_nobody_speaks_for_a_grant_that_was_not_given_to_him(
    fuzzed: WorkerPair, oracle: Oracle, always: str, data: st.DataObject
) -> None:
    prompt = prompt_of(data.draw(st.integers(17, 60)), seed=3)
    async with Router(fuzzed) as router, make_channel(fuzzed.decode.parts.info.address) as channel:
        router.attaches = False
        ask = await router.begin(Ask(prompt))
        await router.heard(ask, "decode.granted")
        grant = router.outcomes[ask.key].grant
        assert grant is not None
        for method in data.draw(st.lists(st.sampled_from(["Attach", "part", "commit", "ConfirmIdle"]), max_size=3)):
            forged = _changed(data, _calls(fuzzed, grant)[method], always)
            reply = await _ask(channel, method, forged)
            if method != "ConfirmIdle":
                assert not reply.ok
                assert reply.error.code == "handoff"
                assert reply.error.reason
        await router.attach(ask)
        outcome = await router.finish(ask)
        assert outcome.ids() == oracle.greedy(prompt, PARAMS.max_tokens)


@FEW
@given(data=st.data())
async def test_the_right_writer_saying_wrong_things_ends_its_own_attempt_at_most(
    fuzzed: WorkerPair, data: st.DataObject
) -> None:
    async with Router(fuzzed) as router, make_channel(fuzzed.decode.parts.info.address) as channel:
        router.attaches = False
        ask = await router.begin(Ask(prompt_of(50, seed=4)))
        await router.heard(ask, "decode.granted")
        grant = router.outcomes[ask.key].grant
        assert grant is not None
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        calls = _calls(fuzzed, grant)
        assert (await stub.Attach(calls["Attach"], timeout=ANSWER_S)).ok
        always = data.draw(st.sampled_from(["receiver_incarnation", "sender_incarnation", "grant_id"]))
        method = data.draw(st.sampled_from(["commit", "part"]))
        reply = await _ask(channel, method, _changed(data, calls[method], always))
        assert not reply.ok
        assert reply.error.code == "handoff"
        reply = await _ask(channel, "commit", calls["commit"])  # the digests are wrong in any case
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
        fields = {"transport": "ucx", "agent_name": "x", "address": 0, "num_bytes": 1, "device": "cpu"}
        return Envelope(**fields | {"host": "127.0.0.1", "door": 9, name: value}).pack(blob)  # type: ignore[arg-type]

    names = st.sampled_from(["transport", "agent_name", "address", "num_bytes", "device", "host", "door"])
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
    good = fuzzed.prefill.parts.info
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
    async with make_channel(fuzzed.decode.parts.info.address) as channel:
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        reply = await stub.Pair(decode_pb2.PairRequest(prefill=info), timeout=ANSWER_S)
        await stub.Pair(decode_pb2.PairRequest(prefill=good), timeout=ANSWER_S)  # its right address again
    assert reply.decode.incarnation == fuzzed.decode.parts.incarnation
    if info.incarnation != good.incarnation:
        assert reply.error.code in ("incompatible", "transport", "worker_lost"), reply.error


@contextmanager
def agent(pair: WorkerPair, name: str, **changes: Any) -> Iterator[pb.WorkerInfo]:
    """The description of a peer that is there, as far as the transport can tell, and of which `changes` are lies."""
    memory = np.zeros(4096, dtype=np.uint8)
    transport = create_transport("ucx", name)
    try:
        transport.register(memory.ctypes.data, memory.nbytes, owner=memory)
        info = pb.WorkerInfo()
        info.CopyFrom(pair.prefill.parts.info)
        info.incarnation, info.transport_metadata = name, transport.metadata()
        for field, value in changes.items():
            setattr(info, field, value)
        yield info
    finally:
        transport.close()


@pytest.mark.parametrize("pid", [0, 1 << 22, (1 << 31) - 1, 1 << 31, (1 << 32) - 1])
async def test_a_pid_that_is_none_proves_nothing(fuzzed: WorkerPair, pid: int) -> None:
    with agent(fuzzed, f"odd-{pid}", pid=pid) as info:
        async with make_channel(fuzzed.decode.parts.info.address) as channel:
            stub = decode_pb2_grpc.DecodeServiceStub(channel)
            reply = await stub.Pair(decode_pb2.PairRequest(prefill=info), timeout=ANSWER_S)
            assert not reply.HasField("error")
            control = control_pb2_grpc.WorkerControlStub(channel)
            await control.NoteEnded(control_pb2.NoteEndedRequest(incarnations=[info.incarnation]), timeout=ANSWER_S)


@pytest.mark.parametrize("where", ["nowhere.invalid:1", "127.0.0.1:1", ""])
async def test_a_writer_that_cannot_be_asked_to_stop_holds_its_own_pages_only(
    fuzzed: WorkerPair, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    with agent(fuzzed, f"lost-{len(where)}", address=where) as info:
        async with Router(fuzzed) as router, make_channel(fuzzed.decode.parts.info.address) as channel:
            stub = decode_pb2_grpc.DecodeServiceStub(channel)
            await stub.Pair(decode_pb2.PairRequest(prefill=info), timeout=ANSWER_S)
            router.attaches = False
            ask = await router.begin(Ask(prompt_of(50, seed=5)))
            await router.heard(ask, "decode.granted")
            grant = router.outcomes[ask.key].grant
            assert grant is not None
            attach = _calls(fuzzed, grant)["Attach"]
            attach.sender_incarnation = info.incarnation
            assert (await stub.Attach(attach, timeout=ANSWER_S)).ok
            await router.cancel(ask)
            await until(lambda: "did not hear" in caplog.text, "a stop that nobody hears")
            assert fuzzed.on_runner(fuzzed.decode, fuzzed.decode.parts.pool.counts).quarantined == len(grant.pages)
            control = control_pb2_grpc.WorkerControlStub(channel)
            await control.NoteEnded(control_pb2.NoteEndedRequest(incarnations=[info.incarnation]), timeout=ANSWER_S)


async def test_the_death_of_a_stranger_is_nobodys_but_his_own(fuzzed: WorkerPair) -> None:
    """A peer that gives another's metadata for its own is refused: its end would take that other one's place away."""
    with stranger() as pid:
        info = pb.WorkerInfo()
        info.CopyFrom(fuzzed.prefill.parts.info)
        info.incarnation, info.pid = "stranger-3", pid
        async with make_channel(fuzzed.decode.parts.info.address) as channel:
            stub = decode_pb2_grpc.DecodeServiceStub(channel)
            reply = await stub.Pair(decode_pb2.PairRequest(prefill=info), timeout=ANSWER_S)
    assert reply.error.code == "transport"
    assert "stranger-3" in reply.error.message


@FEW
@given(data=st.data())
async def test_no_description_of_a_target_breaks_prefill(fuzzed: WorkerPair, data: st.DataObject) -> None:
    """A router that names a decode worker which is not there, or another one: the attempt fails, and says why."""
    target = data.draw(messages(pb.WorkerInfo.DESCRIPTOR))
    if data.draw(st.booleans()):
        target.incarnation = data.draw(st.sampled_from(["decode-x", "", fuzzed.decode.parts.incarnation]))
        target.address = fuzzed.decode.parts.info.address
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
        code = router.outcomes[ask.key].failures["prefill"].code
        assert code in ("worker_lost", "transport", "incompatible", "handoff", "config")
