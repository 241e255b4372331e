"""GPU streams of the threads that move pages."""

from __future__ import annotations

import torch


def use_own_stream(device: torch.device) -> None:
    """Let what this thread copies from and to a GPU wait for nothing that the model computes; for good."""
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream(device))  # makes its device the current one, too
        torch.cuda.synchronize(device)  # and this its context, which libraries may want that register memory
