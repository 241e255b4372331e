"""Small servers that speak HTTP by hand, with manners that a test chooses."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any


def chunk(content: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(content), content)


def event(text: str = "a", finish_reason: str | None = None, **more: Any) -> bytes:
    """One event with one choice."""
    choice = {"index": 0, "text": text, "finish_reason": finish_reason}
    return b"data: " + json.dumps({"choices": [choice], **more}).encode() + b"\n\n"


def usage(num_output: int, num_input: int = 4, num_cached: int | None = None) -> bytes:
    """The event of `include_usage`."""
    counts: dict[str, Any] = {"prompt_tokens": num_input, "completion_tokens": num_output}
    if num_cached is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": num_cached}
    return b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\n"


STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
FIRST = chunk(event())
DONE = b"data: [DONE]\n\n"
LAST = b"0\r\n\r\n"
END = chunk(DONE) + LAST
REFUSED = b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 7\r\nContent-Length: 2\r\n\r\n{}"


def whole(status: str, content: Any) -> bytes:
    """An answer of known length."""
    body = json.dumps(content).encode()
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(body), body)


@contextlib.asynccontextmanager
async def serving(handler: Callable[..., object]) -> AsyncIterator[str]:
    """A server whose connections `handler` serves; its URL."""
    server = await asyncio.start_server(handler, "127.0.0.1", 0)  # type: ignore[arg-type]
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def request(reader: asyncio.StreamReader) -> bytes:
    """The head of the next request; its body is read too."""
    return (await request_with_body(reader))[0]


async def request_with_body(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head, body = await reader.readuntil(b"\r\n\r\n"), b""
    if b"Content-Length" in head:
        body = await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
    return head, body


class Peer:
    """An OpenAI-like server. `answer` writes what a completion gets; `bodies` are the requests it saw."""

    def __init__(self, answer: Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[bool]]) -> None:
        """`answer` says whether the connection stays open."""
        self.answer = answer
        self.models: bytes = whole("200 OK", {"data": [{"id": "toy", "max_model_len": 4096}]})
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[bytes] = []
        self.num_under_way = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            stays = True
            while stays:
                head, body = await request_with_body(reader)
                self.heads.append(head)
                if head.startswith(b"GET"):
                    writer.write(self.models)
                else:
                    self.bodies.append(json.loads(body))
                    self.num_under_way += 1
                    try:
                        stays = await self.answer(self.bodies[-1], writer)
                    finally:
                        self.num_under_way -= 1
        writer.close()


def pieces(*contents: bytes, gap_s: float = 0.0) -> Callable[..., Awaitable[bool]]:
    """An answer that writes these in turn, whatever is asked, `gap_s` apart."""

    async def answer(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        for content in contents:
            writer.write(content)
            await writer.drain()
            await asyncio.sleep(gap_s)
        return contents[-1].endswith(LAST)

    return answer


async def well_behaved(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
    """As many tokens as asked for, an event each."""
    num = body["max_tokens"]
    events = [event(f"{n} ", "length" if n == num - 1 else None) for n in range(num)]
    counted = usage(num, len(body["prompt"]))
    writer.write(STREAM)
    for content in (*events, counted, DONE):
        writer.write(chunk(content))
        await asyncio.sleep(0.001)
    writer.write(LAST)
    return True
