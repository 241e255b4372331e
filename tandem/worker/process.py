"""One incarnation of a worker as a process: threads, gRPC service, start, drain and stop, the same for both roles.

    event loop   gRPC: sessions with routers, calls between workers, timers
    runner       scheduler, page accounting, engine
    transfer     transport, handoff protocol

A worker starts as a plain process (`python -m prefill_worker`, `python -m decode_worker`) or inside a Ray actor.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from grpc import aio

from kvtransfer.transports.events import ThreadEvent
from tandem.core.addresses import join_address
from tandem.core.config import Config
from tandem.core.errors import CancelledError
from tandem.core.identity import Role
from tandem.rpc.channel import bind, make_server
from tandem.rpc.convert import ROLE_FROM_PROTO
from tandem.rpc.v1 import common_pb2 as pb
from tandem.rpc.v1 import control_pb2, control_pb2_grpc
from tandem.worker.life import WorkerLife
from tandem.worker.loop_thread import LoopThread
from tandem.worker.orphan import OrphanWatch
from tandem.worker.parts import WorkerParts, WorkerPlace, build_parts
from tandem.worker.sessions import SessionHub
from tandem.worker.step import AheadHooks, StepHooks
from tandem.worker.step_engine import StepEngine
from tandem.worker.watchdog import watch_threads

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NextLife:
    """As what a process goes on."""

    role: Role
    worker_id: str
    incarnation: str


class Worker(Protocol):
    """What a role adds to the parts; made from them, in the thread that starts the worker."""

    role: ClassVar[Role]

    hub: SessionHub[Any, Any, Any]

    def __init__(self, parts: WorkerParts) -> None: ...

    @property
    def hooks(self) -> StepHooks:
        """What the runner calls around each step."""

    @property
    def ahead(self) -> AheadHooks | None:
        """What it asks to plan a step while one is computed; `None`: none is planned."""

    def add_services(self, server: aio.Server) -> None:
        """Add the role's gRPC service."""

    def on_transfer_event(self, event: ThreadEvent) -> None:
        """An event of the transport; on the transfer thread."""

    def process_ended(self, incarnation: str) -> None:
        """The process of this incarnation, on whatever host, has provably ended; in the event loop.

        A fence for all that it might have written here, and the end of all that was sent to it. It may be unknown here.
        """

    def read_report(self) -> pb.WorkerStatus:
        """The status, with what is too long for every message; in the event loop."""

    def num_held(self) -> int:
        """How many requests the worker holds; on the runner thread."""

    def end_streams(self) -> None:
        """End what others keep open here, once what is queued has gone out; in the event loop."""

    async def close(self) -> None:
        """Close the connections to other workers; in the event loop."""


W = TypeVar("W", bound=Worker)


