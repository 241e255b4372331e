"""A stream that is written to at any time ends, with its writer, when whoever made it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from tandem.rpc.channel import make_channel
from tandem.rpc.duplex import writing
from tandem.rpc.v1 import decode_pb2 as decode_pb
from tandem.rpc.v1 import decode_pb2_grpc
from tests.support.scripted_worker import ScriptedDecode
from tests.support.waiting import until

WAIT_S = 60.0


def call_of(request_id: str) -> decode_pb.CommitCall:
    return decode_pb.CommitCall(commit=decode_pb.Commit(request_id=request_id))


@pytest.fixture
def decode() -> Iterator[ScriptedDecode]:
    decode = ScriptedDecode("decode-0")
    yield decode
    decode.kill()


async def test_what_is_queued_goes_out_and_the_end_of_the_block_ends_call_and_writer(decode: ScriptedDecode) -> None:
    unsent: asyncio.Queue[decode_pb.CommitCall] = asyncio.Queue()
    async with asyncio.timeout(WAIT_S), make_channel(f"127.0.0.1:{decode.port}") as channel:
        stub: Any = decode_pb2_grpc.DecodeServiceStub(channel)
        call = stub.Commits()
        async with writing(call, unsent, "the writer"):
            for request_id in ("a", "b"):
                unsent.put_nowait(call_of(request_id))
                assert (await call.read()).request_id == request_id
            assert not decode.stream_ended.is_set()
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "the writer"]
        await until(decode.stream_ended.is_set, "its end at the server")


async def test_a_stream_that_breaks_is_told_by_the_reader_alone(decode: ScriptedDecode) -> None:
    decode.broken.set()
    unsent: asyncio.Queue[decode_pb.CommitCall] = asyncio.Queue()

    async def talk(call: Any) -> None:
        async with writing(call, unsent):
            unsent.put_nowait(call_of("a"))
            async for _ in call:
                raise AssertionError

    async with asyncio.timeout(WAIT_S), make_channel(f"127.0.0.1:{decode.port}") as channel:
        stub: Any = decode_pb2_grpc.DecodeServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="broken"):
            await talk(stub.Commits())
