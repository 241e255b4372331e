"""Time, size and number: what one connection may take, by raw sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from router.http.protocol import ARRIVED
from router.http.server import HttpServer, listen
from tandem.core.config import LimitsConfig
from tandem.core.socket_wait import TICK_S
from tests.support.router_site import Site
from tests.support.waiting import LONG_S, wait_until

MakeSite = Callable[..., Site]
BODY = json.dumps({"model": "toy", "prompt": "x", "max_tokens": 2}).encode()


def connect(site: Site) -> socket.socket:
    host, port = site.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=5)


def post(body: bytes = BODY, length: int | None = None) -> bytes:
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body


def all_of(client: socket.socket) -> bytes:
    """What comes until the server closes."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(65536):
            parts.append(part)
    return b"".join(parts)


def one_answer(client: socket.socket) -> tuple[int, dict[str, str], Any]:
    """Status, headers and JSON of the next answer on a connection that stays open."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += client.recv(1)
    status, headers = parsed_head(received)
    body = b""
    while len(body) < int(headers["content-length"]):
        body += client.recv(int(headers["content-length"]) - len(body))
    return status, headers, json.loads(body)


def parsed_head(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.split(b"\r\n\r\n")[0].decode().split("\r\n")
    return int(first.split()[1]), dict(line.lower().split(": ", 1) for line in lines)


def refusal(answer: bytes) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Status, headers and error object of the only answer of a connection that was closed."""
    status, headers = parsed_head(answer)
    assert headers["connection"] == "close"
    error = json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]
    assert error["request_id"] == headers["x-request-id"]
    return status, headers, error


def trickle(client: socket.socket, piece: bytes, pace_s: float | None) -> None:
    """Send a piece now and then until an answer is there; nothing where no pace is given."""
    deadline_s = time.monotonic() + 3
    while pace_s is not None and not select.select([client], [], [], pace_s)[0] and time.monotonic() < deadline_s:
        client.sendall(piece)


# -- time


@pytest.mark.long
@pytest.mark.parametrize("pace_s", [None, 0.05], ids=["silent", "trickling"])
def test_a_head_that_does_not_end_is_answered_408(make_site: MakeSite, pace_s: float | None) -> None:
    site = make_site({"limits.header_timeout_s": 0.4}, with_workers=False)
    with connect(site) as client:
        began_s = time.monotonic()
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
        trickle(client, b"X-A: b\r\n", pace_s)
        status, _, error = refusal(all_of(client))
    assert 0.35 < time.monotonic() - began_s < 2
    assert (status, error["code"], error["retryable"]) == (408, "request_timeout", True)
    assert "header_timeout_s" in error["message"]


@pytest.mark.long
def test_a_connection_that_says_nothing_is_closed_without_a_word(make_site: MakeSite) -> None:
    site = make_site({"limits.header_timeout_s": 0.2}, with_workers=False)
    with connect(site) as client:
        assert all_of(client) == b""


@pytest.mark.long
@pytest.mark.parametrize("pace_s", [None, 0.05], ids=["silent", "trickling"])
def test_a_body_that_does_not_end_is_answered_408(make_site: MakeSite, pace_s: float | None) -> None:
    site = make_site({"limits.body_timeout_s": 0.4})
    with connect(site) as client:
        began_s = time.monotonic()
        client.sendall(post(b'{"model"', length=10_000))
        trickle(client, b" ", pace_s)
        status, headers, error = refusal(all_of(client))
    assert 0.35 < time.monotonic() - began_s < 2
    assert (status, error["code"]) == (408, "request_timeout")
    assert headers["x-should-retry"] == "true"
    assert site.metrics()['tandem_requests_total{outcome="cancelled"}'] == 1
    assert site.post(prompt="x", max_tokens=1).status_code == 200


