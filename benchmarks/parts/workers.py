"""A prefill and a decode worker that answer at once: what is left of a request's time is the router's.

python -m benchmarks.parts.workers --model-dir DIR --ready-file FILE

No model and no pages: tokens are those of the alphabet, one of each stream in each message, as those of a step, and as
fast as the router takes them. How long each first token took here is written to `answers.json` beside the ready file
when the process is told to stop.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import operator
import os
import signal
import string
import time
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import uvloop
from google.protobuf.message import Message
from grpc import aio

from kvtransfer.wire import protocols_to_proto
from tandem.core.errors import ConfigError
from tandem.core.protocols import Protocols
from tandem.core.ready_file import write_ready_file
from tandem.core.tokenizer import Tokenizer
from tandem.rpc.channel import bind, make_server
from tandem.rpc.v1 import common_pb2 as pb
from tandem.rpc.v1 import decode_pb2, prefill_pb2

ANSWERS = "answers.json"

_HEARTBEAT_S = 1.0
_NUM_PAGES = 1 << 20
_MAX_CONTEXT = 1 << 20
_PAGE_SIZE = 32
_STATUS = pb.WorkerStatus(pages=pb.PageCounts(free=_NUM_PAGES))


def letters_of(tokenizer: Tokenizer) -> list[int]:
    """Ids that are one plain letter each: every token of a stream is then an event of its own.

    Raises:
        ConfigError: the tokenizer has none.
    """
    encoded = [tokenizer.encode(letter, add_special_tokens=False) for letter in string.ascii_lowercase]
    letters = [ids[0] for ids in encoded if len(ids) == 1]
    if not letters:
        raise ConfigError("this tokenizer has no token for a letter alone: take the embedded model")
    return letters


class _Stream:
    """One request's answer, from its reservation to its last token."""

    def __init__(self, reserve: decode_pb2.Reserve, letters: list[int]) -> None:
        self._reserve, self._letters = reserve, letters
        self._index = 1  # the first token comes from prefill

    def next_token(self) -> pb.Token:
        reserve, index = self._reserve, self._index
        self._index += 1
        return token(reserve.request_id, reserve.attempt, index, self._letters, reserve.sampling.max_tokens)

    @property
    def is_over(self) -> bool:
        return self._index >= self._reserve.sampling.max_tokens


def token(request_id: str, attempt: int, index: int, letters: list[int], num_wanted: int) -> pb.Token:
    """Number `index` of a stream of `num_wanted`."""
    is_last = index + 1 >= num_wanted
    return pb.Token(
        request_id=request_id,
        attempt=attempt,
        index=index,
        token_id=letters[index % len(letters)],
        finish_reason=pb.FINISH_REASON_LENGTH if is_last else pb.FINISH_REASON_UNSPECIFIED,
    )


