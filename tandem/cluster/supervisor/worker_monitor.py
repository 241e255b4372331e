"""One incarnation of a worker, followed to the proof of its end, and what the supervisor tells it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeAlias

import grpc
from grpc import aio

from tandem.cluster.supervisor import events as ev
from tandem.cluster.supervisor.handles import ProcessHandle
from tandem.cluster.supervisor.process_monitor import FollowedProcess, Following
from tandem.rpc.convert import ROLE_TO_PROTO
from tandem.rpc.v1 import common_pb2, control_pb2, control_pb2_grpc

_log = logging.getLogger(__name__)

_Stub: TypeAlias = "control_pb2_grpc.WorkerControlAsyncStub"  # a name of the type stubs


class FollowedWorker(FollowedProcess[_Stub]):
    def __init__(self, handle: ProcessHandle, following: Following) -> None:
        super().__init__(handle, following)
        self.load: common_pb2.WorkerStatus | None = None  # its last report
        self._to_drain = asyncio.Event()
        self._ended: dict[str, None] = {}  # whose end it is to be told of, oldest first
        self._to_note = asyncio.Event()
        self._then: ev.NextLife | None = None

    def change_role(self, then: ev.NextLife) -> None:
        """As `stop`, but that its process goes on as that, if it can; `heir` is set then."""
        self._then = then
        self.stop()

    def drain(self) -> None:
        """Let it take no new work; `Drained` is fed once it holds nothing any more."""
        self._to_drain.set()

    def note_ended(self, ended: tuple[str, ...]) -> None:
        """Tell it, in one call with what else comes until that begins; the next heartbeat repeats it if need be."""
        self._ended |= dict.fromkeys(ended)
        self._to_note.set()

    async def _prove_end(self) -> bool:
        if proven := await super()._prove_end():
            self._feed(ev.ProcessEnded(self.incarnation))
        elif self._placement is not None and self._placement.boot is not None:
            self._feed(ev.EndUnproven(self.incarnation, self._placement.boot))
        return proven

    def _make_stub(self, channel: aio.Channel) -> _Stub:
        return control_pb2_grpc.WorkerControlStub(channel)

    def _works(self, stub: _Stub) -> list[Coroutine[Any, Any, None]]:
        return [*super()._works(stub), self._drain_when_asked(stub), self._note_for_ever(stub)]

    async def _ask_status(self, stub: _Stub) -> None:
        self.load = load = await stub.Status(control_pb2.StatusRequest(), timeout=self._heartbeat_s)
        self._feed(ev.LoadReported(self.name, self.incarnation, load.num_running + load.num_queued))

    async def _ask_to_stop(self, stub: _Stub) -> None:
        request = control_pb2.StopWorkerRequest()
        if (then := self._then) is not None:
            life = control_pb2.NextLife(
                role=ROLE_TO_PROTO[then.role], worker_id=then.worker_id, incarnation=then.incarnation
            )
            request.then.CopyFrom(life)
        await stub.Stop(request, timeout=self._heartbeat_s)

    async def _closed(self) -> ev.Event:
        if self._then is not None:
            self.heir = await self._handle.next_life(self._then)
        if self.heir is None:
            return await super()._closed()
        # Nothing writes in its name any more, nor into its pages: it begins the next life only if no write may be left.
        self._feed(ev.ProcessEnded(self.incarnation))
        return ev.RoleChanged(self.name, self.incarnation)

    async def _drain_when_asked(self, stub: _Stub) -> None:
        await self._to_drain.wait()
        if await self._is_answered(lambda: stub.Drain(control_pb2.DrainWorkerRequest()), "drain"):
            self._feed(ev.Drained(self.name, self.incarnation))

    async def _note_for_ever(self, stub: _Stub) -> None:
        """One call at a time: where many have ended at once, a call for each to each of many workers would keep the
        supervisor from their heartbeats."""
        while True:
            await self._to_note.wait()
            self._to_note.clear()
            if not (ended := tuple(self._ended)):  # a heartbeat has repeated what it has just taken
                continue
            try:
                await stub.NoteEnded(control_pb2.NoteEndedRequest(incarnations=ended), timeout=self._heartbeat_s)
            except grpc.aio.AioRpcError as error:
                _log.warning("%s was not told of %d ended processes: %s", self.name, len(ended), error.code())
            else:
                self._feed(ev.EndingsTaken(self.name, self.incarnation, ended))
                for life in ended:
                    del self._ended[life]
