"""What a worker takes of a GPU; the driver's own command is played by a script."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tandem.cluster.ray.node_resources import gpu_memory_bytes, held_by_workers, kv_bytes_here
from tandem.cluster.ray.worker_actor import bytes_of_pages
from tandem.cluster.spec import ClusterSpec
from tandem.core.config import EMBEDDED_MODEL, Config, from_dict
from tandem.core.errors import ConfigError
from tandem.core.identity import Role
from tandem.core.model_path import read_facts, resolve_model

MIB = 1 << 20
CONFIG = {"pools": {"decode": {"gpus": 0.5}}, "cache": {"memory_share": 0.5}, "model": {"path": "org/not-here"}}


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    script = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    return script


def says(script: Path, answer: str) -> None:
    script.write_text(f'#!/bin/sh\n[ "$4" = 3 ] && printf "{answer}"\n')
    script.chmod(0o755)


def config() -> Config:
    return from_dict(CONFIG)


@pytest.mark.processes
def test_pages_get_a_share_of_the_workers_part_of_its_gpu(smi: Path) -> None:
    """The checkpoint that lies here is read, and not the one that is named: that may be on a hub."""
    model = resolve_model(EMBEDDED_MODEL)
    weights = read_facts(EMBEDDED_MODEL, model).weight_bytes("float32")
    says(smi, "1000, 900\\n")
    assert kv_bytes_here(config(), Role.DECODE, model) == (500 * MIB - weights) // 2
    says(smi, "1000, 420\\n")
    assert kv_bytes_here(config(), Role.DECODE, model) == (420 * MIB - weights) // 2


@pytest.mark.processes
def test_weights_that_fill_the_part_are_said(smi: Path) -> None:
    says(smi, "1000, 0\\n")
    with pytest.raises(ConfigError, match="beside the weights"):
        kv_bytes_here(config(), Role.DECODE, resolve_model(EMBEDDED_MODEL))


@pytest.mark.processes
def test_a_worker_that_changes_its_role_asks_for_no_other_pages(smi: Path) -> None:
    """Its own fill the GPU."""
    model = resolve_model(EMBEDDED_MODEL)
    spec = ClusterSpec(config(), "m", "", {Role.DECODE: 0}, {}, False, 1, "", "", log_directory="")
    says(smi, "1000, 0\\n")
    with pytest.raises(ConfigError, match="beside the weights"):
        bytes_of_pages(spec, Role.DECODE, model, is_kept=False)
    assert bytes_of_pages(spec, Role.DECODE, model, is_kept=True) == 0


@pytest.mark.processes
@pytest.mark.parametrize("answer", ["", "900\\n", "[N/A], [N/A]\\n"])
def test_a_driver_that_does_not_say_is_named(smi: Path, answer: str) -> None:
    says(smi, answer)
    with pytest.raises(ConfigError, match="nvidia-smi does not tell the memory of GPU 3"):
        gpu_memory_bytes()


@contextmanager
def holding(title: str, num_bytes: int) -> Iterator[None]:
    """A process of this name, a child of this one, that holds so much memory: the end of what it is given to read."""
    line = [title, "-c", str(num_bytes)]
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(line, executable="/usr/bin/tail", stdin=pipe, stdout=nothing) as process:
        assert process.stdin is not None
        process.stdin.write(bytes(num_bytes))
        process.stdin.flush()
        yield


@pytest.mark.processes
def test_what_the_nodes_workers_hold_counts_as_free_at_start() -> None:
    before = held_by_workers(psutil.Process())
    with holding("ray::WorkerActor.wait_closed", 32 * MIB), holding("ray::RouterActor.wait_closed", 32 * MIB):
        held = held_by_workers(psutil.Process()) - before
    assert 30 * MIB < held < 50 * MIB
    assert held_by_workers(psutil.Process()) == before