class WorkerProcess(Generic[W]):
    """Starts, drains and stops a worker.

    Attributes:
        worker: the role; there once the worker has started.
    """

    def __init__(
        self, make: type[W], config: Config, place: WorkerPlace, engine: StepEngine | None = None
    ) -> None:
        """`engine`: of an earlier life of this process, which has stopped; `None`: the model is loaded."""
        self.next_life: NextLife | None = None  # as what this process shall go on when this life has stopped
        self._engine = engine
        self._make = make
        self._config = config
        self.place = place
        self.life = WorkerLife(
            place.worker_id,
            config.transport.lease_s,
            begin_drain=self._begin_drain,
            num_held=lambda: self.worker.num_held(),
        )
        self.orphan = OrphanWatch(config.transport.lease_s)
        self.parts: WorkerParts
        self.worker: W
        self._server: aio.Server | None = None
        self._loop_thread = LoopThread(f"loop-{place.worker_id}")
        # Held while the worker starts or stops. Each step of the start leaves here what undoes it.
        self._starting = threading.Lock()
        self._undo = ExitStack()
        self._undo_in_loop = AsyncExitStack()

    @property
    def info(self) -> pb.WorkerInfo:
        """How others know the worker; there once it has started."""
        return self.parts.info

    # -- start

    def start(self) -> pb.WorkerInfo:
        """Load the model, start all threads and listen. Blocks until the worker can be reached; leaves nothing behind
        when it fails.

        Raises:
            TandemError: the model cannot be served, memory or transport cannot be had; `stop` was called meanwhile.
            OSError: the port is taken.
        """
        with self._starting:
            started = time.monotonic()
            try:
                self._start()
            except BaseException as error:
                self.life.stopping = True
                self.life.close(error)
                self._undo.close()
                raise
        seconds = time.monotonic() - started
        _log.info("worker ready: %s at %s after %.1f s", self.place.worker_id, self.info.address, seconds)
        return self.info

    def _start(self) -> None:
        """Undone in the opposite order: no more calls, then runner, transfer thread, tasks, and the loop last."""
        undo = self._undo
        self._check_wanted()
        loop = self._loop_thread.start()
        undo.callback(self._loop_thread.stop)
        self.life.begin(loop)
        undo.callback(lambda: self._loop_thread.run(self._undo_in_loop.aclose()).result(10))
        self.parts = parts = build_parts(
            self._make.role,
            self._config,
            self.place,
            loop,
            self.life,
            on_transfer_event=lambda event: self.worker.on_transfer_event(event),
            on_load=lambda: self.worker.hub.status_changed(),
            undo=undo,
            engine=self._engine,
        )
        self._check_wanted()
        self.worker = self._make(parts)
        self._undo_in_loop.push_async_callback(self.worker.close)
        self._undo_in_loop.push_async_callback(self.life.end_tasks)
        self._undo_in_loop.callback(parts.exits.close)  # the end of another begins tasks, and changes what is closed
        undo.callback(parts.runner.stop)
        undo.callback(lambda: self._loop_thread.run(self._stop_serving()).result(30))
        parts.info.address = self._loop_thread.run(self._serve()).result()
        self._check_wanted()
        parts.pacing.start()
        parts.runner.start(self.worker.hooks, self.worker.ahead)

    def _check_wanted(self) -> None:
        if self.life.stopping:
            raise CancelledError(f"{self.place.worker_id} was stopped while it started")

    async def _serve(self) -> str:
        parts, place = self.parts, self.place
        server = make_server()
        self.worker.add_services(server)
        control_pb2_grpc.add_WorkerControlServicer_to_server(_ControlService(self), server)
        port = bind(server, place.host, place.port)
        await server.start()
        self._server = server
        self.life.spawn(self.worker.hub.beat())
        self.life.spawn(self.orphan.watch(lambda: self.worker.hub.num_sessions))
        threads = {"runner": lambda: parts.runner.busy_since_s, "transfer": lambda: parts.transfer.busy_since_s}
        self.life.spawn(watch_threads(threads, self._config.scheduling.max_step_s))
        return join_address(place.host, port)

    # -- the end

    def wait_closed(self, timeout_s: float | None = None) -> bool:
        """As `WorkerLife.wait_closed`."""
        return self.life.wait_closed(timeout_s)

    def _begin_drain(self) -> None:
        self.worker.hub.tell_status()  # routers look for other places at once
        self.parts.runner.submit(self.life.check_drained)

    def drain(self) -> None:
        """Take no new work and return when nothing is held any more, or the worker stops; from any thread but the
        event loop's."""
        self._loop_thread.run(self.life.drain()).result()

    @property
    def kept_engine(self) -> StepEngine | None:
        """The model of this life, which has stopped, for the next one; `None`: an unfinished write may still reach its
        pages, or leave them, which nothing fences but the end of this process."""
        pages = self.parts.pool.counts()
        return None if pages.used or pages.reserved or pages.quarantined else self.parts.engine

    def stop(self) -> None:
        """End all threads and free everything; returns when that is done. A start under way gives up.

        Idempotent, from any thread but the worker's own.
        """
        self.life.stopping = True
        with self._starting:
            try:
                self._undo.close()
            finally:
                self.life.close()

    async def _stop_serving(self) -> None:
        self.worker.end_streams()
        self.life.end_drain()
        if self._server is not None:
            await self._server.stop(grace=0.5)


class _ControlService(control_pb2_grpc.WorkerControlServicer):
    def __init__(self, process: WorkerProcess[Any]) -> None:
        self._process = process

    async def Describe(self, _request: control_pb2.DescribeRequest, _: Any) -> pb.WorkerInfo:
        return self._process.info

    async def Status(self, _request: control_pb2.StatusRequest, _: Any) -> pb.WorkerStatus:
        self._process.orphan.supervised()
        report: pb.WorkerStatus = self._process.worker.read_report()
        return report

    async def Drain(self, _request: control_pb2.DrainWorkerRequest, _: Any) -> control_pb2.DrainWorkerReply:
        await self._process.life.drain()
        return control_pb2.DrainWorkerReply()

    async def Stop(self, request: control_pb2.StopWorkerRequest, _: Any) -> control_pb2.StopWorkerReply:
        then = request.then
        if role := ROLE_FROM_PROTO.get(then.role):  # else there is none, or none that this version knows
            self._process.next_life = NextLife(role, then.worker_id, then.incarnation)
        self._process.life.close()
        return control_pb2.StopWorkerReply()

    async def NoteEnded(self, request: control_pb2.NoteEndedRequest, _: Any) -> control_pb2.NoteEndedReply:
        for incarnation in request.incarnations:
            self._process.worker.process_ended(incarnation)
        return control_pb2.NoteEndedReply()
