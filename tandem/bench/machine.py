"""Where and with what a measurement was made."""

from __future__ import annotations

import datetime
import os
import platform
import re
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from tandem.core.version import version

#: More cores than this, used by others just before a measurement, are a disturbance.
QUIET_CORES = 0.2
#: Fields of /proc/stat up to `steal`; those behind, of guests, are in the first two already.
_NUM_TIMES = 8
_PACKAGES = ("torch", "numpy", "numba", "transformers", "nixl-cu12", "ray", "grpcio", "uvloop", "vllm")


def machine() -> dict[str, Any]:
    """The host on which the generator runs, which is the server's where that is local."""
    return {
        "cpu": _cpu_model(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    """Of Tandem, Python and the packages installed beside the generator."""
    found = {"tandem": version(), "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


class OtherLoad:
    """How many of this process's cores others have used since this was made: a measurement's disturbance."""

    def __init__(self) -> None:
        self._start_s, self._start_others_s = time.monotonic(), self._others_s()

    def cores(self) -> float:
        """On average; what a hypervisor took away counts too."""
        return max(0.0, self._others_s() - self._start_others_s) / (time.monotonic() - self._start_s)

    @staticmethod
    def _others_s() -> float:
        """CPU seconds of these cores that neither this process nor its ended children used."""
        all_cores, own = psutil.cpu_times(percpu=True), os.times()
        used = [all_cores[core] for core in os.sched_getaffinity(0)]
        busy_s = sum(sum(core[:_NUM_TIMES]) - core.idle - getattr(core, "iowait", 0.0) for core in used)
        return busy_s - (own.user + own.system + own.children_user + own.children_system)


def now() -> str:
    """Date and time of the day, in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _cpu_model() -> str:
    try:
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor()
