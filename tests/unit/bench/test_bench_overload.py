"""The overload measurement, against servers whose capacity and manners are known."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest
from bench_peers import END, FIRST, REFUSED, STREAM, chunk, request, serving

from tandem import cli
from tandem.bench.load.http_client import BROKEN, NO_SOCKET, UNFINISHED, LoadClient, Outcome
from tandem.bench.load.stream_log import StreamLog
from tandem.bench.overload import Phase, Plan, measure, seconds_until_normal


class Router:
    """Serves `num_places` at a time, each for `service_s`; refuses the others."""

    def __init__(self, num_places: int, service_s: float) -> None:
        self.num_places, self.service_s = num_places, service_s
        self.num_under_way = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await self.answer(await request(reader), writer)
        writer.close()

    async def answer(self, head: bytes, writer: asyncio.StreamWriter) -> None:
        if head.startswith(b"GET"):
            body = json.dumps({"data": [{"id": "toy"}]}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        elif self.num_under_way >= self.num_places:
            writer.write(REFUSED)
        else:
            self.num_under_way += 1
            writer.write(STREAM + FIRST)
            await asyncio.sleep(self.service_s)
            writer.write(END)
            self.num_under_way -= 1


@pytest.mark.long
async def test_capacity_is_found_and_the_overload_told() -> None:
    router = Router(num_places=8, service_s=0.05)  # at most 160 a second; without refusals far fewer
    plan = Plan(probe_s=0.6, num_probes=6, normal_s=0.6, overload_s=1.0, overload_factor=10, recovery_s=3.0)
    async with serving(router) as url:
        report = await measure(url, plan)
    assert 5 < report["capacity_per_s"] < 160
    assert report["normal"]["num_by_status"].keys() <= {"200", "429"}
    overload = report["overload"]
    assert overload["num_by_status"]["429"] > overload["num_by_status"]["200"] > 20
    assert overload["retry_after_s"] == {"7": overload["num_by_status"]["429"]}
    assert 0.05 < overload["e2e_s"]["p50"] < 0.5
    assert overload["ttft_s"]["p50"] < overload["e2e_s"]["p50"]
    assert report["latency_ratio"]["e2e_s"] < 3
    assert report["generator"]["rss_max_mib"] > 0
    assert 0 < report["generator"]["cpu_share"] < 2
    json.dumps(report)


async def outcomes(url: str, num: int, max_sockets: int = 10) -> list[Outcome]:
    client, found = LoadClient(url, max_sockets=max_sockets), list[Outcome]()
    for _ in range(num):
        client.send(client.message("POST", "/v1/completions", b"{}"), found.append)
    await client.wait_none_under_way(0.5)
    client.close()
    return found


async def test_requests_beyond_the_sockets_are_not_sent() -> None:
    async with serving(Router(100, 0.05)) as url:
        found = await outcomes(url, 5, max_sockets=3)
    assert sorted(outcome.status for outcome in found) == [NO_SOCKET, NO_SOCKET, 200, 200, 200]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (STREAM + FIRST + END, 200),
        (STREAM + FIRST + b"0\r\n\r\n", UNFINISHED),
        (STREAM + chunk(b'data: {"error": {"message": "out of pages"}}\n\n') + END, UNFINISHED),
        (STREAM + FIRST, BROKEN),
        (b"HTTP/1.1 200 OK\r\nContent-Le", BROKEN),
        (b"", BROKEN),
        (REFUSED, 429),
    ],
)
@pytest.mark.parametrize("is_trickling", [False, True])
async def test_every_end_of_an_answer_is_told_apart(sent: bytes, status: int, is_trickling: bool) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        for n in range(0, len(sent), 1 if is_trickling else 1000):
            writer.write(sent[n : n + (1 if is_trickling else 1000)])
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    async with serving(handler) as url:
        (outcome,) = await outcomes(url, 1)
    assert outcome.status == status
    assert outcome.retry_after_s == (7 if status == 429 else None)


@pytest.mark.long
async def test_an_answer_that_never_comes_is_broken_off() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with serving(silent) as url, asyncio.timeout(3):
        assert [outcome.status for outcome in await outcomes(url, 2)] == [BROKEN, BROKEN]


def test_where_nobody_listens_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "overload", "--url", "http://127.0.0.1:9"]) == 1
    assert "nobody answers at http://127.0.0.1:9" in capsys.readouterr().err


def phase(*seconds: tuple[int, float]) -> Phase:
    """For each second ten outcomes of this status and latency."""
    found = Phase(10.0, 100.0)
    for number, (status, e2e_s) in enumerate(seconds):
        for tenth in range(10):
            sent_s = 100.0 + number + tenth / 10
            stream = StreamLog(event_s=[sent_s + e2e_s / 2])
            found.outcomes.append(Outcome(sent_s, status, sent_s + e2e_s, stream))
    return found


def test_normal_again_needs_two_good_seconds_in_a_row() -> None:
    normal = phase((200, 0.1), (200, 0.1), (200, 0.1))
    good, slow, refused, last = (200, 0.1), (200, 0.5), (429, 0.1), (200, 0.1)
    assert seconds_until_normal(phase(good, good, last), normal) == 0.0
    assert seconds_until_normal(phase(slow, good, refused, good, good, last), normal) == 3.0
    assert seconds_until_normal(phase(slow, good, slow, good, last), normal) is None
