"""A host's Ray dies, the head's, or its control store alone: what is left of a cluster, and how it goes on."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from serving import Rays, Serve

from tandem.core.ports import free_port
from tests.support.waiting import nothing, wait_until

pytestmark = [pytest.mark.timeout(300), pytest.mark.faults]

TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
LEASE_S = 1.0
SECURITY = {"tls": "off"}


class Hosts:
    """A head and nodes for workers, each with processes of its own to kill."""

    def __init__(self, directory: Path, **settings: str) -> None:
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._directory, self._settings = directory, settings
        self.head = self._make("head")
        self.nodes: list[Rays] = []

    def _make(self, name: str) -> Rays:
        rays = Rays(self._directory / name)
        rays.home.mkdir()
        rays.env |= {**TOKEN, **self._settings}
        return rays

    def start_head(self) -> None:
        self.head.start("--head", "--include-dashboard=false", f"--port={self.port}", mode="token")

    def start_node(self, **places: int) -> None:
        self.nodes.append(self._make(f"node-{len(self.nodes)}"))
        resources = f"--resources={json.dumps(places)}"
        self.nodes[-1].start(f"--address={self.address}", resources, mode="token")

    def end_nodes(self) -> None:
        for node in self.nodes:
            node.end()

    def end(self) -> None:
        self.end_nodes()
        self.head.end()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    hosts = Hosts(tmp_path)
    try:
        hosts.start_head()
        hosts.start_node(prefill=1, decode=1)
        yield hosts
    finally:
        hosts.end()


def serving(directory: Path, hosts: Hosts) -> Serve:
    directory.mkdir()
    transport = {"lease_s": LEASE_S, "grace_s": 0.5}
    return Serve(directory, "--address", hosts.address, env=TOKEN, security=SECURITY, transport=transport)


def pids_of(serve: Serve) -> list[int]:
    return [member["pid"] for member in serve.members().values()]


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def test_workers_of_a_dead_head_end_themselves_and_the_next_head_gets_others(hosts: Hosts, tmp_path: Path) -> None:
    serve = serving(tmp_path / "first", hosts)
    try:
        serve.wait_ready()
        workers = pids_of(serve)
        hosts.head.end()  # all at once, as with its host
        serve.process.kill()
        serve.process.wait()
        assert alive(workers) == workers  # their own Ray waits for a head on and on
        wait_until(lambda: alive(workers), "no worker", 60, wanted=nothing, every_s=0.5)
    finally:
        serve.clean_up()
    hosts.end_nodes()  # `ray up` stops the Ray of every node before it starts it anew
    hosts.start_head()
    hosts.start_node(prefill=1, decode=1)
    serve = serving(tmp_path / "second", hosts)
    try:
        serve.wait_ready()
        assert not set(pids_of(serve)) & set(workers)
        assert serve.complete().status_code == 200
        assert serve.interrupt() == 0, serve.output
    finally:
        serve.clean_up()


def test_a_successor_goes_to_another_node_though_ray_takes_the_dead_one_for_alive(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, RAY_health_check_failure_threshold="1000")  # Ray never gives a node up
    serve: Serve | None = None
    try:
        hosts.start_head()
        for places in ({"prefill": 1}, {"decode": 1}, {"decode": 1}):
            hosts.start_node(**places)
        serve = serving(tmp_path / "serve", hosts)
        serve.wait_ready()
        before = serve.members()["decode-0"]
        raylet = psutil.Process(before["pid"]).parent()
        assert raylet is not None
        raylet.kill()
        serve.until(lambda cluster: _incarnation(cluster, "decode-0") != before["incarnation"])
        serve.until(lambda cluster: cluster.get("settled", False))
        assert psutil.Process(serve.members()["decode-0"]["pid"]).ppid() != raylet.pid
        assert serve.complete().status_code == 200
        assert serve.interrupt() == 0, serve.output
    finally:
        if serve is not None:
            serve.clean_up()
        hosts.end()


# --- a control store with a memory -----------------------------------------------------------------------------------


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[int]:
    """The port of a Redis of our own."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("needs redis-server: apt-get install redis-server")
    port = free_port()
    line = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path)]
    with subprocess.Popen(line, stdout=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: _listens(port), "redis-server", 10)
            yield port
        finally:
            process.kill()


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def control_store(rays: Rays) -> psutil.Process:
    return next(p for p in rays.processes() if p.cmdline() and Path(p.cmdline()[0]).name == "gcs_server")


def test_with_redis_the_control_store_is_started_again_and_all_goes_on(redis: int, tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, RAY_REDIS_ADDRESS=f"127.0.0.1:{redis}")
    store: subprocess.Popen[bytes] | None = None
    serve: Serve | None = None
    try:
        hosts.start_head()
        hosts.start_node(prefill=1, decode=2)
        serve = serving(tmp_path / "serve", hosts)
        serve.wait_ready()
        before = {name: member["incarnation"] for name, member in serve.members().items()}
        old = control_store(hosts.head)
        line, environment = old.cmdline(), old.environ()
        old.kill()
        old.wait(10)
        assert serve.complete().status_code == 200
        store = subprocess.Popen(line, env=environment)
        assert serve.complete().status_code == 200
        run = serve.tandem("scale", "--decode", "2")  # Ray has to place a worker
        assert run.returncode == 0, run.stderr + run.stdout
        assert {name: serve.members()[name]["incarnation"] for name in before} == before
        os.kill(serve.members()["prefill-0"]["pid"], 9)
        serve.until(lambda cluster: _incarnation(cluster, "prefill-0") != before["prefill-0"])
        serve.until(lambda cluster: cluster.get("settled", False))
        assert serve.complete().status_code == 200
        assert serve.interrupt() == 0, serve.output
    finally:
        if serve is not None:
            serve.clean_up()
        hosts.end()
        if store is not None:
            store.kill()
            store.wait()


def _incarnation(cluster: dict[str, Any], name: str) -> str:
    return next((w["member"]["incarnation"] for w in cluster["workers"] if w["member"]["worker_id"] == name), "")
