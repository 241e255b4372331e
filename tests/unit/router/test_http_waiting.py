"""A request whose pool has no ready worker waits where one is coming, and is refused at once where none is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from router.request.targets import ON_CPU, ON_GPU
from tandem.core.protocols import NEWEST, OLDEST
from tandem.rpc.v1.common_pb2 import Protocols
from tests.support.router_site import Site, cluster, in_background
from tests.support.scripted_worker import ScriptedDecode, ScriptedPrefill
from tests.support.waiting import wait_until

MakeSite = Callable[..., Site]


@pytest.fixture
def patient(make_site: MakeSite) -> Site:
    return make_site({"scheduling.max_queued_requests": 2})


@pytest.mark.parametrize("state", ["starting", "failed", "draining"])
def test_a_request_waits_for_a_worker_that_is_coming(patient: Site, state: str) -> None:
    patient.pool.states["decode-0"] = state
    patient.pool.push()
    patient.wait_ready(503)
    under_way = in_background(patient)
    patient.until_metric("tandem_router_waiting_requests", 1)
    heir = ScriptedDecode("decode-1", incarnation="2")
    patient.pool.workers.remove(patient.decode)
    patient.pool.add(heir)
    assert under_way.result().json()["choices"][0]["text"] == "abcde"
    assert heir.wait_for("reserve").attempt == 1
    assert patient.metrics()["tandem_router_waiting_requests"] == 0
    patient.decode.kill()


def test_a_router_that_has_just_started_has_who_comes_wait_until_it_is_told_of_workers(make_site: MakeSite) -> None:
    """It listens before the supervisor tells it: clients of a router that was replaced would be refused."""
    site = make_site(with_workers=False, told=False)
    under_way = in_background(site)
    site.until_metric("tandem_router_waiting_requests", 1)
    site.pool.add(site.prefill, site.decode)
    assert under_way.result().json()["choices"][0]["text"] == "abcde"


@pytest.mark.long
def test_who_waits_keeps_its_place_and_its_deadline(patient: Site) -> None:
    patient.pool.states["decode-0"] = "failed"
    patient.pool.push()
    patient.wait_ready(503)
    began_s = time.monotonic()
    waiting = [in_background(patient, timeout=2.0) for _ in range(2)]
    patient.until_metric("tandem_router_waiting_requests", 2)
    assert patient.post(prompt="x").status_code == 429
    assert [answer.result().status_code for answer in waiting] == [504, 504]
    assert 2.0 <= time.monotonic() - began_s < 10
    assert patient.metrics()["tandem_router_waiting_requests"] == 0


@pytest.mark.long
def test_a_wait_is_bounded(make_site: MakeSite) -> None:
    site = make_site({"limits.wait_for_worker_s": 1.0})
    site.pool.states["decode-0"] = "failed"
    site.pool.push()
    site.wait_ready(503)
    began_s = time.monotonic()
    answer = site.post(prompt="x")
    assert 1.0 <= time.monotonic() - began_s < 3
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_worker")
    assert "no decode worker" in answer.json()["error"]["message"]
    assert int(answer.headers["retry-after"]) >= 1
    assert site.metrics()['tandem_requests_total{outcome="no_worker"}'] == 1


def test_an_empty_pool_is_refused_at_once(patient: Site) -> None:
    patient.pool.remove(patient.decode)
    patient.wait_ready(503)
    began_s = time.monotonic()
    answer = patient.post(prompt="x")
    assert time.monotonic() - began_s < 1
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    patient.decode.kill()


def test_workers_that_do_not_pair_are_waited_for_only_while_one_is_coming(make_site: MakeSite) -> None:
    site = make_site(with_workers=False)
    site.decode.info.layout.dtype = "bfloat16"
    site.add(site.prefill, site.decode)
    began_s = time.monotonic()
    refused = site.post(prompt="x").json()["error"]
    assert time.monotonic() - began_s < 1
    assert refused["code"] == "incompatible"
    assert "dtype: prefill-0/1 has 'float32', decode-0/1 has 'bfloat16'" in refused["message"]
    heir = ScriptedDecode("decode-1")
    site.pool.states["decode-1"] = "starting"
    site.pool.add(heir)
    under_way = in_background(site)
    site.until_metric("tandem_router_waiting_requests", 1)
    site.pool.states.clear()
    site.pool.push()
    assert under_way.result().status_code == 200
    assert site.decode.count("reserve") == 0


def test_a_worker_of_a_version_too_far_away_is_not_connected_and_says_why(make_site: MakeSite) -> None:
    site = make_site(with_workers=False)
    site.decode.info.protocols.CopyFrom(Protocols(oldest=NEWEST + 1, newest=NEWEST + 2))
    site.pool.add(site.prefill, site.decode)
    (decode,) = wait_until(lambda: [worker for worker in cluster(site)["decode"] if worker["unreached"]], "its refusal")
    assert f"decode-0/1 speaks {NEWEST + 1} to {NEWEST + 2}" in decode["unreached"]
    site.wait_ready(503)


def test_a_worker_of_the_next_version_serves(make_site: MakeSite) -> None:
    site = make_site(with_workers=False)
    site.decode.info.protocols.CopyFrom(Protocols(oldest=NEWEST, newest=NEWEST + 1))
    site.add(site.prefill, site.decode)
    site.wait_ready(200)
    assert site.post(prompt="x").status_code == 200


@pytest.mark.parametrize(
    "asked",
    [
        {"bad_words": ["x"]},
        {"allowed_token_ids": [97]},
        pytest.param({"structured_outputs": {"choice": ["a", "b"]}}, marks=pytest.mark.processes),
        {"cache_salt": "s"},
    ],
)
def test_what_a_worker_of_the_version_before_would_not_obey_is_refused_until_it_is_gone(
    make_site: MakeSite, asked: dict[str, Any]
) -> None:
    site = make_site({"limits.wait_for_worker_s": 20.0}, with_workers=False)
    site.prefill.info.protocols.CopyFrom(Protocols(oldest=OLDEST, newest=OLDEST))
    site.add(site.prefill, site.decode)
    site.wait_ready(200)
    assert site.post(prompt="x").status_code == 200, "other requests are served"
    refused = site.post(prompt="x", **asked)
    assert refused.status_code == 503
    assert "is being upgraded" in refused.json()["error"]["message"]
    assert refused.json()["error"]["retryable"]
    site.add(ScriptedPrefill("prefill-1"))
    site.drain(site.prefill)
    site.until_shown("prefill-0", state="draining")
    assert site.post(prompt="x", **asked).status_code == 200


def test_who_waits_for_a_worker_that_knows_what_it_asks_for_holds_nobody_up_who_asks_for_less(
    make_site: MakeSite,
) -> None:
    """As many wait as the router places and are not begun: two for each worker that computes prompts."""
    site = make_site({"limits.wait_for_worker_s": 20.0}, with_workers=False)
    site.prefill.info.protocols.CopyFrom(Protocols(oldest=OLDEST, newest=OLDEST))
    site.add(site.prefill, site.decode)
    site.wait_ready(200)
    coming = ScriptedPrefill("prefill-1")
    site.pool.states["prefill-1"] = "starting"
    site.pool.add(coming)
    waiting = [in_background(site, cache_salt="s") for _ in range(2)]
    site.until_metric("tandem_router_waiting_requests", 2)
    assert site.post(prompt="x").status_code == 200
    assert site.metrics()["tandem_router_waiting_requests"] == 2
    site.pool.states |= {"prefill-0": "draining", "prefill-1": "ready"}
    site.pool.push()
    assert [each.result().status_code for each in waiting] == [200, 200]
    assert coming.count("start") == 2


@pytest.mark.long
def test_a_client_that_goes_away_leaves_the_wait(patient: Site) -> None:
    patient.pool.states["decode-0"] = "failed"
    patient.pool.push()
    patient.wait_ready(503)
    with patient.http() as client, pytest.raises(Exception, match="timed out"):
        client.post("/v1/completions", json={"model": "toy", "prompt": "x"}, timeout=0.3)
    patient.until_metric('tandem_requests_total{outcome="cancelled"}', 1)
    assert patient.metrics()["tandem_router_waiting_requests"] == 0


@pytest.mark.long
def test_a_router_that_leaves_ends_the_wait(patient: Site) -> None:
    patient.pool.states["decode-0"] = "failed"
    patient.pool.push()
    patient.wait_ready(503)
    under_way = in_background(patient)
    patient.until_metric("tandem_router_waiting_requests", 1)
    patient.server.stop(drain_s=0.1)
    assert under_way.result().json()["error"]["code"] == "draining"


def test_workers_on_another_transport_do_not_pair(make_site: MakeSite, caplog: pytest.LogCaptureFixture) -> None:
    site = make_site(with_workers=False)
    site.decode.info.transport = "nccl"
    site.add(site.prefill, site.decode)
    site.wait_ready(503)
    expected = "transport: prefill-0/1 has 'loopback', decode-0/1 has 'nccl'"
    assert [entry["differences"] for entry in cluster(site)["incompatible"]] == [[expected]]
    assert f"pairs with 0 of the 1 workers of the other pool: {expected}" in caplog.text


def test_by_when_tokens_are_wanted_goes_by_where_decode_workers_compute(patient: Site) -> None:
    """Without Ray the configuration does not say: `--device` of each worker does."""

    def told_s() -> list[float]:
        return sorted(s for name, s in patient.metrics().items() if name.startswith("tandem_slo_target_seconds"))

    assert told_s() == sorted(ON_CPU)
    heir = ScriptedDecode("decode-1", incarnation="2")
    heir.info.on_gpu = True
    patient.add(heir)
    assert told_s() == sorted(ON_GPU)
