"""The load driver against peers with odd manners."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from bench_peers import (
    DONE,
    END,
    LAST,
    REFUSED,
    STREAM,
    Peer,
    chunk,
    event,
    pieces,
    serving,
    usage,
    well_behaved,
    whole,
)

from tandem.bench import server
from tandem.bench.commands import in_loop
from tandem.bench.load.drive import Load, LoadDriver
from tandem.bench.load.http_client import LoadClient
from tandem.bench.load.records import RequestRecord
from tandem.bench.load.workload import body_of, fixed_lengths, make_jobs
from tandem.bench.session import Session, Shape, Target, Workload
from tandem.core.errors import ConfigError, TandemError

pytestmark = pytest.mark.long

NUM_INPUT, NUM_OUTPUT = 4, 3
PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"  # up to the end of the connection


def session(url: str, num: int = 1, *, num_warm_up: int = 0, timeout_s: float = 5.0, **target: Any) -> Session:
    entries = fixed_lengths(num, NUM_INPUT, NUM_OUTPUT)
    return Session(
        Target(url, "toy", timeout_s=timeout_s, **target), Workload(entries, range(100, 200), num_warm_up=num_warm_up)
    )


async def one(answer: Callable[..., Any], **options: Any) -> RequestRecord:
    """The record of one request to a peer that answers so."""
    async with serving(Peer(answer)) as url:
        load = await session(url, **options).measure(Shape(concurrency=1))
    (record,) = load.records
    return record


def tokens(num: int, **last: Any) -> bytes:
    return b"".join(chunk(event(f"{n}")) for n in range(num - 1)) + chunk(event("z", **last))


ODD_BUT_WELL = {
    "no usage, but a limit": ((STREAM, tokens(3, finish_reason="length"), END), 3, 3, "limit"),
    "neither usage nor limit": ((STREAM, tokens(2, finish_reason="stop"), END), 2, 2, "events"),
    "several tokens in an event": ((STREAM, tokens(2), chunk(usage(3)), END), 2, 3, "usage"),
    "no space after data": ((STREAM, chunk(event().replace(b"data: ", b"data:")), chunk(usage(1)), END), 1, 1, "usage"),
    "comments": ((STREAM, chunk(b": ping\n\n"), tokens(3), chunk(b":\n\n"), chunk(usage(3)), END), 3, 3, "usage"),
    "events in one chunk": ((STREAM, chunk(event() * 3 + usage(3) + DONE), LAST), 3, 3, "usage"),
    "an event in several chunks": (
        (STREAM, chunk(event()[:9]), chunk(event()[9:]), chunk(usage(1)), END), 1, 1, "usage"
    ),
    "lines end in CRLF": ((STREAM, chunk((event() + usage(1) + DONE).replace(b"\n", b"\r\n")), LAST), 1, 1, "usage"),
    "no DONE, but a reason": ((STREAM, tokens(2, finish_reason="length"), chunk(usage(2)), LAST), 2, 2, "usage"),
    "the end of the connection": ((PLAIN, event() * 2, usage(2), DONE), 2, 2, "usage"),
    "usage with each event": (
        (STREAM, chunk(event(usage={"prompt_tokens": 4, "completion_tokens": 1})),
         chunk(event(usage={"prompt_tokens": 4, "completion_tokens": 2})), END), 2, 2, "usage"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("contents", "num_events", "num_output", "source"), ODD_BUT_WELL.values(), ids=ODD_BUT_WELL)
async def test_odd_peers_are_measured(
    contents: tuple[bytes, ...], num_events: int, num_output: int, source: str
) -> None:
    record = await one(pieces(*contents, gap_s=0.001))
    assert record.failure is None, record.message
    assert (len(record.event_s), record.num_output, record.token_source) == (num_events, num_output, source)
    assert 0 < record.ttft_s <= record.e2e_s <= record.ended_s


def answer_at_once(listener: socket.socket, num: int) -> None:
    connection, _ = listener.accept()
    for _ in range(num):
        connection.recv(1 << 16)
        connection.sendall(STREAM + tokens(2) + chunk(usage(2)) + END)
    connection.close()


async def test_what_the_generator_takes_for_itself_is_known() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = threading.Thread(target=answer_at_once, args=(listener, 2))
        peer.start()
        client = LoadClient(f"http://127.0.0.1:{listener.getsockname()[1]}", max_sockets=1)
        for _ in range(2):  # the connection is to be opened; it is open
            asking = asyncio.create_task(client.ask("POST", "/", b"{}"))
            await asyncio.sleep(0)
            time.sleep(0.1)  # noqa: ASYNC251 - the loop stands still
            outcome = await asking
            assert outcome.status == 200
            assert 0.08 < outcome.own_s <= outcome.e2e_s
        client.close()
        peer.join()


ERROR = b'data: {"error": {"message": "out of pages", "code": "overloaded"}}\n\n'
FAILING = {
    "error in mid-stream": ((STREAM, tokens(2), chunk(ERROR), END), "unfinished", "out of pages"),
    "early close": ((STREAM, tokens(2)), "broken", "closed the connection"),
    "early close of a body without bounds": ((PLAIN, event()), "unfinished", "no end"),
    "early close in a chunk": ((STREAM, tokens(2)[:-4]), "broken", "closed the connection"),
    "no answer": ((b"",), "broken", "closed the connection"),
    "an end without an end": ((STREAM, tokens(2), LAST), "unfinished", "no end"),
    "nothing but the end": ((STREAM, END), "no_token", "without a token"),
    "no stream": ((whole("200 OK", {"choices": [{"text": "abc"}]}), LAST), "no_stream", "no text/event-stream"),
    "refused": ((REFUSED,), "http_429", ""),
    "refused with a word": (
        (whole("400 Bad Request", {"error": {"message": "too long"}}),), "http_400", "too long"
    ),
    "a proxy's page": (
        (b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 6\r\n\r\n<html>",), "http_502", "<html>"
    ),
    "another protocol": ((b"220 smtp ready\r\n\r\n",), "broken", "no HTTP/1.1"),
    "garbage for JSON": ((STREAM, tokens(1), chunk(b"data: {oops\n\n"), END), "unfinished", "no JSON object: {oops"),
}  # fmt: skip


@pytest.mark.parametrize(("contents", "kind", "message"), FAILING.values(), ids=FAILING)
async def test_failures_have_a_kind_and_no_latency(contents: tuple[bytes, ...], kind: str, message: str) -> None:
    record = await one(pieces(*contents))
    assert record.failure == kind
    assert message in record.message
    assert (record.event_s, record.num_output) == ((), 0)


async def test_an_answer_that_stalls_times_out() -> None:
    async def stalls(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        writer.write(STREAM + tokens(1))
        await asyncio.sleep(30)
        return False

    began_s = time.monotonic()
    record = await one(stalls, timeout_s=0.2)
    assert record.failure == "timeout"
    assert 0.2 <= record.ended_s < time.monotonic() - began_s + 1


async def test_each_request_on_a_connection_has_its_own_timeout() -> None:
    async def slow(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        await asyncio.sleep(0.3)
        return await well_behaved(body, writer)

    async with serving(Peer(slow)) as url:
        load = await session(url, 6, timeout_s=1.5).measure(Shape(concurrency=1))
    assert [record.failure for record in load.records] == [None] * 6
    assert load.duration_s > 1.5


async def test_latencies_are_those_that_the_peer_shows() -> None:
    async def paced(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        writer.write(STREAM)
        for gap_s, content in ((0.2, event()), (0.1, event()), (0.3, event()), (1.5, usage(3) + DONE)):
            await asyncio.sleep(gap_s)
            writer.write(chunk(content))
        writer.write(LAST)
        return True

    record = await one(paced)
    # A busy machine makes them longer, never shorter.
    first, second = record.itl_s
    assert 0.19 < record.ttft_s < 0.9
    assert 0.09 < first < 0.9
    assert 0.29 < second < 1.1
    assert record.e2e_s < 2.1 < record.ended_s - record.sent_s  # the usage that comes later is no token
    assert record.tpot_s == pytest.approx((first + second) / 2)


async def test_nobody_there_is_told_from_a_broken_answer() -> None:
    load = await session("http://127.0.0.1:9", 2).measure(Shape(concurrency=2))
    assert [record.failure for record in load.records] == ["unreachable", "unreachable"]


@pytest.mark.parametrize("host", ["a..b", "x" * 64])
def test_a_name_that_no_host_can_have_is_nobody(host: str) -> None:
    """The resolver of the command's own loop raises UnicodeError."""
    with pytest.raises(ConfigError, match=f"nobody answers at http://{host}:80: .*; name a running server with --url"):
        in_loop(asyncio.wait_for(session(f"http://{host}:80").open(), 10.0))


