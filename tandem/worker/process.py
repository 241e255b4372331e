"""What the two kinds of worker share as a process: engine, threads, gRPC service, start, drain and stop.

    event loop   gRPC: sessions with routers, calls between workers, timers
    runner       scheduler, page accounting, engine
    transfer     transport, handoff protocol

A worker starts as a plain process (`python -m prefill_worker`, `python -m decode_worker`) or inside a Ray actor.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from concurrent import futures
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from grpc import aio

from kvtransfer.extents import ArenaShape
from kvtransfer.layout import LayoutId
from kvtransfer.transfer_thread import TransferThread
from kvtransfer.transports.base import Transport
from kvtransfer.transports.events import ThreadEvent
from kvtransfer.transports.own_stream import use_own_stream
from kvtransfer.transports.registry import create_transport
from kvtransfer.wire import layout_to_proto
from tandem.core.config import Config
from tandem.core.errors import CancelledError, InternalError
from tandem.core.pages import PagePool
from tandem.core.pidfd import ExitWatch, host_id
from tandem.core.version import version
from tandem.engine.arena import KVArena
from tandem.engine.engine import Engine
from tandem.rpc.channel import bind, make_server
from tandem.rpc.convert import page_counts_to_proto
from tandem.rpc.v1 import common_pb2 as pb
from tandem.rpc.v1 import control_pb2, control_pb2_grpc
from tandem.worker.counters import WorkerCounters
from tandem.worker.cpu.core_shares import CoreShares
from tandem.worker.cpu.pacing import DecodePacing, PrefillPacing
from tandem.worker.cpu.pages_ahead import PagesAhead
from tandem.worker.cpu.transfer_cores import transfer_cores
from tandem.worker.limits import Site, mixed_step_tokens, scheduler_limits
from tandem.worker.load import LoadReport
from tandem.worker.loop_thread import LoopThread
from tandem.worker.pacing import Pacing
from tandem.worker.runner import Runner
from tandem.worker.scheduler import BatchScheduler
from tandem.worker.sessions import SessionHub
from tandem.worker.step import StepHooks
from tandem.worker.watchdog import Watchdog

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

# How long a worker that has too much in quarantine goes on with what it holds, in leases: time for routers to hear of
# the drain and to move their requests elsewhere.
_LAST_WORK_LEASES = 3

ROLES = {"prefill": pb.ROLE_PREFILL, "decode": pb.ROLE_DECODE}


class WorkerProcess(ABC):
    """One incarnation of a worker.

    Args:
        worker_id: stable name in the cluster, e.g. `prefill-0`.
        incarnation: new at each start; also the transport's agent name.
        kv_bytes: memory of the KV arena, in bytes.
        num_threads: CPU threads of the engine.
        host: address to listen on, and to tell to others.
        port: TCP port of the gRPC service; 0 takes a free one.
        core_shares: a file in which the workers of this node share their CPU threads; none: each has its own only.
    """

    role: str

    def __init__(
        self,
        config: Config,
        *,
        worker_id: str,
        incarnation: str,
        model_dir: Path,
        kv_bytes: int,
        num_threads: int,
        host: str = "127.0.0.1",
        port: int = 0,
        device: str = "cpu",
        core_shares: Path | None = None,
    ) -> None:
        self.config = config
        self.worker_id = worker_id
        self.incarnation = incarnation
        self._model_dir = model_dir
        self._kv_bytes = kv_bytes
        self._num_threads = num_threads
        self._host = host
        self._port = port
        self._device = device
        self._core_shares = core_shares
        self.engine: Engine
        self.pool: PagePool
        self.pacing = Pacing()
        self.counters = WorkerCounters()
        self.load: LoadReport
        self.scheduler: BatchScheduler
        self.runner: Runner
        self.transfer: TransferThread
        self.layout: LayoutId
        self.arena_shape: ArenaShape
        self.info: pb.WorkerInfo
        self.loop: asyncio.AbstractEventLoop
        self.exits: ExitWatch
        self.hub: SessionHub[Any, Any, Any]
        self.draining = False
        self._drained = asyncio.Event()
        self._role: StepHooks | None = None
        self._server: aio.Server | None = None
        self._loop_thread = LoopThread(f"loop-{worker_id}")
        self._background: set[asyncio.Task[Any]] = set()
        # Done when the worker is stopped, is to be stopped or has failed; guarded by `_closing`.
        self._closed: Future[None] = Future()
        self._closing = threading.Lock()
        # Held while the worker starts or stops. Each step of the start leaves here what undoes it.
        self._life = threading.Lock()
        self._undo = ExitStack()
        self._stopping = False

    # -- what each role adds

    @abstractmethod
    def make_role(self) -> StepHooks:
        """Build the role's own parts and `hub`; engine, pool, scheduler, runner, transfer and loop are there."""

    @abstractmethod
    def add_services(self, server: aio.Server) -> None:
        """Add the role's gRPC service."""

    @abstractmethod
    def on_transfer_event(self, event: ThreadEvent) -> None:
        """An event of the transport; on the transfer thread."""

    @abstractmethod
    async def close_channels(self) -> None:
        """Close the connections to other workers; in the event loop."""

    @abstractmethod
    def process_ended(self, incarnation: str) -> None:
        """The process of this incarnation, on whatever host, has provably ended; in the event loop.

        A fence for all that it might have written here, and the end of all that was sent to it. Often unknown here.
        """

    @abstractmethod
    def num_held(self) -> int:
        """How many requests the worker holds; on the runner thread."""

    def end_streams(self) -> None:
        """End what others keep open here, once what is queued has gone out; in the event loop."""
        self.hub.close()

    # -- life

    def start(self) -> pb.WorkerInfo:
        """Load the model, start all threads and listen. Blocks until the worker can be reached; leaves nothing behind
        when it fails.

        Raises:
            TandemError: the model cannot be served, memory or transport cannot be had; `stop` was called meanwhile.
            OSError: the port is taken.
        """
        with self._life:
            started = time.monotonic()
            try:
                self._start()
            except BaseException as error:
                self._stopping = True
                self._close(error)
                self._undo.close()
                raise
        _log.info("worker ready: %s at %s after %.1f s", self.worker_id, self.info.address, time.monotonic() - started)
        return self.info

    def _start(self) -> None:
        """Undone in the opposite order: no more calls, then runner, transfer thread, tasks, and the loop last."""
        undo = self._undo
        self._check_wanted()
        self.loop = self._loop_thread.start()
        undo.callback(self._loop_thread.stop)
        self.exits = ExitWatch(self.loop)
        undo.callback(lambda: self._run_in_loop(self._end_tasks()).result(10))
        self._load()
        undo.callback(self.transfer.stop)
        self._check_wanted()
        self.transfer.start()
        transport_metadata = self._on_transfer(lambda transport: self._register(transport)).result()
        self.info = self._describe(transport_metadata)
        self._role = role = self.make_role()
        undo.callback(self.runner.stop)
        undo.callback(lambda: self._run_in_loop(self._stop_serving()).result(30))
        self.info.address = self._run_in_loop(self._serve()).result()
        self._check_wanted()
        self.pacing.start()
        self.runner.start(role)

    def _check_wanted(self) -> None:
        if self._stopping:
            raise CancelledError(f"{self.worker_id} was stopped while it started")

    def _load(self) -> None:
        config = self.config
        self.engine = Engine.load(
            self._model_dir,
            dtype=config.model.dtype,
            page_size=config.cache.page_size,
            kv_bytes=self._kv_bytes,
            num_threads=self._num_threads,
            device=self._device,
            max_context=config.cache.max_context or None,
        )
        self.engine.warmup(config.scheduling.max_num_seqs if self.role == "decode" else 0)
        arena = self.engine.arena
        self.pool = PagePool(self.engine.num_pages, config.cache.page_size)
        site = Site(self.role, arena.device.type == "cpu", self._cores_file is not None)
        limits = scheduler_limits(config, site)
        salt = self.engine.weights_sha256.encode()
        self.scheduler = BatchScheduler(self.pool, limits, salt=salt, prefix_cache=config.cache.prefix_cache)
        self.load = LoadReport(self.scheduler, lambda: self.hub.status_changed(), self.check_drained)
        if site.on_cpu:
            self.pacing = self._make_cpu_pacing(arena)
            self._undo.callback(self.pacing.close)
        self.runner = Runner(
            self.engine,
            self.scheduler,
            name=f"runner-{self.worker_id}",
            on_fatal=self.fail,
            pacing=self.pacing,
        )
        layout = arena.layout
        self.layout = LayoutId(
            weights_sha256=self.engine.weights_sha256,
            dtype=layout.dtype,
            num_layers=layout.num_layers,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            page_size=layout.page_size,
        )
        self.arena_shape = ArenaShape(layout.num_layers, arena.num_pages, layout.extent_bytes)
        transport = create_transport(config.transport.name, self.incarnation, host=self._host)
        self.transfer = TransferThread(
            transport,
            self.on_transfer_event,
            self.fail,
            name=f"kv-{self.worker_id}",
            cores=transfer_cores(self.role, os.sched_getaffinity(0)) if site.on_cpu else None,
        )

    def _make_cpu_pacing(self, arena: KVArena) -> Pacing:
        shares = CoreShares(self._cores_file, self._num_threads) if self._cores_file is not None else None
        pages_ahead = PagesAhead(arena, f"pages-{self.worker_id}")
        if self.role == "prefill":
            return PrefillPacing(shares, pages_ahead)
        return DecodePacing(shares, pages_ahead, self.config.scheduling.handoff_wait)

    def _register(self, transport: Transport) -> bytes:
        arena = self.engine.arena
        use_own_stream(arena.device)  # whoever sends pages has been told that they are written
        transport.register(arena.base_address, arena.num_bytes, owner=arena.tensor, device=self._device)
        return transport.metadata()

    def _describe(self, transport_metadata: bytes) -> pb.WorkerInfo:
        site = Site(self.role, self.engine.arena.device.type == "cpu")
        return pb.WorkerInfo(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            role=ROLES[self.role],
            node=socket.gethostname(),
            pid=os.getpid(),
            layout=layout_to_proto(self.layout),
            transport=self.config.transport.name,
            transport_metadata=transport_metadata,
            num_pages=self.pool.num_pages,
            max_context=self.engine.max_context,
            vocab_size=self.engine.vocab_size,
            eos_token_ids=self.engine.eos_token_ids,
            version=version(),
            host_id=host_id(),
            mixed_step_tokens=mixed_step_tokens(self.config, site),
        )

    def _run_in_loop(self, coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
        return self._loop_thread.run(coroutine)

    async def _serve(self) -> str:
        server = make_server()
        self.add_services(server)
        control_pb2_grpc.add_WorkerControlServicer_to_server(_ControlService(self), server)
        port = bind(server, self._host, self._port)
        await server.start()
        self._server = server
        self.spawn(self.hub.beat())
        threads = {"runner": lambda: self.runner.busy_since_s, "transfer": lambda: self.transfer.busy_since_s}
        self.spawn(Watchdog(threads, self.config.scheduling.max_step_s).watch())
        return f"{self._host}:{port}"

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run in the background of the event loop; its failure is the worker's. Call in the event loop."""
        task = self.loop.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background_ended)

    def _background_ended(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def _on_transfer(self, command: Callable[[Transport], _T]) -> Future[_T]:
        """Run on the transfer thread; a failure is the worker's as well as the future's."""
        future = self.transfer.submit(command)
        future.add_done_callback(self._report_failure)
        return future

    def on_transfer(self, command: Callable[[Transport], None]) -> Future[None] | None:
        """Run on the transfer thread, in order; from any thread. `None`: nothing happens, the worker is stopping."""
        return None if self._stopping else self._on_transfer(command)

    def _report_failure(self, future: Future[Any]) -> None:
        if not future.cancelled() and (error := future.exception()) is not None and not self._stopping:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """The worker is of no use any more: `wait_closed` raises `error`. From any thread."""
        _log.error("worker %s fails: %s: %s", self.worker_id, type(error).__name__, error)
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        with self._closing:
            if not self._closed.done():
                if error is not None:
                    self._closed.set_exception(error)
                else:
                    self._closed.set_result(None)

    def request_stop(self) -> None:
        """Let `wait_closed` return: whoever calls it then calls `stop`. From any thread."""
        self._close(None)

    def wait_closed(self, timeout_s: float | None = None) -> bool:
        """Block until the worker is stopped or asked to stop, or for `timeout_s`; whether it is. Raises what made it
        fail."""
        futures.wait([self._closed], timeout_s)
        if not self._closed.done():
            return False
        self._closed.result()
        return True

    async def drain_async(self) -> None:
        """Take no new work and return when nothing is held any more, or the worker stops; in the event loop."""
        self.draining = True
        self.hub.status_changed()  # routers look for other places at once
        self.runner.submit(self.check_drained)
        await self._drained.wait()

    def check_drained(self) -> None:
        """Tell `drain` when nothing is held; on the runner thread, between any two steps."""
        if self.draining and self.num_held() == 0:
            self.loop.call_soon_threadsafe(self._drained.set)

    @property
    def _cores_file(self) -> Path | None:
        """Where the workers of this node share their cores; `None`: this one does not."""
        return self._core_shares if self._device == "cpu" and self.config.scheduling.share_cores else None

    def replace_self(self, num_quarantined: int) -> None:
        """Too many pages stay in quarantine; from any thread."""
        if not self.draining:  # else it leaves anyway
            self.loop.call_soon_threadsafe(lambda: self.spawn(self._retire(num_quarantined)))

    async def _retire(self, num_quarantined: int) -> None:
        """Take no new work, let end what can, and fail: whoever supervises this worker starts a new process."""
        _log.error("%d pages are in quarantine: this process drains, and only a new one frees them", num_quarantined)
        bound_s = _LAST_WORK_LEASES * self.config.transport.lease_s
        try:
            async with asyncio.timeout(bound_s):
                await self.drain_async()
        except TimeoutError:
            _log.warning("requests are still held %g s after the drain began: they are lost here", bound_s)
        if not self._stopping:
            self.fail(InternalError(f"{num_quarantined} pages are in quarantine: only a new process frees them"))

    def drain(self) -> None:
        """As `drain_async`, from any thread but the event loop's; blocks."""
        self._run_in_loop(self.drain_async()).result()

    def stop(self) -> None:
        """End all threads and free everything; returns when that is done. A start under way gives up.

        Idempotent, from any thread but the worker's own.
        """
        self._stopping = True
        with self._life:
            try:
                self._undo.close()
            finally:
                self._close(None)

    async def _stop_serving(self) -> None:
        self.end_streams()
        self._drained.set()
        if self._server is not None:
            await self._server.stop(grace=0.5)

    async def _end_tasks(self) -> None:
        self.exits.close()
        tasks = list(self._background)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._role is not None:
            await self.close_channels()

    # -- load, as others see it

    def read_status(self) -> pb.WorkerStatus:
        """The newest snapshot; from any thread."""
        load, counters = self.load.newest, self.counters
        return pb.WorkerStatus(
            num_running=load.num_running,
            num_queued=load.num_queued,
            num_queued_tokens=load.num_queued_tokens,
            pages=page_counts_to_proto(load.pages),
            draining=self.draining,
            prompt_tokens_computed=counters.num_prompt_tokens_computed,
            decode_tokens=counters.num_decode_tokens,
            transfer_bytes=counters.num_transfer_bytes,
            preemptions=counters.num_preemptions,
            prompt_tokens_cached=counters.num_prompt_tokens_cached,
            refused=counters.num_refused,
            handoff_wait_s=self.pacing.waited_s,
        )


class _ControlService(control_pb2_grpc.WorkerControlServicer):
    def __init__(self, worker: WorkerProcess) -> None:
        self._worker = worker

    async def Describe(self, _request: control_pb2.DescribeRequest, _: Any) -> pb.WorkerInfo:
        return self._worker.info

    async def Status(self, _request: control_pb2.StatusRequest, _: Any) -> pb.WorkerStatus:
        return self._worker.read_status()

    async def Drain(self, _request: control_pb2.DrainWorkerRequest, _: Any) -> control_pb2.DrainWorkerReply:
        await self._worker.drain_async()
        return control_pb2.DrainWorkerReply()

    async def Stop(self, _request: control_pb2.StopWorkerRequest, _: Any) -> control_pb2.StopWorkerReply:
        self._worker.request_stop()
        return control_pb2.StopWorkerReply()

    async def NoteEnded(self, request: control_pb2.NoteEndedRequest, _: Any) -> control_pb2.NoteEndedReply:
        for incarnation in request.incarnations:
            self._worker.process_ended(incarnation)
        return control_pb2.NoteEndedReply()
