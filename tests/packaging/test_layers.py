"""The import contracts of `.importlinter` hold, and each of them breaks when an arrow points the wrong way."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOP_LEVEL = ["benchmarks", "tandem", "router", "prefill_worker", "decode_worker", "kvtransfer"]

WRONG_ARROWS = {
    # module that is extended, import that it must not have, contract that says so
    "product knows benchmarks": ("tandem/bench/commands.py", "import benchmarks.code", "Arrows point down"),
    "HTTP below": ("router/openai/schema.py", "import router.http.bodies", "Rooms of the router"),
    "OpenAI below": ("router/lifecycle/attempt.py", "import router.openai.fields", "Rooms of the router"),
    "life below": ("router/workers/session.py", "import router.lifecycle.attempt", "Rooms of the router"),
    "workers below": ("router/policy/recovery.py", "import router.workers.gauges", "Rooms of the router"),
    "policy knows requests": ("router/policy/recovery.py", "import router.request.journal", "Rooms of the router"),
    "serve below": ("tandem/cluster/ray/launcher.py", "import tandem.cluster.serve.banner", "Rooms of the cluster"),
    "Ray below": ("tandem/cluster/supervisor/pools.py", "import tandem.cluster.ray.home", "Rooms of the cluster"),
    "checks know the supervisor": (
        "tandem/cluster/checks/host.py",
        "import tandem.cluster.supervisor.slots",
        "Rooms of the cluster",
    ),
    "attention knows a device": (
        "tandem/engine/attention/reference.py",
        "import tandem.engine.cpu.threads",
        "Rooms of the engine",
    ),
    "CPU knows CUDA": ("tandem/engine/cpu/threads.py", "import tandem.engine.cuda.graphs", "Rooms of the engine"),
    "fusing knows a device": ("tandem/engine/fuse/trial.py", "import tandem.engine.cuda.graphs", "Rooms of the engine"),
    "CPU room knows the process": (
        "tandem/worker/cpu/transfer_cores.py",
        "import tandem.worker.process",
        "What only CPUs",
    ),
    "load knows reports": ("tandem/bench/load/sse.py", "import tandem.bench.report.summary", "Rooms of the load"),
    "a circle": ("kvtransfer/extents.py", "import kvtransfer.transfer_thread", "No import circle"),
    "core knows rpc": ("tandem/core/pages.py", "import tandem.rpc.v1", "Arrows point down"),
    "roles know each other": ("decode_worker/__init__.py", "import prefill_worker", "Arrows point down"),
    "transfer knows the engine": ("kvtransfer/extents.py", "import tandem.engine.arena", "Arrows point down"),
    "router knows the engine": ("router/request/journal.py", "import tandem.engine.arena", "The router holds no model"),
    "router knows torch": ("router/request/journal.py", "import torch", "Torch is imported by"),
    "core knows torch": ("tandem/core/pages.py", "import torch", "What decides runs anywhere"),
    "worker knows Ray": ("tandem/worker/scheduler.py", "import ray", "Ray is imported by"),
    "engine knows NIXL": ("tandem/engine/arena.py", "import nixl_cu12", "NIXL is imported by"),
    "scheduler knows gRPC": ("tandem/worker/scheduler.py", "import grpc", "What decides runs anywhere"),
    "protocol reads a clock": ("kvtransfer/protocol/grants.py", "import time", "What decides reads no clock"),
    "a role knows protobuf": ("prefill_worker/role.py", "import tandem.rpc.convert", "What decides runs anywhere"),
    "a role reads a clock": ("prefill_worker/role.py", "import time", "What decides reads no clock"),
    "a driver waits": ("prefill_worker/sender_driver.py", "import threading", "What decides reads no clock"),
    "decode's core knows gRPC": ("decode_worker/role.py", "import decode_worker.wire", "What decides runs anywhere"),
    "decode's core reads a clock": ("decode_worker/role.py", "import time", "What decides reads no clock"),
    "a driver reads a clock": ("decode_worker/receiver_driver.py", "import time", "What decides reads no clock"),
    "scheduler waits": ("tandem/worker/scheduler.py", "import asyncio", "What decides reads no clock"),
}


def copied(folder: Path) -> Path:
    for name in TOP_LEVEL:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "models"))
    shutil.copy(ROOT / ".importlinter", folder)
    return folder


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    # Not the `lint-imports` script: it would see the installed checkout before the copy.
    code = "from importlinter.cli import lint_imports_command as main; main()"
    wide = os.environ | {"COLUMNS": "300"}  # no line is wrapped
    return subprocess.run(
        [sys.executable, "-c", code, "--no-cache"], cwd=folder, env=wide, capture_output=True, text=True, check=False
    )


def test_all_contracts_hold(tmp_path: Path) -> None:
    result = lint(copied(tmp_path))
    assert result.returncode == 0, result.stdout
    assert " 0 broken" in result.stdout


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What is said against all wrong arrows together, by the name of the contract that each thing is said under."""
    folder = copied(tmp_path_factory.mktemp("wrong"))
    for module, line, _ in WRONG_ARROWS.values():
        with (folder / module).open("a") as file:
            file.write(f"\n{line}\n")
    result = lint(folder)
    assert result.returncode != 0
    _, _, said = result.stdout.partition("Broken contracts")
    parts = re.split(r"^(\S.*)\n-+\n", said, flags=re.MULTILINE)  # heading, text, heading, text
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize(("module", "line", "contract"), WRONG_ARROWS.values(), ids=WRONG_ARROWS.keys())
def test_wrong_arrow_is_caught(broken: dict[str, str], module: str, line: str, contract: str) -> None:
    (said,) = [text for name, text in broken.items() if name.startswith(contract)]
    importer = module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    if "circle" in contract:
        assert f"No cycles are allowed in {importer.rpartition('.')[0]}." in said
    else:
        assert f" {importer} -> {line.removeprefix('import ')} (l." in said
