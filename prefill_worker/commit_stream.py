"""The stream to one decode worker, which stays open: answers to commits come on it, and commits go on it at need."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import grpc
from grpc import aio

from tandem.core.errors import TandemError, WorkerLostError
from tandem.rpc.convert import error_from_rpc
from tandem.rpc.duplex import writing
from tandem.rpc.v1 import decode_pb2 as decode_pb
from tandem.rpc.v1 import decode_pb2_grpc

_log = logging.getLogger(__name__)

_Calls = asyncio.Queue[decode_pb.CommitCall]
_Known = asyncio.Future[TandemError | None]


class CommitStream:
    """Lives in the event loop. When it breaks, what was on it is lost; the next call opens another.

    The end of the channel ends it.

    Args:
        peer: names the decode worker.
        sender: this worker's incarnation.
        answered: called with each answer.
        broke: called with the reason when decode cannot be reached any more by a stream that was open.
        timeout_s: for `open`, in seconds.

    Attributes:
        is_open: whether decode knows where its answers go; from any thread.
    """

    def __init__(
        self,
        stub: decode_pb2_grpc.DecodeServiceAsyncStub,
        peer: str,
        sender: str,
        answered: Callable[[decode_pb.CommitAnswer], None],
        broke: Callable[[str], None],
        timeout_s: float,
    ) -> None:
        self._stub = stub
        self._peer = peer
        self._opened = decode_pb.CommitCall(opened=decode_pb.CommitsOpened(sender_incarnation=sender))
        self._answered = answered
        self._broke = broke
        self._timeout_s = timeout_s
        self._is_closed = False
        # Of the stream that runs, if one does.
        self._running: asyncio.Task[None] | None = None
        self._unsent: _Calls = asyncio.Queue()
        self._known: _Known | None = None  # done when decode knows it, or it has ended before: why
        self.is_open = False

    async def open(self) -> None:
        """Open it, if it is not, and wait until decode knows it.

        Raises:
            WorkerLostError: it broke or was closed, or decode did not answer in time.
            TransportError: it ended in another way.
        """
        known = self._start()
        await asyncio.wait([known], timeout=self._timeout_s)
        if not known.done():
            raise WorkerLostError(f"commits to {self._peer}: no answer in {self._timeout_s} s")
        if (error := known.result()) is not None:
            raise error

    def put(self, call: decode_pb.CommitCall) -> None:
        """Send `call`; it opens the stream if need be."""
        self._start()
        if self._running is None:
            _log.info("commits to %s: the connection has been closed", self._peer)
            return
        self._unsent.put_nowait(call)

    async def close(self) -> None:
        """End it for good."""
        self._is_closed = True
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])

    def _start(self) -> _Known:
        if self._running is None or self._known is None:
            unsent: _Calls = asyncio.Queue()
            known: _Known = asyncio.get_running_loop().create_future()
            self._unsent, self._known = unsent, known
            if self._is_closed:
                known.set_result(WorkerLostError(f"commits to {self._peer}: the connection has been closed"))
                return known
            unsent.put_nowait(self._opened)
            self._running = asyncio.create_task(self._run(unsent, known))
            # Not at the end of the task itself: one that is cancelled before it began has none.
            self._running.add_done_callback(lambda task: self._over(task, known))
        return self._known

    async def _run(self, unsent: _Calls, known: _Known) -> None:
        """One stream, from its beginning to its end. Raises what ended it."""
        stub: Any = self._stub  # the stub's types know no stream that is written to
        stream = stub.Commits()
        async with writing(stream, unsent):
            try:
                async for answer in stream:
                    if known.done():
                        self._answered(answer)
                    else:
                        known.set_result(None)
                        self.is_open = True
            finally:
                self.is_open = False

    def _over(self, task: asyncio.Task[None], known: _Known) -> None:
        self._running = None
        what = f"commits to {self._peer}"
        failure = None if task.cancelled() else task.exception()
        error: TandemError = WorkerLostError(f"{what}: the stream ended")
        if isinstance(failure, grpc.RpcError):
            error = error_from_rpc(failure, what)
        elif isinstance(failure, aio.UsageError):  # the channel was closed before
            error = WorkerLostError(f"{what}: {failure}")
        elif failure is not None:
            _log.error("%s failed", what, exc_info=failure)
        if not known.done():
            known.set_result(error)
        elif not self._is_closed:
            _log.warning("%s; what is unanswered is asked again", error)
            if isinstance(error, WorkerLostError):
                self._broke(error.message)
