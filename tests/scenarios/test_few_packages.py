"""A machine with a GPU and a bare Python serves: nothing but what `few_packages` names can be imported here.

Without a GPU the same is run on the CPU by torch's own kernels.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.few_packages import ROOT, environment, hidden_modules

#: What each of these is for has its own place, and none of them may be needed here.
NEVER = {"numba", "llvmlite", "cryptography", "ray", "nixl_cu12", "fastapi", "llguidance", "psutil", "xdist"}


@pytest.mark.faults
def test_all_that_is_checked_on_a_gpu_runs_with_few_packages(tmp_path: Path) -> None:
    """`tools/gpu_check.sh`: the GPU's tests are collected, an engine is measured, and pages go from one process to
    another with the tokens of the model itself."""
    assert set(hidden_modules()) >= NEVER
    script = subprocess.run(
        ["bash", str(ROOT / "tools" / "gpu_check.sh"), "--small"],
        env=environment(PYTHON=sys.executable, OUT=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=170,
    )
    log = (tmp_path / "gpu_check.log").read_text()
    assert script.returncode == 0, script.stdout + script.stderr + log
    parts = json.loads((tmp_path / "gpu_check.json").read_text())["parts"]
    tests, figures, handoffs = (parts[name]["result"] for name in ("tests", "figures", "handoff"))
    assert tests["tests"] > 40  # all but those of Triton's kernels, where these could be interpreted
    assert tests["failures"] == tests["errors"] == 0
    assert [figure["model"] for figure in figures["figures"]] == ["tiny"] * 3
    assert [figure["are_the_models"] for figure in handoffs["handoffs"]] == [True] * 4


def test_a_cpu_without_numba_is_told_what_to_install() -> None:
    code = (
        "import torch\n"
        "from tandem.core.errors import ConfigError\n"
        "from tandem.engine.select_kernels import kernels_for\n"
        "import decode_worker.worker, prefill_worker.worker, tandem.worker.main\n"
        "import tandem.engine.cuda.kernels, tandem.engine.cuda.graphs, kvtransfer.transports.nccl\n"
        "try:\n"
        "    kernels_for(torch.device('cpu'))\n"
        "except ConfigError as error:\n"
        "    print(error.message)\n"
    )
    child = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60)
    assert "`pip install numba`" in child.stdout, child.stderr
    assert "model.kernels: torch" in child.stdout
