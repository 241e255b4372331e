"""What one worker may take of the node it runs on, where `tandem serve` could not decide: clusters of several nodes."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import psutil
import ray

from tandem.cluster.checks.host import this_host
from tandem.cluster.checks.preflight import Preflight, share_of_gpu, share_of_memory
from tandem.cluster.supervisor.nodes import Node
from tandem.core.config import Config
from tandem.core.errors import ConfigError
from tandem.core.identity import WORKER_ROLES, Role

_WORKER_TITLE = "ray::WorkerActor"
"""How Ray names the processes of workers."""


def threads_for(role: Role) -> int:
    """CPU threads: an equal share of the cores for each worker that the smallest node of this role can hold."""
    shares = [
        resources.get("CPU", 1.0) // num_places(resources)
        for resources in (node["Resources"] for node in ray.nodes() if node["Alive"])
        if resources.get(role, 0) >= 1
    ]
    return max(1, int(min(shares, default=1)))


def list_nodes() -> list[Node]:
    """Those that Ray takes for alive. Blocks."""
    return [
        Node(
            node["NodeID"],
            node["NodeManagerAddress"],
            node["NodeManagerPort"],
            {role: int(node["Resources"].get(role, 0)) for role in Role},
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def kv_bytes_here(config: Config, role: Role, model_dir: Path) -> int:
    """Bytes of KV pages for a worker of `role` in this process, as if this node held as many as it has places.

    `model_dir` is where the model that the configuration names lies here.

    Raises:
        ConfigError: nothing is left for pages.
    """
    pool = getattr(config.pools, role)
    here = replace(config, model=replace(config.model, path=str(model_dir)))
    check = Preflight(here, this_host(), local=False)
    if pool.gpus:
        share = share_of_gpu(config, *gpu_memory_bytes(), check.weight_bytes, pool.gpus)
    else:
        node_id = ray.get_runtime_context().get_node_id()
        resources = next(node["Resources"] for node in ray.nodes() if node["NodeID"] == node_id)
        places = {role: int(resources.get(role, 0.0)) for role in WORKER_ROLES}
        places[role] = max(1, places[role])
        fixed = check.fixed_bytes(places)
        free_at_start = check.host.available_bytes + held_by_workers(psutil.Process(os.getppid()))
        share = share_of_memory(config, free_at_start, fixed, sum(places.values()))
    if share <= 0:
        raise ConfigError(
            "no memory is left for KV pages on this node beside the weights; use a smaller model or dtype, "
            "give each worker more of a GPU (pools.*.gpus), or set cache.memory_bytes",
            key="cache.memory_bytes",
        )
    return share


def held_by_workers(raylet: psutil.Process) -> int:
    """Bytes that the node's workers hold already, this one among them: weights and pages that they share are counted
    once. With what is free now it makes what was free before the first of them, so that a worker that starts later, or
    again, gets as many pages as the others."""
    held = 0
    for process in raylet.children():
        try:
            if " ".join(process.cmdline()).startswith(_WORKER_TITLE):
                held += _taken_from_free(process.pid)
        except (psutil.Error, OSError):  # it has ended meanwhile
            continue
    return held


def _taken_from_free(pid: int) -> int:
    """Bytes of a process that would be free without it, its part of what several share. Files that are mapped, as its
    libraries, count as free memory anyway."""
    kept = 0
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, _, size = line.partition(":")
        if name in ("Pss_Anon", "Pss_Shmem"):
            kept += int(size.split()[0]) << 10
    return kept


def num_places(resources: dict[str, float]) -> float:
    """How many workers a node with these Ray resources can hold; at least 1."""
    return max(1.0, sum(resources.get(role, 0.0) for role in WORKER_ROLES))


def gpu_memory_bytes() -> tuple[int, int]:
    """All and the free memory of the first GPU that Ray gave to this process; asked of the driver: no context is made.

    Raises:
        ConfigError: the driver does not say.
    """
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    query = ["nvidia-smi", "--query-gpu=memory.total,memory.free", "--format=csv,noheader,nounits", "-i", device]
    try:
        said = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout
        total, free = said.strip().splitlines()[0].split(",")
        return int(total) << 20, int(free) << 20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise ConfigError(
            f"nvidia-smi does not tell the memory of GPU {device} ({error}); set cache.memory_bytes",
            key="cache.memory_bytes",
        ) from error
