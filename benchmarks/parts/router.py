"""What the router costs, before workers that answer at once: its share of TTFT, and the tokens that it streams."""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import psutil

from benchmarks.parts.processes import Child, Processes, start_router, tell_router
from benchmarks.parts.workers import ANSWERS
from tandem.bench.load.http_client import LoadClient
from tandem.bench.process_watch import watched
from tandem.core.errors import TandemError

_PATH = "/v1/completions"
_MODEL = "tandem-tiny"
_OK = 200
_GOOD = b"HTTP/1.1 200"
_END_OF_EVENT = b"\n\n"
_SHOWN = 200
_STREAM_S = 120.0
_HEALTH_S = 10.0
_LOOK_S = 0.02


@dataclass(frozen=True)
class RouterSizes:
    """How much is asked.

    Attributes:
        num_ttft: requests whose first token is timed, one at a time, after `num_warm_up`.
        prompt_chars: of their prompts, which are text.
        num_streams, num_tokens: streams at a time, and tokens of each.
    """

    num_ttft: int = 300
    num_warm_up: int = 50
    prompt_chars: int = 512
    num_streams: int = 256
    num_tokens: int = 600


# --- time to first token ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RouterTtft:
    """Of each request in turn; seconds."""

    client_s: list[float]  # from sending to the first event
    workers_s: list[float]  # of that, what the scripted prefill worker took

    @property
    def added_s(self) -> list[float]:
        return [client - workers for client, workers in zip(self.client_s, self.workers_s, strict=True)]


