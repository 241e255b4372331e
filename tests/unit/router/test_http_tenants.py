"""Tenants through HTTP: their salts, priorities, limits a minute and counts."""

from __future__ import annotations

import contextlib
import json
import select
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from router.lifecycle.tenants import MAX_NAMELESS, Tenants
from router.request.request import Request
from router.request.tenant import OTHER, Tenant
from tandem.core.clock import VirtualClock
from tandem.core.metrics import RouterMetrics
from tandem.core.protocols import OLDEST
from tandem.core.sampling import SamplingParams
from tests.support.router_site import Site
from tests.support.scripted_worker import WAIT_S
from tests.support.waiting import wait_until

MakeSite = Callable[..., Site]
SEARCH, ADS, LAB, POOR, CHATTY = (f"sk-{name}-0123456789" for name in ("search", "ads", "lab", "poor", "chatty"))
FILE = f"""tenants:
  - {{name: search, keys: [{SEARCH}], group: web, most_urgent_priority: -2}}
  - {{name: ads, keys: [{ADS}], group: web}}
  - {{name: lab, keys: [{LAB}]}}
  - {{name: poor, keys: [{POOR}], requests_per_minute: 2, tokens_per_minute: 60}}
  - {{name: chatty, keys: [{CHATTY}], tokens_per_minute: 60}}
"""


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.touch(mode=0o600)
    file.write_text(FILE)
    return file


@pytest.fixture
def site(make_site: MakeSite, keys: Path) -> Site:
    return make_site({"http.api_keys_file": str(keys)})


def asked(site: Site, key: str, **body: Any) -> httpx.Response:
    with site.http(headers={"Authorization": f"Bearer {key}"}) as client:
        return client.post("/v1/completions", json={"model": "toy", "prompt": "x", "max_tokens": 2, **body})


LARGEST_BYTES = 64 << 10
NUM_STALLED, NUM_HELD = 8, 4  # of all bodies, and of uploads, one tenant has half


