"""Bad bytes for the supervisor's control service, on a real supervisor whose processes exist only here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from tandem.cluster.spec import ClusterSpec
from tandem.cluster.supervisor.service import SupervisorService
from tandem.cluster.supervisor.supervisor import Supervisor
from tandem.core.config import from_dict
from tandem.core.errors import ConfigError
from tandem.core.identity import Role
from tandem.rpc.channel import make_channel
from tandem.rpc.v1 import supervisor_pb2, supervisor_pb2_grpc
from tests.support.grpc_server import serving
from tests.support.scripted_processes import POLICY, World, processes, supervising, until_change
from tests.unit.rpc.wire_fuzz import FUZZ, check_answer, methods, payloads, send

METHODS = methods(supervisor_pb2.DESCRIPTOR.services_by_name["SupervisorControl"])
SCALE, DRAIN, GET, WATCH, SHUTDOWN = (
    f"/tandem.v1.SupervisorControl/{name}" for name in ("Scale", "Drain", "GetCluster", "WatchCluster", "Shutdown")
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Running:
    world: World
    supervisor: Supervisor
    channel: grpc.aio.Channel


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Running]:
    async with processes() as world, supervising(world) as supervisor, reaching(supervisor) as channel:
        supervisor._check_room = little_room
        yield Running(world, supervisor, channel)


def little_room(added: dict[Role, int]) -> None:
    if sum(added.values()) > 2:
        raise ConfigError("no room")


@asynccontextmanager
async def reaching(supervisor: Supervisor) -> AsyncIterator[grpc.aio.Channel]:
    spec = ClusterSpec(
        config=from_dict({"model": {"served_names": ["m"]}}),
        model_name="m",
        model_dir="",
        kv_bytes={},
        num_threads={},
        local=True,
        control_port=0,
        node_id="",
        ray_address="",
        log_directory="",
    )
    add = supervisor_pb2_grpc.add_SupervisorControlServicer_to_server
    async with serving(add, SupervisorService(supervisor, spec)) as port, make_channel(f"127.0.0.1:{port}") as channel:
        yield channel


@pytest.mark.long
@pytest.mark.parametrize("name", [GET, WATCH])
@FUZZ
@given(data=st.data())
async def test_no_question_breaks_it(running: Running, name: str, data: st.DataObject) -> None:
    payload = data.draw(payloads(METHODS[name].input_type))
    check_answer(METHODS[name], payload, await send(running.channel, name, METHODS[name], [payload]))


@pytest.mark.long
@FUZZ
@given(data=st.data())
async def test_no_drain_breaks_it(running: Running, data: st.DataObject) -> None:
    ids = st.sampled_from(["decode-0", "prefill-0", "decode-9", "", "\x00"])
    payload = data.draw(payloads(METHODS[DRAIN].input_type, worker_id=ids))
    check_answer(METHODS[DRAIN], payload, await send(running.channel, DRAIN, METHODS[DRAIN], [payload]))


@pytest.mark.long
@FUZZ
@given(data=st.data())
async def test_no_size_breaks_it(running: Running, data: st.DataObject) -> None:
    sizes = st.sampled_from([0, 1, 2, 3, 1 << 20, (1 << 32) - 1])
    payload = data.draw(payloads(METHODS[SCALE].input_type, prefill=sizes, decode=sizes))
    check_answer(METHODS[SCALE], payload, await send(running.channel, SCALE, METHODS[SCALE], [payload]))
    assert max(running.supervisor.cluster.wanted.values()) < 10


async def test_a_size_beyond_all_measure_is_refused_where_any_number_fits(running: Running) -> None:
    running.supervisor._check_room = lambda _added: None
    stub = supervisor_pb2_grpc.SupervisorControlStub(running.channel)
    reply = await stub.Scale(supervisor_pb2.ScaleRequest(decode=1 << 20), timeout=5)
    assert reply.error.code == "config"
    assert running.supervisor.cluster.wanted[Role.DECODE] < 10


async def test_afterwards_it_does_what_it_is_told(running: Running) -> None:
    stub = supervisor_pb2_grpc.SupervisorControlStub(running.channel)
    reply = await stub.Scale(supervisor_pb2.ScaleRequest(prefill=2, decode=1), timeout=5)
    assert not reply.HasField("error")

    def settled() -> bool:
        for worker in running.world.workers:  # whoever is asked to drain holds nothing
            worker.drained.set()
        return running.supervisor.cluster.settled

    await until_change(running.supervisor, settled)


@pytest.mark.parametrize("grace_s", [float("nan"), float("inf"), -1.0, 1e300])
async def test_a_grace_that_is_none_is_refused_and_it_stops_in_order_after(grace_s: float) -> None:
    async with processes() as world:
        supervisor = Supervisor(world, wanted=dict.fromkeys(Role, 1), heartbeat_s=0.1, policy=POLICY)
        life = asyncio.create_task(supervisor.run())
        async with reaching(supervisor) as channel:
            await supervisor.opened.wait()
            await until_change(supervisor, lambda: supervisor.cluster.settled)
            stub = supervisor_pb2_grpc.SupervisorControlStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Shutdown(supervisor_pb2.ShutdownRequest(grace_s=grace_s), timeout=10)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert not supervisor.cluster.stopping
            await stub.Shutdown(supervisor_pb2.ShutdownRequest(grace_s=0.0), timeout=10)
        await asyncio.wait_for(life, 60)
