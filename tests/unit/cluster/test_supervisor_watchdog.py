"""What `tandem serve` looks after, against servers and processes that really run."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from tandem.cluster.serve import supervisor_watchdog
from tandem.cluster.serve.supervisor_watchdog import end_silent_supervisor, watch_ray
from tandem.cluster.spec import SupervisorFace
from tandem.core.config import SecurityConfig
from tandem.core.pidfd import started_at
from tandem.rpc.channel import make_channel
from tandem.rpc.v1 import supervisor_pb2, supervisor_pb2_grpc
from tests.support.grpc_server import serving

LEASE_S = 0.5


class Face(supervisor_pb2_grpc.SupervisorControlServicer):
    """A supervisor that answers while `awake`."""

    def __init__(self) -> None:
        self.awake = True
        self.refuses = False
        self.freezes = False  # with everything else here, once, while a question is under way

    async def GetCluster(self, request: Any, context: Any) -> supervisor_pb2.Cluster:
        if self.freezes:
            self.freezes = False
            time.sleep(2 * LEASE_S)  # noqa: ASYNC251 - nothing runs here
        if self.refuses:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "not you")
        if not self.awake:
            await asyncio.Event().wait()
        return supervisor_pb2.Cluster()


@pytest.fixture
async def face() -> AsyncIterator[tuple[Face, str]]:
    face = Face()
    async with serving(supervisor_pb2_grpc.add_SupervisorControlServicer_to_server, face) as port:
        yield face, f"127.0.0.1:{port}"


@pytest.mark.processes
async def test_a_supervisor_is_killed_when_it_has_been_silent_for_the_lease_and_not_before(
    face: tuple[Face, str],
) -> None:
    servicer, address = face
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "import time; time.sleep(600)")
    started = started_at(process.pid)
    assert started is not None
    try:
        async with make_channel(address) as channel:
            stub: Any = supervisor_pb2_grpc.SupervisorControlStub(channel)
            told = SupervisorFace(address, SecurityConfig(), process.pid, started)
            watchdog = asyncio.create_task(end_silent_supervisor(stub, told, LEASE_S))
            await asyncio.sleep(3 * LEASE_S)
            assert process.returncode is None
            servicer.awake, silent_since = False, time.monotonic()
            await asyncio.wait_for(watchdog, 10 * LEASE_S)
            assert time.monotonic() - silent_since >= LEASE_S * (1 - 2 / supervisor_watchdog.BEATS_PER_LEASE)
            assert await asyncio.wait_for(process.wait(), 60) == -9
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.processes
@pytest.mark.parametrize("case", ["all stood still", "all stood still while it was asked", "it refuses"])
async def test_a_supervisor_that_is_not_silent_is_left_alone(face: tuple[Face, str], case: str) -> None:
    servicer, address = face
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "import time; time.sleep(600)")
    started = started_at(process.pid)
    assert started is not None
    try:
        async with make_channel(address) as channel:
            stub: Any = supervisor_pb2_grpc.SupervisorControlStub(channel)
            told = SupervisorFace(address, SecurityConfig(), process.pid, started)
            watching = asyncio.create_task(end_silent_supervisor(stub, told, LEASE_S))
            await asyncio.sleep(LEASE_S / 2)
            servicer.refuses = case == "it refuses"
            servicer.freezes = case == "all stood still while it was asked"
            if case == "all stood still":
                time.sleep(2 * LEASE_S)  # noqa: ASYNC251 - nothing runs here
            await asyncio.sleep(4 * LEASE_S)
            assert not watching.done()
            assert process.returncode is None
            watching.cancel()
    finally:
        process.kill()
        await process.wait()


@pytest.mark.long
async def test_a_control_store_is_lost_after_several_looks_and_may_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_watchdog, "RAY_PROBE_S", 0.05)
    said: asyncio.Queue[bool] = asyncio.Queue()

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    watching = asyncio.create_task(watch_ray(f"127.0.0.1:{port}", said.put_nowait))
    await asyncio.sleep(0.3)
    assert said.empty()
    server.close()
    lost_since = time.monotonic()
    assert await asyncio.wait_for(said.get(), 60) is False
    assert time.monotonic() - lost_since >= (supervisor_watchdog.MISSED_PROBES - 1) * 0.05
    server = await asyncio.start_server(greet, "127.0.0.1", port)
    assert await asyncio.wait_for(said.get(), 60) is True
    watching.cancel()
    server.close()
