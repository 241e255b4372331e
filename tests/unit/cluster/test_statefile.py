"""The claim of a port: one `tandem serve` has it, and whoever asks is told how far it is."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from state_files import cluster_file

from tandem.cluster import statefile
from tandem.cluster.statefile import Claim, Stage
from tandem.core.errors import ConfigError


@pytest.fixture(autouse=True)
def _own_runtime_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def test_a_claim_tells_how_far_it_is_until_it_is_released() -> None:
    claim = Claim(8000, local=True)
    claim.take(waits_for="Ray to start")
    (first,) = statefile.running()
    assert (first.pid, first.stage, first.waits_for) == (os.getpid(), Stage.STARTING, "Ray to start")
    claim.tell(Stage.STARTING, "the workers to load", control_address="127.0.0.1:1")
    (second,) = statefile.running()
    assert (second.waits_for, second.since_s) == ("the workers to load", first.since_s)
    claim.tell(Stage.READY)
    (third,) = statefile.running()
    assert (third.stage, third.waits_for, third.control_address) == (Stage.READY, "", "127.0.0.1:1")
    assert third.since_s > first.since_s
    claim.release()
    assert list(statefile.runtime_directory().iterdir()) == []


@pytest.mark.parametrize(
    ("stage", "says"),
    [
        (Stage.STARTING, r"starting \(pid \d+, since \S+, waits for Ray\); end it with `tandem stop --port 8000`"),
        (Stage.READY, r"ready \(pid \d+, since \S+, waits for Ray\); end it with `tandem stop --port 8000`"),
        (Stage.STOPPING, r"stopping \(pid .*\); start again when it has ended \(`tandem stop --port 8000` waits"),
    ],
)
def test_a_port_that_is_held_is_not_taken(stage: Stage, says: str) -> None:
    held = cluster_file(stage=stage, waits_for="Ray")
    statefile.write(held)
    claim = Claim(8000, local=True)
    with pytest.raises(ConfigError, match=says):
        claim.take("Ray to start")
    claim.tell(Stage.STOPPING, "nothing")
    claim.release()
    assert statefile.running() == [held]
    Claim(8001, local=True).take("Ray to start")


@pytest.mark.parametrize("changes", [{"started": 1}, {"pid": 2**22 + 1}], ids=["number used again", "gone"])
def test_what_a_dead_process_left_is_no_claim(changes: dict[str, int]) -> None:
    statefile.write(cluster_file(stage=Stage.STARTING, **changes))
    Claim(8000, local=True).take("Ray to start")
    assert [cluster.pid for cluster in statefile.running()] == [os.getpid()]


def test_a_joined_cluster_that_lost_its_serve_keeps_its_port_while_it_lives(taken_port: int) -> None:
    left = cluster_file(local=False, started=1, stage=Stage.STARTING, control_address=f"127.0.0.1:{taken_port}")
    statefile.write(left)
    with pytest.raises(ConfigError, match="running on without its `tandem serve`; end it with"):
        Claim(8000, local=False).take("Ray to let it in")
    statefile.write(cluster_file(local=False, started=1, control_address="127.0.0.1:1"))
    Claim(8000, local=False).take("Ray to let it in")


TAKE = """
import sys
import tempfile
from tandem.cluster.statefile import Claim
from tandem.core.errors import ConfigError
sys.stdin.readline()
try:
    Claim(8000, local=True).take("Ray to start")
    print("took", flush=True)
except ConfigError as error:
    print(error.message, flush=True)
sys.stdin.readline()
"""


@pytest.mark.processes
def test_of_several_that_come_at_once_one_takes_the_port() -> None:
    line = [sys.executable, "-c", TAKE]
    takers = [
        subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) for _ in range(4)
    ]
    try:
        for taker in takers:
            assert taker.stdin
            taker.stdin.write("\n")
        said = [taker.stdout.readline() for taker in takers if taker.stdout]
    finally:
        for taker in takers:
            taker.communicate("\n", timeout=10)
    assert said.count("took\n") == 1, said
    assert sum("taken by a Tandem cluster of yours, starting" in each for each in said) == 3, said


def test_a_state_file_does_not_lie_where_the_end_of_a_session_removes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the login manager gives ends with the user's last session, and a cluster may go on."""
    assert statefile.runtime_directory() == Path(os.environ["XDG_RUNTIME_DIR"]) / "tandem"
    monkeypatch.setenv("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}")
    assert statefile.runtime_directory().parent == Path(tempfile.gettempdir())


def test_a_file_that_the_host_has_cleaned_away_is_written_again() -> None:
    claim = Claim(8000, local=True)
    claim.take("Ray to start")
    file = statefile.runtime_directory() / "8000.json"
    file.unlink()
    file.parent.rmdir()
    claim.renew()
    (found,) = statefile.running()
    assert found.waits_for == "Ray to start"


@pytest.mark.parametrize("step", ["write", "runtime_directory"])
def test_where_the_file_cannot_be_written_whoever_tells_it_goes_on(
    step: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    claim = Claim(8000, local=True)
    claim.take("Ray to start")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(statefile, step, full)
    claim.tell(Stage.STOPPING, "its processes to end")
    assert "8000.json cannot be written: [Errno 28] No space left on device" in caplog.text
