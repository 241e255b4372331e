"""How a channel gets through to a server whose connection is slow to be answered, or is never answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from tandem.rpc.channel import make_channel
from tandem.rpc.v1 import common_pb2, control_pb2, control_pb2_grpc, decode_pb2, decode_pb2_grpc
from tests.support import grpc_server
from tests.support.waiting import until
from tests.unit.rpc.test_rpc_security import LOOPBACK, PLAIN, ask, serving

Before = Callable[[int, asyncio.StreamReader], Awaitable[None]]

SLOW_S = 0.5
RECOVERY_S = 5.0  # two seconds are the channel's own; the rest is for a busy machine


@asynccontextmanager
async def forwarding(port: int, before: Before) -> AsyncIterator[int]:
    """A TCP port that leads to `port`, once `before(number of the connection, what the client says)` has returned."""
    num_connections = 0
    tasks: set[asyncio.Task[None]] = set()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()

    async def forward(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await before(number, reader)
            server_reader, server_writer = await asyncio.open_connection(LOOPBACK, port)
            await asyncio.gather(copy(reader, server_writer), copy(server_reader, writer))
        finally:
            writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        tasks.add(asyncio.create_task(forward(num_connections, reader, writer)))

    listener = await asyncio.start_server(accept, LOOPBACK, 0)
    try:
        yield int(listener.sockets[0].getsockname()[1])
    finally:
        listener.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.long
@pytest.mark.parametrize("is_near", [False, True])
async def test_a_server_sends_far_ahead_of_its_reader_but_not_on_a_near_channel(is_near: bool) -> None:
    """What it has sent cannot be joined with what comes later; a large message goes all the same."""
    decode = Endless()
    added = decode_pb2_grpc.add_DecodeServiceServicer_to_server
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(grpc_server.serving(added, decode, PLAIN))
        channel = await stack.enter_async_context(make_channel(f"{LOOPBACK}:{port}", is_near=is_near))
        stub: Any = decode_pb2_grpc.DecodeServiceStub(channel)
        call = stub.Session()
        for _ in range(3):
            await call.read()
        if not is_near:
            await until(lambda: decode.num_sent - 3 > 300, "a server that is far ahead")
        before = -1
        while before != decode.num_sent:  # that none follows can only be waited for
            before = decode.num_sent
            await asyncio.sleep(0.3)
        if is_near:
            assert decode.num_sent - 3 < 50
        decode.num_bytes = 3 << 20
        while len((await call.read()).SerializeToString()) < decode.num_bytes:
            pass
        call.cancel()


class Endless(decode_pb2_grpc.DecodeServiceServicer):
    """Sends as much as it may."""

    def __init__(self) -> None:
        self.num_sent, self.num_bytes = 0, 100

    async def Session(self, _: Any, __: Any) -> AsyncIterator[decode_pb2.DecodeEvents]:
        while True:
            failed = common_pb2.AttemptFailed(request_id="r" * self.num_bytes)
            yield decode_pb2.DecodeEvents(events=[decode_pb2.DecodeEvent(failed=failed)])
            self.num_sent += 1


@pytest.mark.long
async def test_a_server_that_is_slow_to_answer_a_connection_is_waited_for() -> None:
    """As one whose host is busy is: a call must not fail because its connection took a moment."""

    async def wait(_number: int, _reader: asyncio.StreamReader) -> None:
        await asyncio.sleep(SLOW_S)

    async with serving(PLAIN) as server_port, forwarding(server_port, wait) as port:
        assert await ask(port, PLAIN) == 7


@pytest.mark.long
async def test_a_connection_that_nobody_answers_is_given_up_soon_for_another_one() -> None:
    numbers: list[int] = []

    async def swallow_first(number: int, reader: asyncio.StreamReader) -> None:
        numbers.append(number)
        if number == 1:
            await reader.read(-1)  # until the client gives up
            raise ConnectionAbortedError

    async with (
        serving(PLAIN) as server_port,
        forwarding(server_port, swallow_first) as port,
        make_channel(f"{LOOPBACK}:{port}", PLAIN) as channel,
    ):
        stub = control_pb2_grpc.WorkerControlStub(channel)
        request = control_pb2.StatusRequest()
        assert (await stub.Status(request, timeout=RECOVERY_S, wait_for_ready=True)).num_running == 7
    assert numbers == [1, 2]
