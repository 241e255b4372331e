"""Small things that a GPU needs and a CPU does not."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU this thread's own: kernels and events go to the current one, not to that of their tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return a copy of `array` on `device`, through pinned memory where that is a GPU; on the CPU, the same memory.

    A copy from pageable memory may wait for all that is queued on the stream.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    # torch's allocator of pinned memory keeps the block until the copy has run.
    return tensor.pin_memory().to(device, non_blocking=True)
