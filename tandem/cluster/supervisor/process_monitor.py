"""One incarnation of a process, followed from its placement to the proof of its end; what happens becomes events."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import grpc
from grpc import aio

from tandem.cluster.supervisor import events as ev
from tandem.cluster.supervisor.handles import ProcessHandle
from tandem.core.errors import TandemError, WorkerLostError
from tandem.rpc.channel import make_channel

_log = logging.getLogger(__name__)

REASON_S = 0.3
"""How long Ray may take to say why a process ended that has provably ended."""

GONE_S = 5.0
"""How long the kernel may take to end a killed process before its place is filled again without proof of its end."""

KILLED = ev.Ending(WorkerLostError.code, "its process was killed or crashed")

# What may be otherwise when it is asked again: the connection broke, or the other side stands still.
_PASSING = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})

_Stub = TypeVar("_Stub")


@dataclass(frozen=True)
class Following:
    """What all that are followed share."""

    feed: Callable[[ev.Event], None]  # takes what happens
    note_change: Callable[[], None]  # what watchers of the cluster see has changed
    is_suspect: Callable[[str], bool]  # whether the node with this id does not answer
    tasks: asyncio.TaskGroup
    heartbeat_s: float
    cache_secret: bytes = field(default=b"", repr=False)  # that all routers have in common


class FollowedProcess(ABC, Generic[_Stub]):
    """Follows one life of a slot. All calls in the supervisor's event loop."""

    def __init__(self, handle: ProcessHandle, following: Following) -> None:
        self.name, self.incarnation = handle.name, handle.incarnation
        self._handle = handle
        self._feed, self._note_change = following.feed, following.note_change
        self._tasks, self._heartbeat_s = following.tasks, following.heartbeat_s
        self._is_suspect = following.is_suspect
        self._stub: _Stub | None = None  # while it listens
        self._found = asyncio.Event()  # it has listened, or has ended
        self._placement: ev.Placement | None = None  # once its process runs
        self._to_stop = asyncio.Event()
        self.heir: ProcessHandle | None = None  # the life that its process has begun in its place

    async def follow(self) -> ev.Event:
        """Until its end, which is returned; its process is gone then, or has been killed at least.

        Not so when the supervisor itself is cancelled: then it lives on for the next supervisor to adopt.
        """
        end, proof = await self._live()
        self._found.set()
        if self.heir is not None:  # the process lives on as another, who proves its end
            if proof is not None:
                proof.cancel()
            return end
        killing = self._tasks.create_task(self._handle.kill())
        if not self._is_cut_off:
            await asyncio.wait({killing, proof} if proof else {killing}, timeout=GONE_S)
        return end

    def stop(self) -> None:
        """Let it end in order; `follow` tells the end."""
        self._to_stop.set()

    async def kill(self) -> None:
        await self._handle.kill()

    @property
    def _is_cut_off(self) -> bool:
        """Its node does not answer: nothing is to be seen of its end, and its successor goes elsewhere."""
        return self._placement is not None and self._is_suspect(self._placement.node_id)

    # --- what workers and routers do in their own ways -----------------------------------------------------------

    @abstractmethod
    def _make_stub(self, channel: aio.Channel) -> _Stub: ...

    @abstractmethod
    async def _ask_status(self, stub: _Stub) -> None:
        """One heartbeat; feeds what it says."""

    @abstractmethod
    async def _ask_to_stop(self, stub: _Stub) -> None: ...

    def _works(self, stub: _Stub) -> list[Coroutine[Any, Any, None]]:
        """What is done for it as long as it listens."""
        return [self._beat(stub), self._stop_when_asked(stub)]

    async def _prove_end(self) -> bool:
        """Wait for the proof that its process has ended; `False` when there will be none."""
        try:
            await self._handle.wait_ended()
        except WorkerLostError as error:
            _log.warning(
                "no proof that %s has ended (%s): pages that it may write to stay in quarantine", self.name, error
            )
            return False
        return True

    # --- its life ------------------------------------------------------------------------------------------------

    def _exited(self, error: TandemError | None) -> ev.Event:
        return ev.Exited(self.name, self.incarnation, ev.Ending(error.code, error.message) if error else None)

    async def _live(self) -> tuple[ev.Event, asyncio.Task[bool] | None]:
        """How it ended, and the task that proves it, if there is a process."""
        try:
            state = await self._handle.state()
        except TandemError as error:
            return self._exited(error), None
        self._placement = state.placement
        self._feed(ev.Placed(self.name, self.incarnation, state.placement))
        proof = self._tasks.create_task(self._prove_end())
        serving = self._tasks.create_task(self._serve())
        if await _ends_by_proof(serving, proof):
            serving.cancel()
            return ev.Exited(self.name, self.incarnation, KILLED), proof
        return await serving, proof

    async def _serve(self) -> ev.Event:
        """How it ended, as the process itself or Ray tells it."""
        starting = self._tasks.create_task(self._watch_start())
        try:
            state = await self._handle.start()
            starting.cancel()
            async with self._connected(state.address):
                told = state.address, state.placement, state.url, state.draining
                self._feed(ev.Started(self.name, self.incarnation, *told))
                await self._handle.wait_closed()
            return await self._closed()
        except TandemError as error:
            return self._exited(error)
        finally:
            starting.cancel()

    async def _closed(self) -> ev.Event:
        """It has stopped as it was asked to. Raises the `TandemError` that says otherwise."""
        return self._exited(None)

    async def _watch_start(self) -> None:
        """One that is stopped while it starts does not answer."""
        while True:
            await asyncio.sleep(self._heartbeat_s)
            try:
                await self._handle.state()
            except TandemError:
                return  # its end, which `_serve` tells
            self._feed(ev.LoadingHeard(self.name, self.incarnation))

    @asynccontextmanager
    async def _connected(self, address: str) -> AsyncIterator[None]:
        async with make_channel(address) as channel:
            self._stub = stub = self._make_stub(channel)
            self._found.set()
            tasks = [self._tasks.create_task(work) for work in self._works(stub)]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                self._stub = None

    async def _beat(self, stub: _Stub) -> None:
        while True:
            try:
                await self._ask_status(stub)
            except grpc.aio.AioRpcError as error:
                _log.warning("%s does not answer: %s", self.name, error.code())
                self._feed(ev.HeartbeatMissed(self.name, self.incarnation))
            await asyncio.sleep(self._heartbeat_s)

    async def _stop_when_asked(self, stub: _Stub) -> None:
        """One that does not stop in time is killed."""
        await self._to_stop.wait()
        await self._is_answered(lambda: self._ask_to_stop(stub), "stop")

    async def _is_answered(self, ask: Callable[[], Awaitable[Any]], what: str) -> bool:
        """Ask for something idempotent, and again after a heartbeat where that may help; else kill the process.

        Its end and its silence are noticed elsewhere.
        """
        while True:
            try:
                await ask()
            except grpc.aio.AioRpcError as error:
                _log.warning("%s did not take the order to %s: %s", self.name, what, error.code())
                if error.code() not in _PASSING:
                    await self._handle.kill()
                    return False
                await asyncio.sleep(self._heartbeat_s)
            else:
                return True


async def _ends_by_proof(life: asyncio.Task[ev.Event], proof: asyncio.Task[bool]) -> bool:
    """Whether the proof of its end has come and `life` does not tell why: Ray may be slow, or out of order itself."""
    await asyncio.wait({life, proof}, return_when=asyncio.FIRST_COMPLETED)
    if life.done():
        return False
    if not proof.result():
        await asyncio.wait({life})
        return False
    await asyncio.wait({life}, timeout=REASON_S)
    return not life.done()
