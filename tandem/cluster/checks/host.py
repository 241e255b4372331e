"""What this machine has, as far as a cluster on it needs to know."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from tandem.core.cpu_info import of_cpu

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Host:
    """What a cluster needs to know.

    Attributes:
        available_bytes: memory that can be taken now without swapping, within the container's limit if any.
        multiplies_bfloat16: whether its CPUs do, on vectors (AVX512_BF16).
    """

    available_bytes: int
    num_cores: int
    num_gpus: int
    multiplies_bfloat16: bool = False


def this_host() -> Host:
    flags = set(of_cpu("flags").split())
    return Host(
        available_bytes=min([psutil.virtual_memory().available, *_cgroup_available()]),
        num_cores=len(os.sched_getaffinity(0)),
        num_gpus=_count_gpus(),
        multiplies_bfloat16="avx512_bf16" in flags,
    )


def human_bytes(count: float) -> str:
    """`1536` → `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _count_gpus() -> int:
    """NVIDIA GPUs that this process may use; counted by the driver's files, so that no CUDA context is made."""
    present = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return present if visible is None else min(present, len([d for d in visible.split(",") if d.strip()]))


def _cgroup_available() -> list[int]:
    """Bytes left under the container's memory limit (cgroup v2); empty without a limit."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit == "max":
            return []
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return []  # no cgroup v2 here, or it is not ours to read: then no such limit is known
    reclaimable = int(stat.get("inactive_file", 0))
    return [max(0, int(limit) - used + reclaimable)]
