"""Routers as plain processes that share one HTTP port, before one pair of scripted workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tandem.core.ports import free_port
from tandem.rpc.v1.control_pb2 import DrainRouterReply, DrainRouterRequest, OtherRouter, StopRouterRequest
from tests.support.scripted_pool import ScriptedPool
from tests.support.scripted_worker import ScriptedDecode, ScriptedPrefill
from tests.support.stopping import is_still, stop_still
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
BODY = {"model": "tandem-tiny", "prompt": "x", "max_tokens": 3}


@dataclass
class RouterProcess:
    """One of them, and what the supervisor tells it."""

    name: str
    popen: subprocess.Popen[bytes]
    pool: ScriptedPool
    log: Path
    http_port: int

    @property
    def pid(self) -> int:
        return self.popen.pid

    def ports(self) -> set[int]:
        """Those of the clients whose connections it has accepted."""
        open_ones = psutil.Process(self.pid).net_connections("tcp")
        return {c.raddr.port for c in open_ones if c.raddr and c.laddr.port == self.http_port}

    def leave(self) -> Future[DrainRouterReply]:
        """It is told that others serve; done once it has no connection any more."""
        threads = ThreadPoolExecutor(1)
        order = DrainRouterRequest(others_serve=True)
        left = threads.submit(lambda: self.pool.control.DrainRouter(order, timeout=60))
        threads.shutdown(wait=False)
        return left

    @property
    def as_other(self) -> OtherRouter:
        return self.pool.as_other(self.name)

    def stop(self) -> int:
        """In order; its exit status."""
        self.pool.control.StopRouter(StopRouterRequest(drain_s=2.0), timeout=10)
        return self.popen.wait(20)

    def end(self) -> None:
        self.popen.kill()
        self.popen.wait()


@dataclass
class SharedPort:
    """Starts routers on one port; `close` ends them all."""

    directory: Path
    checkpoint: Path
    port: int = field(default_factory=free_port)
    routers: list[RouterProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.workers = (ScriptedPrefill("prefill-0"), ScriptedDecode("decode-0"))
        self.meeting_place = self.directory / "siblings"
        # Handoffs are scripted here, whatever a router holds for its sibling's; test_http_mixed.py has the mixed pool.
        config = {"transport": {"lease_s": 30.0}, "scheduling": {"mixed_pool": False}}
        (self.directory / "tandem.yaml").write_text(json.dumps(config))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def decode(self) -> ScriptedDecode:
        return self.workers[1]

    def command(self, name: str, ready: Path) -> list[str]:
        return [
            sys.executable, "-m", "router", "--config", str(self.directory / "tandem.yaml"), "--name", name,
            "--model-dir", str(self.checkpoint), "--siblings", str(self.meeting_place),
            "--http-port", str(self.port), "--ready-file", str(ready),
        ]  # fmt: skip

    def start(self, name: str, *, told: bool = True) -> RouterProcess:
        """Until it listens and, if `told`, knows the workers."""
        ready, log = (self.directory / f"{name}.{len(self.routers)}.{kind}" for kind in ("json", "log"))
        with log.open("wb") as sink:
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            popen = subprocess.Popen(self.command(name, ready), stdout=sink, stderr=sink, cwd=ROOT, env=environment)
        wait_until(lambda: ready.exists() or popen.poll() is not None, f"the start of {name}", 60, more=log.read_text)
        assert ready.exists(), log.read_text()
        pool = ScriptedPool(json.loads(ready.read_text())["control"])
        router = RouterProcess(name, popen, pool, log, self.port)
        self.routers.append(router)
        if told:
            pool.workers.extend(self.workers)
            self.tell()
        return router

    def tell(self) -> None:
        """Each router that knows workers, of the others too."""
        there = [router for router in self.routers if router.popen.poll() is None and router.pool.workers]
        for router in there:
            router.pool.others = [other.as_other for other in there if other is not router]
            if not is_still(router.pid):
                router.pool.push()

    def close(self) -> None:
        for router in self.routers:
            router.end()
            router.pool.workers = []
            router.pool.close()
        for worker in self.workers:
            worker.kill()

    def metrics(self) -> str:
        return httpx.get(f"{self.url}/metrics", timeout=10).text

    @contextmanager
    def accepted_by(self, router: RouterProcess, *others: RouterProcess) -> Iterator[httpx.Client]:
        """A client with a connection that this router has accepted: the others are stopped until it is there."""
        with httpx.Client(base_url=self.url, timeout=30) as client:
            for other in others:
                stop_still(other.pid)
            try:
                wait_until(lambda: client.get("/health").status_code, "health", 20, wanted=lambda status: status == 200)
                assert router.ports()
            finally:
                for other in others:
                    psutil.Process(other.pid).resume()
            yield client


class SteadyLoad:
    """Clients that ask one request after the other while a `with` block runs.

    Attributes:
        failures: what came instead of a whole answer.
    """

    def __init__(self, url: str, num_clients: int, **body: Any) -> None:
        self.failures: list[str] = []
        self.num_answers = 0
        self._url, self._body = url, {**BODY, **body}
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._ask, args=(number % 2 == 0,), daemon=True) for number in range(num_clients)
        ]

    def __enter__(self) -> SteadyLoad:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)

    def wait_for(self, num_more: int) -> None:
        goal = self.num_answers + num_more
        wait_until(lambda: self.num_answers >= goal or self.failures, f"{num_more} more answers", 60)

    def _ask(self, keeps_connection: bool) -> None:
        """Half of them keep their connection as long as the server does, and half open one for each request."""
        client = httpx.Client(base_url=self._url, timeout=60)
        while not self._over.is_set():
            if not keeps_connection:
                client.close()
                client = httpx.Client(base_url=self._url, timeout=60)
            began = time.monotonic()
            try:
                answer = client.post("/v1/completions", json=self._body)
                what = "" if answer.status_code == 200 else f"{answer.status_code} {answer.text}"
                if not what and answer.json()["usage"]["completion_tokens"] != self._body["max_tokens"]:
                    what = f"a short answer: {answer.text}"
            except httpx.HTTPError as error:
                what = f"{error!r} after {time.monotonic() - began:.3f} s"
            with self._lock:
                self.num_answers += not what
                self.failures += [what] if what else []
        client.close()
