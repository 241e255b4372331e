"""How one incarnation of a worker ends: by a stop, a drain, a failure, or too many pages in quarantine."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent import futures
from concurrent.futures import Future
from typing import Any

from tandem.core.errors import InternalError

_log = logging.getLogger(__name__)

# How long a worker with too many pages in quarantine goes on with its requests, in leases: time for routers to hear of
# the drain and to move their requests elsewhere.
_LAST_WORK_LEASES = 3


class WorkerLife:
    """Knows of a worker's end. The worker's parts report to it, and the caller that started the worker waits for it.

    Args:
        lease_s: `transport.lease_s`.
        begin_drain: called in the event loop; tells routers of the drain, and lets the runner call `check_drained`.
        num_held: how many requests the worker holds; asked on the runner thread.
    """

    def __init__(
        self, worker_id: str, lease_s: float, *, begin_drain: Callable[[], None], num_held: Callable[[], int]
    ) -> None:
        self._worker_id = worker_id
        self._lease_s = lease_s
        self._begin_drain = begin_drain
        self._num_held = num_held
        self._loop: asyncio.AbstractEventLoop
        self.draining = False
        self.stopping = False
        self._drained = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        # Done when the worker is stopped, is to be stopped or has failed; guarded by `_closing`.
        self._closed: Future[None] = Future()
        self._closing = threading.Lock()

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """The worker's event loop runs."""
        self._loop = loop

    # -- from any thread

    def fail(self, error: BaseException) -> None:
        """The worker has failed: `wait_closed` raises `error`."""
        _log.error("worker %s fails: %s: %s", self._worker_id, type(error).__name__, error)
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """Let `wait_closed` return, or raise `error`. Only the first call counts."""
        with self._closing:
            if not self._closed.done():
                if error is not None:
                    self._closed.set_exception(error)
                else:
                    self._closed.set_result(None)

    def wait_closed(self, timeout_s: float | None = None) -> bool:
        """Block until the worker is stopped or asked to stop, for at most `timeout_s`. Return whether it is, and raise
        what made it fail."""
        futures.wait([self._closed], timeout_s)
        if not self._closed.done():
            return False
        self._closed.result()
        return True

    def watch(self, future: Future[Any]) -> None:
        """A failure of `future` is the worker's."""
        future.add_done_callback(self._future_ended)

    def _future_ended(self, future: Future[Any]) -> None:
        if not future.cancelled() and (error := future.exception()) is not None and not self.stopping:
            self.fail(error)

    def replace_self(self, num_quarantined: int) -> None:
        """Drain and fail, because too many pages stay in quarantine: only a new process frees them."""
        if not self.draining:  # else it leaves anyway
            self._loop.call_soon_threadsafe(lambda: self.spawn(self._retire(num_quarantined)))

    # -- on the runner thread

    def check_drained(self) -> None:
        """Let `drain` return when nothing is held any more; between any two steps."""
        if self.draining and self._num_held() == 0:
            self._loop.call_soon_threadsafe(self._drained.set)

    # -- in the event loop

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run in the background; its failure is the worker's."""
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    async def drain(self) -> None:
        """Take no new work and return when nothing is held any more, or the worker stops."""
        self.draining = True
        self._begin_drain()
        await self._drained.wait()

    def end_drain(self) -> None:
        """Let `drain` return, because the worker stops."""
        self._drained.set()

    async def _retire(self, num_quarantined: int) -> None:
        """Take no new work, let requests end for a while, and fail: the supervisor then starts a new process."""
        _log.error("%d pages are in quarantine: this process drains, and only a new one frees them", num_quarantined)
        bound_s = _LAST_WORK_LEASES * self._lease_s
        try:
            async with asyncio.timeout(bound_s):
                await self.drain()
        except TimeoutError:
            _log.warning("requests are still held %g s after the drain began: they are lost here", bound_s)
        if not self.stopping:
            self.fail(InternalError(f"{num_quarantined} pages are in quarantine: only a new process frees them"))

    async def end_tasks(self) -> None:
        """Cancel what runs in the background."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
