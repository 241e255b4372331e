"""One incarnation of a worker, followed from its placement to the proof of its end; what happens becomes events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from tandem.cluster.supervisor import events as ev
from tandem.cluster.supervisor.handles import ProcessHandle, WorkerHandle
from tandem.core.errors import TandemError, WorkerLostError
from tandem.rpc.channel import make_channel
from tandem.rpc.v1 import common_pb2, control_pb2, control_pb2_grpc

log = logging.getLogger(__name__)

REASON_S = 0.3
"""How long Ray may take to say why a process ended that has provably ended."""

GONE_S = 5.0
"""How long the kernel may take to end a killed process before its place is filled again without proof of its end."""


class FollowedWorker:
    """Follows one worker. All calls in the supervisor's event loop.

    Attributes:
        load: its last report.
    """

    def __init__(
        self,
        worker_id: str,
        incarnation: str,
        handle: WorkerHandle,
        *,
        feed: Callable[[ev.Event], None],
        tasks: asyncio.TaskGroup,
        heartbeat_s: float,
    ) -> None:
        self.load: common_pb2.WorkerStatus | None = None
        self.worker_id, self.incarnation = worker_id, incarnation
        self._handle = handle
        self._feed, self._tasks, self._heartbeat_s = feed, tasks, heartbeat_s
        self._stub: control_pb2_grpc.WorkerControlAsyncStub | None = None  # while it is ready
        self._to_drain, self._to_stop = asyncio.Event(), asyncio.Event()

    async def follow(self) -> ev.Event:
        """Until its end, which is returned; its process is gone then, or has been killed at least.

        Not so when the supervisor itself is cancelled: then the worker lives on for the next supervisor to adopt.
        """
        end, proof = await self._live()
        await self._handle.kill()
        if proof is not None:
            await asyncio.wait({proof}, timeout=GONE_S)
        return end

    def drain(self) -> None:
        """Let it take no new work; `Drained` is fed once it holds nothing any more."""
        self._to_drain.set()

    def stop(self) -> None:
        """Let it end in order; `follow` tells the end."""
        self._to_stop.set()

    async def kill(self) -> None:
        await self._handle.kill()

    async def note_ended(self, ended: tuple[str, ...]) -> None:
        """One try; the next heartbeat repeats it if need be."""
        if self._stub is None:
            return
        try:
            await self._stub.NoteEnded(control_pb2.NoteEndedRequest(incarnations=ended), timeout=self._heartbeat_s)
        except grpc.aio.AioRpcError as error:
            log.warning("%s was not told of %d ended processes: %s", self.worker_id, len(ended), error.code())
        else:
            self._feed(ev.EndingsTaken(self.worker_id, self.incarnation, ended))

    async def _live(self) -> tuple[ev.Event, asyncio.Task[bool] | None]:
        """How it ended, and the task that proves it, if there is a process."""
        try:
            placement = (await self._handle.state()).placement
        except TandemError as error:
            return ev.WorkerExited(self.worker_id, self.incarnation, ending(error)), None
        self._feed(ev.WorkerPlaced(self.worker_id, self.incarnation, placement))
        proof = self._tasks.create_task(self._prove_end())
        serving = self._tasks.create_task(self._serve())
        if await ends_by_proof(serving, proof):
            serving.cancel()
            return ev.WorkerExited(self.worker_id, self.incarnation, KILLED), proof
        return await serving, proof

    async def _serve(self) -> ev.Event:
        """Feeds what happens on the way and returns how it ended, as the process itself or Ray tells it."""
        try:
            loading = self._tasks.create_task(self._watch_loading())
            try:
                state = await self._handle.start()
            except WorkerLostError:
                raise
            except TandemError as error:
                return ev.WorkerFailedToStart(self.worker_id, self.incarnation, ending(error))
            finally:
                loading.cancel()
            async with self._connected(state.address):
                self._feed(ev.WorkerStarted(self.worker_id, self.incarnation, state.address, state.placement))
                await self._handle.wait_closed()
        except TandemError as error:
            return ev.WorkerExited(self.worker_id, self.incarnation, ending(error))
        return ev.WorkerExited(self.worker_id, self.incarnation, None)

    async def _prove_end(self) -> bool:
        if proven := await prove_end(self._handle, self.worker_id):
            self._feed(ev.ProcessEnded(self.incarnation))
        return proven

    async def _watch_loading(self) -> None:
        """One that is stopped while it loads does not answer."""
        while True:
            await asyncio.sleep(self._heartbeat_s)
            try:
                await self._handle.state()
            except TandemError:
                return  # its end, which `_serve` tells
            self._feed(ev.LoadingHeard(self.worker_id, self.incarnation))

    @asynccontextmanager
    async def _connected(self, address: str) -> AsyncIterator[None]:
        async with make_channel(address) as channel:
            self._stub = control_pb2_grpc.WorkerControlStub(channel)
            works = (self._beat, self._drain_when_asked, self._stop_when_asked)
            tasks = [self._tasks.create_task(work(self._stub)) for work in works]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                self._stub = None

    async def _beat(self, stub: control_pb2_grpc.WorkerControlAsyncStub) -> None:
        while True:
            try:
                load = await stub.Status(control_pb2.StatusRequest(), timeout=self._heartbeat_s)
            except grpc.aio.AioRpcError as error:
                log.warning("%s does not answer: %s", self.worker_id, error.code())
            else:
                self.load = load
                num_requests = load.num_running + load.num_queued
                self._feed(ev.LoadReported(self.worker_id, self.incarnation, num_requests))
            await asyncio.sleep(self._heartbeat_s)

    async def _drain_when_asked(self, stub: control_pb2_grpc.WorkerControlAsyncStub) -> None:
        await self._to_drain.wait()
        drain = control_pb2.DrainWorkerRequest()
        if await is_answered(lambda: stub.Drain(drain), f"drain {self.worker_id}", self._handle, self._heartbeat_s):
            self._feed(ev.Drained(self.worker_id, self.incarnation))

    async def _stop_when_asked(self, stub: control_pb2_grpc.WorkerControlAsyncStub) -> None:
        """One that does not stop in time is killed."""
        await self._to_stop.wait()
        stop, timeout_s = control_pb2.StopWorkerRequest(), self._heartbeat_s
        await is_answered(lambda: stub.Stop(stop, timeout=timeout_s), f"stop {self.worker_id}", self._handle, timeout_s)


# What may be otherwise when it is asked again: the connection broke, or the other side stands still.
_PASSING = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})


async def is_answered(ask: Callable[[], Awaitable[Any]], what: str, handle: ProcessHandle, pause_s: float) -> bool:
    """Ask for something idempotent, again after `pause_s` seconds where that may help; else the process is killed.

    Whether it has ended or is silent is found out elsewhere.
    """
    while True:
        try:
            await ask()
        except grpc.aio.AioRpcError as error:
            log.warning("%s: %s", what, error.code())
            if error.code() not in _PASSING:
                await handle.kill()
                return False
            await asyncio.sleep(pause_s)
        else:
            return True


KILLED = ev.Ending(WorkerLostError.code, "its process was killed or crashed")


async def prove_end(handle: ProcessHandle, name: str) -> bool:
    """Wait for the proof that a process has ended; `False` when there will be none."""
    try:
        await handle.wait_ended()
    except WorkerLostError as error:
        log.warning("no proof that %s has ended (%s): pages that it may write to stay in quarantine", name, error)
        return False
    return True


async def ends_by_proof(life: asyncio.Task[ev.Event], proof: asyncio.Task[bool]) -> bool:
    """Whether the proof of its end has come and `life` does not tell why: Ray may be slow, or out of order itself."""
    await asyncio.wait({life, proof}, return_when=asyncio.FIRST_COMPLETED)
    if life.done():
        return False
    if not proof.result():
        await asyncio.wait({life})
        return False
    await asyncio.wait({life}, timeout=REASON_S)
    return not life.done()


def ending(error: TandemError) -> ev.Ending:
    return ev.Ending(error.code, error.message)
