"""However `tandem serve` ends, nothing of it stays."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from serving import ROOT, Serve, Stream

from tests.support.stopping import stop_still
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def serves() -> Iterator[list[Serve]]:
    started: list[Serve] = []
    yield started
    for serve in started:
        serve.clean_up()


@pytest.mark.parametrize(
    ("said", "number"),
    [
        ("Starting Ray", signal.SIGINT),
        pytest.param("Starting the workers", signal.SIGTERM, marks=pytest.mark.faults),
        pytest.param("loads the model", signal.SIGINT, marks=pytest.mark.faults),
    ],
)
def test_a_signal_while_it_starts(serves: list[Serve], tmp_path: Path, said: str, number: int) -> None:
    serve = Serve(tmp_path)
    serves.append(serve)
    serve.wait_for(said)
    begun = time.monotonic()
    assert serve.interrupt(number) == 0, serve.output
    assert time.monotonic() - begun < 20
    assert serve.processes() == []
    assert "Stopping" in serve.output
    assert "Traceback" not in serve.output


def test_a_cluster_that_starts_is_seen_met_and_stopped(serves: list[Serve], tmp_path: Path) -> None:
    serve = Serve(tmp_path)
    serves.append(serve)
    serve.wait_for("Tandem ")
    run = serve.tandem("status")
    assert run.returncode == 0, run.stderr
    assert f"starting (pid {serve.process.pid}, since " in run.stdout
    told = json.loads(serve.tandem("status", "--json").stdout)
    assert told["state"] == "starting"
    assert told["serve"]["since_s"] - psutil.Process(serve.process.pid).create_time() < 5.0  # 0.5 if alone
    second = Serve(tmp_path, port=serve.port)
    serves.append(second)
    assert second.process.wait(timeout=10) == 1
    assert f"a Tandem cluster of yours, starting (pid {serve.process.pid}" in second.output
    assert f"end it with `tandem stop --port {serve.port}`, or choose another with --port" in second.output
    run = serve.tandem("scale", "--decode", "2")
    assert run.returncode == 1
    assert "try again when it is ready" in run.stderr
    run = serve.tandem("stop")
    assert run.returncode == 0, run.stderr + serve.output
    assert serve.process.wait(timeout=5) == 0, serve.output
    assert serve.processes() == []
    assert serve.state_files() == []
    assert "Ready" not in serve.output


@pytest.mark.faults
def test_a_cluster_that_stops_says_what_it_waits_for(serves: list[Serve], tmp_path: Path) -> None:
    serve = Serve(tmp_path)
    serves.append(serve)
    serve.wait_ready()
    decode = psutil.Process(serve.members()["decode-0"]["pid"])
    stream = Stream(serve, max_tokens=1500)
    stream.wait_for_token()
    stop_still(decode.pid)  # so that the request does not end
    serve.process.send_signal(signal.SIGINT)
    waits = "stopping: 1 request under way"
    wait_until(lambda: serve.tandem("status").stdout, waits, 15, wanted=lambda said: waits in said)
    second = Serve(tmp_path, port=serve.port)
    serves.append(second)
    assert second.process.wait(timeout=10) == 1
    assert f"a Tandem cluster of yours, stopping (pid {serve.process.pid}" in second.output
    assert f"start again when it has ended (`tandem stop --port {serve.port}` waits for that)" in second.output
    assert serve.tandem("stop", "--now").returncode == 0
    assert serve.process.wait(timeout=5) == 0, serve.output
    assert serve.state_files() == []


def test_a_second_ctrl_c_stops_at_once(serves: list[Serve], tmp_path: Path) -> None:
    serve = Serve(tmp_path)
    serves.append(serve)
    serve.wait_for("Starting the workers")
    serve.process.send_signal(signal.SIGINT)
    serve.wait_for("Stopping")
    serve.process.send_signal(signal.SIGINT)
    assert serve.process.wait(timeout=15) in (0, 130)
    assert serve.process.returncode == 0 or "processes were killed" in serve.lines[-1]
    assert serve.processes() == []


def test_a_kill_while_it_starts_takes_everything_with_it(serves: list[Serve], tmp_path: Path) -> None:
    """That of one that serves is in tests/scenarios/faults/test_under_ray.py."""
    serve = Serve(tmp_path)
    serves.append(serve)
    for _ in range(2):
        serve.wait_for("loads the model")
    family = serve.processes()
    assert len([p for p in family if "Actor" in " ".join(p.cmdline())]) == 4  # supervisor, router and two workers
    serve.process.kill()
    _, alive = psutil.wait_procs(family, timeout=10)  # Ray's own agents too, which would try for long to report it
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
    assert serve.processes() == []


@pytest.mark.faults
def test_a_model_that_cannot_be_served_ends_serve_with_its_reason(serves: list[Serve], tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(ROOT / "tandem" / "models" / "tiny", broken)
    config = json.loads((broken / "config.json").read_text())
    config["num_hidden_layers"] += 1
    (broken / "config.json").write_text(json.dumps(config))
    serve = Serve(tmp_path, "--model", str(broken))
    serves.append(serve)
    assert serve.process.wait(timeout=120) == 1
    assert "cannot start: " in serve.lines[-1]
    assert "Traceback" not in serve.output
    assert serve.processes() == []
