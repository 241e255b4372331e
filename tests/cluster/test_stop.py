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
from serving import ROOT, Serve

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
        ("loads the model", signal.SIGINT),
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


def test_tandem_stop_ends_it_and_waits_for_the_end(serves: list[Serve], tmp_path: Path) -> None:
    serve = Serve(tmp_path)
    serves.append(serve)
    serve.wait_ready()
    run = serve.tandem("stop")
    assert run.returncode == 0, run.stderr + serve.output
    assert serve.process.wait(timeout=5) == 0
    assert serve.processes() == []
    assert serve.tandem("stop").returncode == 1


def test_a_kill_of_serve_takes_everything_with_it(serves: list[Serve], tmp_path: Path) -> None:
    serve = Serve(tmp_path)
    serves.append(serve)
    serve.wait_ready()
    family = serve.processes()
    ours = [p for p in family if "Actor" in " ".join(p.cmdline())]
    assert len(ours) == 4  # supervisor, router and two workers
    serve.process.kill()
    _, alive = psutil.wait_procs(family, timeout=10)  # Ray's own agents too, which would try for long to report it
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
    assert serve.processes() == []


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