async def test_a_closed_loop_keeps_to_its_concurrency() -> None:
    seen: list[int] = []

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        seen.append(peer.num_under_way)
        return await well_behaved(body, writer)

    peer = Peer(answer)
    async with serving(peer) as url:
        load = await session(url, 20).measure(Shape(concurrency=3))
    assert max(seen) == 3
    assert [record.number for record in load.records] == list(range(20))
    assert all(record.is_good and record.num_input == NUM_INPUT for record in load.records)
    assert len({record.digest for record in load.records}) == 1
    assert len({tuple(body["prompt"]) for body in peer.bodies}) == 20
    assert 0 < load.cpu_share < 2
    assert not load.is_partial


async def test_an_open_loop_waits_for_nobody() -> None:
    release = asyncio.Event()

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        if peer.num_under_way == 10:
            release.set()
        await release.wait()  # until all ten are there
        return await well_behaved(body, writer)

    peer = Peer(answer)
    async with serving(peer) as url, asyncio.timeout(10):
        load = await session(url, 10).measure(Shape(rate=50.0))
    assert all(record.is_good for record in load.records)
    for record in load.records:
        assert record.planned_s is not None
        assert 0 <= record.sent_s - record.planned_s < 1.0
    assert load.records[-1].planned_s == pytest.approx(0.2)


