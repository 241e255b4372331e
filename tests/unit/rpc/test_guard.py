"""What comes before every handler: the role first, then the bytes; over real connections."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from tandem.core.config import SecurityConfig
from tandem.rpc.channel import bind, make_channel, make_server
from tandem.rpc.permissions import PeerRole
from tandem.rpc.security import Security
from tandem.rpc.v1 import common_pb2, decode_pb2, decode_pb2_grpc

GARBAGE = b"\x0a\xff\xff\xff\xff\x07x"  # a text that promises more than there is
PLAIN = Security(SecurityConfig("off"), None, "127.0.0.1")
SESSION, ATTACH, IDLE = (f"/tandem.v1.DecodeService/{name}" for name in ("Session", "Attach", "ConfirmIdle"))


class _Decode(decode_pb2_grpc.DecodeServiceServicer):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.num_streams_ended = 0

    async def Session(
        self, request_iterator: AsyncIterator[decode_pb2.DecodeCommand], context: Any
    ) -> AsyncIterator[decode_pb2.DecodeEvents]:
        try:
            async for command in request_iterator:
                self.heard.append(command.cancel.request_id)
                yield decode_pb2.DecodeEvents(status=common_pb2.WorkerStatus(num_running=len(self.heard)))
        finally:
            self.num_streams_ended += 1

    async def Attach(self, request: decode_pb2.AttachRequest, context: Any) -> decode_pb2.AttachReply:
        self.heard.append(request.grant_id)
        return decode_pb2.AttachReply(ok=True)

    async def ConfirmIdle(self, request: decode_pb2.ConfirmIdleRequest, context: Any) -> decode_pb2.ConfirmIdleReply:
        raise RuntimeError("a defect")


class _Served:
    def __init__(self, certificates: Path) -> None:
        self._certificates = certificates
        self.service = _Decode()
        self.server = make_server()
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self.service, self.server)
        self._plain_port = bind(self.server, "127.0.0.1", 0, PLAIN)
        self._tls_port = bind(self.server, "127.0.0.1", 0, self._member(PeerRole.DECODE))

    def _member(self, role: PeerRole) -> Security:
        return Security(SecurityConfig("on", str(self._certificates)), role, "127.0.0.1")

    def channel(self, role: PeerRole | None = None) -> grpc.aio.Channel:
        """Plain, or as a member."""
        if role is None:
            return make_channel(f"127.0.0.1:{self._plain_port}", PLAIN)
        return make_channel(f"127.0.0.1:{self._tls_port}", self._member(role))


@pytest_asyncio.fixture
async def served(certificates: Path) -> AsyncIterator[_Served]:
    served = _Served(certificates)
    await served.server.start()
    yield served
    await served.server.stop(None)


def cancel(request_id: str) -> bytes:
    return decode_pb2.DecodeCommand(cancel=common_pb2.Cancel(request_id=request_id)).SerializeToString()


@pytest.mark.parametrize("role", [None, PeerRole.PREFILL])
async def test_a_call_that_is_no_message_is_refused_before_the_handler(served: _Served, role: PeerRole | None) -> None:
    async with served.channel(role) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(ATTACH)(GARBAGE)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        good = decode_pb2.AttachRequest(grant_id="g").SerializeToString()
        assert decode_pb2.AttachReply.FromString(await channel.unary_unary(ATTACH)(good)).ok
    assert served.service.heard == ["g"]


async def test_who_may_not_call_learns_that_and_nothing_of_his_bytes(served: _Served) -> None:
    async with served.channel(PeerRole.ROUTER) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(ATTACH)(GARBAGE)
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize("role", [None, PeerRole.ROUTER])
async def test_a_stream_ends_at_bytes_that_are_no_message(served: _Served, role: PeerRole | None) -> None:
    """What came before counts, what comes after does not, and the handler's own end is an orderly one."""
    async with served.channel(role) as channel:
        call = channel.stream_stream(SESSION)(iter([cancel("first"), GARBAGE, cancel("too late")]))
        answers = aiter(call)
        assert decode_pb2.DecodeEvents.FromString(await anext(answers)).status.num_running == 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(answers)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert served.service.heard == ["first"]
    assert served.service.num_streams_ended == 1


async def test_a_stream_of_messages_ends_well(served: _Served) -> None:
    async with served.channel(PeerRole.ROUTER) as channel:
        call = channel.stream_stream(SESSION)()
        for name in "abc":
            await call.write(cancel(name))
        await call.done_writing()
        assert len([message async for message in call]) == 3
        assert await call.code() is grpc.StatusCode.OK


async def test_a_handlers_own_failure_stays_its_own(served: _Served) -> None:
    async with served.channel(PeerRole.PREFILL) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(IDLE)(b"")
    assert caught.value.code() is grpc.StatusCode.UNKNOWN


async def test_a_method_that_does_not_exist_is_unimplemented(served: _Served) -> None:
    async with served.channel(PeerRole.PREFILL) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/tandem.v1.DecodeService/Reboot")(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
