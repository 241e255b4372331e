"""Commits to one decode worker, on a stream that stays open."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

import grpc
from grpc import aio

from tandem.core.errors import TandemError, WorkerLostError
from tandem.rpc.convert import error_from_rpc
from tandem.rpc.v1 import decode_pb2 as decode_pb
from tandem.rpc.v1 import decode_pb2_grpc


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
        # Of the stream that is open, if one is.
        self._running: asyncio.Task[None] | None = None
        self._unsent: asyncio.Queue[decode_pb.CommitCall] = asyncio.Queue()
        self._unanswered: dict[int, asyncio.Future[decode_pb.CommitAnswer]] = {}

    def open(self) -> None:
        """Open it, if it is not, so that the first call finds it so."""
        if self._running is None:
            self._unsent, self._unanswered = asyncio.Queue(), {}
            self._running = asyncio.create_task(self._run(self._unsent, self._unanswered))

    async def ask(self, call: decode_pb.CommitCall, what: str) -> decode_pb.CommitAnswer:
        """Send `call`, which gets its number here, and return its answer; `what` names it in errors.

        Raises:
            WorkerLostError: the stream broke, or the answer did not come in time.
            TransportError: the stream ended in another way.
        """
        self.open()
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
        """End it; what is not answered fails."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])

    async def _run(
        self,
        unsent: asyncio.Queue[decode_pb.CommitCall],
        unanswered: dict[int, asyncio.Future[decode_pb.CommitAnswer]],
    ) -> None:
        """One stream, from its beginning to its end, which is that of all its unanswered calls."""
        what = f"commits to {self._peer}"
        error: TandemError = WorkerLostError(f"{what}: the stream ended")
        try:
            async for message in self._stub.Commits(_each(unsent)):
                answer = unanswered.get(message.number)  # none: it came too late
                if answer is not None and not answer.done():
                    answer.set_result(message)
        except grpc.RpcError as failure:
            error = error_from_rpc(failure, what)
        except aio.UsageError as failure:  # the channel was closed before
            error = WorkerLostError(f"{what}: {failure}")
        finally:
            self._running = None
            for answer in unanswered.values():
                if not answer.done():
                    answer.set_exception(error)


async def _each(unsent: asyncio.Queue[decode_pb.CommitCall]) -> AsyncIterator[decode_pb.CommitCall]:
    while True:
        yield await unsent.get()
