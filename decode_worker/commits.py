"""The streams on which prefill workers commit: one for each of them, open for as long as both live."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Protocol

from decode_worker.receiving import Answer, ReceivingDesk
from tandem.core.errors import IncompatibleError, TransportError
from tandem.rpc.convert import error_to_proto
from tandem.rpc.v1 import common_pb2 as pb
from tandem.rpc.v1 import decode_pb2 as decode_pb
from tandem.worker.sessions import Session, reading
from tandem.worker.wire import commit_from_proto, part_from_proto, refusal_to_proto

_log = logging.getLogger(__name__)

Stream = Session[decode_pb.CommitAnswer]


class AsksDesk(Protocol):
    """The worker, as far as its streams need it."""

    def ask_desk(self, question: Callable[[ReceivingDesk], Answer]) -> Future[Answer]: ...


class CommitStreams:
    """All of one worker; lives in the event loop. Calls are asked in the order in which they come, and each is answered
    when its answer is there."""

    def __init__(self, worker: AsksDesk) -> None:
        self._worker = worker
        self._streams: set[Stream] = set()
        self._numbers = itertools.count()

    async def run(self, calls: AsyncIterator[decode_pb.CommitCall]) -> AsyncIterator[decode_pb.CommitAnswer]:
        """Serve one prefill worker until either side ends."""
        task = asyncio.current_task()
        assert task is not None

        def cut_off() -> None:
            task.cancel()  # it may be stuck in a write that nobody reads

        stream = Stream(next(self._numbers), cut_off)
        self._streams.add(stream)
        try:
            with reading(stream, calls, lambda call: self._take(stream, call)):
                async for answer in stream.messages():
                    yield answer
        finally:
            stream.drop()
            self._streams.discard(stream)

    def close(self) -> None:
        """End every stream, once what is answered has gone out."""
        for stream in list(self._streams):
            stream.end()

    def _take(self, stream: Stream, call: decode_pb.CommitCall) -> None:
        arrived_s, loop = time.monotonic(), asyncio.get_running_loop()
        try:
            match call.WhichOneof("call"):
                case "commit":
                    commit, request_id = commit_from_proto(call.commit), call.commit.request_id
                    asked = self._worker.ask_desk(lambda desk: desk.commit(commit, arrived_s))
                case "part":
                    part, request_id = part_from_proto(call.part), call.part.request_id
                    asked = self._worker.ask_desk(lambda desk: desk.commit_part(part))
                case _:
                    error = error_to_proto(IncompatibleError("this version knows no such call"))
                    stream.put(decode_pb.CommitAnswer(number=call.number, error=error))
                    return
        except TransportError as stops:  # of the transfer thread; the prefill worker asks again, or elsewhere
            _log.info("a stream of commits ends: %s", stops)
            stream.drop()
            return

        def answer(asked: Future[Answer]) -> None:
            if asked.cancelled() or asked.exception() is not None:  # the worker itself ends
                loop.call_soon_threadsafe(stream.end)
                return
            message = _to_proto(call.number, asked.result(), request_id)
            loop.call_soon_threadsafe(stream.put, message)

        asked.add_done_callback(answer)


def _to_proto(number: int, answer: Answer, request_id: str) -> decode_pb.CommitAnswer:
    error = error_of(answer, request_id)
    return decode_pb.CommitAnswer(
        number=number, ok=answer.refusal is None, error=error, verified_at_s=answer.verified_at_s
    )


def error_of(answer: Answer, request_id: str) -> pb.Error | None:
    """What the prefill worker hears of a refusal."""
    return refusal_to_proto(answer.refusal, answer.detail, request_id) if answer.refusal else None
