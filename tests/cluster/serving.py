"""`tandem serve` as a subprocess, and what tests ask of it."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
import pytest

from benchmarks.autoscale.ray_hosts import MARK, marked
from tandem.core.ports import free_port
from tests.scenarios.client import events
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parent.parent.parent
CACHE_BYTES = 64 << 20
"""KV pages of one worker."""

RAY = str(Path(sys.executable).parent / "ray")


def rare(value: object) -> Any:
    """A parameter that is left to `make test-faults`."""
    return pytest.param(value, marks=pytest.mark.faults)


class Serve:
    """One `tandem serve` with a small cache and one thread a worker."""

    def __init__(
        self,
        directory: Path,
        *options: str,
        port: int | None = None,
        env: dict[str, str] | None = None,
        **config: Any,
    ) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.mark = uuid.uuid4().hex
        self.env = {
            **os.environ,
            MARK: self.mark,
            "XDG_RUNTIME_DIR": str(directory),
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            **(env or {}),
        }
        self.env.pop("RES_OPTIONS")  # of the tests' own processes: a cluster sets it where it matters
        pool = {"threads": 1}
        tree = {"cache": {"memory_bytes": CACHE_BYTES}, "pools": {"prefill": pool, "decode": pool}, **config}
        file = directory / f"tandem-{self.port}.json"  # JSON is YAML
        file.write_text(json.dumps(tree))
        line = [sys.executable, "-m", "tandem.cli", "serve", "--config", str(file), "--port", str(self.port), *options]
        self.process = subprocess.Popen(
            line, env=self.env, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines: list[str] = []
        self._news: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def wait_for(self, text: str, timeout_s: float = 150.0) -> str:
        """The first line, from here on, that holds `text`."""
        deadline = time.monotonic() + timeout_s
        while (line := self._news.get(timeout=max(0.1, deadline - time.monotonic()))) is not None:
            if text in line:
                return line
        raise AssertionError(f"`tandem serve` ended without saying {text!r}:\n{self.output}")

    def wait_ready(self) -> Serve:
        self.wait_for("Ready: ")
        self.wait_for("stop  ")
        return self

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def tandem(self, *line: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Another command of the command line, as the same user."""
        return subprocess.run(
            [sys.executable, "-m", "tandem.cli", *line],
            env={**self.env, MARK: "a command"},
            cwd=self.env["XDG_RUNTIME_DIR"],
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def start(self, *line: str) -> subprocess.Popen[str]:
        """As `tandem`, without waiting for its end."""
        return subprocess.Popen(
            [sys.executable, "-m", "tandem.cli", *line],
            env={**self.env, MARK: "a command"},
            cwd=self.env["XDG_RUNTIME_DIR"],
            stdout=subprocess.PIPE,
            text=True,
        )

    def status(self) -> dict[str, Any]:
        """What the supervisor tells now. `tandem status --json` prints the same, after the start of a process."""
        return self.until(lambda _: True)

    def members(self) -> dict[str, dict[str, Any]]:
        return {worker["member"]["worker_id"]: worker["member"] for worker in self.status()["workers"]}

    def complete(
        self, prompt: str = "Once upon a time", *, max_tokens: int = 8, timeout_s: float = 60.0
    ) -> httpx.Response:
        body = {"model": "tandem-tiny", "prompt": prompt, "max_tokens": max_tokens}
        body |= {"temperature": 0, "ignore_eos": True}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=timeout_s)

    def until(self, condition: Callable[[dict[str, Any]], bool], timeout_s: float = 150.0) -> dict[str, Any]:
        """The cluster's state once `condition` holds: told by the supervisor at each change."""
        import grpc

        from tandem.cluster.plain import plain
        from tandem.core.config import SecurityConfig
        from tandem.rpc.channel import host_of, make_blocking_channel
        from tandem.rpc.permissions import PeerRole
        from tandem.rpc.security import Security
        from tandem.rpc.v1 import supervisor_pb2, supervisor_pb2_grpc

        file = json.loads((Path(self.env["XDG_RUNTIME_DIR"]) / "tandem" / f"{self.port}.json").read_text())
        address = file["control_address"]
        security = Security(SecurityConfig(file["tls"], file["certificates"]), PeerRole.CLIENT, host_of(address))
        deadline = time.monotonic() + timeout_s
        with make_blocking_channel(address, security) as channel:
            stub = supervisor_pb2_grpc.SupervisorControlStub(channel)
            request = supervisor_pb2.WatchClusterRequest()
            while True:
                left_s = max(0.1, deadline - time.monotonic())
                try:
                    for message in stub.WatchCluster(request, timeout=left_s, wait_for_ready=True):
                        cluster: dict[str, Any] = plain(message)
                        if condition(cluster):
                            return cluster
                except grpc.RpcError as error:
                    if error.code() is not grpc.StatusCode.UNAVAILABLE:  # its supervisor was killed: ask the next
                        raise

    def state_files(self) -> list[Path]:
        return list((Path(self.env["XDG_RUNTIME_DIR"]) / "tandem").iterdir())

    def processes(self) -> list[psutil.Process]:
        """Everything that this `tandem serve` has started and that lives, itself included."""
        return list(marked(self.mark))

    def interrupt(self, number: int = signal.SIGINT) -> int:
        """Send a signal and wait for the end; the exit code."""
        self.process.send_signal(number)
        return self.process.wait(timeout=60)

    def clean_up(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for process in self.processes():
            process.kill()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            self._news.put(line)
        self._news.put(None)


class Rays:
    """Ray nodes made by `ray start`; all of them are killed at the end."""

    def __init__(self, home: Path) -> None:
        self.home, self.mark = home, uuid.uuid4().hex
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self.env |= {"HOME": str(home), "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0", MARK: self.mark}
        self.env.setdefault("XDG_CACHE_HOME", str(Path.home() / ".cache"))  # compiled kernels

    def start(self, *options: str, mode: str) -> None:
        line = [RAY, "start", *options, "--num-cpus=1", "--object-store-memory=100000000"]
        run = subprocess.run(
            line, env={**self.env, "RAY_AUTH_MODE": mode}, capture_output=True, text=True, timeout=90, check=False
        )
        assert run.returncode == 0, run.stdout + run.stderr

    def tandem(self, *line: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tandem.cli", *line],
            env={**self.env, MARK: "a command", "XDG_RUNTIME_DIR": str(self.home), **variables},
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def processes(self) -> list[psutil.Process]:
        return list(marked(self.mark))

    def end(self) -> None:
        for process in self.processes():
            process.kill()


def parent_of(pid: int) -> int:
    return psutil.Process(pid).ppid()


def raylet_of(node: Any) -> int:
    """Process id of the raylet of a node of Ray's cluster utility: the parent of all that runs there."""
    from ray._private import ray_constants

    return int(node.all_processes[ray_constants.PROCESS_TYPE_RAYLET][0].process.pid)


class Stream:
    """One long streamed request on a thread: the texts of its chunks as they come."""

    def __init__(self, serve: Serve, *, max_tokens: int) -> None:
        self.texts: list[str] = []
        self.finish = ""
        self.error: Exception | None = None
        self.num_seen = threading.Semaphore(0)
        self._serve, self._max_tokens = serve, max_tokens
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def wait_for_token(self) -> None:
        assert self.num_seen.acquire(timeout=60), self.error

    def join(self, timeout_s: float = 60.0) -> None:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "the stream hangs"

    def _run(self) -> None:
        fields = {"model": "tandem-tiny", "max_tokens": self._max_tokens, "ignore_eos": True}
        try:
            for event in events(self._serve.url, "Once upon a time", **fields):
                self._take(event)
        except httpx.HTTPError as error:
            self.error = error

    def _take(self, chunk: dict[str, Any] | None) -> None:
        if chunk is None:
            return
        if "error" in chunk:
            self.finish = f"error: {chunk['error']['message']}"
            return
        self.texts.append(chunk["choices"][0]["text"])
        self.finish = chunk["choices"][0]["finish_reason"] or self.finish
        self.num_seen.release()


class Clients:
    """So many threads, each of which runs `_run` with its number until the block ends; `_stop` tells it."""

    def __init__(self, serve: Serve, num_clients: int) -> None:
        self._serve = serve
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(num_clients)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(90)
            assert not thread.is_alive(), "a request hangs"

    def _run(self, client: int) -> None:
        raise NotImplementedError


class Load(Clients):
    """Clients that send requests one after another until the block ends; every answer is kept.

    They rest for `PAUSE_S` in between: what a cluster does meanwhile, a start for one, wants the cores too.
    """

    PAUSE_S = 0.1

    def __init__(self, serve: Serve, num_clients: int) -> None:
        self.responses: list[httpx.Response] = []
        self.errors: list[Exception] = []
        super().__init__(serve, num_clients)

    def wait_for(self, num: int) -> None:
        """Until there are so many answers."""
        wait_until(lambda: len(self.responses), f"{num} answers", 60, wanted=lambda seen: seen >= num)

    @property
    def failures(self) -> list[str]:
        bad = [f"{r.status_code}: {r.text[:300]}" for r in self.responses if r.status_code != 200]
        return bad + [repr(error) for error in self.errors]

    def _run(self, client: int) -> None:
        turn = 0
        while not self._stop.is_set():
            turn += 1
            try:
                prompt = f"Client {client} tells story {turn}: once upon a time"
                self.responses.append(self._serve.complete(prompt, max_tokens=24))
            except httpx.HTTPError as error:
                self.errors.append(error)
                self._stop.wait(0.1)  # not to take the cores from what starts again
            self._stop.wait(self.PAUSE_S)
