"""A site under `tandem serve`: Ray starts again what a fault ends, and the real supervisor tells everybody."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tandem.core.fault_points import VARIABLE
from tandem.rpc.v1 import common_pb2 as pb
from tests.cluster.serving import Serve
from tests.scenarios.faults.arming import Points
from tests.scenarios.faults.site import CONFIG
from tests.scenarios.processes import holds_anything, shows_idle, statuses_at
from tests.support.waiting import nothing, wait_until

SETTLE_S = 60.0
_ACTORS = {"router": "RouterActor", "supervisor": "SupervisorActor"}


@dataclass
class RaySite:
    """One `tandem serve` for many cases. A fault is sent from here, at a process that a point holds."""

    serve: Serve
    points: Points
    _worker_pids: dict[str, int] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return self.serve.url

    def settled(self) -> dict[str, Any]:
        """The cluster's state once every pool is whole."""
        return self.serve.until(lambda cluster: cluster.get("settled", False), SETTLE_S)

    def prepare(self) -> dict[str, Any]:
        """Whole, idle, nothing armed; the cluster's state."""
        self.points.clear()
        cluster = self.settled()
        self.wait_idle(cluster, 10.0)
        wait_until(lambda: shows_idle(self.url), "a router that has heard that all workers are idle", every_s=0.05)
        return cluster

    def pid(self, cluster: dict[str, Any], name: str) -> int:
        """Of a worker, `router` or `supervisor`."""
        if name == "supervisor":
            return int(cluster["pid"])
        if name == "router":
            return self.running()["router"].pid
        (found_pid,) = [w["member"]["pid"] for w in cluster["workers"] if w["member"]["worker_id"] == name]
        return int(found_pid)

    def running(self) -> dict[str, psutil.Process]:
        """Processes by name, found without the supervisor, which may be down; workers as the router last told."""
        with contextlib.suppress(httpx.TransportError):
            shown = httpx.get(f"{self.url}/v1/cluster", timeout=2.0).json()
            self._worker_pids = {w["id"]: w["pid"] for pool in ("prefill", "decode") for w in shown[pool]}
        names = {pid: name for name, pid in self._worker_pids.items()}
        found = {}
        for process in self.serve.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                title = " ".join(process.cmdline())
                name = names.get(process.pid) or next((n for n, actor in _ACTORS.items() if actor in title), None)
                if name is not None:
                    found[name] = process
        return found

    def wait_idle(self, cluster: dict[str, Any], timeout_s: float) -> None:
        """Until no worker holds a request, or a page for one."""

        def held() -> dict[str, str]:
            return {name: str(s) for name, s in self.statuses(cluster).items() if holds_anything(s)}

        wait_until(held, "idle workers", timeout_s, wanted=nothing, every_s=0.05)

    def until_replaced(self, before: dict[str, Any], name: str) -> dict[str, Any]:
        """The cluster's state once `name` has another incarnation than `before` and all is whole."""
        old = incarnation_of(before, name)
        return self.serve.until(lambda c: c.get("settled", False) and incarnation_of(c, name) != old, SETTLE_S)

    def check_baseline(self, cluster: dict[str, Any], census: dict[str, int], timeout_s: float = 10.0) -> None:
        """Nothing is held for any request, and there are no more processes of any kind than before."""
        self.wait_idle(cluster, timeout_s)

        def orphans() -> dict[str, int]:
            return {kind: n for kind, n in self.census().items() if n > census.get(kind, 0)}

        wait_until(orphans, f"no process beyond {census}", timeout_s, wanted=nothing, every_s=0.2)

    def statuses(self, cluster: dict[str, Any]) -> dict[str, pb.WorkerStatus]:
        """Every worker's own word, by its id."""
        return statuses_at({w["member"]["worker_id"]: w["member"]["address"] for w in cluster["workers"]})

    def census(self) -> dict[str, int]:
        """How many processes of each kind there are: orphans would show."""
        counts: dict[str, int] = {}
        for process in self.serve.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                kind = kind_of(process.cmdline())
                counts[kind] = counts.get(kind, 0) + 1
        return counts


def incarnation_of(cluster: dict[str, Any], name: str) -> str:
    """Of a worker or `router`; empty where there is none now."""
    if name == "router":
        return str((cluster["router"] or {}).get("incarnation", ""))
    found = [w["member"]["incarnation"] for w in cluster.get("workers", []) if w["member"]["worker_id"] == name]
    return found[0] if found else ""


def kind_of(cmdline: list[str]) -> str:
    """`ray::WorkerActor`, `raylet`, `python …/dashboard.py`: what stays when a process is started again.

    Ray's idle workers come and go as it likes, under one name.
    """
    first = cmdline[0] if cmdline else "?"
    if first.startswith("ray::"):
        return first.partition(".")[0]
    script = next((part for part in cmdline[1:] if part.endswith(".py")), "")
    return Path(first).name + (f" {Path(script).name}" if script else "")


@contextlib.contextmanager
def ray_site(directory: Path, *, num_prefill: int = 2, num_decode: int = 2, **config: Any) -> Iterator[RaySite]:
    """A `tandem serve` with points, for the length of a `with` block."""
    points = Points(directory / "points")
    pools = {
        "prefill": {"workers": num_prefill, "threads": 1},
        "decode": {"workers": num_decode, "threads": 1},
    }
    os.environ[VARIABLE] = str(points.directory)  # goes from here to `tandem serve`, to Ray, to every actor
    try:
        serve = Serve(directory, **{**CONFIG, "pools": pools, **config})
    finally:
        del os.environ[VARIABLE]
    try:
        yield RaySite(serve.wait_ready(), points)
    finally:
        points.clear()
        serve.clean_up()
