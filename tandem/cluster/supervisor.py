"""The supervisor: carries out what `tandem.cluster.pools` decides. One event loop, no decisions of its own.

Every process it drives has one task here that follows its life and turns what happens into events. An error that
nothing here foresees ends the whole supervisor: its actor is started again by Ray and adopts what runs.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import grpc

from tandem.cluster import events as ev
from tandem.cluster.handles import FoundWorker, Launcher, Memory, RouterHandle, WorkerHandle
from tandem.cluster.pools import Cluster, Phase, Policy
from tandem.cluster.wire import membership
from tandem.core.errors import ConfigError, TandemError, WorkerLostError
from tandem.rpc.channel import make_channel
from tandem.rpc.v1 import common_pb2, control_pb2, control_pb2_grpc

log = logging.getLogger(__name__)

FIND_TIMEOUT_S = 5.0
"""How long an adopted worker may take to say how it is; after that it counts as one that still starts."""

RETRY_S = 0.2
"""Between two tries to push the membership to a router that lives but does not answer."""


class Supervisor:
    """Owns the pools of one cluster.

    Attributes:
        cluster: the state; read by the gRPC service.
        loads: the last report of each worker, by worker id.
        opened: set once what an earlier supervisor left has been adopted; before that the state means nothing.
    """

    def __init__(
        self,
        launcher: Launcher,
        *,
        wanted: dict[ev.Role, int],
        heartbeat_s: float,
        policy: Policy,
        check_room: Callable[[dict[ev.Role, int]], None] = lambda _added: None,
    ) -> None:
        """`wanted` counts until something else is remembered. `check_room` raises when more workers do not fit."""
        self.cluster = Cluster(policy=policy, new_incarnation=lambda: uuid.uuid4().hex[:12])
        self.loads: dict[str, common_pb2.WorkerStatus] = {}
        self.opened = asyncio.Event()
        self._launcher = launcher
        self._first_wanted = wanted
        self._check_room = check_room
        self._heartbeat_s = heartbeat_s
        self._workers: dict[tuple[str, str], WorkerHandle] = {}
        self._router: RouterHandle | None = None
        self._tasks: asyncio.TaskGroup
        self._loop: asyncio.AbstractEventLoop
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Condition()
        self._num_changes = 0
        self._to_publish: ev.PublishMembership | None = None
        self._publish = asyncio.Event()
        self._closed = asyncio.Event()

    async def run(self) -> None:
        """Adopt what runs, bring up what is missing and supervise until a shutdown is complete."""
        self._loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as self._tasks:
            memory = await asyncio.to_thread(self._launcher.begin_term)
            self.cluster.version = memory.term << 32
            await self._adopt(memory)
            publisher = self._tasks.create_task(self._publish_for_ever())
            await self._closed.wait()
            publisher.cancel()
            if self._timer:
                self._timer.cancel()

    @property
    def now(self) -> float:
        return self._loop.time()

    async def scale(self, wanted: dict[ev.Role, int]) -> None:
        """Change the wanted sizes of the pools named; takes effect at once, ends later.

        Raises:
            ConfigError: a size that cannot be.
        """
        if self.cluster.stopping:
            raise ConfigError("the cluster is stopping; start it again with `tandem serve`")
        for role, workers in wanted.items():
            if workers < 1:
                raise ConfigError(f"--{role} is {workers}, must be at least 1; `tandem stop` ends all", key=str(role))
        added = {role: workers - self.cluster.wanted[role] for role, workers in wanted.items()}
        if any(count > 0 for count in added.values()):
            await asyncio.to_thread(self._check_room, {role: count for role, count in added.items() if count > 0})
        sizes = self.cluster.wanted | wanted
        await asyncio.to_thread(self._launcher.remember_wanted, sizes)
        for role, workers in wanted.items():
            self._feed(ev.WantedChanged(role, workers))

    def suspect(self, worker_id: str, incarnation: str) -> None:
        """This writer is silent beyond its lease, and pages wait for its end: kill it. From any thread."""
        self._loop.call_soon_threadsafe(self._feed, ev.WriterSuspected(worker_id, incarnation))

    async def shut_down(self, grace_s: float) -> None:
        """Let requests end for at most `grace_s`, then stop everything; returns when all of it has stopped."""
        router = self.cluster.router
        if grace_s > 0 and router and router.phase is Phase.READY:
            await self._drain_router(router.control_address, grace_s)
        self._feed(ev.ShutdownRequested())
        try:
            async with asyncio.timeout(self.cluster.policy.stop_s + 2):
                await self._closed.wait()
        except TimeoutError:
            log.warning("some processes did not stop in time; killing them")
            for handle in self._workers.values():
                handle.kill(unresponsive=True)
            if self._router:
                self._router.kill()
            await self._closed.wait()

    async def changes(self) -> AsyncIterator[None]:
        """Yields at once, then after each change; ends when everything has stopped."""
        seen = -1
        while not self._closed.is_set():
            async with self._changed:
                await self._changed.wait_for(lambda: self._num_changes != seen or self._closed.is_set())  # noqa: B023
                seen = self._num_changes
            yield

    # --- from events to deeds ------------------------------------------------------------------------------------

    def _feed(self, event: ev.Event) -> None:
        before = self._outline()
        if not isinstance(event, (ev.LoadReported, ev.Tick)):
            log.info("%s", event)
        for instruction in self.cluster.handle(event, self.now):
            log.info("-> %s", _brief(instruction))
            self._do(instruction)
        self._arm()
        if self.cluster.closed:
            self._closed.set()
        if self._outline() != before or self.cluster.closed:
            self._num_changes += 1
            self._spawn(self._tell_watchers())

    def _outline(self) -> object:
        """All that a watcher can see, without the loads."""
        cluster = self.cluster
        router = (cluster.router.phase, cluster.router.incarnation) if cluster.router else None
        slots = tuple((slot.member, slot.failures, slot.leaving) for slot in cluster.slots.values())
        return slots, router, tuple(cluster.wanted.items()), cluster.stopping

    def _do(self, instruction: ev.Instruction) -> None:
        match instruction:
            case ev.StartWorker(role, worker_id, incarnation):
                self._spawn(self._start_worker(role, worker_id, incarnation))
            case ev.DrainWorker(worker_id, incarnation):
                self._spawn(self._drain_worker(worker_id, incarnation))
            case ev.StopWorker(worker_id, incarnation):
                self._spawn(_quietly(self._workers[worker_id, incarnation].stop()))
            case ev.KillWorker(worker_id, incarnation):
                # Absent: killed before its process was even asked for; its task ends by itself.
                if handle := self._workers.get((worker_id, incarnation)):
                    handle.kill(unresponsive=True)
            case ev.StartRouter(incarnation):
                self._spawn(self._start_router(incarnation))
            case ev.StopRouter():
                self._spawn(self._stop_router())
            case ev.PublishMembership():
                self._to_publish = instruction
                self._publish.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.create_task(work)

    def _arm(self) -> None:
        if self._timer:
            self._timer.cancel()
        due = self.cluster.wake_at()
        self._timer = self._loop.call_at(due, lambda: self._spawn(self._tick())) if due is not None else None

    async def _tick(self) -> None:
        self._feed(ev.Tick())

    async def _tell_watchers(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    # --- workers -------------------------------------------------------------------------------------------------

    async def _adopt(self, memory: Memory) -> None:
        found = await asyncio.to_thread(self._launcher.find)
        states = await asyncio.gather(*(self._adopt_worker(worker) for worker in found.workers))
        for worker, alive in zip(found.workers, states, strict=True):
            if alive:
                self._spawn(self._follow_worker(worker.worker_id, worker.incarnation, worker.handle))
        if found.router:
            self._feed(ev.RouterAdopted(found.router[0]))
            self._spawn(self._follow_router(*found.router))
        wanted = memory.wanted or self._first_wanted
        if memory.wanted is None:
            await asyncio.to_thread(self._launcher.remember_wanted, wanted)
        self.opened.set()
        self._feed(ev.ClusterOpened(prefill=wanted[ev.Role.PREFILL], decode=wanted[ev.Role.DECODE]))

    async def _adopt_worker(self, worker: FoundWorker) -> bool:
        """Take over a worker that an earlier supervisor started; `False` when it has died meanwhile."""
        address, placement, draining = "", None, False
        try:
            async with asyncio.timeout(FIND_TIMEOUT_S):
                state = await worker.handle.state()
            address, placement, draining = state.address, state.placement, state.draining
        except WorkerLostError:
            return False
        except TimeoutError:
            log.warning("%s does not say how it is; taking it for one that starts", worker.worker_id)
        self._workers[worker.worker_id, worker.incarnation] = worker.handle
        self._feed(
            ev.WorkerAdopted(worker.role, worker.worker_id, worker.incarnation, address, placement, draining)
        )
        return True

    async def _start_worker(self, role: ev.Role, worker_id: str, incarnation: str) -> None:
        handle = await asyncio.to_thread(self._launcher.start_worker, role, worker_id, incarnation)
        slot = self.cluster.slots.get(worker_id)
        if slot is None or slot.incarnation != incarnation or slot.phase is not Phase.STARTING:
            handle.kill()  # dismissed while its process was asked for
            self._feed(ev.WorkerExited(worker_id, incarnation, None))
            return
        await self._follow_worker(worker_id, incarnation, handle)

    async def _follow_worker(self, worker_id: str, incarnation: str, handle: WorkerHandle) -> None:
        """From its placement to its end; whatever the end, its process is gone afterwards.

        Not so when the supervisor itself is cancelled: then the worker lives on for the next supervisor to adopt.
        """
        self._workers[worker_id, incarnation] = handle
        end = await self._worker_life(worker_id, incarnation, handle)
        handle.kill()
        del self._workers[worker_id, incarnation]
        self.loads.pop(worker_id, None)
        self._feed(end)

    async def _worker_life(self, worker_id: str, incarnation: str, handle: WorkerHandle) -> ev.Event:
        """Feeds what happens on the way and returns how it ended."""
        try:
            placement = (await handle.state()).placement
            self._feed(ev.WorkerPlaced(worker_id, incarnation, placement))
            try:
                state = await handle.start()
            except WorkerLostError:
                raise
            except TandemError as error:
                return ev.WorkerFailedToStart(worker_id, incarnation, _ending(error))
            self._feed(ev.WorkerStarted(worker_id, incarnation, state.address, state.placement))
            async with self._heartbeats(worker_id, incarnation, state.address):
                await handle.wait_closed()
        except TandemError as error:
            return ev.WorkerExited(worker_id, incarnation, _ending(error))
        return ev.WorkerExited(worker_id, incarnation, None)

    async def _drain_worker(self, worker_id: str, incarnation: str) -> None:
        handle = self._workers.get((worker_id, incarnation))
        if handle is None:  # it has ended meanwhile, which its own task reports
            return
        try:
            await handle.drain()
        except TandemError as error:  # it died, which its own task reports, or cannot drain: then it is killed
            log.warning("%s did not drain: %s", worker_id, error)
            handle.kill()
            return
        self._feed(ev.Drained(worker_id, incarnation))

    @asynccontextmanager
    async def _heartbeats(self, worker_id: str, incarnation: str, address: str) -> AsyncIterator[None]:
        async def beat(stub: control_pb2_grpc.WorkerControlAsyncStub) -> None:
            while True:
                try:
                    load = await stub.Status(control_pb2.StatusRequest(), timeout=self._heartbeat_s)
                except grpc.aio.AioRpcError as error:
                    log.warning("%s does not answer: %s", worker_id, error.code())
                else:
                    self.loads[worker_id] = load
                    self._feed(ev.LoadReported(worker_id, incarnation, load.num_running + load.num_queued))
                await asyncio.sleep(self._heartbeat_s)

        async with make_channel(address) as channel:
            beats = self._tasks.create_task(beat(control_pb2_grpc.WorkerControlStub(channel)))
            try:
                yield
            finally:
                beats.cancel()

    # --- the router ----------------------------------------------------------------------------------------------

    async def _start_router(self, incarnation: str) -> None:
        handle = await asyncio.to_thread(self._launcher.start_router, incarnation)
        if self.cluster.stopping:
            handle.kill()
            self._feed(ev.RouterExited(incarnation, None))
            return
        await self._follow_router(incarnation, handle)

    async def _follow_router(self, incarnation: str, handle: RouterHandle) -> None:
        self._router = handle
        try:
            url, control_address = await handle.start()
            self._feed(ev.RouterStarted(incarnation, url, control_address))
            await handle.wait_closed()
            end = ev.RouterExited(incarnation, None)
        except TandemError as error:
            end = ev.RouterExited(incarnation, _ending(error))
        handle.kill()
        self._feed(end)

    async def _stop_router(self) -> None:
        """In order if it can within the policy's time, else by a kill; `_follow_router` tells the end."""
        if self._router is None:
            return  # its process has been asked for and is not there yet: `_start_router` ends it
        try:
            async with asyncio.timeout(self.cluster.policy.stop_s):
                await self._router.stop()
        except (TandemError, TimeoutError) as error:
            log.warning("the router did not stop in order: %r", error)
        self._router.kill()

    async def _publish_for_ever(self) -> None:
        """Push the newest membership until the router has taken it or another router has come."""
        while True:
            await self._publish.wait()
            self._publish.clear()
            router, message = self.cluster.router, self._to_publish
            if router is None or router.phase is not Phase.READY or message is None:
                continue
            try:
                async with make_channel(router.control_address) as channel:
                    stub: control_pb2_grpc.RouterControlAsyncStub = control_pb2_grpc.RouterControlStub(channel)
                    await stub.SetMembership(membership(message), timeout=5.0)
            except grpc.aio.AioRpcError as error:
                log.warning("the router did not take membership %d: %s", message.version, error.details())
                self._loop.call_later(RETRY_S, self._publish.set)

    async def _drain_router(self, control_address: str, grace_s: float) -> None:
        try:
            async with make_channel(control_address) as channel:
                stub: control_pb2_grpc.RouterControlAsyncStub = control_pb2_grpc.RouterControlStub(channel)
                await stub.DrainRouter(control_pb2.DrainRouterRequest(), timeout=grace_s)
        except grpc.aio.AioRpcError as error:
            log.warning("requests were still under way when the router was stopped: %s", error.code())


async def _quietly(call: Coroutine[Any, Any, None]) -> None:
    """For a stop: a process that has ended already, or cannot stop in order, is dealt with by its own task."""
    try:
        await call
    except TandemError as error:
        log.info("stop: %s", error)


def _brief(instruction: ev.Instruction) -> str:
    if isinstance(instruction, ev.PublishMembership):
        return f"PublishMembership(version={instruction.version}, members={len(instruction.members)})"
    return str(instruction)


def _ending(error: TandemError) -> ev.Ending:
    return ev.Ending(error.code, error.message)
