"""The router as a plain process: ready file, signals, idle cost, a port that is taken."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tandem.rpc.v1.control_pb2 import RouterStatusReply, RouterStatusRequest, StopRouterRequest
from tests.support.scripted_pool import ScriptedPool
from tests.support.scripted_worker import ScriptedDecode, ScriptedPrefill
from tests.support.waiting import wait_until

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[3]


@pytest.fixture
def started(checkpoint: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    ready, points = tmp_path / "ready.json", tmp_path / "points"
    points.mkdir()
    command = [sys.executable, "-m", "router", "--model-dir", str(checkpoint), "--http-port", "0"]
    process = subprocess.Popen(
        [*command, "--ready-file", str(ready)],
        cwd=ROOT,
        env={**os.environ, "TANDEM_POINTS": str(points)},
        text=True,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    wait_until(lambda: ready.exists() or process.poll() is not None, "its ready file", 20)
    assert ready.exists(), process.communicate()[1]
    yield process, json.loads(ready.read_text())
    if process.poll() is None:
        process.kill()
    process.communicate()


def test_ready_serve_and_drain_on_sigterm(started: tuple[subprocess.Popen[str], dict[str, Any]]) -> None:
    process, facts = started
    assert facts["pid"] == process.pid
    pool, decode = ScriptedPool(facts["control"]), ScriptedDecode("decode-0")
    pool.add(ScriptedPrefill("prefill-0"), decode)
    with httpx.Client(base_url=facts["http"], timeout=10) as client:
        wait_until(lambda: client.get("/health").status_code == 200, "health")
        decode.token_gap_s = 0.1
        body = {"model": "tandem-tiny", "prompt": "x", "max_tokens": 6, "stream": True}
        with client.stream("POST", "/v1/completions", json=body, headers={"x-request-id": "r-7"}) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
    assert process.wait(10) == 0
    logged = [json.loads(line) for line in process.communicate()[1].splitlines() if line.startswith("{")]
    of_request = [line for line in logged if line.get("request_id") == "r-7"]
    told = "\n".join(line["event"] for line in of_request)
    ended = r"request ended as finished in attempt 1 with \d+ prompt and 6 output tokens: queued [\d.]+ s, prefilling"
    assert re.search(ended, told)
    assert re.search(r"POST ./v1/completions. answered with 200 in [0-9.]+ s", told)
    assert all(line["process"] == "router" for line in logged)
    assert all({"level", "logger", "timestamp"} <= line.keys() for line in logged)
    pool.close()


def test_ends_when_its_control_service_says_so(started: tuple[subprocess.Popen[str], dict[str, Any]]) -> None:
    process, facts = started
    pool = ScriptedPool(facts["control"])
    pool.control.StopRouter(StopRouterRequest(drain_s=1), timeout=10)
    assert process.wait(10) == 0
    pool.close()


def test_an_error_that_ends_it_is_in_its_exit_status(
    started: tuple[subprocess.Popen[str], dict[str, Any]], tmp_path: Path
) -> None:
    process, _ = started
    (tmp_path / "points" / "router.router.stop").write_text("raise")
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 1
    assert '"event": "the router failed"' in process.communicate()[1]


def test_an_idle_router_costs_next_to_nothing(started: tuple[subprocess.Popen[str], dict[str, Any]]) -> None:
    process, _ = started

    def cpu_s() -> float:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    time.sleep(0.5)
    before = cpu_s()
    time.sleep(2)
    assert cpu_s() - before <= 0.02


@pytest.fixture
def serving(started: tuple[subprocess.Popen[str], dict[str, Any]]) -> Iterator[tuple[ScriptedPool, httpx.Client]]:
    """A router process with a pair of workers, which is ready, and a client of it."""
    _, facts = started
    pool = ScriptedPool(facts["control"])
    pool.add(ScriptedPrefill("prefill-0"), ScriptedDecode("decode-0"))
    with httpx.Client(base_url=facts["http"], timeout=30) as client:
        wait_until(lambda: client.get("/health").status_code == 200, "health")
        yield pool, client
    pool.close()


COMPLETION = {"model": "tandem-tiny", "prompt": "x", "max_tokens": 3}


@pytest.mark.parametrize("point", ["placed", "sent", "granted", "first_token", "token"])
def test_a_fault_at_each_point_is_that_requests_alone(
    serving: tuple[ScriptedPool, httpx.Client], tmp_path: Path, point: str
) -> None:
    pool, client = serving
    (tmp_path / "points" / f"router.router.{point}").write_text("raise")
    answer = client.post("/v1/completions", json=COMPLETION)
    assert (tmp_path / "points" / f"router.router.{point}.hit").exists()
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")
    if point != "placed":  # nothing is left at the workers; by its second token prefill may have ended the handoff
        told = [worker for worker in pool.workers if point != "token" or worker.kind == "decode"]
        assert {worker.wait_for("cancel").attempt for worker in told} == {1}
    assert client.post("/v1/completions", json=COMPLETION).json()["choices"][0]["text"] == "abc"


def test_the_status_says_what_is_under_way_and_stands_still_with_the_loop(
    serving: tuple[ScriptedPool, httpx.Client], tmp_path: Path
) -> None:
    pool, client = serving
    held = tmp_path / "points" / "router.router.first_token"
    held.write_text("hold")

    def status(timeout_s: float) -> RouterStatusReply:
        return pool.control.RouterStatus(RouterStatusRequest(), timeout=timeout_s)

    assert (status(10).num_under_way, status(10).num_waiting) == (0, 0)
    with ThreadPoolExecutor(1) as threads:
        under_way = threads.submit(lambda: client.post("/v1/completions", json=COMPLETION))
        wait_until(held.with_name(held.name + ".hit").exists, "the first token")
        with pytest.raises(grpc.RpcError, match="Deadline Exceeded"):
            status(0.5)
        held.with_name(held.name + ".go").touch()
        assert under_way.result().status_code == 200
    pool.states["decode-0"] = "failed"
    pool.push()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(lambda: client.post("/v1/completions", json={**COMPLETION, "timeout": 2}))
        wait_until(lambda: (seen := status(10)).num_under_way == seen.num_waiting == 1, "one that waits")


def test_a_port_that_is_taken_is_named(checkpoint: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "router", "--model-dir", str(checkpoint), "--http-port", str(port)]
        ended = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=20, check=False)
    assert ended.returncode == 2
    assert f"127.0.0.1:{port}" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_checkpoint_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "router", "--model-dir", str(tmp_path), "--http-port", "0"]
    ended = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=20, check=False)
    assert ended.returncode == 2
    assert "tokenizer.json is missing" in ended.stderr