@pytest.mark.long
def test_a_body_in_chunks_is_bounded_in_time_too(make_site: MakeSite) -> None:
    site = make_site({"limits.body_timeout_s": 0.3}, with_workers=False)
    with connect(site) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n{   \r\n")
        assert refusal(all_of(client))[0] == 408


@pytest.mark.long
def test_the_time_runs_anew_for_each_request_of_a_connection(make_site: MakeSite) -> None:
    site = make_site({"limits.header_timeout_s": 0.5, "limits.body_timeout_s": 0.5})
    with connect(site) as client:
        for number in range(3):
            time.sleep(0.6 if number else 0)  # idle between requests is the keep-alive's time, not the head's
            client.sendall(post()[:30])
            time.sleep(0.3)
            client.sendall(post()[30:-5])
            time.sleep(0.3)
            client.sendall(post()[-5:])
            assert one_answer(client)[0] == 200
        client.sendall(b"GET /hea")
        assert refusal(all_of(client))[0] == 408


@pytest.mark.long
def test_a_long_answer_is_no_slow_request(make_site: MakeSite) -> None:
    site = make_site({"limits.header_timeout_s": 0.2, "limits.body_timeout_s": 0.2})
    site.decode.token_gap_s = 0.1
    assert site.post(prompt="x", max_tokens=10).json()["choices"][0]["text"] == "abcdefghij"


# -- size


def test_a_head_that_is_too_large_is_answered_431(make_site: MakeSite) -> None:
    site = make_site(with_workers=False)
    with connect(site) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 40_000)
        status, _, error = refusal(all_of(client))
    assert (status, error["code"], error["retryable"]) == (431, "invalid_request", False)


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_that_is_too_large_is_answered_413(make_site: MakeSite, is_chunked: bool) -> None:
    site = make_site({"limits.max_body_bytes": 2000}, with_workers=False)
    body = b"a" * 3000  # 0xbb8
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    with connect(site) as client:
        if is_chunked:
            client.sendall(head + b"Transfer-Encoding: chunked\r\n\r\nbb8\r\n" + body + b"\r\n0\r\n\r\n")
        else:
            client.sendall(head + b"Content-Length: 3000\r\n\r\n" + body)
        status, _, answer = one_answer(client)
        assert (status, answer["error"]["code"]) == (413, "request_too_large")
        client.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")  # the connection is in step
        assert one_answer(client)[0] == 200


def test_a_body_that_nobody_reads_is_cut_off_at_the_bound(make_site: MakeSite) -> None:
    site = make_site({"limits.max_body_bytes": 2000}, with_workers=False)
    with connect(site) as client:
        client.sendall(b"POST /no/such/path HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n")
        assert one_answer(client)[0] == 404
        with pytest.raises(OSError, match=r"reset|Broken pipe"):
            client.sendall(b"a" * 100_000_000)


# -- number


@pytest.mark.long
def test_connections_beyond_the_bound_are_refused_and_room_comes_back(make_site: MakeSite) -> None:
    site = make_site({"limits.max_connections": 3}, with_workers=False)
    wait_until(lambda: num_connections(site), "0 connections", wanted=lambda num: num == 0)
    held = [connect(site) for _ in range(3)]
    wait_until(lambda: num_connections(site), "3 connections", wanted=lambda num: num == 3)
    with connect(site) as client:
        status, headers, error = refusal(all_of(client))
    assert (status, error["code"], headers["retry-after"]) == (503, "overloaded", "1")
    held.pop().close()
    wait_until(lambda: num_connections(site), "2 connections", wanted=lambda num: num == 2)
    with connect(site) as client:
        client.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        assert one_answer(client)[0] == 200
    for client in held:
        client.close()


def num_connections(site: Site) -> int:
    """Open connections at the router's end, by the kernel's table: this process holds both ends."""
    port = int(site.url.rsplit(":", 1)[1])
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in table.readlines()[1:]]
    return sum(row[1].endswith(f":{port:04X}") and row[3] == "01" for row in rows)


def test_pipelined_requests_are_answered_in_order(make_site: MakeSite) -> None:
    site = make_site()
    with connect(site) as client:
        client.sendall(b"".join(post(BODY.replace(b'"max_tokens": 2', b'"max_tokens": %d' % n)) for n in range(1, 6)))
        answers = [one_answer(client) for _ in range(5)]
    assert [answer[2]["usage"]["completion_tokens"] for answer in answers] == [1, 2, 3, 4, 5]


@pytest.mark.long
def test_a_flood_of_pipelined_requests_waits_in_the_clients_buffers(make_site: MakeSite) -> None:
    site = make_site()
    site.decode.held_back.clear()
    with connect(site) as client:
        client.sendall(post())
        site.decode.wait_for("attach")
        client.settimeout(0.3)
        flood = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n" * 1_000_000  # far more than the kernel's buffers take
        with pytest.raises(TimeoutError):
            client.sendall(flood)
        site.decode.held_back.set()
        client.settimeout(5)
        assert one_answer(client)[0] == 200