async def measure_ttft(directory: Path, model_dir: Path, sizes: RouterSizes) -> RouterTtft:
    """One request in flight. Raises `TandemError` where one fails."""
    async with Processes(directory) as processes:
        router = await _start(processes, model_dir)
        client = LoadClient(router.facts["http"], max_sockets=1)
        text = ("the quick brown fox jumps over the lazy dog " * (sizes.prompt_chars // 44 + 1))[: sizes.prompt_chars]
        client_s = []
        for number in range(sizes.num_warm_up + sizes.num_ttft):
            body = {"model": _MODEL, "prompt": f"{number} {text}", "max_tokens": 2, "stream": True, "temperature": 0}
            answer = await client.ask("POST", _PATH, json.dumps(body).encode())
            if answer.status != _OK:
                raise TandemError(f"the router answers {answer.status}: {answer.why or answer.body.decode()}")
            client_s.append(answer.ttft_s)
        client.close()
    workers_s: list[float] = json.loads((directory / ANSWERS).read_text())
    return RouterTtft(client_s[sizes.num_warm_up :], workers_s[sizes.num_warm_up :])


# --- streaming --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Streamed:
    """All streams at once.

    Attributes:
        num_events: in the time in which all streams ran; `seconds` long. Where several routers serve, each its own
            workers, there may be no such time.
        cpu_share: CPU seconds of the routers for each second of the whole load; 1 is one core.
        reader_cpu_share: the same of this process, which read them.
        token_cpu_s: CPU seconds of the routers for each token of the whole load.
        whole_tokens_per_s: of the whole load, from the first request to the last event.
    """

    num_events: int
    seconds: float
    cpu_share: float
    reader_cpu_share: float
    token_cpu_s: float
    whole_tokens_per_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_events / self.seconds


async def measure_streaming(directory: Path, model_dir: Path, sizes: RouterSizes, num_rounds: int) -> list[Streamed]:
    """`num_rounds` times `num_streams` streams, after one round that does not count.

    Raises:
        TandemError: a stream failed, or had more or fewer events than tokens.
    """
    async with Processes(directory) as processes:
        router = await _start(processes, model_dir, num_together=sizes.num_streams)
        rounds = [await stream_all(router.facts["http"], [router.pid], sizes) for _ in range(1 + num_rounds)]
    return rounds[1:]


async def stream_all(address: str, routers: Sequence[int], sizes: RouterSizes) -> Streamed:
    """All streams at once, at `address`, where the processes `routers` take them. Raises `TandemError`."""
    host, _, port = urlsplit(address).netloc.rpartition(":")
    tally, loop = _Tally(sizes.num_streams), asyncio.get_running_loop()
    body = {"model": _MODEL, "prompt": [100] * 8, "max_tokens": sizes.num_tokens, "stream": True, "temperature": 0}
    message = LoadClient(address, max_sockets=1).message("POST", _PATH, json.dumps(body).encode())
    readers: list[_Reader] = []
    try:
        for _ in range(sizes.num_streams):
            make_reader = functools.partial(_Reader, tally, sizes.num_tokens)
            readers.append((await loop.create_connection(make_reader, host, int(port)))[1])
        async with AsyncExitStack() as watches:
            used = [await watches.enter_async_context(watched(psutil.Process(pid))) for pid in routers]
            own = await watches.enter_async_context(watched(psutil.Process()))
            begun_s = loop.time()
            for reader in readers:
                reader.send(message)
            async with asyncio.timeout(_STREAM_S):
                await tally.over
            whole_s = loop.time() - begun_s
    except TimeoutError:
        raise TandemError(f"{sizes.num_streams} streams had not ended after {_STREAM_S:.0f} s") from None
    finally:
        for reader in readers:
            reader.close()
    for reader in readers:
        reader.check()
    num_tokens = sizes.num_streams * sizes.num_tokens
    return Streamed(
        tally.num_in_window,
        tally.window_s,
        sum(usage.cpu_share for usage in used),
        own.cpu_share,
        sum(usage.cpu_s for usage in used) / num_tokens,
        num_tokens / whole_s,
    )


class _Tally:
    """Events of all streams, in the time from which each has one until one has ended."""

    def __init__(self, num_streams: int) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.num_in_window = 0
        self._num_silent = self._num_open = num_streams
        self._num_streams = num_streams
        self._began_s = self._ended_s = 0.0

    @property
    def window_s(self) -> float:
        return self._ended_s - self._began_s

    def count(self, num_events: int, *, is_first: bool) -> None:
        if is_first:
            self._num_silent -= 1
            if self._num_silent == 0:
                self._began_s = time.monotonic()
                return
        if self._num_silent == 0 and self._num_open == self._num_streams:
            self.num_in_window += num_events

    def ended(self) -> None:
        if self._num_open == self._num_streams:
            self._ended_s = time.monotonic()
        self._num_open -= 1
        if self._num_open == 0 and not self.over.done():
            self.over.set_result(None)


class _Reader(asyncio.Protocol):
    """Counts the events of one stream as their bytes come, and looks at nothing else of them."""

    def __init__(self, tally: _Tally, num_tokens: int) -> None:
        self._tally, self._num_tokens = tally, num_tokens
        self._transport: asyncio.Transport
        self._head = b""  # the first bytes of the answer
        self._carry = b""  # half of an end of an event
        self._num_events = 0
        self._is_over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's do not derive from it

    def send(self, message: bytes) -> None:
        self._transport.write(message)

    def data_received(self, data: bytes) -> None:
        if len(self._head) < _SHOWN:
            self._head += data[: _SHOWN - len(self._head)]
        data = self._carry + data
        num_ends = data.count(_END_OF_EVENT)  # heads and JSON hold none
        self._carry = b"\n" if data.endswith(b"\n") and not data.endswith(_END_OF_EVENT) else b""
        if num_ends:
            before, self._num_events = self._num_events, self._num_events + num_ends
            self._tally.count(min(self._num_events, self._num_tokens) - before, is_first=not before)
        has_failed = not self._head.startswith(_GOOD[: len(self._head)])
        if has_failed or self._num_events > self._num_tokens:  # `[DONE]` is the last
            self._end()

    def connection_lost(self, _: Exception | None) -> None:
        self._end()

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._tally.ended()

    def close(self) -> None:
        self._transport.close()

    def check(self) -> None:
        """Raises `TandemError` where tokens and events are not as many."""
        if self._num_events != self._num_tokens + 1:
            begun = self._head.decode(errors="replace")
            raise TandemError(
                f"a stream of {self._num_tokens} tokens came as {self._num_events - 1} events; it began: {begun!r}"
            )


# --- the processes ----------------------------------------------------------------------------------------------------


async def _start(processes: Processes, model_dir: Path, *, num_together: int = 1) -> Child:
    """A router that has both scripted workers, and these."""
    line = ("--model-dir", str(model_dir), "--together", str(num_together))
    workers = await (await processes.start("workers", "benchmarks.parts.workers", *line)).ready()
    router = await start_router(processes, model_dir)
    await tell_router(router, workers.facts.items())
    client = LoadClient(router.facts["http"], max_sockets=1)
    try:
        async with asyncio.timeout(_HEALTH_S):
            while (await client.ask("GET", "/health")).status != _OK:  # noqa: ASYNC110 - another process can only be asked
                await asyncio.sleep(_LOOK_S)
    except TimeoutError:
        raise TandemError(f"the router did not find its workers in {_HEALTH_S:.0f} s") from None
    finally:
        client.close()
    return router
