"""Commits to one decode worker, on a stream that stays open."""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import Any

import grpc
from grpc import aio

from tandem.core.errors import TandemError, WorkerLostError
from tandem.rpc.convert import error_from_rpc
from tandem.rpc.v1 import decode_pb2 as decode_pb
from tandem.rpc.v1 import decode_pb2_grpc

_log = logging.getLogger(__name__)

_Calls = asyncio.Queue[decode_pb.CommitCall]
_Answers = dict[int, asyncio.Future[decode_pb.CommitAnswer]]


class CommitStream:
    """Calls that are told apart by their numbers. A stream that broke is opened anew by the next call.

    Lives in the event loop. The end of the channel ends it.

    Args:
        peer: names the decode worker.
        timeout_s: for one call, in seconds.
    """

    def __init__(self, stub: decode_pb2_grpc.DecodeServiceAsyncStub, peer: str, timeout_s: float) -> None:
        self._stub = stub
        self._peer = peer
        self._timeout_s = timeout_s
        self._numbers = itertools.count(1)
        self._is_closed = False
        # Of the stream that is open, if one is.
        self._running: asyncio.Task[None] | None = None
        self._unsent: _Calls = asyncio.Queue()
        self._unanswered: _Answers = {}

    def open(self) -> None:
        """Open it, if it is not, so that the first call finds it so."""
        if self._running is None and not self._is_closed:
            unsent: _Calls = asyncio.Queue()
            unanswered: _Answers = {}
            self._unsent, self._unanswered = unsent, unanswered
            self._running = asyncio.create_task(self._run(unsent, unanswered))
            # Not at the end of the task itself: one that is cancelled before it began has none.
            self._running.add_done_callback(lambda task: self._over(task, unanswered))

    async def ask(self, call: decode_pb.CommitCall, what: str) -> decode_pb.CommitAnswer:
        """Send `call`, which gets its number here, and return its answer; `what` names it in errors.

        Raises:
            WorkerLostError: the stream broke or was closed, or the answer did not come in time.
            TransportError: the stream ended in another way.
        """
        self.open()
        if self._running is None:
            raise WorkerLostError(f"{what} to {self._peer}: the connection has been closed")
        unanswered = self._unanswered
        call.number = next(self._numbers)
        answer: asyncio.Future[decode_pb.CommitAnswer] = asyncio.get_running_loop().create_future()
        unanswered[call.number] = answer
        self._unsent.put_nowait(call)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await answer
        except TimeoutError:
            raise WorkerLostError(f"{what} to {self._peer}: no answer in {self._timeout_s} s") from None
        finally:
            unanswered.pop(call.number, None)

    async def close(self) -> None:
        """End it for good; what is not answered fails."""
        self._is_closed = True
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])

    async def _run(self, unsent: _Calls, unanswered: _Answers) -> None:
        """One stream, from its beginning to its end. Raises what ended it."""
        stub: Any = self._stub  # the stub's types know no stream that is written to
        stream = stub.Commits()
        writer = asyncio.create_task(_write(stream, unsent, unanswered))
        try:
            async for message in stream:
                answer = unanswered.get(message.number)  # none: it came too late
                if answer is not None and not answer.done():
                    answer.set_result(message)
        finally:
            writer.cancel()
            stream.cancel()
            # A write fails only with the stream, and the reader reports that.
            await asyncio.gather(writer, return_exceptions=True)

    def _over(self, task: asyncio.Task[None], unanswered: _Answers) -> None:
        """The end of a stream is that of all its unanswered calls."""
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
        for answer in unanswered.values():
            if not answer.done():
                answer.set_exception(error)


async def _write(stream: Any, unsent: _Calls, unanswered: _Answers) -> None:
    while True:
        call = await unsent.get()
        if call.number in unanswered:  # else nobody waits for it any more
            await stream.write(call)
