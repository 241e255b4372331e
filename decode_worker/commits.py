"""Receives parts and commits from prefill workers, and answers them.

They come behind the pages as messages of the transport, or on a gRPC stream that each prefill worker keeps open. All
answers go out on the streams.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Protocol

from decode_worker.receiver_driver import Answer, ReceiverDriver
from kvtransfer.protocol.messages import Commit, CommitPart
from kvtransfer.transports.events import MessageArrived
from tandem.core.errors import TransportError
from tandem.rpc.duplex import ServedStream
from tandem.rpc.v1 import common_pb2 as pb
from tandem.rpc.v1 import decode_pb2 as decode_pb
from tandem.worker.wire import call_from_message, call_from_proto, refusal_to_proto

_log = logging.getLogger(__name__)

Stream = ServedStream[decode_pb.CommitAnswer]


class AsksDriver(Protocol):
    """The worker, as far as its streams need it."""

    def ask_driver(self, question: Callable[[ReceiverDriver], Answer]) -> Future[Answer]: ...

    def has_paired(self, incarnation: str) -> bool: ...


class CommitStreams:
    """All of one worker. Lives in the event loop, but for `heard`. Calls are asked in the order in which they come, and
    each is answered when its answer is there.

    Args:
        loop: the worker's event loop.
    """

    def __init__(self, worker: AsksDriver, loop: asyncio.AbstractEventLoop) -> None:
        self._worker = worker
        self._loop = loop
        self._streams: set[Stream] = set()
        # By incarnation of the sender: its newest stream. Invariant: all of them are in `_streams`.
        self._of_senders: dict[str, Stream] = {}
        self._numbers = itertools.count()

    async def run(self, calls: AsyncIterator[decode_pb.CommitCall]) -> AsyncIterator[decode_pb.CommitAnswer]:
        """Serve one prefill worker until either side ends."""
        task = asyncio.current_task()
        assert task is not None

        def cut_off() -> None:
            task.cancel()  # it may be stuck in a write that its peer does not read

        stream = Stream(next(self._numbers), cut_off)
        self._streams.add(stream)
        try:
            with stream.reading(calls, lambda call: self._take(stream, call)):
                async for answer in stream.messages():
                    yield answer
        finally:
            stream.drop()
            self._streams.discard(stream)
            self._of_senders = {sender: other for sender, other in self._of_senders.items() if other is not stream}

    def close(self) -> None:
        """End every stream, once what is answered has gone out."""
        for stream in list(self._streams):
            stream.end()

    def heard(self, driver: ReceiverDriver, message: MessageArrived) -> None:
        """Something was said behind the pages. On the transfer thread.

        Only what is proven is answered: a forger would have the writer hear that it is refused.
        """
        arrived_s = time.monotonic()
        try:
            call = call_from_message(message.content)
        except ValueError as error:
            driver.ignore(message.peer, str(error))
            return
        said = call.opened(driver.capability_of(call.grant_id))
        if said is None:
            driver.refuse_unproven(message.peer)
        elif (reply := _to_proto(said, _ask(driver, said, arrived_s))) is not None:
            self._loop.call_soon_threadsafe(self._tell, said.sender, reply)

    def _tell(self, sender: str, answer: decode_pb.CommitAnswer) -> None:
        stream = self._of_senders.get(sender)
        if stream is None:
            _log.info("%s has no stream to hear of %s: it will ask again", sender, answer.grant_id)
        else:
            stream.put(answer)

    def _open(self, stream: Stream, sender: str) -> None:
        if not self._worker.has_paired(sender) or stream in self._of_senders.values():
            _log.warning("a stream of commits ends: %.100r has not paired, or the stream has another's name", sender)
            stream.end()
            return
        self._of_senders[sender] = stream
        stream.put(decode_pb.CommitAnswer())

    def _take(self, stream: Stream, call: decode_pb.CommitCall) -> None:
        if call.HasField("opened"):
            self._open(stream, call.opened.sender_incarnation)
            return
        arrived_s, said = time.monotonic(), call_from_proto(call)
        if said is None:
            _log.warning("a call of a prefill worker is ignored: this version does not know it")
            return
        try:
            asked = self._worker.ask_driver(lambda driver: _ask(driver, said, arrived_s))
        except TransportError as stops:  # the transfer thread stops; the prefill worker asks again, or elsewhere
            _log.info("a stream of commits ends: %s", stops)
            stream.drop()
            return

        def answer(asked: Future[Answer]) -> None:
            if asked.cancelled() or asked.exception() is not None:  # the worker itself ends
                self._loop.call_soon_threadsafe(stream.end)
            elif (reply := _to_proto(said, asked.result())) is not None:
                self._loop.call_soon_threadsafe(stream.put, reply)

        asked.add_done_callback(answer)


def _ask(driver: ReceiverDriver, said: Commit | CommitPart, arrived_s: float) -> Answer:
    return driver.commit(said, arrived_s) if isinstance(said, Commit) else driver.commit_part(said)


def _to_proto(said: Commit | CommitPart, answer: Answer) -> decode_pb.CommitAnswer | None:
    """`None`: a part that is right needs no answer."""
    if isinstance(said, CommitPart) and answer.refusal is None:
        return None
    return decode_pb.CommitAnswer(
        request_id=said.key.request_id,
        attempt=said.key.attempt,
        grant_id=said.grant_id,
        ok=answer.refusal is None,
        error=error_of(answer, said.key.request_id),
        verified_at_s=answer.verified_at_s,
    )


def error_of(answer: Answer, request_id: str) -> pb.Error | None:
    """What the prefill worker hears of a refusal."""
    return refusal_to_proto(answer.refusal, answer.detail, request_id) if answer.refusal else None
