"""Several routers of one `tandem serve` on one port, while requests run: killed, stopped, drained, scaled."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import httpx
import psutil
import pytest
from serving import Load, Serve, Stream

from tests.support.stopping import stop_still
from tests.support.waiting import SLACK

pytestmark = pytest.mark.timeout(300)

@pytest.fixture(autouse=True)
def _two_are_there(serve: Serve) -> None:
    """Before each test, whatever the one before has left."""
    if len(routers(serve.status())) != 2:
        assert serve.tandem("scale", "--routers", "2").returncode == 0
    serve.until(lambda cluster: cluster.get("settled", False))


def routers(cluster: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {router["name"]: router for router in cluster["routers"]}


def process_of(cluster: dict[str, Any], name: str) -> psutil.Process:
    return psutil.Process(routers(cluster)[name]["pid"])


def until_replaced(serve: Serve, name: str, incarnation: str) -> dict[str, Any]:
    return serve.until(
        lambda c: c.get("settled", False) and name in routers(c) and routers(c)[name]["incarnation"] != incarnation
    )


def test_both_are_shown_and_one_scrape_has_both(serve: Serve) -> None:
    cluster = serve.status()
    assert {router["state"] for router in cluster["routers"]} == {"ready"}
    assert {router["url"] for router in cluster["routers"]} == {serve.url}
    assert len({router["pid"] for router in cluster["routers"]}) == 2
    assert cluster["router"] == cluster["routers"][0]
    said = serve.tandem("status").stdout
    assert "routers 2/2 ready" in said
    assert re.search(rf"^router-1 +ready +\d+ .*{serve.url}", said, re.MULTILINE)
    answers = re.findall(r'tandem_router_answers{router="(.*?)"} 1', httpx.get(f"{serve.url}/metrics").text)
    assert sorted(answers) == sorted(routers(cluster))


def test_both_give_the_same_json_by_a_schema(serve: Serve) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "legs": {"enum": [2, 4]}},
        "required": ["name", "legs"],
        "additionalProperties": False,
    }
    body = {
        "model": "tandem-tiny", "prompt": "An animal:", "max_tokens": 60, "temperature": 0.8, "seed": 4,
        "response_format": {"type": "json_schema", "json_schema": {"name": "animal", "schema": schema}},
    }  # fmt: skip
    # Each over a connection of its own, so that both routers get some.
    answers = [httpx.post(f"{serve.url}/v1/completions", json=body, timeout=60) for _ in range(16)]
    assert {answer.status_code for answer in answers} == {200}, answers[0].text
    texts = {answer.json()["choices"][0]["text"] for answer in answers}
    assert len(texts) == 1
    assert set(json.loads(texts.pop())) == {"name", "legs"}
    page = httpx.get(f"{serve.url}/metrics").text
    compiled = re.findall(r'tandem_grammar_compile_seconds_count{router="(.*?)"} 1', page)
    assert sorted(compiled) == sorted(routers(serve.status()))


def test_a_killed_router_breaks_its_own_requests_only_and_is_started_again(serve: Serve) -> None:
    before = serve.status()
    name = sorted(routers(before))[-1]
    with Load(serve, num_clients=4) as load:
        load.wait_for(8)
        process_of(before, name).kill()
        since, killed_at = len(load.errors), time.monotonic()
        load.wait_for(len(load.responses) + 20)
        until_replaced(serve, name, routers(before)[name]["incarnation"])
        load.wait_for(len(load.responses) + 8)
    assert all(isinstance(error, httpx.RemoteProtocolError | httpx.ReadError) for error in load.errors), load.errors
    assert len(load.errors) - since <= 4, "each client had one request under way"
    assert {r.status_code for r in load.responses} == {200}
    assert time.monotonic() - killed_at < SLACK * 30


def test_a_stopped_router_holds_up_nobody_else_until_it_is_killed(serve: Serve) -> None:
    before = serve.status()
    name = sorted(routers(before))[-1]
    stopped = process_of(before, name)
    stop_still(stopped.pid)  # what it accepts before that stays with it
    for _ in range(10):
        assert serve.complete(timeout_s=SLACK * 5.0).status_code == 200
    after = until_replaced(serve, name, routers(before)[name]["incarnation"])
    assert not stopped.is_running() or stopped.status() == psutil.STATUS_ZOMBIE
    assert "it answered no heartbeat" in routers(after)[name]["last_error"]["message"]


def test_a_drained_router_is_replaced_and_no_request_fails(serve: Serve) -> None:
    name = sorted(routers(serve.status()))[0]
    with Load(serve, num_clients=4) as load:
        load.wait_for(4)
        streams = [Stream(serve, max_tokens=150) for _ in range(4)]
        for stream in streams:
            stream.wait_for_token()
        run = serve.tandem("drain", name)
        load.wait_for(len(load.responses) + 8)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"Done: {name} has been replaced" in run.stdout
    for stream in streams:
        stream.join()
        assert (stream.error, stream.finish) == (None, "length")
    assert not load.failures
    assert name not in routers(serve.status())


def test_from_one_to_three_and_back_no_request_fails(serve: Serve) -> None:
    with Load(serve, num_clients=2) as load:
        for number in (1, 3, 1):
            run = serve.tandem("scale", "--routers", str(number))
            assert run.returncode == 0, run.stdout + run.stderr
            assert len(routers(serve.status())) == number
            load.wait_for(len(load.responses) + 8)
    assert not load.failures
