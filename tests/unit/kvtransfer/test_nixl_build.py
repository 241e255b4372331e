"""NIXL comes in a build for each CUDA: the transport takes the one that fits torch's, where it is installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from kvtransfer.transports import ucx


@pytest.mark.parametrize(
    ("cuda", "taken"),
    [("13.0", "nixl_cu13._api"), ("14.1", "nixl_cu12._api"), ("12.8", "nixl_cu12._api"), (None, "nixl_cu12._api")],
)
def test_the_build_is_that_of_torchs_cuda(
    cuda: str | None, taken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nixl_cu12", "nixl_cu13"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
        (tmp_path / name / "_api.py").touch()
        for loaded in [module for module in sys.modules if module.partition(".")[0] == name]:
            monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert ucx._nixl().__name__ == taken
    for name in ("nixl_cu12", "nixl_cu13"):  # else other tests would find these
        for loaded in [module for module in sys.modules if module.partition(".")[0] == name]:
            del sys.modules[loaded]
