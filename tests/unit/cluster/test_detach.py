"""`tandem serve --detach`: what goes on without the terminal that it was started from, and what that one is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tandem.cluster.serve.detach import _follow, default_log, serve_detached
from tandem.core.errors import ConfigError
from tests.support.waiting import nothing, wait_until

pytestmark = pytest.mark.processes

SERVES = """
import os, sys, time
from pathlib import Path
from tandem.cluster.serve.detach import serve_detached

place = Path(sys.argv[1])

def serve(on_ready):
    print("starting", flush=True)
    (place / "pid").write_text(str(os.getpid()))
    while not (place / "go").exists():
        time.sleep(0.05)
    if (place / "go").read_text() == "fail":
        print("cannot start", flush=True)
        return 3
    print("Ready", flush=True)
    on_ready()
    while not (place / "stop").exists():
        time.sleep(0.05)
    (place / "stopped").touch()
    return 0

sys.exit(serve_detached(serve, place / "logs" / "serve.log"))
"""


def start(place: Path, **options: object) -> subprocess.Popen[str]:
    line = [sys.executable, "-c", SERVES, str(place)]
    return subprocess.Popen(line, stdout=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload,no-any-return]


def pid_of(place: Path) -> int:
    file = place / "pid"
    wait_until(lambda: file.exists() and file.read_text() != "", "a process that serves", 60)
    return int(file.read_text())


def end(place: Path) -> None:
    pid = pid_of(place)
    (place / "stop").touch()
    wait_until(lambda: [pid] if psutil.pid_exists(pid) else [], "no process", 30, wanted=nothing)
    assert (place / "stopped").exists()


def test_it_returns_when_it_is_ready_and_what_was_started_goes_on(tmp_path: Path) -> None:
    starting = start(tmp_path)
    serving = psutil.Process(pid_of(tmp_path))
    (tmp_path / "go").write_text("serve")
    said, _ = starting.communicate(timeout=60)
    assert starting.returncode == 0
    assert said.splitlines()[:2] == ["starting", "Ready"]
    assert str(tmp_path / "logs" / "serve.log") in said
    assert serving.is_running()
    assert os.getsid(serving.pid) == serving.pid != os.getsid(0)
    assert {Path(f"/proc/{serving.pid}/fd/{n}").resolve() for n in (1, 2)} == {tmp_path / "logs" / "serve.log"}
    end(tmp_path)


def test_a_start_that_fails_is_told_with_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "go").write_text("fail")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "serve.log").write_text("of an earlier one\n")
    starting = start(tmp_path)
    said, _ = starting.communicate(timeout=60)
    assert starting.returncode == 3
    assert said == "starting\ncannot start\n"


def test_the_end_of_the_terminal_does_not_end_what_starts_in_it(tmp_path: Path) -> None:
    """As an SSH session that breaks: the terminal hangs up, and nobody follows any more."""
    ours, theirs = os.openpty()
    starting = start(tmp_path, stdin=theirs, start_new_session=True, preexec_fn=_take_terminal)
    pid = pid_of(tmp_path)
    os.close(theirs)
    os.close(ours)  # the kernel sends SIGHUP to the session
    assert starting.wait(timeout=30) == -signal.SIGHUP
    assert starting.stdout is not None
    starting.stdout.close()
    (tmp_path / "go").write_text("serve")
    wait_until(lambda: "Ready" in (tmp_path / "logs" / "serve.log").read_text(), "a cluster that serves", 30)
    assert psutil.pid_exists(pid)
    end(tmp_path)


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever started the tests may ignore it


def test_a_log_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--log"):
        serve_detached(lambda _: 0, tmp_path / "file" / "serve.log")


def test_the_log_lies_where_the_session_leaves_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_log(8000) == tmp_path / ".local/state/tandem/serve-8000.log"


def test_what_is_no_text_in_its_log_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A library prints a path as it is, or half a character has been written."""
    log = tmp_path / "serve.log"
    log.write_bytes(b"loads \xff\nReady \xe2\x86")
    news, tell = os.pipe()
    os.write(tell, b"!")
    process = os.pidfd_open(os.getpid())
    try:
        assert _follow(log, 0, news, process)
    finally:
        for each in (news, tell, process):
            os.close(each)
    assert "loads" in capsys.readouterr().out
