"""Which kernels serve, by device and by `model.kernels`; imported here, so that none needs another's libraries."""

from __future__ import annotations

import torch

from tandem.core.errors import ConfigError
from tandem.engine.kernels import Kernels
from tandem.engine.torch_kernels import TorchKernels

#: Of `model.kernels`.
CHOICES = ("auto", "vectors", "torch")


def kernels_for(device: torch.device, num_threads: int = 1, wanted: str = "auto") -> Kernels:
    """The kernels of `device`, with `num_threads` threads where that is the CPU, and tiles where it has them and not
    `vectors` alone are wanted; or torch's own, where these are.

    Raises `ConfigError` where `wanted` is none of `CHOICES`, or a library of the kernels is missing.
    """
    if wanted not in CHOICES:
        raise ConfigError(f"kernels {wanted!r} is not one of {', '.join(CHOICES)}", key="model.kernels")
    if wanted == "torch":
        return TorchKernels()
    if device.type == "cuda":
        from tandem.engine.cuda.kernels import CudaKernels

        return CudaKernels(device)
    try:
        from tandem.engine.cpu.kernels import CPUKernels
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("numba", "llvmlite"):
            raise
        raise ConfigError(
            f"the kernels for CPUs are compiled by Numba, and {error.name} is not installed here: `pip install numba`; "
            "or serve on a GPU, or set model.kernels: torch, which is slower",
            key="model.kernels",
        ) from error
    return CPUKernels(num_threads, tiles=wanted != "vectors")
