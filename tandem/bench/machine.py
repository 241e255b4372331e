"""Where and with what a measurement was made."""

from __future__ import annotations

import datetime
import os
import platform
from importlib import metadata
from typing import Any

from tandem.core.cpu_info import of_cpu
from tandem.core.version import version

# What kernels are made of, by Linux' names.
_INSTRUCTIONS = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_bf16": "BF16", "avx512_vnni": "VNNI", "amx_bf16": "AMX"}
_PACKAGES = ("torch", "numpy", "numba", "transformers", "triton", "nixl-cu12", "ray", "grpcio", "uvloop", "vllm")


def machine() -> dict[str, Any]:
    """The host on which the generator runs, which is the server's where that is local."""
    return {
        "cpu": _cpu_model(),
        "instructions": _instructions(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
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


def now() -> str:
    """Date and time of the day, in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _cpu_model() -> str:
    return of_cpu("model name") or platform.processor()


def _instructions() -> list[str]:
    flags = set(of_cpu("flags").split())
    return [name for flag, name in _INSTRUCTIONS.items() if flag in flags]
