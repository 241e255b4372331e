"""Routers of different hosts: each has a port of its own, and all know of each other's requests and turns."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from unittest.mock import Mock

import httpx
import orjson
import pytest

from router.control import RouterControl, serve_control
from router.observe.feed import Seen, part_of
from router.observe.recorder import Recorder
from router.observe.trace import Trace
from router.server import RouterServer
from router.workers.other_routers import Answer, OtherRouters
from tandem.core import config as configuration
from tandem.rpc.guard import RoleGuard
from tandem.rpc.v1.control_pb2 import OtherRouter
from tests.support.scripted_pool import ScriptedPool
from tests.support.scripted_worker import ScriptedDecode, ScriptedPrefill
from tests.support.waiting import LONG_S, wait_until

BODY = {"prompt": "x", "max_tokens": 3}


class Host:
    """A router with a port of its own, as on a host of its own."""

    def __init__(self, name: str, checkpoint: Path) -> None:
        config = configuration.load(None, {"transport.lease_s": 30.0, "model.served_names": ["toy"]})
        self.name, self.server = name, RouterServer(config, model_dir=checkpoint, name=name)
        info = self.server.start()
        self.url, self.pool = info.http_url, ScriptedPool(info.control_address)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=30)

    def serve_one(self, **headers: str) -> str:
        """The request's id."""
        answer = httpx.post(f"{self.url}/v1/completions", json={"model": "toy", **BODY}, headers=headers, timeout=30)
        return str(answer.raise_for_status().headers["x-request-id"])

    def close(self) -> None:
        self.server.stop(drain_s=0.2)
        self.pool.workers = []
        self.pool.close()


@pytest.fixture
def hosts(checkpoint: Path) -> Iterator[list[Host]]:
    with ExitStack() as stack:
        workers = [ScriptedPrefill("prefill-0"), ScriptedDecode("decode-0")]
        for worker in workers:
            stack.callback(worker.kill)
        hosts = [Host(f"router-{number}", checkpoint) for number in range(3)]
        for host in hosts:
            stack.callback(host.close)
            host.pool.workers = list(workers)
            host.pool.num_routers = len(hosts)
            host.pool.others = [o.pool.as_other(o.name, shares_port=False) for o in hosts if o is not host]
            host.pool.push()
        for host in hosts:
            wait_until(lambda: host.get("/health").status_code == 200, f"health of {host.name}")  # noqa: B023 - at once
        yield hosts


def test_whichever_is_asked_knows_the_requests_of_all(hosts: list[Host]) -> None:
    ids = {host.name: host.serve_one() for host in hosts}
    for asked in hosts:
        for name, request_id in ids.items():
            (found,) = asked.get(f"/v1/requests/{request_id}").raise_for_status().json()["data"]
            assert found["router"] == name
        shown, ended = set[str](), set[str]()
        deadline_s = time.monotonic() + LONG_S
        with httpx.stream("GET", f"{asked.url}/v1/events", timeout=30) as events:
            for line in events.iter_lines():  # who answers late is in a later event
                if line.startswith("data: "):
                    told = json.loads(line[6:])
                    shown |= {router["router"] for router in told["routers"]}
                    ended |= {row["id"].partition("#")[0] for row in told["ended"]}
                if (shown, ended) == (set(ids), set(ids.values())):
                    break
                assert time.monotonic() < deadline_s, (shown, ended)


def test_others_know_an_id_that_begins_as_that_of_a_body(hosts: list[Host]) -> None:
    first, second, _ = hosts
    request_id = second.serve_one(**{"x-request-id": "resp_42"})
    for name in (request_id, f"cmpl-{request_id}"):
        (found,) = first.get(f"/v1/requests/{name}").raise_for_status().json()["data"]
        assert (found["router"], request_id) == (second.name, "resp_42")


def test_each_is_scraped_for_itself(hosts: list[Host]) -> None:
    """Prometheus asks each port: what two of them told would count twice."""
    for host in hosts:
        samples = host.get("/metrics").text.splitlines()
        answering = [line for line in samples if line.startswith("tandem_router_answers{")]
        assert answering == [f'tandem_router_answers{{router="{host.name}"}} 1']


@pytest.mark.long
def test_one_that_has_ended_and_is_not_known_to_have_is_left_out(hosts: list[Host]) -> None:
    first, second, ended = hosts
    request_id = second.serve_one()
    ended.server.stop(drain_s=0.2)
    assert first.get(f"/v1/requests/{request_id}").status_code == 200
    assert first.get("/v1/requests/nobody").status_code == 404
    assert first.serve_one()


@asynccontextmanager
async def beside(host: Host, answer: Answer) -> AsyncIterator[None]:
    """The one other router that `host` knows of answers everything so."""
    others = OtherRouters()
    for kind in ("live part", "request"):
        others.on_question(kind, answer)
    control = RouterControl(None, others, Mock(), Mock(), Mock())  # type: ignore[arg-type]
    server, port = await serve_control(control, RoleGuard(), "127.0.0.1", 0)
    host.pool.others = [OtherRouter(name="mine", control_address=f"127.0.0.1:{port}")]
    await asyncio.to_thread(host.pool.push)
    yield
    await server.stop(0)


async def test_what_a_page_was_told_is_not_told_again_by_one_that_missed_a_question(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.http.live._EVERY_S", 0.01)
    recorder, num_asked = Recorder(), 0

    def end_one(number: int) -> None:
        recorder.begin(Trace(f"r#{number}", "r", 0.0, 1, 1))
        recorder.end([f"r#{number}"], 0.5)

    def tell(question: bytes) -> bytes:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 2:
            raise ValueError
        if num_asked == 4:
            end_one(2)
        seen = Seen(*json.loads(question)["seen"].get("mine", ()))
        return orjson.dumps(part_of(recorder, "mine", seen, 1.0), option=orjson.OPT_NON_STR_KEYS)

    end_one(1)
    ended: list[str] = []
    async with (
        beside(hosts[0], tell),
        httpx.AsyncClient(base_url=hosts[0].url, timeout=30) as client,
        client.stream("GET", "/v1/events") as events,
    ):
        async for line in events.aiter_lines():
            if line.startswith("data: "):
                ended += [row["id"] for row in json.loads(line[6:])["ended"]]
            if "r#2" in ended:
                break
    assert ended == ["r#1", "r#2"]


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b'{"router": "mine"}', b"null"])
async def test_one_that_answers_otherwise_takes_nothing_from_the_others(hosts: list[Host], text: bytes) -> None:
    async with beside(hosts[0], lambda _: text), httpx.AsyncClient(base_url=hosts[0].url, timeout=30) as client:
        assert (await client.get("/v1/requests/nobody")).status_code == 404
        async with client.stream("GET", "/v1/events") as events:
            line = await anext(line async for line in events.aiter_lines() if line.startswith("data: "))
    assert [router["router"] for router in json.loads(line[6:])["routers"]] == ["router-0"]


def test_one_that_is_no_member_any_more_is_not_asked(hosts: list[Host]) -> None:
    first, second, _ = hosts
    request_id = second.serve_one()
    assert first.get(f"/v1/requests/{request_id}").status_code == 200
    first.pool.others = []
    first.pool.push()
    assert first.get(f"/v1/requests/{request_id}").status_code == 404
