"""Plays the supervisor for a cluster of plain processes, as `tandem.cluster` does it with Ray.

It sees a process's end by its pidfd and tells every other worker (`NoteEnded`), the fence for pages that it might
have written; tells the router who is left; starts what ended again. It has a session with every worker, as a router
has: over it come suspicions of silent writers and, by what does not come, silent workers; both are killed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Coroutine
from typing import Any

import grpc

from tandem.rpc.channel import make_channel
from tandem.rpc.v1 import control_pb2, control_pb2_grpc
from tandem.rpc.v1.decode_pb2_grpc import DecodeServiceStub
from tandem.rpc.v1.prefill_pb2_grpc import PrefillServiceStub
from tests.scenarios.processes import START_TIMEOUT_S, Process, ProcessCluster

_log = logging.getLogger(__name__)
_MAX_FAILED_STARTS = 3
_LOOK_S = 0.02
"""Between two looks at a file that a starting process will write."""
_CALL_S = 5.0


class Overseer:
    """Watches the processes that `cluster` has when it starts, and their successors, while its block runs.

    Args:
        silence_s: a worker from which nothing is heard for so long is killed.

    Attributes:
        killed: incarnations that it has killed, in order.
    """

    def __init__(self, cluster: ProcessCluster, *, silence_s: float) -> None:
        self.killed: list[str] = []
        self._cluster = cluster
        self._silence_s = silence_s
        self._loop: asyncio.AbstractEventLoop
        self._tasks: set[asyncio.Task[None]] = set()
        self._over: asyncio.Future[None]  # done when the block ends, or with the error that ends the watch
        self._is_running = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="overseer", daemon=True)

    def __enter__(self) -> Overseer:
        self._thread.start()
        assert self._is_running.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end, None)
            self._thread.join(START_TIMEOUT_S)
        self._check()

    def wait_whole(self, timeout_s: float = 60.0) -> None:
        """Until every process lives, is ready, and the router takes requests for all workers."""
        cluster = self._cluster

        def is_whole() -> bool:
            self._check()
            if not all(process.lives and process.facts for process in cluster.processes):
                return False
            shown = cluster.status()
            ready = {w["incarnation"] for pool in ("prefill", "decode") for w in shown[pool] if w["state"] == "ready"}
            return ready == {process.incarnation for process in cluster.workers.values()}

        cluster.wait_for(is_whole, "a whole cluster", timeout_s)

    def _check(self) -> None:
        if self._failure is not None:
            raise AssertionError("the overseer has failed") from self._failure

    # -- in the thread

    def _run(self) -> None:
        try:
            asyncio.run(self._watch())
        except BaseException as error:  # noqa: BLE001 - raised again where the test waits
            self._failure = error

    async def _watch(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._over = self._loop.create_future()
        for process in self._cluster.processes:
            self._spawn(self._follow(process))
        self._is_running.set()
        try:
            await self._over
        finally:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if self._over.done():
            return
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)

    async def _follow(self, process: Process) -> None:
        """One place in the cluster: a process, its end, its successor. A fault may hit one that still starts."""
        num_failed = 0
        while True:
            await self._life(process)
            self._spawn(self._tell(process))
            process = self._start_again(process)
            if await self._comes_up(process):
                num_failed = 0
                await self._publish()
            else:
                num_failed += 1
                log = process.log.read_text()[-4000:]
                assert num_failed < _MAX_FAILED_STARTS, f"{process.name} does not start:\n{log}"

    async def _life(self, process: Process) -> None:
        """Until the process has ended and is reaped."""
        listener = self._loop.create_task(self._listen(process)) if process.name in self._cluster.workers else None
        try:
            await self._exit(process)
        finally:
            if listener is not None:
                listener.cancel()
                await asyncio.gather(listener, return_exceptions=True)

    async def _exit(self, process: Process) -> None:
        over = self._loop.create_future()
        try:
            pidfd = os.pidfd_open(process.pid)
        except ProcessLookupError:  # it ended before, and was reaped by who looked whether it lives
            return
        try:
            self._loop.add_reader(pidfd, lambda: over.done() or over.set_result(None))
            await over
        finally:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
        process.popen.wait()

    def _start_again(self, process: Process) -> Process:
        if process is self._cluster.router:
            return self._cluster.start_router()
        role, _, number = process.name.rpartition("-")
        return self._cluster.start_worker(role, int(number))

    async def _comes_up(self, process: Process) -> bool:
        """Whether it gets ready; what another process does can only be looked at."""
        while process.lives:
            if process.is_ready():
                return True
            await asyncio.sleep(_LOOK_S)
        return False

    async def _tell(self, process: Process) -> None:
        """All that live hear of the end; the router by a membership without it."""
        if process is self._cluster.router or not process.incarnation:
            return
        request = control_pb2.NoteEndedRequest(incarnations=[process.incarnation])
        others = [worker for worker in self._cluster.workers.values() if worker.lives and worker.facts]
        await asyncio.gather(self._publish(), *(self._note_ended(worker, request) for worker in others))

    async def _note_ended(self, worker: Process, request: control_pb2.NoteEndedRequest) -> None:
        async with make_channel(worker.facts["address"]) as channel:
            try:
                await control_pb2_grpc.WorkerControlStub(channel).NoteEnded(request, timeout=_CALL_S)
            except grpc.aio.AioRpcError as error:
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    raise
                _log.warning("%s did not hear of an end: %s", worker.name, error.code())

    async def _publish(self) -> None:
        """A router that is down or stopped hears it when it is back: its own start publishes again."""
        if not self._cluster.router.facts:
            return
        try:
            await self._cluster.push_membership()
        except grpc.aio.AioRpcError as error:
            if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise
            _log.warning("the router did not take a membership: %s", error.code())

    # -- sessions with workers

    async def _listen(self, process: Process) -> None:
        """Hear what a worker says for as long as it lives."""
        stub_class: Any = PrefillServiceStub if process.name.startswith("prefill") else DecodeServiceStub
        async with make_channel(process.facts["address"]) as channel:
            while True:
                try:
                    await self._hear(process, stub_class(channel).Session())
                except grpc.aio.AioRpcError as error:
                    _log.info("session with %s broke: %s", process.name, error.code())
                await asyncio.sleep(_LOOK_S)  # its end is near, or it takes a new session

    async def _hear(self, process: Process, call: Any) -> None:
        messages = aiter(call)
        while True:
            try:
                async with asyncio.timeout(self._silence_s):
                    message = await anext(messages)
            except StopAsyncIteration:
                return
            except TimeoutError:
                self._kill(process, f"silent for {self._silence_s:g} s")
                return
            for event in message.events:
                if event.WhichOneof("event") == "writer_suspected":
                    self._suspect(event.writer_suspected.writer_incarnation)

    def _suspect(self, incarnation: str) -> None:
        for process in self._cluster.workers.values():
            if process.incarnation == incarnation:
                self._kill(process, "suspected by a decode worker")

    def _kill(self, process: Process, why: str) -> None:
        if process.lives:
            _log.warning("killing %s: %s", process.name, why)
            self.killed.append(process.incarnation)
            process.kill()
