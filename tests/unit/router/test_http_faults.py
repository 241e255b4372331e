"""What clients and workers see when something goes wrong: scripted workers, real HTTP and gRPC."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.router_site import Site, cluster, frames, in_background
from tests.support.scripted_worker import ScriptedDecode
from tests.support.waiting import wait_until

MakeSite = Callable[..., Site]


# -- readiness and back-pressure


def test_without_workers_everything_says_503(make_site: MakeSite) -> None:
    site = make_site(with_workers=False)
    with site.http() as client:
        health = client.get("/health")
    assert health.status_code == 503
    assert health.json()["error"]["code"] == "no_worker"
    answer = site.post(prompt="x")
    assert answer.status_code == 503
    assert "retry-after" in answer.headers
    site.add(site.prefill)
    site.wait_ready(503)
    site.pool.add(site.decode)
    site.wait_ready()


def test_beyond_the_bound_clients_are_told_when_to_come_back(make_site: MakeSite) -> None:
    site = make_site({"scheduling.max_queued_requests": 2})
    site.prefill.auto = site.decode.auto = False
    waiting = [in_background(site) for _ in range(2)]
    site.prefill.wait_for("start", 2)
    refused = site.post(prompt="x")
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["type"] == "rate_limit_error"
    with pytest.raises(openai.RateLimitError):
        site.openai().completions.create(model="toy", prompt="x")
    for number in (1, 2):
        site.prefill.first_tokens(site.prefill.wait_for("start", number))
        site.decode.generate(site.decode.wait_for("reserve", number))
    assert [w.result().status_code for w in waiting] == [200, 200]
    assert site.metrics()['tandem_requests_total{outcome="overloaded"}'] == 2
    site.prefill.auto = site.decode.auto = True
    assert site.post(prompt="x", max_tokens=1).status_code == 200


def test_workers_with_other_layouts_are_not_paired(make_site: MakeSite) -> None:
    site = make_site(with_workers=False)
    site.decode.info.layout.page_size = 64
    site.pool.add(site.prefill, site.decode)
    site.until_shown("prefill-0", state="ready")
    site.until_shown("decode-0", state="ready")
    site.wait_ready(503)
    answer = site.post(prompt="x")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "incompatible"
    differing = "page_size: prefill-0/1 has 16, decode-0/1 has 64"
    assert differing in answer.json()["error"]["message"]
    known = [{"prefill": "prefill-0/1", "decode": "decode-0/1", "differences": [differing]}]
    assert cluster(site)["incompatible"] == known
    third = ScriptedDecode("decode-1")
    site.pool.add(third)
    wait_until(lambda: site.post(prompt="x", max_tokens=2).status_code == 200, "an answer")
    assert site.decode.count("reserve") == 0


# -- cancelling


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_cancels_at_both_workers(site: Site, stream: bool) -> None:
    site.decode.held_back.clear()
    site.prefill.auto = False
    body = json.dumps({"model": "toy", "prompt": "x", "max_tokens": 50, "stream": stream}).encode()
    host, port = site.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        start = site.prefill.wait_for("start")
        if stream:
            site.prefill.first_tokens(start)
            assert b"200 OK" in client.recv(4096)
    gone_s = time.monotonic()
    for worker in (site.prefill, site.decode):
        cancel = worker.wait_for("cancel", timeout_s=1.0)
        assert (cancel.request_id, cancel.attempt) == (start.request_id, 1)
        assert "client went away" in cancel.reason
    assert time.monotonic() - gone_s < 0.5
    site.until_metric('tandem_requests_total{outcome="cancelled"}', 1)
    assert site.metrics()["tandem_router_waiting_requests"] == 0


@pytest.mark.long
def test_a_deadline_cancels_at_both_workers(site: Site) -> None:
    site.prefill.auto = False
    answer = site.post(prompt="x", max_tokens=5, timeout=0.2)
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline"
    for worker in (site.prefill, site.decode):
        assert "deadline" in worker.wait_for("cancel", timeout_s=1.0).reason
    assert site.metrics()['tandem_requests_total{outcome="deadline"}'] == 1


@pytest.mark.long
def test_a_deadline_in_mid_stream_is_an_error_frame_without_done(site: Site) -> None:
    site.decode.held_back.clear()
    answer = site.post(prompt="x", max_tokens=5, timeout=2.0, stream=True)
    assert answer.status_code == 200
    assert frames(answer)[0]["choices"][0]["text"] == "a"
    assert frames(answer)[-1]["error"]["code"] == "deadline"
    assert "[DONE]" not in answer.text
    with pytest.raises(openai.APIError, match="deadline"):
        list(
            site.openai().completions.create(
                model="toy", prompt="x", max_tokens=5, stream=True, extra_body={"timeout": 2.0}
            )
        )


def has_socket(port: int, peer_port: int) -> bool:
    """Whether a process holds the end at `port` of a connection to `peer_port`, both on loopback."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        ends = [int(end.rpartition(":")[2], 16) for end in fields[1:3]]
        if ends == [port, peer_port] and fields[9] != "0":  # an inode of 0: the kernel alone still has it
            return True
    return False


