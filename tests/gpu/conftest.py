"""Tests on GPUs skip, with a reason, where there are none. Nothing here imports Ray, FastAPI or NIXL."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "engine"))

import engine_helpers as helpers


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    """The first GPU."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU: this torch sees no CUDA device")
    return torch.device("cuda", 0)


@pytest.fixture(scope="session")
def two_gpus() -> tuple[torch.device, torch.device]:
    """Where a request is prefilled, and where it is decoded."""
    if (num := torch.cuda.device_count()) < 2:
        pytest.skip(f"needs two GPUs, this torch sees {num}")
    return torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture(scope="session")
def triton_device() -> torch.device:
    """A GPU; without one the CPU, where Triton is told to interpret its kernels (it cuts bfloat16 off, unrounded)."""
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    pytest.importorskip("triton", reason="no GPU, and no Triton to interpret its kernels")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no GPU; TRITON_INTERPRET=1 runs these tests without one")
    return torch.device("cpu")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests of Triton's kernels. Where they can be interpreted, who asks for no interpreter leaves them out."""
    kernels = [item for item in items if "triton_device" in getattr(item, "fixturenames", ())]
    for item in kernels:
        item.add_marker(pytest.mark.interpreted)
    can_interpret = not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
    if can_interpret and os.environ.get("TRITON_INTERPRET") != "1":
        items[:] = [item for item in items if item not in kernels]
        config.hook.pytest_deselected(items=kernels)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama whose heads every flash kernel takes: 4 over 2 KV heads of 64.

    Its weights give logits of about 1 in size, so that what 16 bits lose of them stays small.
    """
    target = tmp_path_factory.mktemp("models") / "llama"
    sizes = {"hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "max_positions": 1024}
    return helpers.save_model("llama", target, std=0.06, **sizes)
