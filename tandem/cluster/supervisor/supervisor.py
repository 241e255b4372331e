"""The supervisor: carries out what `pools` decides. One event loop, no decisions of its own.

Every process it drives has one task that follows its life and turns what happens into events
(`process_monitor`). An error that nothing here foresees ends the whole supervisor: its actor is
started again by Ray and adopts what runs.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from tandem.cluster.supervisor import events as ev
from tandem.cluster.supervisor.clock_jump import ClockJump
from tandem.cluster.supervisor.handles import FoundWorker, Launcher, Memory, ProcessHandle, RouterHandle, WorkerHandle
from tandem.cluster.supervisor.pools import PoolState
from tandem.cluster.supervisor.process_monitor import Following
from tandem.cluster.supervisor.router_monitor import FollowedRouter
from tandem.cluster.supervisor.slots import Phase, Policy
from tandem.cluster.supervisor.wire import joined_errors
from tandem.cluster.supervisor.worker_monitor import FollowedWorker
from tandem.core import fault_points
from tandem.core.config import MAX_POOL
from tandem.core.errors import ConfigError, TandemError
from tandem.core.identity import Role
from tandem.rpc.v1 import common_pb2

_log = logging.getLogger(__name__)

FIND_TIMEOUT_S = 9.0
"""How long an adopted worker may take to say how it is, 4 s of them for a call of the earlier supervisor. After that it
counts as one that still starts, also where it is about to stop."""

_UNREMARKABLE = (ev.LoadReported, ev.LoadingHeard, ev.WriterSuspected, ev.Tick)


class Supervisor:
    """Owns the pools of one cluster.

    Attributes:
        cluster: the state; read by the gRPC service.
        opened: set once what an earlier supervisor left has been adopted; before that the state means nothing.
    """

    def __init__(
        self,
        launcher: Launcher,
        *,
        wanted: dict[Role, int],
        heartbeat_s: float,
        policy: Policy,
        check_room: Callable[[dict[Role, int]], None] = lambda _added: None,
    ) -> None:
        """`wanted` counts until something else is remembered. `check_room` raises when more workers do not fit."""
        self.cluster = PoolState(policy=policy, new_incarnation=lambda: uuid.uuid4().hex[:12])
        self.opened = asyncio.Event()
        self._launcher = launcher
        self._first_wanted = wanted
        self._check_room = check_room
        self._heartbeat_s = heartbeat_s
        # By name and incarnation: all and only those whose process has been asked for.
        self._workers: dict[tuple[str, str], FollowedWorker] = {}
        self._routers: dict[tuple[str, str], FollowedRouter] = {}
        self._tasks: asyncio.TaskGroup
        self._loop: asyncio.AbstractEventLoop
        self._timer: asyncio.TimerHandle | None = None
        self._clock_jump: ClockJump
        self._changed = asyncio.Condition()
        self._num_changes = 0
        self._remembered: ev.Intent | None = None
        self._remembering = asyncio.Lock()
        self._closed = asyncio.Event()

    async def run(self) -> None:
        """Adopt what runs, bring up what is missing and supervise until a shutdown is complete."""
        self._loop = asyncio.get_running_loop()
        policy = self.cluster.policy
        tolerance_s = min(policy.silence_s, policy.router_silence_s) / 4
        self._clock_jump = ClockJump(self.now, turn_s=self._heartbeat_s, tolerance_s=tolerance_s)
        closed = self._loop.create_task(self._closed.wait())
        supervising = self._loop.create_task(self._supervise())
        try:
            await asyncio.wait({closed, supervising}, return_when=asyncio.FIRST_COMPLETED)
            if not closed.done():
                await supervising  # raises what ended it
        finally:
            if self._timer:
                self._timer.cancel()
            # Proofs that nobody waits for any more, and calls that a lost Ray does not answer.
            closed.cancel()
            supervising.cancel()
            await asyncio.gather(closed, supervising, return_exceptions=True)
            await self._tell_watchers()

    @property
    def _following(self) -> Following:
        return Following(self._feed, self._tasks, self._heartbeat_s)

    @property
    def now(self) -> float:
        return self._loop.time()

    @property
    def loads(self) -> dict[str, common_pb2.WorkerStatus]:
        """The last report of each worker that lives, by worker id."""
        return {worker_id: worker.load for (worker_id, _), worker in self._workers.items() if worker.load}

    @property
    def num_under_way(self) -> int:
        """Requests that the routers have, as of their last heartbeats."""
        return sum(router.num_under_way for router in self._routers.values())

    @property
    def request_errors(self) -> common_pb2.RequestErrors | None:
        """What the routers that live have told of their requests; the newest is of the one that told last."""
        told = sorted(self._routers.values(), key=lambda router: router.errors_at)
        return joined_errors([router.errors for router in told if router.errors is not None])

    async def scale(self, wanted: dict[Role, int]) -> None:
        """Change the wanted sizes of the pools named; takes effect at once, ends later.

        Raises:
            ConfigError: a size that cannot be.
        """
        self._check_open()
        for role, workers in wanted.items():
            if workers < 1:
                raise ConfigError(f"--{role} is {workers}, must be at least 1; `tandem stop` ends all", key=str(role))
            if workers > MAX_POOL:
                raise ConfigError(f"--{role} is {workers}, must be at most {MAX_POOL}", key=str(role))
        added = {role: workers - self.cluster.wanted[role] for role, workers in wanted.items()}
        if any(count > 0 for count in added.values()):
            await asyncio.to_thread(self._check_room, {role: count for role, count in added.items() if count > 0})
        for role, workers in wanted.items():
            self._feed(ev.WantedChanged(role, workers))
        await self._remember()

    async def drain(self, worker_id: str, *, replace_first: bool, timeout_s: float) -> None:
        """Replace one worker; takes effect at once, ends later.

        Args:
            replace_first: start the successor first, where there is room for both.
            timeout_s: seconds that its drain may take before it is killed.

        Raises:
            ConfigError: there is no such worker, or it is not ready.
        """
        self._check_open()
        slot = self.cluster.workers.get(worker_id)
        if slot is None:
            known = ", ".join(sorted(self.cluster.workers))
            raise ConfigError(f"there is no worker {worker_id}; there are {known}", key="worker_id")
        if slot.leaving:
            raise ConfigError(f"{worker_id} is leaving already; `tandem status` shows how far it is", key="worker_id")
        if slot.phase is not Phase.READY:
            raise ConfigError(
                f"{worker_id} is {slot.phase.value}: it holds nothing that could be finished", key="worker_id"
            )
        note = ""
        if replace_first:
            try:
                await asyncio.to_thread(self._check_room, {slot.role: 1})
            except ConfigError as error:
                replace_first, note = False, f"it goes before its successor starts: {error.message}"
                _log.warning("%s: %s", worker_id, note)
        self._feed(ev.DrainOrdered(worker_id, replace_first, timeout_s))
        slot.note = note
        await self._remember()

    async def shut_down(self, grace_s: float) -> None:
        """Let requests end for at most `grace_s`, then stop everything; returns when all of it has stopped.

        It goes on when the caller is cancelled, and under the next supervisor. Of several calls the shortest counts.
        """
        self._spawn(self._shut_down(grace_s))
        await self._closed.wait()

    async def _shut_down(self, grace_s: float) -> None:
        self._feed(ev.ClosingBegun(grace_s))
        if grace_s > 0:
            await self._let_requests_end(grace_s)
        if self.cluster.stopping:
            return  # a call with a shorter grace is ending the cluster already
        self._feed(ev.ShutdownRequested())
        try:
            async with asyncio.timeout(self.cluster.policy.stop_s + 2):
                await self._closed.wait()
        except TimeoutError:
            _log.warning("some processes did not stop in time; killing them")
            for followed in (self._workers, self._routers):
                for process in followed.values():
                    self._spawn(process.kill())
            self._forget_what_never_ran()
            await self._closed.wait()

    async def _let_requests_end(self, grace_s: float) -> None:
        """At every router. An adopted one is not connected yet: it is awaited."""
        try:
            async with asyncio.timeout(grace_s):
                async for _ in self.changes():
                    if all(router.phase is not Phase.STARTING for router in self.cluster.routers.values()):
                        break
                await asyncio.gather(*(router.drain(grace_s) for router in self._routers.values()))
        except TimeoutError:
            _log.warning("requests were still under way after %.0f s", grace_s)

    def _forget_what_never_ran(self) -> None:
        """Ray was asked for these processes and has not even taken the order: its control store is lost."""
        taken = self._workers.keys() | self._routers.keys()
        for slot in self.cluster.slots:
            if (slot.name, slot.incarnation) not in taken:
                self._feed(ev.Exited(slot.name, slot.incarnation, None))

    async def changes(self) -> AsyncIterator[None]:
        """Yields at once, then after each change; ends when everything has stopped."""
        seen = -1
        while not self._closed.is_set():
            async with self._changed:
                await self._changed.wait_for(lambda: self._num_changes != seen or self._closed.is_set())  # noqa: B023
                seen = self._num_changes
            yield

    # --- from events to deeds ------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        async with asyncio.TaskGroup() as self._tasks:
            pulse = self._tasks.create_task(self._pulse())
            memory = await asyncio.to_thread(self._launcher.begin_term)
            self.cluster.version = memory.term << 32
            await self._adopt(memory)
            if self.cluster.closing_s is not None:  # begun under an earlier supervisor
                self._spawn(self._shut_down(self.cluster.closing_s))
            await self._closed.wait()
            pulse.cancel()

    def _feed(self, event: ev.Event) -> None:
        before = self._outline()
        if not isinstance(event, _UNREMARKABLE):
            _log.info("%s", event)
        for instruction in self.cluster.handle(event, self.now):
            _log.info("-> %s", _brief(instruction))
            self._do(instruction)
        self._arm()
        if self.cluster.closed:
            self._closed.set()
        if self._outline() != before or self.cluster.closed:
            self._note_change()
        if self.opened.is_set() and self.cluster.intent != self._remembered and not self.cluster.stopping:
            self._spawn(self._remember())

    def _note_change(self) -> None:
        self._num_changes += 1
        self._spawn(self._tell_watchers())

    def _outline(self) -> object:
        """All that a watcher can see, without the loads and the errors of requests."""
        cluster = self.cluster
        routers = tuple((slot.phase, slot.incarnation) for slot in cluster.routers.values())
        workers = tuple((slot.member, slot.failures, slot.leaving, slot.note) for slot in cluster.workers.values())
        return workers, routers, tuple(cluster.wanted.items()), cluster.closing, cluster.stopping

    def _do(self, instruction: ev.Instruction) -> None:
        if isinstance(instruction, ev.StartProcess):
            start = self._start_router if instruction.role is Role.ROUTER else self._start_worker
            self._spawn(start(instruction))
            return
        # Absent: it has ended meanwhile, or its process has not even been asked for; its own task tells.
        match instruction:
            case ev.DrainWorker() | ev.NoteEnded():
                if worker := self._workers.get((instruction.worker_id, instruction.incarnation)):
                    self._do_to_worker(worker, instruction)
            case ev.PublishMembership():
                if router := self._routers.get((instruction.name, instruction.incarnation)):
                    router.publish(instruction)
            case ev.StopProcess() | ev.KillProcess():
                key = instruction.name, instruction.incarnation
                if process := self._workers.get(key) or self._routers.get(key):
                    self._end(process, instruction)

    def _do_to_worker(self, worker: FollowedWorker, instruction: ev.DrainWorker | ev.NoteEnded) -> None:
        match instruction:
            case ev.DrainWorker():
                worker.drain()
            case ev.NoteEnded():
                self._spawn(worker.note_ended(instruction.ended))

    def _end(self, process: FollowedWorker | FollowedRouter, instruction: ev.StopProcess | ev.KillProcess) -> None:
        match instruction:
            case ev.StopProcess():
                process.stop()
            case ev.KillProcess():
                self._spawn(process.kill())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.create_task(work)

    def _arm(self) -> None:
        if self._timer:
            self._timer.cancel()
        due = self.cluster.wake_at()
        self._timer = self._loop.call_at(due, lambda: self._spawn(self._tick())) if due is not None else None

    async def _tick(self) -> None:
        self._look_for_clock_jump()
        self._feed(ev.Tick())

    async def _pulse(self) -> None:
        """Looks often enough to tell a jump of the clock from the silence of others."""
        while True:
            await asyncio.sleep(self._heartbeat_s)
            self._look_for_clock_jump()

    def _look_for_clock_jump(self) -> None:
        if jump_s := self._clock_jump.look(self.now):
            _log.warning("the supervisor stood still for %.1f s; no process counts as silent for that time", jump_s)
            self._feed(ev.ClockJumped(jump_s))

    async def _tell_watchers(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _remember(self) -> None:
        """Keep what is intended for the next supervisor; the newest is kept when several calls meet."""
        async with self._remembering:
            if (intent := self.cluster.intent) != self._remembered:
                await asyncio.to_thread(self._launcher.remember, intent)
                self._remembered = intent

    def _check_open(self) -> None:
        if self.cluster.closing:
            raise ConfigError("the cluster is stopping; start it again with `tandem serve`")

    # --- what is followed ----------------------------------------------------------------------------------------

    async def _adopt(self, memory: Memory) -> None:
        found = await asyncio.to_thread(self._launcher.find)
        await asyncio.gather(*(self._adopt_worker(worker) for worker in found.workers))
        for ended in found.ended:
            self._feed(ev.ProcessEnded(ended))
        for router in found.routers:
            self._feed(ev.RouterAdopted(router.name, router.incarnation))
            self._spawn(self._follow_router(self._take_router(router.name, router.incarnation, router.handle)))
        self._feed(ev.ClusterOpened(memory.intent or ev.Intent(self._first_wanted)))
        await self._remember()
        self.opened.set()

    async def _adopt_worker(self, worker: FoundWorker) -> None:
        """Take over a worker that an earlier supervisor started, unless it has died meanwhile."""
        address, placement, draining = "", None, False
        try:
            async with asyncio.timeout(FIND_TIMEOUT_S):
                state = await worker.handle.state()
            address, placement, draining = state.address, state.placement, state.draining
        except TandemError as error:  # it has died, or Ray cannot tell: it must not live on beside its replacement
            _log.warning("%s cannot be adopted: %s", worker.worker_id, error)
            await worker.handle.kill()
            return
        except TimeoutError:
            _log.warning("%s does not say how it is; taking it for one that starts", worker.worker_id)
        followed = self._take_worker(worker.worker_id, worker.incarnation, worker.handle)
        self._feed(ev.WorkerAdopted(worker.role, worker.worker_id, worker.incarnation, address, placement, draining))
        self._spawn(self._follow_worker(followed))

    async def _start_worker(self, start: ev.StartProcess) -> None:
        fault_points.reach("supervisor.start_worker")
        handle = await asyncio.to_thread(self._launcher.start_worker, start.role, start.name, start.incarnation)
        if await self._is_still_wanted(start, handle):
            await self._follow_worker(self._take_worker(start.name, start.incarnation, handle))

    async def _start_router(self, start: ev.StartProcess) -> None:
        handle = await asyncio.to_thread(self._launcher.start_router, start.name, start.incarnation)
        if await self._is_still_wanted(start, handle):
            await self._follow_router(self._take_router(start.name, start.incarnation, handle))

    async def _is_still_wanted(self, start: ev.StartProcess, handle: ProcessHandle) -> bool:
        """One that was dismissed while its process was asked for is killed here."""
        slot = self.cluster.workers.get(start.name) or self.cluster.routers.get(start.name)
        if slot is not None and slot.incarnation == start.incarnation and slot.phase is Phase.STARTING:
            return True
        await handle.kill()
        self._feed(ev.Exited(start.name, start.incarnation, None))
        return False

    def _take_worker(self, name: str, incarnation: str, handle: WorkerHandle) -> FollowedWorker:
        """From here on instructions reach it."""
        worker = self._workers[name, incarnation] = FollowedWorker(name, incarnation, handle, self._following)
        return worker

    def _take_router(self, name: str, incarnation: str, handle: RouterHandle) -> FollowedRouter:
        router = self._routers[name, incarnation] = FollowedRouter(
            name, incarnation, handle, self._following, self._note_change
        )
        return router

    async def _follow_worker(self, worker: FollowedWorker) -> None:
        end = await worker.follow()
        del self._workers[worker.name, worker.incarnation]
        self._feed(end)

    async def _follow_router(self, router: FollowedRouter) -> None:
        end = await router.follow()
        del self._routers[router.name, router.incarnation]
        self._feed(end)


def _brief(instruction: ev.Instruction) -> str:
    if isinstance(instruction, ev.PublishMembership):
        version, num_members = instruction.version, len(instruction.members)
        return f"PublishMembership({instruction.name}, version={version}, members={num_members})"
    return str(instruction)
