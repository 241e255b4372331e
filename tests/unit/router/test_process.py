"""The router as a plain process: ready file, signals, idle cost, a port that is taken."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from router_fakes import FakeDecode, FakePool, FakePrefill
from router_site import wait_until

ROOT = Path(__file__).parents[3]


@pytest.fixture
def started(checkpoint: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    ready = tmp_path / "ready.json"
    command = [sys.executable, "-m", "router", "--model-dir", str(checkpoint), "--http-port", "0"]
    process = subprocess.Popen(
        [*command, "--ready-file", str(ready)], cwd=ROOT, text=True, stderr=subprocess.PIPE, stdout=subprocess.PIPE
    )
    wait_until(lambda: ready.exists() or process.poll() is not None, timeout_s=20)
    assert ready.exists(), process.communicate()[1]
    yield process, json.loads(ready.read_text())
    if process.poll() is None:
        process.kill()
    process.communicate()


def test_ready_serve_and_drain_on_sigterm(started: tuple[subprocess.Popen[str], dict[str, Any]]) -> None:
    process, facts = started
    assert facts["pid"] == process.pid
    pool, decode = FakePool(facts["control"]), FakeDecode("decode-0")
    pool.add(FakePrefill("prefill-0"), decode)
    with httpx.Client(base_url=facts["http"], timeout=10) as client:
        wait_until(lambda: client.get("/health").status_code == 200)
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
    assert {line["event"] for line in of_request} >= {"request ended", "http"}
    assert all(line["process"] == "router" for line in logged)
    pool.close()


def test_an_idle_router_costs_next_to_nothing(started: tuple[subprocess.Popen[str], dict[str, Any]]) -> None:
    process, _ = started

    def cpu_s() -> float:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    time.sleep(0.5)
    before = cpu_s()
    time.sleep(2)
    assert cpu_s() - before <= 0.02


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
