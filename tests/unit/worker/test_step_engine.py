"""In which order workers compile what the first on a host compiles for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.core.config import Config
from tandem.core.identity import Role
from tandem.core.model_path import resolve_model
from tandem.engine import engine
from tandem.engine.cpu import draw_kernel
from tandem.engine.cpu.attention_kernel import ATTEND
from tandem.engine.cpu.threads import Kernel
from tandem.worker.step_engine import load_engine


class Probed(Exception):
    """The probe runs a small model, which compiles the products of weights before all else."""


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_of_two_workers_that_start_together_decode_begins_with_what_prefill_needs_last(
    role: Role, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Kernel] = []
    monkeypatch.setattr(Kernel, "compile", lambda kernel: compiled.append(kernel))  # a method

    def probe(*_: Any) -> None:
        raise Probed

    monkeypatch.setattr(engine, "probe_architecture", probe)
    with pytest.raises(Probed):
        load_engine(
            role,
            Config(),
            model_dir=resolve_model("embedded"),
            kv_bytes=1 << 20,
            num_threads=1,
            device="cpu",
            weight_register=tmp_path / "weights",
        )
    first = [ATTEND["float32"], draw_kernel._draw_kernel]
    assert compiled == (first if role is Role.DECODE else [])