class ScriptedDecode:
    """Grants at once, and generates from when prefill has the grant.

    Args:
        num_together: streams that must have been handed over before the first of them goes on.
    """

    def __init__(self, letters: list[int], num_together: int) -> None:
        self.info = pb.WorkerInfo()
        self._letters = letters
        self._num_together = num_together
        self._is_stepping = False
        self._reserves: dict[str, decode_pb2.Reserve] = {}
        self._running: dict[str, _Stream] = {}
        self._events: deque[decode_pb2.DecodeEvent] = deque()
        self._changed = asyncio.Event()

    async def session(
        self, commands: AsyncIterator[decode_pb2.DecodeCommand], _: Any
    ) -> AsyncIterator[decode_pb2.DecodeEvents]:
        """The router's stream."""
        self._events.append(decode_pb2.DecodeEvent(hello=self.info))
        reader = asyncio.create_task(self._read(commands))
        try:
            while not reader.done():
                events = [*self._events, *self._step()]
                self._events.clear()
                yield decode_pb2.DecodeEvents(events=events, status=_STATUS)
                if not self._is_stepping and not self._events:
                    await _news(self._changed)
            await reader  # raises what ended it
        finally:
            reader.cancel()

    async def _read(self, commands: AsyncIterator[decode_pb2.DecodeCommand]) -> None:
        async for command in commands:
            match command.WhichOneof("command"):
                case "reserve":
                    self._grant(command.reserve)
                case "cancel":
                    self._reserves.pop(command.cancel.request_id, None)
                    self._running.pop(command.cancel.request_id, None)

    def _grant(self, reserve: decode_pb2.Reserve) -> None:
        self._reserves[reserve.request_id] = reserve
        grant = decode_pb2.Grant(
            grant_id=f"{self.info.incarnation}/{reserve.request_id}",
            request_id=reserve.request_id,
            attempt=reserve.attempt,
            receiver_incarnation=self.info.incarnation,
            pages=range(-(-len(reserve.prompt_ids) // _PAGE_SIZE)),
            lease_s=60.0,
        )
        self._tell(decode_pb2.DecodeEvent(granted=grant))

    def committed(self, request_id: str) -> None:
        """Prefill has handed the request over: it runs from the next step on."""
        reserve = self._reserves.pop(request_id, None)
        if reserve is None:  # cancelled meanwhile
            return
        self._running[request_id] = _Stream(reserve, self._letters)
        self._is_stepping = self._is_stepping or len(self._running) >= self._num_together
        self._tell(decode_pb2.DecodeEvent(admitted=decode_pb2.Admitted(request_id=request_id, attempt=reserve.attempt)))

    def _tell(self, event: decode_pb2.DecodeEvent) -> None:
        self._events.append(event)
        self._changed.set()

    def _step(self) -> list[decode_pb2.DecodeEvent]:
        """A token of each stream."""
        if not self._is_stepping:
            return []
        events = [decode_pb2.DecodeEvent(token=stream.next_token()) for stream in self._running.values()]
        self._running = {name: stream for name, stream in self._running.items() if not stream.is_over}
        self._is_stepping = bool(self._running)
        return events


class ScriptedPrefill:
    """Gives the first token at once, and hands off as soon as there is a grant."""

    def __init__(self, decode: ScriptedDecode, letters: list[int]) -> None:
        self.info = pb.WorkerInfo()
        self.answer_s: list[float] = []  # from each start to its first token, in order
        self._decode = decode
        self._letters = letters
        self._events: deque[prefill_pb2.PrefillEvent] = deque()
        self._changed = asyncio.Event()
        self._started_s: deque[float] = deque()  # of starts whose first token has not left

    async def session(
        self, commands: AsyncIterator[prefill_pb2.PrefillCommand], _: Any
    ) -> AsyncIterator[prefill_pb2.PrefillEvents]:
        """The router's stream."""
        self._events.append(prefill_pb2.PrefillEvent(hello=self.info))
        reader = asyncio.create_task(self._read(commands))
        try:
            while not reader.done():
                message = prefill_pb2.PrefillEvents(events=self._events, status=_STATUS)
                self._events.clear()
                while self._started_s:
                    self.answer_s.append(time.monotonic() - self._started_s.popleft())
                yield message
                if not self._events:
                    await _news(self._changed)
            await reader  # raises what ended it
        finally:
            reader.cancel()

    async def _read(self, commands: AsyncIterator[prefill_pb2.PrefillCommand]) -> None:
        async for command in commands:
            match command.WhichOneof("command"):
                case "start":
                    self._start(command.start)
                case "attach":
                    self._hand_off(command.attach)

    def _start(self, start: prefill_pb2.StartPrefill) -> None:
        self._started_s.append(time.monotonic())
        request_id, attempt = start.request_id, start.attempt
        started = prefill_pb2.PrefillStarted(request_id=request_id, attempt=attempt)
        first = token(request_id, attempt, 0, self._letters, start.sampling.max_tokens)
        self._tell(prefill_pb2.PrefillEvent(started=started), prefill_pb2.PrefillEvent(first_token=first))

    def _hand_off(self, attach: prefill_pb2.AttachGrant) -> None:
        self._decode.committed(attach.request_id)
        done = prefill_pb2.HandoffDone(request_id=attach.request_id, attempt=attach.attempt)
        self._tell(prefill_pb2.PrefillEvent(handoff_done=done))

    def _tell(self, *events: prefill_pb2.PrefillEvent) -> None:
        self._events.extend(events)
        self._changed.set()


async def _news(changed: asyncio.Event) -> None:
    """Until something is to be told, or the next heartbeat is due."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_HEARTBEAT_S):
            await changed.wait()
    changed.clear()


async def _serve(model_dir: Path, ready_file: Path, num_together: int) -> None:
    tokenizer = Tokenizer.from_dir(model_dir)
    letters = letters_of(tokenizer)
    decode = ScriptedDecode(letters, num_together)
    prefill = ScriptedPrefill(decode, letters)
    decode_server, decode.info = await _listen(
        "decode", pb.ROLE_DECODE, decode.session, decode_pb2.DecodeCommand, tokenizer.vocab_size
    )
    prefill_server, prefill.info = await _listen(
        "prefill", pb.ROLE_PREFILL, prefill.session, prefill_pb2.PrefillCommand, tokenizer.vocab_size
    )
    infos = {"prefill": prefill.info, "decode": decode.info}
    stop_asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop_asked.set)
    write_ready_file(
        ready_file,
        {
            role: {"id": info.worker_id, "incarnation": info.incarnation, "address": info.address, "pid": info.pid}
            for role, info in infos.items()
        },
    )
    await stop_asked.wait()
    write_ready_file(ready_file.with_name(ANSWERS), prefill.answer_s)
    await asyncio.gather(prefill_server.stop(grace=None), decode_server.stop(grace=None))


async def _listen(
    name: str, role: pb.Role.ValueType, session: Any, command: type[Message], vocab_size: int
) -> tuple[aio.Server, pb.WorkerInfo]:
    """Serve the router's stream alone: nobody calls anything else."""
    server = make_server()
    handler = grpc.stream_stream_rpc_method_handler(
        session, request_deserializer=command.FromString, response_serializer=operator.methodcaller("SerializeToString")
    )
    service = f"tandem.v1.{name.capitalize()}Service"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Session": handler}),))
    info = _info(f"{name}-0", role, f"127.0.0.1:{bind(server, '127.0.0.1', 0)}", vocab_size)
    await server.start()
    return server, info


def _info(worker_id: str, role: pb.Role.ValueType, address: str, vocab_size: int) -> pb.WorkerInfo:
    return pb.WorkerInfo(
        worker_id=worker_id,
        incarnation=f"{worker_id}-{os.getpid()}",
        role=role,
        address=address,
        node="localhost",
        pid=os.getpid(),
        layout=pb.Layout(weights_sha256="none", dtype="float32", num_layers=1, page_size=_PAGE_SIZE),
        transport="loopback",
        num_pages=_NUM_PAGES,
        max_context=_MAX_CONTEXT,
        vocab_size=vocab_size,
        protocols=protocols_to_proto(Protocols()),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Workers that answer at once, to measure a router")
    parser.add_argument("--model-dir", type=Path, required=True, help="whose tokenizer the router has")
    parser.add_argument("--ready-file", type=Path, required=True, help="written, as JSON, when both listen")
    parser.add_argument("--together", type=int, default=1, metavar="N", help="let N streams begin as one (default: 1)")
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(options.model_dir, options.ready_file, options.together))


if __name__ == "__main__":
    main()
