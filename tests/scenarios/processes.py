"""A cluster of plain processes, without Ray: the real router and workers, the real transport, HTTP on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from tandem.core.model_path import resolve_model
from tandem.rpc.channel import make_channel
from tandem.rpc.v1 import common_pb2 as pb
from tandem.rpc.v1 import control_pb2, control_pb2_grpc

START_TIMEOUT_S = 120.0
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Process:
    """One process of the cluster and the facts of its ready file."""

    name: str
    popen: subprocess.Popen[bytes]
    ready_file: Path
    log: Path
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def pid(self) -> int:
        return self.popen.pid

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.popen.send_signal(number)

    def wait_ready(self) -> None:
        """Until the ready file is there; fails with the log when the process ends before."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.ready_file.exists():
            if self.popen.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{self.name} did not start:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.05)
        self.facts = json.loads(self.ready_file.read_text())


class ProcessCluster:
    """Starts, kills and replaces the processes of one cluster, and tells the router who is there."""

    def __init__(self, directory: Path, model: str = "embedded", config: dict[str, Any] | None = None) -> None:
        self.directory = directory
        self.model_dir = resolve_model(model)
        self.config_file = directory / "tandem.yaml"
        self.config_file.write_text(yaml.safe_dump(config or {}))
        self.workers: dict[str, Process] = {}
        self.router: Process
        self._membership_version = 0
        self._num_started = 0

    @property
    def url(self) -> str:
        return str(self.router.facts["http"])

    # -- processes

    def _start(self, name: str, module: str, *arguments: str) -> Process:
        self._num_started += 1
        ready, log = (self.directory / f"{name}.{self._num_started}.{kind}" for kind in ("json", "log"))
        command = [
            sys.executable, "-m", module, "--config", str(self.config_file), "--model-dir", str(self.model_dir),
            "--ready-file", str(ready), *arguments,
        ]  # fmt: skip
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "PYTHONPATH": str(ROOT)}
        with log.open("wb") as sink:
            popen = subprocess.Popen(
                command, stdout=sink, stderr=subprocess.STDOUT, env=environment, cwd=self.directory
            )
        return Process(name, popen, ready, log)

    def start_worker(self, role: str, number: int = 0, *arguments: str) -> Process:
        """Start a worker without waiting for it; a dead one of the same name is replaced."""
        name = f"{role}-{number}"
        process = self._start(name, f"{role}_worker", "--worker-id", name, "--kv-bytes", str(48 << 20), *arguments)
        self.workers[name] = process
        return process

    def start_router(self) -> Process:
        self.router = self._start("router", "router", "--http-port", "0")
        return self.router

    def start(self, num_prefill: int = 1, num_decode: int = 1) -> None:
        """Start everything and, when both pools have workers, wait until `/health` says 200."""
        self.start_router()
        for n in range(num_prefill):
            self.start_worker("prefill", n)
        for n in range(num_decode):
            self.start_worker("decode", n)
        for process in [self.router, *self.workers.values()]:
            process.wait_ready()
        self.publish()
        if num_prefill and num_decode:
            self.wait_healthy()

    def publish(self) -> None:
        """Tell the router about all workers that live."""
        self._membership_version += 1
        members = [
            control_pb2.Member(
                worker_id=name,
                incarnation=process.facts["incarnation"],
                role=pb.ROLE_PREFILL if name.startswith("prefill") else pb.ROLE_DECODE,
                address=process.facts["address"],
                state="ready",
                node="localhost",
                pid=process.pid,
            )
            for name, process in self.workers.items()
            if process.popen.poll() is None and process.facts
        ]
        membership = control_pb2.Membership(version=self._membership_version, members=members)

        async def push() -> None:
            async with make_channel(self.router.facts["control"]) as channel:
                await control_pb2_grpc.RouterControlStub(channel).SetMembership(membership, timeout=10)

        asyncio.run(push())

    def wait_healthy(self, timeout_s: float = 30.0) -> None:
        self.wait_for(lambda: httpx.get(f"{self.url}/health").status_code == 200, "health", timeout_s)

    def stop(self) -> None:
        """End all processes; those that must be killed make the test fail."""
        processes = [self.router, *self.workers.values()]
        for process in processes:
            if process.popen.poll() is None:
                process.kill(signal.SIGCONT)
                process.kill(signal.SIGTERM)
        stuck = []
        for process in processes:
            try:
                process.popen.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.popen.wait()
                stuck.append(f"{process.name}:\n{process.log.read_text()[-3000:]}")
        assert not stuck, f"had to be killed: {stuck}"

    # -- looking

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(f"{self.url}/v1/cluster").json()
        return answer

    def pages(self) -> dict[str, dict[str, int]]:
        """Counts of pages by state, of every worker, by the worker's own word."""

        async def ask(address: str) -> pb.WorkerStatus:
            async with make_channel(address) as channel:
                stub = control_pb2_grpc.WorkerControlStub(channel)
                return await stub.Status(control_pb2.StatusRequest(), timeout=10)

        counts = {}
        for name, process in self.workers.items():
            if process.popen.poll() is None:
                pages = asyncio.run(ask(process.facts["address"])).pages
                counts[name] = {s: getattr(pages, s) for s in ("free", "used", "reserved", "cached", "quarantined")}
        return counts

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels."""
        text = httpx.get(f"{self.url}/metrics").text
        values = [line.rsplit(" ", 1)[1] for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
        return sum(map(float, values))

    def wait_for(self, condition: Any, what: str, timeout_s: float = 10.0) -> None:
        """Until `condition()` holds: what other processes do can only be looked at."""
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(httpx.TransportError):
                if condition():
                    return
            assert time.monotonic() < deadline, f"{what} did not come within {timeout_s} s; {self.logs()}"
            time.sleep(0.02)

    def wait_idle(self, timeout_s: float = 5.0) -> None:
        """Until no worker holds a page for any request."""

        def idle() -> bool:
            return all(p["used"] == p["reserved"] == p["quarantined"] == 0 for p in self.pages().values())

        try:
            self.wait_for(idle, "idle workers", timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; pages: {self.pages()}") from None

    def logs(self) -> str:
        return "\n".join(f"== {p.name}\n{p.log.read_text()[-1500:]}" for p in [self.router, *self.workers.values()])


@contextlib.contextmanager
def running(directory: Path, num_prefill: int = 1, num_decode: int = 1, **options: Any) -> Iterator[ProcessCluster]:
    """A cluster for the length of a `with` block; nothing of it is left afterwards."""
    cluster = ProcessCluster(directory, **options)
    try:
        cluster.start(num_prefill, num_decode)
        yield cluster
    finally:
        cluster.stop()
