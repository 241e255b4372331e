"""What a supervisor starts and talks to: workers and routers that exist only here, each with its gRPC service."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import grpc

from tandem.cluster.supervisor.events import Build, Intent, NextLife, Placement
from tandem.cluster.supervisor.handles import Found, Memory, ProcessState
from tandem.cluster.supervisor.nodes import Aim, Node
from tandem.cluster.supervisor.slots import Policy, place_of
from tandem.cluster.supervisor.supervisor import Supervisor
from tandem.core.errors import TandemError, WorkerLostError
from tandem.core.identity import Role
from tandem.core.machine import HostBoot
from tandem.rpc.v1 import common_pb2, control_pb2, control_pb2_grpc
from tandem.rpc.v1.control_pb2 import SuspectedWriter
from tests.support.grpc_server import serving
from tests.support.waiting import LONG_S

_P = TypeVar("_P", "ScriptedWorkerProcess", "ScriptedRouterProcess")

CACHE_SECRET = b"of the cluster"
#: Nobody counts as silent while the test's own process waits for a core.
POLICY = Policy(first_delay_s=0.05, stable_s=60, silence_s=60, router_silence_s=60, stop_s=0.3)
#: For what a silence brings about.
IMPATIENT = replace(POLICY, silence_s=0.6, router_silence_s=0.6)


@dataclass
class ScriptedProcess:
    """It lives until `ended`; its end is proved once `gone` is done, which a kill is if `provable`."""

    ended: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    gone: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    begun: asyncio.Future[None] | None = None  # no node has begun it before; `None`: one has
    provable: bool = True
    was_killed: bool = False
    ignores_stop: bool = False
    address: str = ""
    name: str = ""
    incarnation: str = ""
    url: str = ""
    started: bool = False
    draining: bool = False
    heir: ScriptedWorkerProcess | None = None  # as what it goes on where it is asked to
    node_id: str = ""
    boot: HostBoot | None = None

    @property
    def role(self) -> Role:
        return place_of(self.name)[0]

    @property
    def seat(self) -> Role:
        return self.role

    async def next_life(self, then: NextLife) -> ScriptedWorkerProcess | None:
        if self.heir is not None:
            self.heir.name, self.heir.incarnation = then.worker_id, then.incarnation
        return self.heir

    def die(self, error: TandemError | None = None) -> None:
        """Ray tells that it is dead."""
        _fail(self.ended, error or WorkerLostError("its process was killed or crashed"))
        if self.begun is not None:
            _fail(self.begun, error or WorkerLostError("its process was killed or crashed"))
        self.prove()

    def prove(self) -> None:
        if self.provable and not self.gone.done():
            self.gone.set_result(None)

    def stop(self) -> None:
        """Asked by its gRPC service."""
        if not self.ignores_stop and not self.ended.done():
            self.ended.set_result(None)

    async def state(self) -> ProcessState:
        if self.begun is not None:
            await asyncio.shield(self.begun)
        address, url = (self.address, self.url) if self.started else ("", "")
        return ProcessState(address, url, Placement("here", 1, self.node_id, self.boot), self.draining)

    async def wait_closed(self) -> None:
        await asyncio.shield(self.ended)

    async def wait_ended(self) -> None:
        await asyncio.shield(self.gone)

    async def kill(self) -> None:
        self.was_killed = True
        self.die()


@dataclass
class ScriptedWorkerProcess(ScriptedProcess):
    """It loads until `loaded`."""

    loaded: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    drained: asyncio.Event = field(default_factory=asyncio.Event)
    num_drains: int = 0
    num_stops: int = 0
    breaks_off: bool = False  # the first call of each kind
    refuses_drain: bool = False

    def die(self, error: TandemError | None = None) -> None:
        _fail(self.loaded, error or WorkerLostError("its process was killed or crashed"))
        super().die(error)

    async def start(self) -> ProcessState:
        await asyncio.shield(self.loaded)
        self.started = True
        return await self.state()


@dataclass
class ScriptedRouterProcess(ScriptedProcess):
    memberships: list[control_pb2.Membership] = field(default_factory=list)
    asked_to_drain: asyncio.Event = field(default_factory=asyncio.Event)
    asked_to_leave: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)  # its last connection has ended
    url: str = "http://127.0.0.1:8000"

    async def start(self) -> ProcessState:
        self.started = True
        return await self.state()


def _fail(future: asyncio.Future[None], error: TandemError) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # seen: nobody may wait for this one


class World:
    """Implements `Launcher`, and the gRPC services that the supervisor talks to."""

    def __init__(self) -> None:
        self.workers: list[ScriptedWorkerProcess] = []
        self.routers: list[ScriptedRouterProcess] = []
        self.started_beside: dict[str, list[str]] = {}  # by slot: who of its pool was to stay
        self.found = Found([], [])
        self.memory = Memory(1, None)
        self.remembered = Intent({})
        self.wheels: dict[Build, bytes] = {}
        self.builds: dict[str, Build] = {}  # of each process that was asked for, by name
        self.closing_remembered = threading.Event()
        self.memberships: list[control_pb2.Membership] = []
        self.told = asyncio.Event()  # a membership has come since it was cleared
        self.deaf = False  # no worker answers a heartbeat
        self.router_deaf = False
        self.suspected: list[SuspectedWriter] = []  # by the router
        self.errors = common_pb2.RequestErrors()  # with which the router has answered
        self.load = control_pb2.RequestLoad()  # that the router has counted
        self.statuses: dict[str, common_pb2.WorkerStatus] = {}  # that workers tell, by name
        self.heartbeats = asyncio.Event()  # the router has answered one since it was cleared
        self.requests_end = asyncio.Event()  # else they go on for ever
        self.requests_end.set()
        self.asked_to_drain = asyncio.Event()  # the router
        self.notes: list[tuple[str, ...]] = []
        self.num_taken = 0
        self.deaf_to_notes = False
        self.noted = asyncio.Condition()
        self.listed: list[Node] = []
        self.cut_off: set[str] = set()  # nodes that take no connection
        self.knocked: list[str] = []
        self.boots: dict[str, HostBoot] = {}  # by node id
        self.autoload = True
        self.autoplace = True  # else what is bound to no node is never placed
        self.takes_orders = threading.Event()  # else it blocks, as Ray does without its control store
        self.takes_orders.set()
        self.cannot_start: TandemError | None = None  # why no worker can even be asked for
        self.loop = asyncio.get_running_loop()
        self._servers = AsyncExitStack()

    # as a Launcher; called in threads

    def keep_build(self, build: Build, wheel: bytes, before: Build) -> None:
        self.wheels[build] = wheel

    def start(
        self, role: Role, name: str, incarnation: str, beside: Sequence[str], build: Build, aim: Aim
    ) -> ScriptedWorkerProcess | ScriptedRouterProcess:
        async def make_worker() -> ScriptedWorkerProcess:
            worker = ScriptedWorkerProcess(name=name, incarnation=incarnation, node_id=aim.node_id)
            worker.boot = self.boots.get(aim.node_id)
            await self.serve(worker)
            if self.autoload:
                worker.loaded.set_result(None)
            if not self.autoplace and not aim.node_id:
                worker.begun = asyncio.get_running_loop().create_future()
            self.workers.append(worker)
            return worker

        async def make_router() -> ScriptedRouterProcess:
            self.routers.append(await self.serve(ScriptedRouterProcess(name=name, incarnation=incarnation)))
            return self.routers[-1]

        self.started_beside[name], self.builds[name] = list(beside), build
        if role is not Role.ROUTER:
            self.takes_orders.wait()
            if self.cannot_start is not None:
                raise self.cannot_start
        make = make_router() if role is Role.ROUTER else make_worker()
        return asyncio.run_coroutine_threadsafe(make, self.loop).result()

    def nodes(self) -> Sequence[Node]:
        return self.listed

    async def knock(self, node: Node) -> bool:
        self.knocked.append(node.node_id)
        return node.node_id not in self.cut_off

    async def meet(self, node: Node) -> HostBoot:
        return self.boots[node.node_id]

    def find(self) -> Found:
        return self.found

    def begin_term(self) -> Memory:
        return self.memory

    def remember(self, intent: Intent) -> None:
        self.remembered = intent
        if intent.closing_s is not None:
            self.closing_remembered.set()

    # what tests ask

    async def serve(self, process: _P) -> _P:
        """Give a process the gRPC service by which the supervisor reaches it."""
        if isinstance(process, ScriptedRouterProcess):
            served = serving(control_pb2_grpc.add_RouterControlServicer_to_server, _Router(self, process))
        else:
            served = serving(control_pb2_grpc.add_WorkerControlServicer_to_server, _Worker(self, process))
        process.address = f"127.0.0.1:{await self._servers.enter_async_context(served)}"
        return process

    async def close(self) -> None:
        await self._servers.aclose()

    async def until_noted(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LONG_S), self.noted:
            await self.noted.wait_for(condition)

    def named(self, name: str) -> ScriptedWorkerProcess:
        return [worker for worker in self.workers if worker.name == name][-1]


class _Router(control_pb2_grpc.RouterControlServicer):
    def __init__(self, world: World, router: ScriptedRouterProcess) -> None:
        self._world, self._router = world, router

    async def SetMembership(self, request: control_pb2.Membership, context: Any) -> control_pb2.MembershipReply:
        self._world.memberships.append(request)
        self._router.memberships.append(request)
        self._world.told.set()
        return control_pb2.MembershipReply()

    async def RouterStatus(self, request: Any, context: Any) -> control_pb2.RouterStatusReply:
        if self._world.router_deaf:
            await asyncio.Event().wait()
        self._world.heartbeats.set()
        return control_pb2.RouterStatusReply(
            suspected_writers=self._world.suspected, errors=self._world.errors, load=self._world.load
        )

    async def DrainRouter(self, request: control_pb2.DrainRouterRequest, context: Any) -> control_pb2.DrainRouterReply:
        if request.others_serve:
            self._router.draining = True
            self._router.asked_to_leave.set()
            await self._router.left.wait()
            return control_pb2.DrainRouterReply()
        self._router.asked_to_drain.set()
        self._world.asked_to_drain.set()
        await self._world.requests_end.wait()
        return control_pb2.DrainRouterReply()

    async def StopRouter(self, request: Any, context: Any) -> control_pb2.StopRouterReply:
        self._router.stop()
        return control_pb2.StopRouterReply()


class _Worker(control_pb2_grpc.WorkerControlServicer):
    def __init__(self, world: World, worker: ScriptedWorkerProcess) -> None:
        self._world, self._worker = world, worker

    async def Status(self, request: Any, context: Any) -> common_pb2.WorkerStatus:
        if self._world.deaf:
            await asyncio.Event().wait()
        # At first nobody holds anything, so that who has told of it goes as one of whom nothing was heard yet.
        return self._world.statuses.get(self._worker.name) or common_pb2.WorkerStatus()

    async def Drain(self, request: Any, context: Any) -> control_pb2.DrainWorkerReply:
        worker = self._worker
        worker.draining = True
        worker.num_drains += 1
        if worker.breaks_off and worker.num_drains == 1:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")
        if worker.refuses_drain:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "of another version")
        await worker.drained.wait()
        return control_pb2.DrainWorkerReply()

    async def Stop(self, request: Any, context: Any) -> control_pb2.StopWorkerReply:
        worker = self._worker
        worker.num_stops += 1
        if worker.breaks_off and worker.num_stops == 1:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")
        worker.stop()
        return control_pb2.StopWorkerReply()

    async def NoteEnded(self, request: control_pb2.NoteEndedRequest, context: Any) -> control_pb2.NoteEndedReply:
        world = self._world
        async with world.noted:
            world.notes.append(tuple(request.incarnations))
            world.num_taken += not world.deaf_to_notes
            world.noted.notify_all()
        if world.deaf_to_notes:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        return control_pb2.NoteEndedReply()


@asynccontextmanager
async def processes() -> AsyncIterator[World]:
    """None, until a supervisor starts them."""
    world = World()
    yield world
    await world.close()


@asynccontextmanager
async def running(
    world: World,
    prefill: int = 1,
    decode: int = 1,
    routers: int = 1,
    check_room: Callable[[dict[Role, int]], None] = lambda _: None,
    policy: Policy = POLICY,
) -> AsyncIterator[tuple[Supervisor, asyncio.Task[None]]]:
    """A supervisor, and its run, which is cancelled at the end of the block: what it has started lives on."""
    wanted = {Role.PREFILL: prefill, Role.DECODE: decode, Role.ROUTER: routers}
    supervisor = Supervisor(
        world, wanted=wanted, heartbeat_s=0.1, policy=policy, check_room=check_room, cache_secret=CACHE_SECRET
    )
    run = asyncio.create_task(supervisor.run())
    await supervisor.opened.wait()
    try:
        yield supervisor, run
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)


@asynccontextmanager
async def supervising(
    world: World, prefill: int = 1, decode: int = 1, routers: int = 1, policy: Policy = POLICY
) -> AsyncIterator[Supervisor]:
    """A supervisor that shuts down at the end of the block."""
    async with running(world, prefill, decode, routers, policy=policy) as (supervisor, run):
        yield supervisor
        await supervisor.shut_down(grace_s=0.2)
        await asyncio.wait_for(run, LONG_S)


async def patient_shutdown(world: World, supervisor: Supervisor) -> asyncio.Task[None]:
    """Shut settled pools down; that waits, as requests are under way at the router."""
    world.requests_end.clear()
    await until_change(supervisor, lambda: supervisor.cluster.settled)
    asking = asyncio.create_task(supervisor.shut_down(grace_s=60))
    await asyncio.wait_for(world.asked_to_drain.wait(), LONG_S)
    return asking


async def until_change(supervisor: Supervisor, condition: Callable[[], bool]) -> None:
    """Wait for a change after which `condition` holds."""
    async with asyncio.timeout(LONG_S):
        async for _ in supervisor.changes():
            if condition():
                return
