"""The supervisor: carries out what `pools` decides. One event loop, no decisions of its own.

Every process it drives has one task that follows its life and turns what happens into events
(`process_monitor`). An error that nothing here foresees ends the whole supervisor: its actor is
started again by Ray and adopts what runs.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

from tandem.cluster.supervisor import events as ev
from tandem.cluster.supervisor.autoscale import Range
from tandem.cluster.supervisor.event_log import log_event, log_instruction
from tandem.cluster.supervisor.handles import Launcher, Memory, ProcessHandle
from tandem.cluster.supervisor.load_follower import Law, LoadFollower
from tandem.cluster.supervisor.node_survey import NodeSurvey
from tandem.cluster.supervisor.nodes import Aim
from tandem.cluster.supervisor.pools import PoolState
from tandem.cluster.supervisor.process_monitor import FollowedProcess, Following
from tandem.cluster.supervisor.router_monitor import FollowedRouter
from tandem.cluster.supervisor.slots import Phase, Policy
from tandem.cluster.supervisor.worker_monitor import FollowedWorker
from tandem.core import fault_points
from tandem.core.clock_jump import ClockJump
from tandem.core.config import COLOCATED_RANGE, MAX_POOL
from tandem.core.errors import ConfigError, TandemError
from tandem.core.identity import WORKER_ROLES, Role
from tandem.rpc.v1 import common_pb2

_log = logging.getLogger(__name__)

FIND_TIMEOUT_S = 9.0
"""How long a process may take to tell its state before it is adopted; a call of the earlier supervisor may take 4 s of
it. After that it counts as one that still starts, even if it is about to stop."""


class Supervisor:
    """Owns the pools of one cluster."""

    def __init__(
        self,
        launcher: Launcher,
        *,
        wanted: dict[Role, int],
        heartbeat_s: float,
        policy: Policy,
        check_room: Callable[[dict[Role, int]], None] = lambda _added: None,
        cache_secret: bytes = b"",
        ranges: Mapping[Role, Range] | None = None,
        law: Law | None = None,
    ) -> None:
        """`wanted`, and the `ranges` of pools that follow their load by `law`, count until others are remembered.
        `check_room` raises when more workers do not fit. `cache_secret` is told to routers alone."""
        self.cluster = PoolState(policy=policy, new_incarnation=lambda: uuid.uuid4().hex[:12])
        self.opened = asyncio.Event()  # what an earlier supervisor left is adopted; before, `cluster` means nothing
        self._launcher = launcher
        self._first = ev.Intent(wanted, ranges=dict(ranges or {}))
        self._check_room = check_room
        self._cache_secret = cache_secret
        self._heartbeat_s = heartbeat_s
        # By name and incarnation: all and only those whose process has been asked for.
        self._processes: dict[tuple[str, str], FollowedWorker | FollowedRouter] = {}
        self.follower = LoadFollower(
            self.cluster, law or Law(), self._processes.values(), heartbeat_s,
            feed=self._feed, check_room=check_room, changed=self._note_change,
        )  # fmt: skip
        self._nodes = NodeSurvey(self.cluster, launcher, self._feed, heartbeat_s)
        self._tasks: asyncio.TaskGroup
        self._loop: asyncio.AbstractEventLoop
        self._timer: asyncio.TimerHandle | None = None
        self._clock_jump: ClockJump
        self._changed = asyncio.Event()  # another one for each change
        self._shown: object = None  # what it was like at the last one
        self._remembered: ev.Intent | None = None
        self._remembering = asyncio.Lock()
        self._will_remember = False  # a task of its own keeps what is intended
        self._upgrading = asyncio.Lock()
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

    @property
    def now(self) -> float:
        return self._loop.time()

    @property
    def loads(self) -> dict[str, common_pb2.WorkerStatus]:
        """The last report of each worker that lives, by worker id."""
        return {p.name: p.load for p in self._processes.values() if isinstance(p, FollowedWorker) and p.load}

    @property
    def routers(self) -> dict[str, FollowedRouter]:
        """Each router that lives, by name, with what it has told of its requests."""
        return {p.name: p for p in self._processes.values() if isinstance(p, FollowedRouter)}

    async def scale(self, wanted: dict[Role, int], most: Mapping[Role, int] | None = None) -> None:
        """Change the wanted sizes of the pools named; takes effect at once, ends later.

        Args:
            most: of pools that are to follow their load, from `wanted` on; the others get a fixed size.

        Raises:
            ConfigError: a size that cannot be.
        """
        self._check_open()
        for role, workers in wanted.items():
            option = "--routers" if role is Role.ROUTER else f"--{role}"
            least = 0 if role is Role.PREFILL and not (most or {}).get(role) else 1
            if workers < least:
                raise ConfigError(
                    f"{option} is {workers}, must be at least {least}; `tandem stop` ends all", key=str(role)
                )
            if workers > MAX_POOL:
                raise ConfigError(f"{option} is {workers}, must be at most {MAX_POOL}", key=str(role))
            if not workers <= (most or {}).get(role, workers) <= MAX_POOL:
                raise ConfigError(
                    f"{option} {workers}:{(most or {})[role]} is no range of sizes; the second must be at least the "
                    f"first, and at most {MAX_POOL}",
                    key=str(role),
                )
        self._check_colocated(wanted, most or {})
        largest = {**wanted, **(most or {})}
        added = {role: workers - self.cluster.wanted[role] for role, workers in largest.items()}
        new = {role: count - self.cluster.num_to_take_over(role, added) for role, count in added.items()}
        if more := {role: count for role, count in new.items() if count > 0}:
            await asyncio.to_thread(self._check_room, more)
        # Those that shrink first: what one pool gives up, the other may take over.
        for role, workers in sorted(wanted.items(), key=lambda size: added[size[0]]):
            self._feed(ev.WantedChanged(role, workers, (most or {}).get(role)))
        await self._remember()

    def _check_colocated(self, wanted: dict[Role, int], most: Mapping[Role, int]) -> None:
        sizes = self.cluster.sizes
        has_range = Role.DECODE in most if Role.DECODE in wanted else Role.DECODE in sizes.ranges
        if wanted.get(Role.PREFILL, sizes.wanted[Role.PREFILL]) == 0 and has_range:
            raise ConfigError(COLOCATED_RANGE, key="decode")

    async def drain(self, worker_id: str, *, replace_first: bool, timeout_s: float) -> None:
        """Replace one worker or router; takes effect at once, ends later.

        Args:
            replace_first: start the successor first, where there is room for both.
            timeout_s: seconds that its drain may take before it is killed.

        Raises:
            ConfigError: there is no such worker or router, or it is not ready.
        """
        self._check_open()
        slot = self.cluster.slots.get(worker_id)
        if slot is None:
            known = ", ".join(sorted(self.cluster.slots))
            raise ConfigError(f"there is no worker {worker_id}; there are {known}", key="worker_id")
        if slot.leaving:
            raise ConfigError(f"{worker_id} is leaving already; `tandem status` shows its progress", key="worker_id")
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

    async def upgrade(self, build: ev.Build, wheel: bytes) -> None:
        """Replace one process after the other by one of this build; takes effect at once, ends later.

        Raises:
            ConfigError: another change has not ended yet.
        """
        async with self._upgrading:
            self._check_open()
            upgrade = self.cluster.upgrade
            if not upgrade.is_done(self.cluster.slots.values()):
                text = "processes are being replaced for another upgrade; `tandem status` shows its progress"
                raise ConfigError(text)
            await asyncio.to_thread(self._launcher.keep_build, build, wheel, upgrade.wanted)
            self._feed(ev.BuildChanged(build))
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
            for process in self._processes.values():
                self._spawn(process.kill())
            self._forget_what_never_ran()
            await self._closed.wait()

    async def _let_requests_end(self, grace_s: float) -> None:
        """At every router. One that starts is awaited: it may have been adopted, and serve."""
        try:
            async with asyncio.timeout(grace_s):
                async for _ in self.changes():
                    if all(router.phase is not Phase.STARTING for router in self.cluster.routers.values()):
                        break
                await asyncio.gather(*(router.drain(grace_s) for router in self.routers.values()))
        except TimeoutError:
            _log.warning("requests were still under way after %.0f s", grace_s)

    def _forget_what_never_ran(self) -> None:
        """Ray was asked for these processes and has not even taken the order: its control store is lost."""
        for slot in list(self.cluster.slots.values()):
            if (slot.name, slot.incarnation) not in self._processes:
                self._feed(ev.Exited(slot.name, slot.incarnation, None))

    async def changes(self) -> AsyncIterator[None]:
        """Yields at once, then after each change; ends when everything has stopped."""
        while True:
            changed, is_last = self._changed, self._closed.is_set()
            yield
            if is_last:
                return
            await changed.wait()

    # --- from events to deeds ------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        async with asyncio.TaskGroup() as self._tasks:
            pulse = self._tasks.create_task(self._pulse())
            survey = self._tasks.create_task(self._nodes.run())
            following = self._tasks.create_task(self.follower.run(self.opened))
            memory = await asyncio.to_thread(self._launcher.begin_term)
            self.cluster.version = memory.term << 32
            await self._adopt(memory)
            if self.cluster.closing_s is not None:  # begun under an earlier supervisor
                self._spawn(self._shut_down(self.cluster.closing_s))
            await self._closed.wait()
            pulse.cancel()
            survey.cancel()
            following.cancel()

    def _feed(self, event: ev.Event) -> None:
        log_event(event)
        for instruction in self.cluster.handle(event, self.now):
            log_instruction(instruction)
            self._do(instruction)
        self._arm()
        if self.cluster.closed:
            self._closed.set()
        if (shown := self.cluster.shown) != self._shown or self.cluster.closed:
            self._shown = shown
            self._note_change()
        if self.opened.is_set() and self.cluster.intent != self._remembered and not self.cluster.stopping:
            self._remember_soon()

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _do(self, instruction: ev.Instruction) -> None:
        # Absent: it has ended meanwhile, or its process has not even been asked for; its own task tells.
        match instruction, self._processes.get((instruction.name, instruction.incarnation)):
            case ev.StartProcess() as start, _:
                self._spawn(self._start(start))
            case ev.DrainProcess(), FollowedWorker() as worker:
                worker.drain()
            case ev.DrainProcess(), FollowedRouter() as router:
                router.leave()
            case ev.NoteEnded() as note, FollowedWorker() as worker:
                worker.note_ended(note.ended)
            case ev.PublishMembership() as news, FollowedRouter() as router:
                router.publish(news)
            case ev.StopProcess(then=ev.NextLife() as then), FollowedWorker() as worker:
                worker.change_role(then)
            case ev.StopProcess(), FollowedProcess() as process:
                process.stop()
            case ev.KillProcess(), FollowedProcess() as process:
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

    async def _remember(self) -> None:
        """Keep what is intended for the next supervisor; the newest is kept when several calls meet."""
        async with self._remembering:
            if (intent := self.cluster.intent) != self._remembered:
                await asyncio.to_thread(self._launcher.remember, intent)
                self._remembered = intent

    def _remember_soon(self) -> None:
        """One task, however much happens until the launcher has kept it: a lost control store keeps it waiting."""
        if not self._will_remember:
            self._will_remember = True
            self._spawn(self._remember_all())

    async def _remember_all(self) -> None:
        try:
            while self.cluster.intent != self._remembered and not self.cluster.stopping:
                await self._remember()
        finally:
            self._will_remember = False

    def _check_open(self) -> None:
        if self.cluster.closing:
            raise ConfigError("the cluster is stopping; start it again with `tandem serve`")

    # --- what is followed ----------------------------------------------------------------------------------------

    async def _adopt(self, memory: Memory) -> None:
        found = await asyncio.to_thread(self._launcher.find)
        await asyncio.gather(*map(self._adopt_process, found.processes))
        for ended in found.ended:
            self._feed(ev.ProcessEnded(ended))
        self._feed(ev.ClusterOpened(memory.intent or self._first))
        await self._remember()
        self.opened.set()

    async def _adopt_process(self, handle: ProcessHandle) -> None:
        """Take over what an earlier supervisor started, unless it has died meanwhile."""
        adopted = ev.Adopted(handle.name, handle.incarnation)
        try:
            async with asyncio.timeout(FIND_TIMEOUT_S):
                state = await handle.state()
            adopted = replace(
                adopted,
                address=state.address,
                placement=state.placement,
                draining=state.draining,
                seat=handle.seat,
                url=state.url,
            )
        except TandemError as error:  # it has died, or Ray cannot tell: it must not live on beside its replacement
            _log.warning("%s cannot be adopted: %s", handle.name, error)
            await handle.kill()
            return
        except TimeoutError:
            _log.warning("%s does not answer; it counts as one that still starts", handle.name)
        self._take(handle)
        self._feed(adopted)

    async def _start(self, start: ev.StartProcess) -> None:
        aim = Aim(avoid=frozenset(self.cluster.book.suspects))
        if start.role in WORKER_ROLES:
            fault_points.reach("supervisor.start_worker")
            if (found := await self._nodes.find_place(start.name, lambda: self._is_wanted(start))) is None:
                # It was dismissed meanwhile.
                self._feed(ev.Exited(start.name, start.incarnation, None))
                return
            aim = found
            self.cluster.slots[start.name].ask(self.now, self.cluster.policy)
        beside = self.cluster.slots.staying_beside(start.name) if start.role is Role.ROUTER else []
        try:
            handle = await asyncio.to_thread(
                self._launcher.start, start.role, start.name, start.incarnation, beside, start.build, aim
            )
        except TandemError as error:
            self._feed(ev.Exited(start.name, start.incarnation, ev.Ending(error.code, error.message)))
            return
        if self._is_wanted(start):
            self._take(handle)
        else:  # dismissed while its process was asked for
            await handle.kill()
            self._feed(ev.Exited(start.name, start.incarnation, None))

    def _is_wanted(self, start: ev.StartProcess) -> bool:
        slot = self.cluster.slots.get(start.name)
        return slot is not None and slot.incarnation == start.incarnation and slot.phase is Phase.STARTING

    def _take(self, handle: ProcessHandle) -> None:
        """From here on instructions reach it, and its end is told."""
        suspects, secret = self.cluster.book.is_suspect, self._cache_secret
        following = Following(self._feed, self._note_change, suspects, self._tasks, self._heartbeat_s, secret)
        kind: type[FollowedRouter | FollowedWorker] = FollowedRouter if handle.role is Role.ROUTER else FollowedWorker
        process = kind(handle, following)
        self._processes[process.name, process.incarnation] = process
        self._spawn(self._follow(process))

    async def _follow(self, process: FollowedWorker | FollowedRouter) -> None:
        end = await process.follow()
        del self._processes[process.name, process.incarnation]
        self._feed(end)
        if (heir := process.heir) is not None:
            if self._is_wanted(ev.StartProcess(heir.name, heir.incarnation, heir.role)):
                self._take(heir)
            else:  # dismissed meanwhile
                await heir.kill()
