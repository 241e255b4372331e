"""The live page's events and the way of single requests, over real HTTP with scripted workers."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from router.http.live import MAX_WATCHERS, Live
from router.observe.recorder import Recorder
from router.workers.other_routers import OtherRouters
from tandem.core.clock import VirtualClock
from tests.support.router_site import Site, in_background
from tests.support.scripted_worker import ScriptedDecode
from tests.support.waiting import wait_until

KEY = "k" * 20


def events(client: httpx.Client) -> Iterator[Any]:
    with client.stream("GET", "/v1/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith("data: "):
                yield json.loads(line[6:])


@pytest.mark.long
def test_a_page_is_told_what_was_and_then_what_is_new(site: Site) -> None:
    assert site.post(prompt="before", max_tokens=3).status_code == 200
    with site.http() as client:
        stream = events(client)
        first = next(stream)
        assert [row["state"] for row in first["ended"]] == ["finished"]
        assert first["ended"][0]["output_tokens"] == 3
        assert first["ended"][0]["ttft_s"] <= first["ended"][0]["age_s"]
        assert [w["id"] for w in first["cluster"]["decode"]] == ["decode-0"]
        site.decode.held_back.clear()
        under_way = in_background(site)
        site.decode.wait_for("reserve", 2)
        told = next(t for t in stream if t["running"])
        assert (told["running"][0]["decode"], told["running"][0]["prefill"]) == ("decode-0", "prefill-0")
        site.decode.held_back.set()
        assert under_way.result().status_code == 200
        ends = list(next(t for t in stream if t["ended"])["ended"])
        assert [row["id"] for row in ends] == [told["running"][0]["id"]]


def work_of(site: Site, request_id: str) -> list[dict[str, Any]]:
    """It may be told only after the end."""
    with site.http() as client:
        work: list[dict[str, Any]] = client.get(f"/v1/requests/{quote(request_id)}").json()["data"][0]["work"]
    return work


def test_of_many_workers_a_page_is_told_of_some_and_how_many_there_are(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.http.live.MAX_WORKERS", 3)
    site.add(*(ScriptedDecode(f"decode-{n}") for n in range(1, 6)))
    with site.http() as client:
        told = next(events(client))["cluster"]
    assert [worker["id"] for worker in told["decode"]] == ["decode-0", "decode-1", "decode-2"]
    assert told["num_workers"] == {"prefill": 1, "decode": 6}


def test_the_way_of_a_request_fills_its_time(site: Site) -> None:
    answer = site.post("/v1/completions", prompt=["one", "two"], max_tokens=4)
    request_id = answer.headers["x-request-id"]
    with site.http() as client:
        told = client.get(f"/v1/requests/{request_id}").json()["data"]
    assert len(told) == 2, "one for each prompt"
    for request in told:
        spans = request["spans"]
        assert [s["name"] for s in spans[:4]] == ["waits for router", "read", "tokenise", "queue"]
        assert spans[-1]["name"] == "send"
        assert sum(s["end_s"] - s["begin_s"] for s in spans) == pytest.approx(request["age_s"], abs=1e-4)
        assert [(a["prefill"], a["decode"], a["why"]) for a in request["attempts"]] == [
            ("prefill-0", "decode-0", "load")
        ]
        assert len(request["token_s"]) == request["output_tokens"] == 4
        look = partial(work_of, site, request["id"])
        done = wait_until(look, "what both workers did", 20, wanted=lambda told: len(told) == 2)
        work = {(part["worker"], part["name"]): part for part in done}
        assert set(work) == {("decode-0", "admission"), ("prefill-0", "commit")}
        commit = work["prefill-0", "commit"]
        assert commit["end_s"] - commit["begin_s"] == pytest.approx(0.001, abs=1e-5)


def test_an_attempt_that_failed_is_told_with_its_reason(site: Site) -> None:
    site.decode.held_back.clear()
    under_way = in_background(site)
    site.decode.wait_for("attach")
    site.add(ScriptedDecode("decode-1"))
    site.decode.kill()
    answer = under_way.result()
    with site.http() as client:
        (told,) = client.get(f"/v1/requests/{answer.headers['x-request-id']}").json()["data"]
    first, second = told["attempts"]
    assert first["ended"].startswith("died: ")
    assert (second["decode"], second["why"], second["ended"]) == ("decode-1", "kept", "")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}),
    ],
)
def test_a_request_is_found_by_the_id_of_its_answers_body(site: Site, path: str, body: dict[str, Any]) -> None:
    answer = site.post(path, **body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["id"] != answer.headers["x-request-id"]
    with site.http() as client:
        (told,) = client.get(f"/v1/requests/{answer.json()['id']}").json()["data"]
    assert told["id"].startswith(answer.headers["x-request-id"])


@pytest.mark.parametrize("given", ["resp_42", "msg_42", "cmpl-42", "chatcmpl-42"])
def test_an_id_of_the_client_may_begin_as_that_of_a_body(site: Site, given: str) -> None:
    with site.http() as client:
        ids = []
        for request_id in ("42", given):
            headers = {"x-request-id": request_id}
            answer = client.post("/v1/completions", json={"model": "toy", "prompt": "x"}, headers=headers)
            ids.append((answer.headers["x-request-id"], answer.json()["id"]))
        assert ids == [("42", "cmpl-42"), (given, f"cmpl-{given}")]
        for name in (given, f"cmpl-{given}"):
            (told,) = client.get(f"/v1/requests/{name}").json()["data"]
            assert told["id"].startswith(given)


@pytest.mark.long
def test_who_goes_away_is_told_as_cancelled(site: Site) -> None:
    site.decode.held_back.clear()
    with pytest.raises(httpx.ReadTimeout), site.http() as client:
        client.post(
            "/v1/completions",
            json={"model": "toy", "prompt": "x"},
            headers={"x-request-id": "mine"},
            timeout=0.5,
        )
    site.until_metric('tandem_requests_total{outcome="cancelled"}', 1)
    with site.http() as client:
        (told,) = client.get("/v1/requests/mine").json()["data"]
    assert told["state"] == "cancelled"
    assert "went away" in told["error"]


def test_an_id_that_nobody_has_is_said_to_be_unknown(site: Site) -> None:
    with site.http() as client:
        answer = client.get("/v1/requests/nobody's <b>")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "unknown_request"


@pytest.mark.long
def test_pages_beyond_the_bound_are_refused_and_places_come_free(site: Site) -> None:
    with site.http(limits=httpx.Limits(max_connections=None)) as client:
        streams = [events(client) for _ in range(MAX_WATCHERS)]
        for stream in streams:
            next(stream)
        refused = client.get("/v1/events")
        assert refused.status_code == 429
        assert "pages watch this router" in refused.json()["error"]["message"]
        for stream in streams:
            stream.close()  # type: ignore[attr-defined]

    def begun() -> bool:
        with site.http() as client, client.stream("GET", "/v1/events") as answer:
            return answer.status_code == 200 and any(line.startswith("data: ") for line in answer.iter_lines())

    wait_until(begun, "a place that comes free once the router has seen that a page has gone")


def test_a_router_that_leaves_ends_its_events(site: Site) -> None:
    with site.http() as client:
        stream = events(client)
        next(stream)
        site.server.stop(drain_s=5.0)
        assert list(stream) == []


def test_a_browser_gets_the_page_and_a_program_does_not(make_site: Callable[..., Site]) -> None:
    site = make_site(key_digests=frozenset({hashlib.sha256(KEY.encode()).digest()}), with_workers=False)
    with site.http() as client:
        page = client.get("/", headers={"accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
        assert page.status_code == 200
        assert page.headers["content-type"].startswith("text/html")
        assert client.get("/").status_code == 401, "what names the model needs a key"
        assert client.get("/v1/events").status_code == 401
        assert client.get("/v1/requests/x").status_code == 401
        headers = {"authorization": f"Bearer {KEY}"}
        assert "speaks the OpenAI API" in client.get("/", headers=headers).text
    script = re.findall(r"<script>(.*?)</script>", page.text, re.DOTALL)[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"'sha256-{digest}'" in page.headers["content-security-policy"]
    assert not re.search(r"(src|href)=.https?:", page.text), "it fetches nothing from elsewhere"
    assert "innerHTML" not in page.text


@pytest.mark.parametrize(("answer_s", "left_s"), [(0.25, 0.75), (1.0, 0.0)])
async def test_what_a_router_takes_that_does_not_answer_is_part_of_the_second(
    monkeypatch: pytest.MonkeyPatch, answer_s: float, left_s: float
) -> None:
    clock, waited = VirtualClock(), list[float]()

    async def ask(*_: Any) -> dict[str, None]:
        clock.advance(answer_s)
        return {"router-1": None}

    async def wait_for(over: Coroutine[Any, Any, Any], timeout_s: float) -> None:
        over.close()
        waited.append(timeout_s)
        raise TimeoutError

    others = OtherRouters()
    monkeypatch.setattr(OtherRouters, "__len__", lambda _: 1)
    monkeypatch.setattr(others, "ask", ask)
    monkeypatch.setattr(asyncio, "wait_for", wait_for)
    workers = SimpleNamespace(outline=lambda *_: {})
    num_settled = []
    tally = SimpleNamespace(settle=lambda: num_settled.append(1))
    context: Any = SimpleNamespace(clock=clock, workers=workers, recorder=Recorder(), tally=tally)
    told = Live(context, "toy", "router-0", others).events()
    for _ in range(3):
        await anext(told)
    await told.aclose()
    assert waited == pytest.approx([left_s] * 2)
    assert len(num_settled) == 3, "each part has all tokens that were given out before"
