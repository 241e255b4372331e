"""The fork server of tests: as `subprocess.Popen` tells of ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import fork_server
from tests.support.fork_server import ForkServer

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    found = ForkServer(modules=())
    yield found
    found.close()


def start(server: ForkServer, directory: Path, text: str, name: str = "program") -> fork_server.ForkedProcess:
    (directory / f"{name}.py").write_text(text)
    environment = os.environ | {"MARK": "here"}
    return server.start(name, ["one", "two"], directory / "log", directory, environment)


def test_a_child_is_as_if_it_had_been_started(server: ForkServer, tmp_path: Path) -> None:
    text = "import os, sys; print(sys.argv[1:], os.environ['MARK'], os.getcwd()); sys.exit(7)"
    process = start(server, tmp_path, text)
    assert process.wait(20) == process.returncode == 7
    assert (tmp_path / "log").read_text() == f"['one', 'two'] here {tmp_path}\n"


def test_who_runs_has_no_end_and_who_is_killed_has_its_signal(server: ForkServer, tmp_path: Path) -> None:
    process = start(server, tmp_path, "import time; time.sleep(60)")
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.1)
    process.kill()
    assert process.wait(20) == -signal.SIGKILL
    process.kill()  # of one that has ended, nothing


def test_what_was_asked_for_ends_where_the_tests_are_killed_before_they_hear_of_it(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    (tmp_path / "program.py").write_text("import time; time.sleep(60)")
    asked = {
        "module": "program", "arguments": [], "log": str(tmp_path / "log"), "directory": str(tmp_path),
        "environment": dict(os.environ),
    }  # fmt: skip
    with theirs, ours:
        ours.send(json.dumps(asked).encode())
        line = [sys.executable, "-m", "tests.support.fork_server", str(theirs.fileno())]
        ours.close()
        ran = subprocess.run(
            line, cwd=fork_server.ROOT, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True, timeout=60,
            check=False,
        )  # fmt: skip
    assert (ran.returncode, ran.stderr) == (0, ""), "it has killed what it forked, and has ended by itself"


def test_an_end_that_was_told_behind_others_is_known() -> None:
    server = ForkServer.__new__(ForkServer)
    server._socket, told = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server._ended, server._lock = {}, threading.Lock()
    for pid in (1, 2, 3):
        told.send(json.dumps({"ended": pid, "status": -pid}).encode())
    assert server.ended(3, 0.0) == -3
    assert server.ended(4, 0.0) is None


def test_an_end_is_not_told_for_another(server: ForkServer, tmp_path: Path) -> None:
    first, second = (start(server, tmp_path, f"raise SystemExit({status})", f"ends_with_{status}") for status in (3, 4))
    assert (second.wait(20), first.wait(20)) == (4, 3)
