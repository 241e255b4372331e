"""Ray's autoscaler over hosts that are processes of this one: nodes of the types prefill and decode come and go.

As `ray.cluster_utils.AutoscalingCluster`, which ends all that runs of Ray on the host, whoever started it, and reads a
file that is missing from Ray's wheel.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from tandem.core.errors import TandemError
from tandem.core.ports import free_port

MARK = "TANDEM_TEST_RUN"
"""In the environment of everything that a run starts: finds processes whoever their parent is by now."""

TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}

HEAD_ID = "fffffffffffffffffffffffffffffffffffffffffffffffffff00000"
"""Of the head, as Ray's provider of such nodes wants it."""

SETTINGS = {
    "RAY_FAKE_CLUSTER": "1",
    "RAY_enable_autoscaler_v2": "1",  # as `ray up` does
    "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    "RAY_worker_niceness": "0",  # else all that others do on this host goes before the cluster
    # Two types that are launched at once may give a node the other one's id: it never registers, and all wait for it.
    "AUTOSCALER_MAX_CONCURRENT_LAUNCHES": "1",
    "RAY_raylet_start_wait_time_s": "90",  # of a node on a host that does much else
    # A node whose Ray was killed shall be given up at once.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "3",
}

_RAY = Path(sys.executable).parent / "ray"
_MEMORY = 100 << 20
_START_S = 300.0
_END_S, _LOOK_S = 60.0, 0.5


def marked(mark: str) -> Iterator[psutil.Process]:
    """Everything with this mark that lives."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                yield process
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
            continue


def end_marked(mark: str) -> None:
    """Kill everything with this mark, and what it starts meanwhile; return when all has ended. Raises `TandemError`
    where some has not in time."""
    until_s = time.monotonic() + _END_S
    while found := list(marked(mark)):
        if time.monotonic() > until_s:
            raise TandemError(f"{len(found)} processes have not ended {_END_S:g} s after they were killed: {found}")
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, timeout=_LOOK_S)


class RayHosts:
    """A head, and between one and `most` nodes of each type; all of them end with the `with` block.

    Args:
        home: for Ray's files.
        most: nodes, by type; each has room for one worker of that role.
    """

    def __init__(self, home: Path, most: Mapping[str, int]) -> None:
        from ray._private.services import get_node_ip_address

        self.mark = uuid.uuid4().hex
        self.address = f"{get_node_ip_address()}:{free_port()}"
        self._home, self._most = home, most
        sources = str(Path(__file__).resolve().parents[2])
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self.env |= {"HOME": str(home), "PYTHONPATH": sources, "RAY_USAGE_STATS_ENABLED": "0", MARK: self.mark}
        self.env.setdefault("XDG_CACHE_HOME", str(Path.home() / ".cache"))  # compiled kernels
        self.env |= {**TOKEN, **SETTINGS}

    def __enter__(self) -> RayHosts:
        """Raises `TandemError`: Ray does not start."""
        file = self._home / "autoscaling.json"
        file.write_text(json.dumps(launcher_tree(self.address, self._most)))
        port = self.address.rpartition(":")[2]
        line = [str(_RAY), "start", "--head", "--include-dashboard=false", f"--port={port}"]
        line += [f"--autoscaling-config={file}", '--resources={"router": 1}', "--num-cpus=1"]
        line += [f"--object-store-memory={_MEMORY}"]
        try:
            run = subprocess.run(line, env=self.env, capture_output=True, text=True, timeout=_START_S, check=False)
            if run.returncode:
                raise TandemError(f"Ray does not start: {run.stdout}{run.stderr}")
        except subprocess.TimeoutExpired:
            self._end()
            raise TandemError(f"Ray has not started within {_START_S:g} s: the host does too much else") from None
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        end_marked(self.mark)

    def num_nodes(self) -> int:
        """Beside the head."""
        return sum(_is_raylet(process) for process in marked(self.mark)) - 1


def _is_raylet(process: psutil.Process) -> bool:
    try:
        return Path(process.cmdline()[0]).name == "raylet"
    except (psutil.Error, IndexError):  # it has ended meanwhile, or is about to
        return False


def launcher_tree(gcs_address: str, most: Mapping[str, int]) -> dict[str, Any]:
    """What `ray up` hands to the head: one node of each type at first."""
    return {
        "cluster_name": "tandem-autoscaling",
        "max_workers": sum(most.values()),
        "idle_timeout_minutes": 0.05,
        "upscaling_speed": 100.0,
        "provider": {
            # Named by its class: the defaults of the type `fake_multinode` are missing from Ray's wheel.
            "type": "external",
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "launch_multiple": True,
            "head_node_id": HEAD_ID,
            "gcs_address": gcs_address,
        },
        "auth": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"node_config": {}, "max_workers": 0, "resources": {"CPU": 1, "router": 1}},
            **{
                role: {
                    "node_config": {},
                    "min_workers": 1,
                    "max_workers": num,
                    "resources": {"CPU": 1, role: 1, "object_store_memory": _MEMORY},
                }
                for role, num in most.items()
            },
        },
        **{
            f"{part}_commands": []
            for part in (
                "initialization",
                "setup",
                "head_setup",
                "worker_setup",
                "head_start_ray",
                "worker_start_ray",
            )
        },
    }
