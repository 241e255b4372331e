"""One incarnation of a router, followed to its end, and what the supervisor tells it."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Coroutine
from typing import Any, TypeAlias

import grpc
from grpc import aio

from tandem.cluster.supervisor import events as ev
from tandem.cluster.supervisor.handles import ProcessHandle
from tandem.cluster.supervisor.process_monitor import FollowedProcess, Following
from tandem.cluster.supervisor.wire import membership
from tandem.core import fault_points
from tandem.rpc.v1 import common_pb2, control_pb2, control_pb2_grpc

_log = logging.getLogger(__name__)

RETRY_S = 0.2
"""Between two tries to push the membership to a router that lives but does not answer."""

PUSH_TIMEOUT_S = 5.0

DRAIN_S = 2.0
"""For requests whose workers stop at the same time: to end in a typed error instead of a broken connection."""

_Stub: TypeAlias = "control_pb2_grpc.RouterControlAsyncStub"  # a name of the type stubs

ERRORS_INTERVAL_S = 1.0
"""Least time between two reports of what went wrong with requests, however often heartbeats come."""


class FollowedRouter(FollowedProcess[_Stub]):
    """Follows one router. Its process has ended or has been killed when `follow` returns, so that its port is free."""

    def __init__(self, handle: ProcessHandle, following: Following) -> None:
        super().__init__(handle, following)
        self._cache_secret = following.cache_secret
        self.load: control_pb2.RequestLoad | None = None  # what is asked for, as of its last heartbeat
        self.load_at = -math.inf  # when that came, by the event loop's clock
        self.num_under_way = 0  # requests, as of its last heartbeat
        self.certificate_expires = 0  # as it says; 0: it shows none
        self.errors: common_pb2.RequestErrors | None = None  # with which it has answered requests, as last reported
        self.errors_at = -math.inf  # when `errors` changed, by the event loop's clock
        self._newest: ev.PublishMembership | None = None  # the last one to push
        self._to_publish = asyncio.Event()
        self._to_leave = asyncio.Event()

    def leave(self) -> None:
        """Let it take no new connections, as others do; `Drained` is fed once it has none any more."""
        self._to_leave.set()

    def publish(self, instruction: ev.PublishMembership) -> None:
        self._newest = instruction
        self._to_publish.set()

    async def drain(self, timeout_s: float) -> None:
        """Let it refuse new requests and end those under way, for at most `timeout_s`. One that has been adopted is
        not connected yet: it is awaited."""
        await self._found.wait()
        if self._stub is None:
            return
        try:
            await self._stub.DrainRouter(control_pb2.DrainRouterRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            _log.warning("requests were still under way when %s was stopped: %s", self.name, error.code())

    def _make_stub(self, channel: aio.Channel) -> _Stub:
        return control_pb2_grpc.RouterControlStub(channel)

    def _works(self, stub: _Stub) -> list[Coroutine[Any, Any, None]]:
        return [*super()._works(stub), self._publish_for_ever(stub), self._leave_when_asked(stub)]

    async def _leave_when_asked(self, stub: _Stub) -> None:
        await self._to_leave.wait()
        order = control_pb2.DrainRouterRequest(others_serve=True)
        if await self._is_answered(lambda: stub.DrainRouter(order), "drain"):
            self._feed(ev.Drained(self.name, self.incarnation))

    async def _ask_status(self, stub: _Stub) -> None:
        status = await stub.RouterStatus(control_pb2.RouterStatusRequest(), timeout=self._heartbeat_s)
        self.num_under_way = status.num_under_way
        self.certificate_expires = status.certificate_expires
        self.load = status.load if status.HasField("load") else None
        self.load_at = asyncio.get_running_loop().time()
        self._feed(ev.LoadReported(self.name, self.incarnation, status.num_under_way))
        for writer in status.suspected_writers:
            self._feed(ev.WriterSuspected(writer.worker_id, writer.incarnation))
        self._take_errors(status.errors)

    def _take_errors(self, errors: common_pb2.RequestErrors) -> None:
        """What comes sooner than it may be reported is still in the next heartbeat."""
        now = asyncio.get_running_loop().time()
        if errors != self.errors and now - self.errors_at >= ERRORS_INTERVAL_S:
            self.errors, self.errors_at = errors, now
            self._note_change()

    async def _ask_to_stop(self, stub: _Stub) -> None:
        await stub.StopRouter(control_pb2.StopRouterRequest(drain_s=DRAIN_S), timeout=self._heartbeat_s)

    async def _publish_for_ever(self, stub: _Stub) -> None:
        """Push the newest membership until the router has taken it."""
        while True:
            await self._to_publish.wait()
            self._to_publish.clear()
            newest = self._newest
            assert newest is not None  # the event comes with it
            fault_points.reach("supervisor.publish")
            try:
                await stub.SetMembership(membership(newest, self._cache_secret), timeout=PUSH_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                _log.warning("%s did not take membership %d: %s", self.name, newest.version, error.details())
                asyncio.get_running_loop().call_later(RETRY_S, self._to_publish.set)