@contextlib.contextmanager
def stalled(site: Site, key: str, path: str, kind: str, body: bytes) -> Iterator[None]:
    """This tenant sends eight bodies of the largest size but for what is missing of them. Inside, the router holds what
    it takes of them, and has refused the others."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Type: {kind}\r\n"
    host, port = site.url.removeprefix("http://").split(":")
    with contextlib.ExitStack() as opened:
        clients = [
            opened.enter_context(socket.create_connection((host, int(port)), timeout=WAIT_S))
            for _ in range(NUM_STALLED)
        ]
        for client in clients:
            client.sendall(f"{head}Content-Length: {LARGEST_BYTES}\r\n\r\n".encode() + body)
        answered = wait_until(
            lambda: select.select(clients, [], [], 0)[0],
            "the refusals",
            WAIT_S,
            wanted=lambda seen: len(seen) >= NUM_STALLED - NUM_HELD,
        )
        assert len(answered) < NUM_STALLED
        assert {client.recv(12) for client in answered} == {b"HTTP/1.1 429"}
        yield


@pytest.mark.long
def test_who_stalls_large_bodies_keeps_no_other_tenants_out(make_site: MakeSite, keys: Path) -> None:
    site = make_site({"http.api_keys_file": str(keys), "limits.max_body_bytes": LARGEST_BYTES})
    with stalled(site, SEARCH, "/v1/completions", "application/json", b" " * (LARGEST_BYTES - 1)):
        for key in (SEARCH, LAB):
            assert asked(site, key).status_code == 200
        padded = json.dumps({"model": "toy", "prompt": "x", "max_tokens": 2}).ljust(LARGEST_BYTES).encode()
        statuses = []
        for key in (SEARCH, LAB):
            with site.http(headers={"Authorization": f"Bearer {key}"}) as client:
                statuses.append(client.post("/v1/completions", content=padded).status_code)
    assert statuses == [429, 200]


def test_who_stalls_uploads_keeps_no_other_tenants_out(make_site: MakeSite, keys: Path, tmp_path: Path) -> None:
    site = make_site({"http.api_keys_file": str(keys), "batches.directory": str(tmp_path / "batches")})

    def upload(key: str) -> int:
        with site.http(headers={"Authorization": f"Bearer {key}"}) as client:
            sent = client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", b"{}")})
        return sent.status_code

    with stalled(site, SEARCH, "/v1/files", "multipart/form-data; boundary=x", b"--x\r\n"):
        assert [upload(key) for key in (SEARCH, LAB)] == [429, 200]


def salt(site: Site, key: str, **body: Any) -> str:
    """Under which both workers keep a prompt."""
    site.prefill.received.clear()
    site.decode.received.clear()
    assert asked(site, key, **body).status_code == 200
    found: str = site.prefill.wait_for("start").cache_salt
    assert found == site.decode.wait_for("reserve").cache_salt
    return found


def test_tenants_have_salts_of_their_own_and_groups_one(site: Site) -> None:
    search, ads, lab = (salt(site, key) for key in (SEARCH, ADS, LAB))
    assert search == ads != lab
    assert "" not in (search, lab)
    assert salt(site, LAB) == lab
    mine = salt(site, LAB, cache_salt="mine")
    assert mine not in (lab, "mine")
    assert salt(site, SEARCH, cache_salt="mine") != mine


@pytest.mark.long
def test_salts_are_the_same_at_every_router_of_a_cluster_and_differ_between_clusters(
    make_site: MakeSite, keys: Path
) -> None:
    def told(secret: bytes) -> str:
        site = make_site({"http.api_keys_file": str(keys)}, with_workers=False)
        site.pool.cache_secret = secret
        site.pool.add(site.prefill, site.decode)
        site.wait_ready()
        return salt(site, LAB)

    assert told(b"one cluster's") == told(b"one cluster's") != told(b"another's")


def test_only_who_may_goes_before_others(site: Site) -> None:
    assert asked(site, SEARCH, priority=-2).status_code == 200
    assert site.prefill.wait_for("start").priority == -2
    for key, priority in ((SEARCH, -3), (LAB, -1)):
        refused = asked(site, key, priority=priority)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "priority"
    assert asked(site, LAB, priority=3).status_code == 200


def test_a_limit_that_is_used_up_says_when_to_come_back(site: Site) -> None:
    first, second, third = (asked(site, POOR) for _ in range(3))
    assert [answer.status_code for answer in (first, second, third)] == [200, 200, 429]
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in (first, second, third)] == ["1", "0", "0"]
    assert int(first.headers["x-ratelimit-remaining-tokens"]) == 60 - first.json()["usage"]["prompt_tokens"]
    assert third.headers["x-ratelimit-limit-tokens"] == "60"
    assert third.headers["x-ratelimit-reset-requests"]
    assert 1 <= int(third.headers["retry-after"]) <= 30
    error = third.json()["error"]
    assert (error["code"], error["type"], error["retryable"]) == ("rate_limit_exceeded", "rate_limit_error", True)
    assert "poor may have 2 requests and 60 tokens a minute" in error["message"]
    assert "x-ratelimit-limit-requests" not in asked(site, LAB).headers, "others have none, and are served"


def test_a_long_answer_is_paid_before_the_next_request(site: Site) -> None:
    site.prefill.script = site.decode.script = lambda prompt, choice, index: 97
    assert asked(site, CHATTY, max_tokens=200).status_code == 200
    refused = asked(site, CHATTY)
    assert refused.status_code == 429
    assert refused.headers["x-ratelimit-remaining-tokens"] == "0"
    assert int(refused.headers["retry-after"]) > 30


def test_only_a_salt_that_a_client_asks_for_needs_workers_that_know_it() -> None:
    """While a cluster is upgraded, tenants are served by workers of the version before."""
    request = Request("r", (1,), SamplingParams(max_tokens=1), arrived_s=0.0, cache_salt="of the tenant")
    assert request.protocol == OLDEST
    assert replace(request, asks_for_salt=True).protocol == 3


def test_a_limit_is_divided_among_routers(make_site: MakeSite, keys: Path) -> None:
    site = make_site({"http.api_keys_file": str(keys)})
    site.pool.num_routers = 2
    site.pool.push()
    assert [asked(site, POOR).status_code for _ in range(2)] == [200, 429]


def test_each_tenant_is_counted(site: Site) -> None:
    answer = asked(site, LAB).json()
    for _ in range(3):
        asked(site, POOR)
    found = site.metrics(LAB)
    assert found['tandem_tenant_requests_total{outcome="finished",tenant="lab"}'] == 1
    assert found['tandem_tenant_requests_total{outcome="finished",tenant="poor"}'] == 2
    assert found['tandem_tenant_requests_total{outcome="rate_limited",tenant="poor"}'] == 1
    usage = answer["usage"]
    assert found['tandem_tenant_tokens_total{kind="prompt",tenant="lab"}'] == usage["prompt_tokens"]
    assert found['tandem_tenant_tokens_total{kind="output",tenant="lab"}'] == usage["completion_tokens"]


def test_keys_without_names_have_a_bounded_number_of_labels() -> None:
    metrics = RouterMetrics()
    tenants = Tenants(metrics, VirtualClock(), lambda: 1)
    for number in range(MAX_NAMELESS + 50):
        tenants.count_end(Tenant(f"key-{number}", str(number), str(number)), "finished")
    tenants.count_end(Tenant("named", "n", "n", is_named=True), "finished")
    (family,) = [f for f in metrics.registry.collect() if f.name == "tandem_tenant_requests"]
    counts = {s.labels["tenant"]: s.value for s in family.samples if s.name.endswith("_total")}
    assert len(counts) == MAX_NAMELESS + 2
    assert (counts["key-0"], counts[OTHER], counts["named"]) == (1, 50, 1)


@pytest.mark.long
def test_batches_belong_to_the_tenant_whatever_its_key_and_use_its_cache(
    make_site: MakeSite, keys: Path, tmp_path: Path
) -> None:
    site = make_site({"http.api_keys_file": str(keys), "batches.directory": str(tmp_path / "batches")})
    usual = salt(site, LAB)
    site.prefill.received.clear()

    def client(key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{site.url}/v1", api_key=key, max_retries=0, timeout=30)

    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "toy", "prompt": "x"}}
    file = client(LAB).files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    client(LAB).batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    assert site.prefill.wait_for("start").cache_salt == usual
    keys.write_text(FILE.replace(LAB, f"{LAB}-new"))
    new = client(f"{LAB}-new")

    def found() -> int:
        try:
            return len(new.files.list(purpose="batch").data)
        except openai.AuthenticationError:  # the file is looked at once a second
            return 0

    wait_until(found, "the file of the tenant's earlier key", WAIT_S, wanted=lambda num: num == 1)
    assert not client(SEARCH).files.list().data