# -- the server alone


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, **times_s: float) -> AsyncIterator[int]:
    listener = listen("127.0.0.1", 0)
    server = HttpServer(app, LimitsConfig(), **times_s)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        server.stop()
        await task


async def _answer(scope: Scope, receive: Receive, send: Send, body: bytes = b"{}") -> None:
    length = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": length})
    await send({"type": "http.response.body", "body": body})


@pytest.mark.long
async def test_requests_that_come_together_have_come_at_the_same_time() -> None:
    """Each waits until those before it are served: that is part of its time."""
    arrived_s, served_s = [], []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        arrived_s.append(scope["state"][ARRIVED])
        served_s.append(time.monotonic())
        time.sleep(0.05)  # noqa: ASYNC251 - as what is computed for a request does: the loop stands still
        await _answer(scope, receive, send)

    async with serving(app) as port:
        pairs = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        for number in range(2):
            came_s = time.monotonic()
            for _, writer in pairs:
                writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")  # at once, before the loop looks
            for reader, _ in pairs:
                assert b"200" in await reader.readuntil(b"{}")
            assert served_s[-1] - served_s[-4] >= 0.15
            assert len(arrived_s) == 4 * (number + 1)
            assert all(came_s - TICK_S - 0.002 <= arrived < came_s + 0.04 for arrived in arrived_s[-4:])
        for _, writer in pairs:
            writer.close()


@pytest.mark.long
async def test_what_comes_while_the_loop_is_busy_has_come_then() -> None:
    arrived_s = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        arrived_s.append(scope["state"][ARRIVED])
        await _answer(scope, receive, send)

    async with serving(app) as port:
        for is_open in (False, True):  # the second on a connection that has served
            if not is_open:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            came_s = time.monotonic()
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            time.sleep(0.1)  # noqa: ASYNC251 - the loop stands still
            assert b"200" in await reader.readuntil(b"{}")
            assert arrived_s.pop() == pytest.approx(came_s, abs=2 * TICK_S + 0.005)
        writer.close()


@pytest.mark.long
async def test_a_head_that_comes_with_the_end_of_the_body_before_it_has_come_then() -> None:
    arrived_s = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        arrived_s.append(scope["state"][ARRIVED])
        await _answer(scope, receive, send)

    async with serving(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        came_s = []
        begun = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nab"
        for part in (begun, b"cdGET / HTTP/1.1\r\nHost: x\r\n\r\n"):
            came_s.append(time.monotonic())
            writer.write(part)
            assert b"200" in await reader.readuntil(b"{}")
            await asyncio.sleep(0.05)
        assert all(came - TICK_S - 0.002 <= arrived for came, arrived in zip(came_s, arrived_s, strict=True))
        writer.close()


@pytest.mark.long
async def test_an_idle_connection_is_closed() -> None:
    async with serving(_answer, keep_alive_s=0.3) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            await asyncio.sleep(0.15)
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200" in await reader.readuntil(b"{}")
        began_s = time.monotonic()
        assert await reader.read() == b""
        assert 0.25 < time.monotonic() - began_s < 2
        writer.close()


@pytest.mark.long
async def test_a_client_that_reads_nothing_of_its_answer_is_cut_off() -> None:
    ended = asyncio.Event()

    async def large(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(1000):
                await send({"type": "http.response.body", "body": b"a" * 65536, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            ended.set()

    async with serving(large, stalled_s=0.3) as port:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
        await asyncio.get_running_loop().sock_sendall(client, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(3):
            await ended.wait()
        client.close()


@pytest.mark.long
async def test_a_client_that_reads_on_gets_all_of_a_large_answer_however_long_it_takes() -> None:
    content = b"a" * (16 << 20)

    async def large(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": content})

    async with serving(large, stalled_s=0.3) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        began_s, num_read = time.monotonic(), 0
        async with asyncio.timeout(LONG_S):
            while part := await reader.read(1 << 17):
                num_read += len(part)
                await asyncio.sleep(0.008)
        assert num_read > len(content)
        assert time.monotonic() - began_s > 3 * 0.3
        writer.close()