@pytest.mark.long
def test_a_client_that_reads_too_slowly_is_cancelled(make_site: MakeSite, checkpoint: Any) -> None:
    site = make_site({"limits.stream_buffer_tokens": 50})
    for worker in (site.prefill, site.decode):
        worker.info.max_context = 10_000_000
    body = {"model": "toy", "prompt": "x", "max_tokens": 250, "n": 16, "stream": True, "logprobs": 20}
    raw = json.dumps(body).encode()
    host, port = site.url.removeprefix("http://").split(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        client.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw)
        assert "too slowly" in site.decode.wait_for("cancel", timeout_s=20).reason
        # It has not read, and does not: what waits for it must not keep the router's socket.
        wait_until(lambda: not has_socket(int(port), client.getsockname()[1]), "the end of its socket", 3)
    site.until_metric('tandem_requests_total{outcome="cancelled"}', 1)


# -- disorder


def test_repeated_and_stale_and_reordered_tokens_do_not_reach_the_client(site: Site) -> None:
    site.prefill.auto = site.decode.auto = False
    under_way = in_background(site, max_tokens=4)
    start, reserve = site.prefill.wait_for("start"), site.decode.wait_for("reserve")
    site.decode.grant(reserve)
    site.prefill.wait_for("attach")
    site.decode.admit(reserve)
    stale = site.decode.token(reserve, 0, 1, 120)
    stale.attempt = 9
    site.decode.emit(token=stale)
    site.decode.emit(token=site.decode.token(reserve, 0, 2))
    site.decode.emit(token=site.decode.token(reserve, 0, 1))
    time.sleep(0.1)
    site.prefill.first_tokens(start)
    site.until_metric("tandem_ttft_seconds_count", 1)
    site.decode.emit(token=site.decode.token(reserve, 0, 1, 121))  # again, and another one
    site.decode.emit(token=site.decode.token(reserve, 0, 3))
    assert under_way.result().json()["choices"][0]["text"] == "abcd"
    metrics = site.metrics()
    assert metrics["tandem_journal_disagreements_total"] == 1
    assert metrics['tandem_journal_dropped_tokens_total{reason="stale"}'] == 1
    assert metrics['tandem_journal_dropped_tokens_total{reason="repeated"}'] == 1


def test_the_grant_goes_to_prefill_and_decode_learns_of_the_writer(site: Site) -> None:
    site.post(prompt="x", max_tokens=3)
    attach = site.prefill.wait_for("attach")
    assert attach.grant.grant_id.startswith("g-")
    assert list(attach.grant.pages) == [1, 2]
    assert site.prefill.wait_for("start").decode == site.decode.info


@pytest.mark.long
def test_counters_never_go_back_when_a_worker_starts_anew(site: Site) -> None:
    def report(worker: ScriptedDecode, tokens: int) -> None:
        worker.status = type(worker.status)(decode_tokens=tokens)

    report(site.decode, 10)
    site.until_metric("tandem_decode_tokens_total", 10)
    time.sleep(0.3)
    assert site.metrics()["tandem_decode_tokens_total"] == 10  # each heartbeat reports the same sum
    site.decode.kill()
    heir = ScriptedDecode("decode-0", incarnation="2")
    report(heir, 3)
    site.pool.workers.remove(site.decode)
    site.pool.add(heir)
    site.until_metric("tandem_decode_tokens_total", 13)


def test_a_stream_that_breaks_is_opened_again(site: Site) -> None:
    site.decode.kill()
    site.wait_ready(503)
    assert cluster(site)["decode"][0]["state"] == "failed"
    again = ScriptedDecode("decode-0", port=site.decode.port)
    site.wait_ready()
    assert site.post(prompt="x", max_tokens=2).json()["choices"][0]["text"] == "ab"
    again.kill()


@pytest.mark.long
def test_a_stranger_at_a_workers_address_gets_nothing(make_site: MakeSite) -> None:
    site = make_site(with_workers=False)
    site.pool.add(site.prefill, site.decode)
    site.wait_ready()
    site.decode.info.incarnation = "someone else"  # the next hello differs from the membership
    for stream in list(site.decode._streams):
        stream.put(None)
    site.wait_ready(503)
    time.sleep(0.5)  # time for several tries
    site.wait_ready(503)
    assert cluster(site)["decode"][0]["state"] == "failed"


def test_the_router_drains_by_call(site: Site) -> None:
    site.decode.held_back.clear()
    under_way = in_background(site)
    site.decode.wait_for("attach")
    stopping = threading.Thread(target=site.server.stop, args=(5.0,))
    stopping.start()
    site.wait_ready(503)
    assert site.post(prompt="x").json()["error"]["code"] == "draining"
    site.decode.held_back.set()
    assert under_way.result().json()["choices"][0]["text"] == "abcde"
    stopping.join(5)
    assert not stopping.is_alive()


@pytest.mark.long
def test_a_drain_is_bounded(site: Site) -> None:
    site.decode.held_back.clear()
    under_way = in_background(site)
    site.decode.wait_for("attach")
    began_s = time.monotonic()
    site.server.stop(drain_s=0.2)
    assert time.monotonic() - began_s < 4
    answer = under_way.result()
    assert answer.status_code == 503, "the client is still there and should try again"
    assert answer.json()["error"]["message"] == "the router is shutting down"
    assert answer.json()["error"]["code"] == "draining"
