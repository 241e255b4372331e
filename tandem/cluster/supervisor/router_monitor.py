"""One incarnation of the router, followed to its end, and what the supervisor tells it."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc

from tandem.cluster.supervisor import events as ev
from tandem.cluster.supervisor.handles import RouterHandle
from tandem.cluster.supervisor.wire import membership
from tandem.cluster.supervisor.worker_monitor import GONE_S, KILLED, ending, ends_by_proof, is_answered, prove_end
from tandem.core import points
from tandem.core.errors import TandemError
from tandem.rpc.channel import make_channel
from tandem.rpc.v1 import common_pb2, control_pb2, control_pb2_grpc

log = logging.getLogger(__name__)

RETRY_S = 0.2
"""Between two tries to push the membership to a router that lives but does not answer."""

PUSH_TIMEOUT_S = 5.0

DRAIN_S = 2.0
"""For requests whose workers stop at the same time: to end in a typed error instead of a broken connection."""


ERRORS_INTERVAL_S = 1.0
"""What requests got wrong is told on so often at most, however fast the heart beats."""


class FollowedRouter:
    """Follows one router. All calls in the supervisor's event loop.

    Attributes:
        errors: with which it has answered requests, as it told last; `None` before the first heartbeat.
    """

    def __init__(
        self,
        incarnation: str,
        handle: RouterHandle,
        *,
        feed: Callable[[ev.Event], None],
        on_errors: Callable[[], None],
        tasks: asyncio.TaskGroup,
        heartbeat_s: float,
    ) -> None:
        """`on_errors` is called when `errors` has changed."""
        self.errors: common_pb2.RequestErrors | None = None
        self._errors_at = -math.inf
        self._on_errors = on_errors
        self._incarnation, self._handle = incarnation, handle
        self._feed, self._tasks, self._heartbeat_s = feed, tasks, heartbeat_s
        self._stub: control_pb2_grpc.RouterControlAsyncStub | None = None  # while it listens
        self._newest: ev.PublishMembership | None = None  # not taken yet
        self._to_publish = asyncio.Event()
        self.num_under_way = 0  # requests, as of its last heartbeat
        self._to_stop, self._ended = asyncio.Event(), asyncio.Event()

    async def follow(self) -> ev.Event:
        """Until its end, which is returned; its process has ended or has been killed, so that its port is free."""
        try:
            return await self._follow()
        finally:
            self._ended.set()

    async def _follow(self) -> ev.Event:
        try:
            await self._handle.place()
        except TandemError as error:
            await self._handle.kill()
            return ev.RouterExited(self._incarnation, ending(error))
        proof = self._tasks.create_task(prove_end(self._handle, "the router"))
        serving = self._tasks.create_task(self._serve())
        if await ends_by_proof(serving, proof):
            serving.cancel()
            end: ev.Event = ev.RouterExited(self._incarnation, KILLED)
        else:
            end = await serving
        await self._handle.kill()
        await asyncio.wait({proof}, timeout=GONE_S)
        return end

    def publish(self, instruction: ev.PublishMembership) -> None:
        self._newest = instruction
        self._to_publish.set()

    async def drain(self, timeout_s: float) -> None:
        """Let it refuse new requests and end those under way, for at most `timeout_s`."""
        if self._stub is None:
            return
        try:
            await self._stub.DrainRouter(control_pb2.DrainRouterRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            log.warning("requests were still under way when the router was stopped: %s", error.code())

    async def stop(self, timeout_s: float) -> None:
        """In order if it can within `timeout_s`, else by a kill; `follow` tells the end."""
        self._to_stop.set()
        try:
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        except TimeoutError:
            log.warning("the router did not stop within %g s", timeout_s)
        await self._handle.kill()

    async def kill(self) -> None:
        await self._handle.kill()

    async def _serve(self) -> ev.Event:
        try:
            url, control_address = await self._handle.start()
            async with self._connected(control_address):
                self._feed(ev.RouterStarted(self._incarnation, url, control_address))
                await self._handle.wait_closed()
        except TandemError as error:
            return ev.RouterExited(self._incarnation, ending(error))
        return ev.RouterExited(self._incarnation, None)

    @asynccontextmanager
    async def _connected(self, control_address: str) -> AsyncIterator[None]:
        async with make_channel(control_address) as channel:
            self._stub = control_pb2_grpc.RouterControlStub(channel)
            works = (self._beat, self._publish_for_ever, self._stop_when_asked)
            tasks = [self._tasks.create_task(work(self._stub)) for work in works]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                self._stub = None

    async def _beat(self, stub: control_pb2_grpc.RouterControlAsyncStub) -> None:
        while True:
            try:
                status = await stub.RouterStatus(control_pb2.RouterStatusRequest(), timeout=self._heartbeat_s)
            except grpc.aio.AioRpcError as error:
                log.warning("the router does not answer: %s", error.code())
            else:
                self.num_under_way = status.num_under_way
                self._feed(ev.RouterHeard(self._incarnation))
                for writer in status.suspected_writers:
                    self._feed(ev.WriterSuspected(writer.worker_id, writer.incarnation))
                self._take_errors(status.errors)
            await asyncio.sleep(self._heartbeat_s)

    def _take_errors(self, errors: common_pb2.RequestErrors) -> None:
        """Those that come sooner than may be told are in the next heartbeat too."""
        now = asyncio.get_running_loop().time()
        if errors != self.errors and now - self._errors_at >= ERRORS_INTERVAL_S:
            self.errors, self._errors_at = errors, now
            self._on_errors()

    async def _stop_when_asked(self, stub: control_pb2_grpc.RouterControlAsyncStub) -> None:
        """One that does not stop in time is killed."""
        await self._to_stop.wait()
        stop, timeout_s = control_pb2.StopRouterRequest(drain_s=DRAIN_S), self._heartbeat_s
        await is_answered(lambda: stub.StopRouter(stop, timeout=timeout_s), "stop the router", self._handle, timeout_s)

    async def _publish_for_ever(self, stub: control_pb2_grpc.RouterControlAsyncStub) -> None:
        """Push the newest membership until the router has taken it."""
        while True:
            await self._to_publish.wait()
            self._to_publish.clear()
            if (newest := self._newest) is None:
                continue
            points.reach("supervisor.publish")
            try:
                await stub.SetMembership(membership(newest), timeout=PUSH_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                log.warning("the router did not take membership %d: %s", newest.version, error.details())
                asyncio.get_running_loop().call_later(RETRY_S, self._to_publish.set)
