"""A stream that is written to at any time ends, with its writer, when whoever made it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from tandem.rpc.channel import bind, make_channel, make_server
from tandem.rpc.duplex import writing
from tandem.rpc.v1 import decode_pb2 as decode_pb
from tandem.rpc.v1 import decode_pb2_grpc

WAIT_S = 3.0


class Decode(decode_pb2_grpc.DecodeServiceServicer):
    """Answers each commit, and breaks at one of the request `break`."""

    def __init__(self) -> None:
        self.port = 0
        self.ended = asyncio.Event()

    async def Commits(
        self, request_iterator: AsyncIterator[decode_pb.CommitCall], context: Any
    ) -> AsyncIterator[decode_pb.CommitAnswer]:
        try:
            async for call in request_iterator:
                if call.commit.request_id == "break":
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "broken")
                yield decode_pb.CommitAnswer(request_id=call.commit.request_id)
        finally:
            self.ended.set()


def call_of(request_id: str) -> decode_pb.CommitCall:
    return decode_pb.CommitCall(commit=decode_pb.Commit(request_id=request_id))


@pytest_asyncio.fixture
async def decode() -> AsyncIterator[Decode]:
    decode, server = Decode(), make_server()
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(decode, server)
    decode.port = bind(server, "127.0.0.1", 0)
    await server.start()
    yield decode
    await server.stop(None)


async def test_what_is_queued_goes_out_and_the_end_of_the_block_ends_call_and_writer(decode: Decode) -> None:
    unsent: asyncio.Queue[decode_pb.CommitCall] = asyncio.Queue()
    async with asyncio.timeout(WAIT_S), make_channel(f"127.0.0.1:{decode.port}") as channel:
        stub: Any = decode_pb2_grpc.DecodeServiceStub(channel)
        call = stub.Commits()
        async with writing(call, unsent, "the writer"):
            for request_id in ("a", "b"):
                unsent.put_nowait(call_of(request_id))
                assert (await call.read()).request_id == request_id
            assert not decode.ended.is_set()
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "the writer"]
        await decode.ended.wait()


async def test_a_stream_that_breaks_is_told_by_the_reader_alone(decode: Decode) -> None:
    unsent: asyncio.Queue[decode_pb.CommitCall] = asyncio.Queue()

    async def talk(call: Any) -> None:
        async with writing(call, unsent):
            unsent.put_nowait(call_of("break"))
            async for _ in call:
                raise AssertionError

    async with asyncio.timeout(WAIT_S), make_channel(f"127.0.0.1:{decode.port}") as channel:
        stub: Any = decode_pb2_grpc.DecodeServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="broken"):
            await talk(stub.Commits())
