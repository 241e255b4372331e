"""The supervisor: carries out what `pools` decides. One event loop, no decisions of its own.

Every process it drives has one task that follows its life and turns what happens into events
(`worker_monitor`, `router_monitor`). An error that nothing here foresees ends the whole supervisor: its actor is
started again by Ray and adopts what runs.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from tandem.cluster.supervisor import events as ev
from tandem.cluster.supervisor.clock_jump import Standstill
from tandem.cluster.supervisor.handles import FoundWorker, Launcher, Memory, RouterHandle, WorkerHandle
from tandem.cluster.supervisor.pools import Cluster
from tandem.cluster.supervisor.router_monitor import FollowedRouter
from tandem.cluster.supervisor.slots import Phase, Policy
from tandem.cluster.supervisor.worker_monitor import FollowedWorker
from tandem.core import points
from tandem.core.config import MAX_POOL
from tandem.core.errors import ConfigError, TandemError
from tandem.core.identity import Role
from tandem.rpc.v1 import common_pb2

log = logging.getLogger(__name__)

FIND_TIMEOUT_S = 9.0
"""How long an adopted worker may take to say how it is, 4 s of them for a call of the earlier supervisor. After that it
counts as one that still starts, also where it is about to stop."""

_UNREMARKABLE = (ev.LoadReported, ev.LoadingHeard, ev.RouterHeard, ev.WriterSuspected, ev.Tick)


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
        self.cluster = Cluster(policy=policy, new_incarnation=lambda: uuid.uuid4().hex[:12])
        self.opened = asyncio.Event()
        self._launcher = launcher
        self._first_wanted = wanted
        self._check_room = check_room
        self._heartbeat_s = heartbeat_s
        self._workers: dict[tuple[str, str], FollowedWorker] = {}
        self._router: FollowedRouter | None = None
        self._tasks: asyncio.TaskGroup
        self._loop: asyncio.AbstractEventLoop
        self._timer: asyncio.TimerHandle | None = None
        self._standstill: Standstill
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
        self._standstill = Standstill(self.now, turn_s=self._heartbeat_s, tolerance_s=tolerance_s)
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
    def now(self) -> float:
        return self._loop.time()

    @property
    def loads(self) -> dict[str, common_pb2.WorkerStatus]:
        """The last report of each worker that lives, by worker id."""
        return {worker_id: worker.load for (worker_id, _), worker in self._workers.items() if worker.load}

    @property
    def num_under_way(self) -> int:
        """Requests that the router has, as of its last heartbeat."""
        return self._router.num_under_way if self._router else 0

    @property
    def request_errors(self) -> common_pb2.RequestErrors | None:
        """What the router that lives has told of its requests."""
        return self._router.errors if self._router else None

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
        slot = self.cluster.slots.get(worker_id)
        if slot is None:
            known = ", ".join(sorted(self.cluster.slots))
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
                log.warning("%s: %s", worker_id, note)
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
            return  # another call had less patience, and sees to the end
        self._feed(ev.ShutdownRequested())
        try:
            async with asyncio.timeout(self.cluster.policy.stop_s + 2):
                await self._closed.wait()
        except TimeoutError:
            log.warning("some processes did not stop in time; killing them")
            for worker in self._workers.values():
                self._spawn(worker.kill())
            if self._router:
                self._spawn(self._router.kill())
            self._forget_what_never_ran()
            await self._closed.wait()

    async def _let_requests_end(self, grace_s: float) -> None:
        """An adopted router is not connected yet: it is awaited."""
        try:
            async with asyncio.timeout(grace_s):
                async for _ in self.changes():
                    router = self.cluster.router
                    if router is None or router.phase is not Phase.STARTING:
                        break
                if self._router:
                    await self._router.drain(grace_s)
        except TimeoutError:
            log.warning("requests were still under way after %.0f s", grace_s)

    def _forget_what_never_ran(self) -> None:
        """Ray was asked for these processes and has not even taken the order: its control store is lost."""
        for slot in list(self.cluster.slots.values()):
            if (slot.worker_id, slot.incarnation) not in self._workers:
                self._feed(ev.WorkerExited(slot.worker_id, slot.incarnation, None))
        if self.cluster.router and self._router is None:
            self._feed(ev.RouterExited(self.cluster.router.incarnation, None))

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
            log.info("%s", event)
        for instruction in self.cluster.handle(event, self.now):
            log.info("-> %s", _brief(instruction))
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
        router = (cluster.router.phase, cluster.router.incarnation) if cluster.router else None
        slots = tuple((slot.member, slot.failures, slot.leaving, slot.note) for slot in cluster.slots.values())
        return slots, router, tuple(cluster.wanted.items()), cluster.closing, cluster.stopping

    def _do(self, instruction: ev.Instruction) -> None:
        match instruction:
            case ev.StartWorker(role, worker_id, incarnation):
                self._spawn(self._start_worker(role, worker_id, incarnation))
            case ev.StartRouter(incarnation):
                self._spawn(self._start_router(incarnation))
            case ev.PublishMembership() | ev.StopRouter() | ev.KillRouter():
                self._do_to_router(instruction)
            case _:
                # Absent: it has ended meanwhile, or its process has not even been asked for; its own task tells.
                if worker := self._workers.get((instruction.worker_id, instruction.incarnation)):
                    self._do_to_worker(worker, instruction)

    def _do_to_worker(
        self, worker: FollowedWorker, instruction: ev.DrainWorker | ev.StopWorker | ev.KillWorker | ev.NoteEnded
    ) -> None:
        match instruction:
            case ev.DrainWorker():
                worker.drain()
            case ev.StopWorker():
                worker.stop()
            case ev.KillWorker():
                self._spawn(worker.kill())
            case ev.NoteEnded():
                self._spawn(worker.note_ended(instruction.ended))

    def _do_to_router(self, instruction: ev.PublishMembership | ev.StopRouter | ev.KillRouter) -> None:
        if self._router is None:
            return  # its process has been asked for and is not there yet: `_start_router` ends it
        match instruction:
            case ev.PublishMembership():
                self._router.publish(instruction)
            case ev.StopRouter():
                self._spawn(self._router.stop(self.cluster.policy.stop_s))
            case ev.KillRouter():
                self._spawn(self._router.kill())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.create_task(work)

    def _arm(self) -> None:
        if self._timer:
            self._timer.cancel()
        due = self.cluster.wake_at()
        self._timer = self._loop.call_at(due, lambda: self._spawn(self._tick())) if due is not None else None

    async def _tick(self) -> None:
        self._look_for_standstill()
        self._feed(ev.Tick())

    async def _pulse(self) -> None:
        """Looks often enough that a standstill is told from the silence of others."""
        while True:
            await asyncio.sleep(self._heartbeat_s)
            self._look_for_standstill()

    def _look_for_standstill(self) -> None:
        if stood_s := self._standstill.look(self.now):
            log.warning("nothing ran here for %.1f s; nobody is blamed for it", stood_s)
            self._feed(ev.StoodStill(stood_s))

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
        if found.router:
            self._feed(ev.RouterAdopted(found.router[0]))
            self._spawn(self._follow_router(*found.router))
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
            log.warning("%s cannot be adopted: %s", worker.worker_id, error)
            await worker.handle.kill()
            return
        except TimeoutError:
            log.warning("%s does not say how it is; taking it for one that starts", worker.worker_id)
        followed = self._take(worker.worker_id, worker.incarnation, worker.handle)
        self._feed(ev.WorkerAdopted(worker.role, worker.worker_id, worker.incarnation, address, placement, draining))
        self._spawn(self._follow_worker(followed))

    async def _start_worker(self, role: Role, worker_id: str, incarnation: str) -> None:
        points.reach("supervisor.start_worker")
        handle = await asyncio.to_thread(self._launcher.start_worker, role, worker_id, incarnation)
        slot = self.cluster.slots.get(worker_id)
        if slot is None or slot.incarnation != incarnation or slot.phase is not Phase.STARTING:
            await handle.kill()  # dismissed while its process was asked for
            self._feed(ev.WorkerExited(worker_id, incarnation, None))
            return
        await self._follow_worker(self._take(worker_id, incarnation, handle))

    def _take(self, worker_id: str, incarnation: str, handle: WorkerHandle) -> FollowedWorker:
        """From here on instructions reach it."""
        worker = FollowedWorker(
            worker_id, incarnation, handle, feed=self._feed, tasks=self._tasks, heartbeat_s=self._heartbeat_s
        )
        self._workers[worker_id, incarnation] = worker
        return worker

    async def _follow_worker(self, worker: FollowedWorker) -> None:
        end = await worker.follow()
        del self._workers[worker.worker_id, worker.incarnation]
        self._feed(end)

    async def _start_router(self, incarnation: str) -> None:
        handle = await asyncio.to_thread(self._launcher.start_router, incarnation)
        if self.cluster.stopping:
            await handle.kill()
            self._feed(ev.RouterExited(incarnation, None))
            return
        await self._follow_router(incarnation, handle)

    async def _follow_router(self, incarnation: str, handle: RouterHandle) -> None:
        self._router = router = FollowedRouter(
            incarnation,
            handle,
            feed=self._feed,
            on_errors=self._note_change,
            tasks=self._tasks,
            heartbeat_s=self._heartbeat_s,
        )
        end = await router.follow()
        self._router = None
        self._feed(end)


def _brief(instruction: ev.Instruction) -> str:
    if isinstance(instruction, ev.PublishMembership):
        return f"PublishMembership(version={instruction.version}, members={len(instruction.members)})"
    return str(instruction)
