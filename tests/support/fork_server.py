"""Processes of test clusters, forked from one that has imported what they import.

A worker spends most of its start on imports (torch, transformers, Numba), and tests start hundreds of workers. So a
process of its own imports it all once, starts no thread, and forks for each process that is asked for; the child
runs the same `__main__` as `python -m MODULE` does. With `TANDEM_TESTS_START=exec` each is started as its users do.

    python -m tests.support.fork_server SOCKET MODULES      what `ForkServer` starts
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import json
import os
import random
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = "TANDEM_TESTS_START"

_MODULES = (
    "prefill_worker.worker",
    "decode_worker.worker",
    "router.server",
    "tandem.worker.main",
    "tandem.engine.engine",
    "tandem.engine.cpu.decode_programs",
    "tandem.engine.cpu.sampler",
    "transformers.models.llama.modeling_llama",
)
_MESSAGE_BYTES = 1 << 20


class ForkedProcess:
    """What tests use of `subprocess.Popen`, of a process whose parent is the fork server."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server = server
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; `None` while it runs."""
        if self.returncode is None:
            self.returncode = self._server.ended(self.pid, 0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status. Raises `subprocess.TimeoutExpired`."""
        if self.returncode is None:
            self.returncode = self._server.ended(self.pid, timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Nothing, where it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Started = ForkedProcess | subprocess.Popen[bytes]


def start(
    module: str,
    arguments: Sequence[str],
    log: Path,
    directory: Path,
    environment: Mapping[str, str],
    *,
    anew: bool = False,
) -> Started:
    """`python -m MODULE ARGUMENTS` in `directory`, with its output in `log`; `anew`: by an interpreter of its own."""
    if anew or os.environ.get(VARIABLE) == "exec":
        with log.open("wb") as sink:
            line = [sys.executable, "-m", module, *arguments]
            return subprocess.Popen(line, stdout=sink, stderr=subprocess.STDOUT, env=environment, cwd=directory)
    return _server().start(module, arguments, log, directory, environment)


@functools.cache
def _server() -> ForkServer:
    """Of this process, for as long as it lives."""
    server = ForkServer()
    atexit.register(server.close)
    return server


class ForkServer:
    """The server, as the tests' process sees it. Its children end with it.

    Args:
        modules: that it imports.
    """

    def __init__(self, modules: Sequence[str] = _MODULES) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fork_server", str(theirs.fileno()), *modules],
            cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
        )  # fmt: skip
        theirs.close()
        self._socket = ours
        self._ended: dict[int, int] = {}
        self._lock = threading.Lock()

    def start(
        self, module: str, arguments: Sequence[str], log: Path, directory: Path, environment: Mapping[str, str]
    ) -> ForkedProcess:
        asked = {
            "module": module, "arguments": list(arguments), "log": str(log), "directory": str(directory),
            "environment": dict(environment),
        }  # fmt: skip
        with self._lock:
            self._socket.send(json.dumps(asked).encode())
            while True:
                told = self._receive(None)
                if "pid" in told:
                    self._ended.pop(told["pid"], None)  # an earlier process of this number
                    return ForkedProcess(self, told["pid"])

    def ended(self, pid: int, timeout_s: float | None) -> int | None:
        """The exit status of a child; `None` where it still runs after that time."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._lock:
                left_s = 0.0 if until_s is None else until_s - time.monotonic()
                # Other threads wait for children of their own: none holds the lock for long.
                told = self._receive(0.1 if until_s is None else min(0.1, max(0.0, left_s)))
                while told:  # ends of others may stand before its own
                    told = self._receive(0.0)
                if pid in self._ended:
                    return self._ended[pid]
            if until_s is not None and time.monotonic() >= until_s:
                return None

    def close(self) -> None:
        """The server ends when nobody is left to ask it."""
        self._socket.close()
        self._process.wait()

    def _receive(self, timeout_s: float | None) -> dict[str, int]:
        """One message, or none. Notes what it says of ends."""
        self._socket.settimeout(timeout_s)
        try:
            data = self._socket.recv(_MESSAGE_BYTES)
        except (TimeoutError, BlockingIOError):
            return {}
        if not data:
            raise RuntimeError(f"the fork server ended with {self._process.wait()}")
        told: dict[str, int] = json.loads(data)
        if "ended" in told:
            self._ended[told["ended"]] = told["status"]
        return told


def _serve(tests: socket.socket) -> dict[str, Any] | None:
    """Fork for each message, and tell of each end. In a child, what it is to run; `None`: nobody asks any more."""
    wakes, woken = socket.socketpair()
    woken.setblocking(False)
    wakes.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the tests' to answer
    selector = selectors.DefaultSelector()
    selector.register(tests, selectors.EVENT_READ)
    selector.register(wakes, selectors.EVENT_READ)
    children: set[int] = set()
    while True:
        for key, _ in selector.select():
            if key.fileobj is wakes:
                wakes.recv(4096)
                _tell_of_ends(tests, children)
                continue
            data = tests.recv(_MESSAGE_BYTES)
            if not data:
                signal.set_wakeup_fd(-1)  # whoever ends now wakes nobody
                for pid in children:
                    os.kill(pid, signal.SIGKILL)
                return None
            if (pid := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                for fd in (tests, wakes, woken, selector):
                    fd.close()
                asked: dict[str, Any] = json.loads(data)
                return asked
            children.add(pid)
            _tell(tests, {"pid": pid})


def _tell_of_ends(tests: socket.socket, children: set[int]) -> None:
    for pid in [*children]:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            children.remove(pid)
            _tell(tests, {"ended": pid, "status": os.waitstatus_to_exitcode(status)})


def _tell(tests: socket.socket, what: Mapping[str, int]) -> None:
    """Where the tests were killed they hear nothing any more, which is seen behind all that they have asked for."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        tests.send(json.dumps(what).encode())


def _become(asked: dict[str, Any]) -> None:
    """As `python -m MODULE` would begin."""
    sink = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.close(sink)
    os.chdir(asked["directory"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    faulthandler.enable()
    random.seed()
    # What was read of the environment when it was imported.
    importlib.reload(importlib.import_module("tandem.core.fault_points"))
    sys.path.insert(0, os.getcwd())
    sys.argv = [asked["module"], *asked["arguments"]]
    runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)


def _prepare() -> None:
    """What each worker would do first, by what it has imported: half of the second in which it loads a small model."""
    if "numba" in sys.modules:
        from numba.core.registry import cpu_target

        cpu_target.typing_context.refresh()
        cpu_target.target_context.refresh()
    if "transformers" in sys.modules:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("llama")


def main() -> None:
    tests = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        importlib.import_module(module)
    _prepare()
    if len(os.listdir("/proc/self/task")) > 1:
        sys.exit("an import starts a thread: a fork would lack it")
    gc.collect()
    gc.freeze()
    if (asked := _serve(tests)) is not None:
        _become(asked)


if __name__ == "__main__":
    main()