async def test_requests_beyond_the_sockets_are_counted() -> None:
    async with serving(Peer(well_behaved)) as url:
        load = await session(url, 5, max_sockets=2).measure(Shape(rate=1e5))
    assert sorted(record.failure or "" for record in load.records) == ["", "", *["no_socket"] * 3]


async def test_a_watcher_may_end_the_run() -> None:
    async def hangs(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        if len(peer.bodies) > 1:
            await asyncio.sleep(30)
        return await well_behaved(body, writer)

    peer = Peer(hangs)
    async with serving(peer) as url, asyncio.timeout(5):
        load = await session(url, 50).measure(Shape(concurrency=3), watch=lambda record: not record.is_good)
    assert load.is_partial
    assert sorted(record.failure or "" for record in load.records) == ["", "interrupted", "interrupted"]


async def test_a_url_may_end_in_v1_and_have_a_path() -> None:
    peer = Peer(well_behaved)
    async with serving(peer) as url:
        await session(f"{url}/proxy/v1/").open()
    assert [head.split(b" ")[1] for head in peer.heads] == [b"/proxy/v1/models", b"/proxy/v1/completions"]


async def test_the_api_key_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_API_KEY", "secret")
    peer = Peer(well_behaved)
    async with serving(peer) as url:
        await session(url).open()
    assert all(b"Authorization: Bearer secret" in head for head in peer.heads)


async def test_warming_up_sends_its_own_prompts_first() -> None:
    peer = Peer(well_behaved)
    async with serving(peer) as url:
        opened = session(url, 2, num_warm_up=3)
        await opened.open()
        assert len(peer.bodies) == 4  # one to try, three to warm up
        await opened.measure(Shape(concurrency=1))
    assert len({tuple(body["prompt"]) for body in peer.bodies[1:]}) == 5


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://127.0.0.1", "http://", "nonsense"])
async def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="no URL of a server"):
        await session(url).open()


