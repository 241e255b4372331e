"""The supervisor's shell against processes that exist only here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from tandem.cluster.events import Placement, Role
from tandem.cluster.handles import Found, FoundWorker, Memory, WorkerState
from tandem.cluster.pools import Phase, Policy
from tandem.cluster.supervisor import Supervisor
from tandem.core.errors import ConfigError, ModelLoadError, TandemError, WorkerLostError
from tandem.rpc.channel import bind, make_server
from tandem.rpc.v1 import common_pb2, control_pb2, control_pb2_grpc

POLICY = Policy(first_delay_s=0.05, stable_s=60, silence_s=0.6, stop_s=0.3)


@dataclass
class FakeWorker:
    """A process: it loads until `loaded`, lives until `ended`."""

    worker_id: str
    incarnation: str
    address: str
    loaded: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    ended: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    drained: asyncio.Event = field(default_factory=asyncio.Event)
    ignores_stop: bool = False
    started: bool = False
    was_killed: bool = False

    def die(self, error: TandemError | None = None) -> None:
        for future in (self.loaded, self.ended):
            if not future.done():
                future.set_exception(error or WorkerLostError("its process was killed or crashed"))
                future.exception()  # seen: nobody may wait for this one

    async def state(self) -> WorkerState:
        return WorkerState(self.address if self.started else "", Placement("here", 1), False)

    async def start(self) -> WorkerState:
        await asyncio.shield(self.loaded)
        self.started = True
        return await self.state()

    async def wait_closed(self) -> None:
        await asyncio.shield(self.ended)

    async def drain(self) -> None:
        await self.drained.wait()

    async def stop(self) -> None:
        if not self.ignores_stop and not self.ended.done():
            self.ended.set_result(None)

    def kill(self, *, unresponsive: bool = False) -> None:
        self.was_killed = True
        self.die()


@dataclass
class FakeRouter:
    address: str
    ended: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    async def start(self) -> tuple[str, str]:
        return "http://127.0.0.1:8000", self.address

    async def wait_closed(self) -> None:
        await asyncio.shield(self.ended)

    async def stop(self) -> None:
        self.ended.set_result(None)

    def kill(self) -> None:
        if not self.ended.done():
            self.ended.set_exception(WorkerLostError("killed"))
            self.ended.exception()


class World:
    """Implements `Launcher`, and the gRPC services that the supervisor talks to."""

    def __init__(self) -> None:
        self.workers: list[FakeWorker] = []
        self.routers: list[FakeRouter] = []
        self.found = Found([], None)
        self.memory = Memory(1, None)
        self.remembered: dict[Role, int] = {}
        self.memberships: list[control_pb2.Membership] = []
        self.told = asyncio.Event()  # a membership has come since it was cleared
        self.deaf = False  # answers no heartbeat
        self.autoload = True
        self.loop = asyncio.get_running_loop()
        self.address = ""

    # as a Launcher; called in threads

    def start_worker(self, role: Role, worker_id: str, incarnation: str) -> FakeWorker:
        async def make() -> FakeWorker:
            worker = FakeWorker(worker_id, incarnation, self.address)
            if self.autoload:
                worker.loaded.set_result(None)
            self.workers.append(worker)
            return worker

        return asyncio.run_coroutine_threadsafe(make(), self.loop).result()

    def start_router(self, incarnation: str) -> FakeRouter:
        async def make() -> FakeRouter:
            self.routers.append(FakeRouter(self.address))
            return self.routers[-1]

        return asyncio.run_coroutine_threadsafe(make(), self.loop).result()

    def find(self) -> Found:
        return self.found

    def begin_term(self) -> Memory:
        return self.memory

    def remember_wanted(self, wanted: dict[Role, int]) -> None:
        self.remembered = dict(wanted)

    # what tests ask

    def named(self, worker_id: str) -> FakeWorker:
        return [worker for worker in self.workers if worker.worker_id == worker_id][-1]


class _Router(control_pb2_grpc.RouterControlServicer):
    def __init__(self, world: World) -> None:
        self._world = world

    async def SetMembership(self, request: control_pb2.Membership, context: Any) -> control_pb2.MembershipReply:
        self._world.memberships.append(request)
        self._world.told.set()
        return control_pb2.MembershipReply()

    async def DrainRouter(self, request: Any, context: Any) -> control_pb2.DrainRouterReply:
        return control_pb2.DrainRouterReply()


class _Worker(control_pb2_grpc.WorkerControlServicer):
    def __init__(self, world: World) -> None:
        self._world = world

    async def Status(self, request: Any, context: Any) -> common_pb2.WorkerStatus:
        if self._world.deaf:
            await asyncio.Event().wait()
        return common_pb2.WorkerStatus(num_running=1)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    server = make_server()
    control_pb2_grpc.add_RouterControlServicer_to_server(_Router(world), server)
    control_pb2_grpc.add_WorkerControlServicer_to_server(_Worker(world), server)
    world.address = f"127.0.0.1:{bind(server, '127.0.0.1', 0)}"
    await server.start()
    yield world
    await server.stop(0)


@asynccontextmanager
async def supervising(world: World, prefill: int = 1, decode: int = 1) -> AsyncIterator[Supervisor]:
    wanted = {Role.PREFILL: prefill, Role.DECODE: decode}
    supervisor = Supervisor(world, wanted=wanted, heartbeat_s=0.1, policy=POLICY)
    task = asyncio.create_task(supervisor.run())
    await supervisor.opened.wait()
    try:
        yield supervisor
        await supervisor.shut_down(grace_s=0.2)
        await asyncio.wait_for(task, 5)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(supervisor: Supervisor, condition: Callable[[], bool]) -> None:
    """Wait for a change after which `condition` holds."""
    async with asyncio.timeout(5):
        async for _ in supervisor.changes():
            if condition():
                return


async def test_brings_up_the_pools_and_tells_the_router(world: World) -> None:
    async with supervising(world, 1, 2) as supervisor:
        await until(supervisor, lambda: supervisor.cluster.settled)
        assert sorted(worker.worker_id for worker in world.workers) == ["decode-0", "decode-1", "prefill-0"]
        assert world.remembered == {Role.PREFILL: 1, Role.DECODE: 2}
        await asyncio.wait_for(world.told.wait(), 5)
    assert len(world.memberships[-1].members) == 3
    versions = [membership.version for membership in world.memberships]
    assert versions == sorted(versions)
    assert versions[0] > 1 << 32
    assert all(worker.ended.done() for worker in world.workers)


async def test_a_dead_worker_is_replaced(world: World) -> None:
    async with supervising(world) as supervisor:
        await until(supervisor, lambda: supervisor.cluster.settled)
        first = world.named("decode-0")
        first.die()
        await until(supervisor, lambda: len(world.workers) == 3 and supervisor.cluster.settled)
        assert world.named("decode-0").incarnation != first.incarnation


async def test_a_failed_start_is_killed_and_its_error_kept(world: World) -> None:
    world.autoload = False
    async with supervising(world) as supervisor:
        await until(supervisor, lambda: len(world.workers) == 2)
        first = world.named("decode-0")
        first.loaded.set_exception(ModelLoadError("no weights"))
        await until(supervisor, lambda: len(world.workers) == 3)
        assert first.was_killed
        error = supervisor.cluster.slots["decode-0"].last_error
        assert error is not None
        assert (error.code, error.message) == ("model_load", "no weights")


async def test_a_worker_that_answers_no_heartbeat_is_killed(world: World) -> None:
    async with supervising(world) as supervisor:
        await until(supervisor, lambda: supervisor.cluster.settled)
        world.deaf = True
        first = world.named("prefill-0")
        await until(supervisor, lambda: first.was_killed)
        world.deaf = False
        await until(supervisor, lambda: world.named("prefill-0") is not first)


async def test_a_removed_worker_goes_only_when_it_has_drained(world: World) -> None:
    async with supervising(world, 1, 2) as supervisor:
        await until(supervisor, lambda: supervisor.cluster.settled)
        await supervisor.scale({Role.DECODE: 1})
        leaving = next(slot for slot in supervisor.cluster.slots.values() if slot.leaving)
        worker = world.named(leaving.worker_id)
        await until(supervisor, lambda: leaving.phase is Phase.DRAINING)
        assert not worker.ended.done()
        worker.drained.set()
        await until(supervisor, lambda: supervisor.cluster.settled)
        assert worker.ended.done()
        assert world.remembered[Role.DECODE] == 1


async def test_a_worker_that_ignores_stop_is_killed(world: World) -> None:
    async with supervising(world, 2, 1) as supervisor:
        await until(supervisor, lambda: supervisor.cluster.settled)
        for worker in world.workers:
            worker.ignores_stop = worker.worker_id == "prefill-1"
            worker.drained.set()
        await supervisor.scale({Role.PREFILL: 1})
        await until(supervisor, lambda: supervisor.cluster.settled)
        assert world.named("prefill-1").was_killed


async def test_a_restarted_router_gets_the_membership_again(world: World) -> None:
    async with supervising(world) as supervisor:
        await until(supervisor, lambda: supervisor.cluster.settled)
        world.told.clear()
        world.routers[0].kill()
        await until(supervisor, lambda: len(world.routers) == 2 and supervisor.cluster.settled)
        await asyncio.wait_for(world.told.wait(), 5)
        assert len(world.memberships[-1].members) == 2


async def test_a_size_below_one_is_refused(world: World) -> None:
    async with supervising(world) as supervisor:
        with pytest.raises(ConfigError, match="at least 1"):
            await supervisor.scale({Role.PREFILL: 0})


async def test_what_does_not_fit_is_refused_and_changes_nothing(world: World) -> None:
    def full(added: dict[Role, int]) -> None:
        raise ConfigError(f"no room for {added[Role.DECODE]} more")

    async with supervising(world) as supervisor:
        await until(supervisor, lambda: supervisor.cluster.settled)
        supervisor._check_room = full
        with pytest.raises(ConfigError, match="no room for 8 more"):
            await supervisor.scale({Role.DECODE: 9})
        assert supervisor.cluster.wanted[Role.DECODE] == 1
        assert world.remembered[Role.DECODE] == 1


async def test_a_suspected_writer_is_killed_from_another_thread(world: World) -> None:
    async with supervising(world) as supervisor:
        await until(supervisor, lambda: supervisor.cluster.settled)
        writer = world.named("prefill-0")
        await asyncio.to_thread(supervisor.suspect, "prefill-0", writer.incarnation)
        await until(supervisor, lambda: world.named("prefill-0") is not writer)
        assert writer.was_killed


async def test_a_later_supervisor_adopts_what_lives_and_forgets_what_died(world: World) -> None:
    alive, dead = (FakeWorker(f"prefill-{n}", f"old-{n}", world.address, started=True) for n in range(2))
    alive.loaded.set_result(None)

    async def gone() -> WorkerState:
        raise WorkerLostError("gone")

    dead.state = gone  # type: ignore[method-assign]
    world.found = Found([FoundWorker(Role.PREFILL, w.worker_id, w.incarnation, w) for w in (alive, dead)], None)
    world.memory = Memory(7, {Role.PREFILL: 1, Role.DECODE: 2})
    async with supervising(world, 5, 5) as supervisor:
        await until(supervisor, lambda: supervisor.cluster.settled)
        assert sorted(worker.worker_id for worker in world.workers) == ["decode-0", "decode-1"]
        assert supervisor.cluster.slots["prefill-0"].incarnation == "old-0"
        assert supervisor.cluster.version > 7 << 32


async def test_a_supervisor_that_is_cancelled_leaves_its_workers_alone(world: World) -> None:
    wanted = {Role.PREFILL: 1, Role.DECODE: 1}
    supervisor = Supervisor(world, wanted=wanted, heartbeat_s=0.1, policy=POLICY)
    task = asyncio.create_task(supervisor.run())
    await supervisor.opened.wait()
    await until(supervisor, lambda: supervisor.cluster.settled)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not any(worker.was_killed for worker in world.workers)