async def test_a_first_request_that_fails_ends_it() -> None:
    refusing = pieces(whole("400 Bad Request", {"error": {"message": "prompt: must be a text"}}))
    async with serving(Peer(refusing)) as url:
        with pytest.raises(TandemError, match="prompt: must be a text"):
            await session(url).open()


async def test_a_server_that_refuses_ignore_eos_is_measured_without_it() -> None:
    async def strict(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        if "ignore_eos" in body:
            writer.write(whole("400 Bad Request", {"error": {"message": "Unrecognized request argument: ignore_eos"}}))
            return True
        return await well_behaved(body, writer)

    async with serving(peer := Peer(strict)) as url:
        with pytest.raises(TandemError, match="Unrecognized request argument"):
            await session(url).open()
        opened = session(url, num_warm_up=1, ignore_eos=False)
        await opened.open()
        assert (await opened.measure(Shape(concurrency=1))).records[0].is_good
    assert len(peer.bodies) == 4


def answering_after(delay_s: float) -> Peer:
    """A server that takes so long for each completion."""

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        await asyncio.sleep(delay_s)
        return await well_behaved(body, writer)

    return Peer(answer)


async def test_a_first_request_may_take_as_long_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_LIST_S", 0.2)
    async with serving(answering_after(0.5)) as url:
        await session(url).open()
        with pytest.raises(ConfigError) as told:
            await session(url, timeout_s=0.25).open()
    assert (told.value.key, told.value.message) == (
        "--timeout",
        f"{url}: no answer within 0.25 s to a first request for one token; give it longer with --timeout",
    )


async def test_a_server_that_lists_no_models_in_time_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    monkeypatch.setattr(server, "_LIST_S", 0.2)
    async with serving(silent) as url:
        for timeout_s, waited in ((5.0, "0.2"), (0.1, "0.1")):
            with pytest.raises(ConfigError, match=f"{url}/v1/models: no answer within {waited} s; is it busy"):
                await session(url, timeout_s=timeout_s).open()


async def test_a_warm_up_that_fails_ends_it() -> None:
    async def only_first(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        if body["max_tokens"] == 1:
            return await well_behaved(body, writer)
        writer.write(REFUSED)
        return True

    async with serving(Peer(only_first)) as url:
        with pytest.raises(TandemError, match="warm up failed"):
            await session(url, num_warm_up=1).open()


async def test_requests_longer_than_the_context_are_refused_before_they_are_sent() -> None:
    peer = Peer(well_behaved)
    peer.models = whole("200 OK", {"data": [{"id": "toy", "max_model_len": 6}]})
    async with serving(peer) as url:
        with pytest.raises(ConfigError, match="longer than the context of 6"):
            await session(url).open()


async def test_a_server_without_a_list_of_models_is_measured() -> None:
    peer = Peer(well_behaved)
    peer.models = whole("404 Not Found", {})
    async with serving(peer) as url:
        opened = session(url)
        await opened.open()
    assert opened.served.name == "toy"


async def test_a_trace_without_times_needs_a_shape() -> None:
    with pytest.raises(ConfigError, match="--rate or --concurrency"):
        await session("http://127.0.0.1:9").measure(Shape())


async def test_the_driver_reads_thousands_of_events_a_second() -> None:
    """Its price for an event; a bound so wide that only a defect can pass it."""
    num_events = 20_000

    async def flood(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        writer.write(STREAM)
        for _n in range(num_events // 100):
            writer.write(chunk(event("abc")) * 100)
            await writer.drain()
        writer.write(chunk(usage(num_events)) + END)
        return True

    async with serving(Peer(flood)) as url:
        client = LoadClient(url, max_sockets=1)
        jobs = make_jobs(fixed_lengths(1, 4, num_events), vocabulary=range(9), seed="1")
        driver = LoadDriver(client, jobs, [body_of(jobs[0], "toy", ignore_eos=True)])
        load: Load = await driver.closed_loop(1)
        client.close()
    assert load.records[0].num_output == len(load.records[0].event_s) == num_events
    assert load.cpu_s / num_events < 100e-6, "seconds for each event"
