"""The wheel holds what it should and runs by itself, in an environment outside the checkout."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tandem.core.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
TOP_LEVEL = {"tandem", "router", "prefill_worker", "decode_worker", "kvtransfer"}


@dataclass(frozen=True)
class Environment:
    """A virtual environment with the wheel and nothing else of its own."""

    folder: Path

    def run(self, *command: str, timeout_s: float = 120) -> str:
        """Standard output of a command of this environment, run from `/` and without our paths."""
        program = self.folder / "bin" / command[0]
        done = subprocess.run(
            [str(program), *command[1:]],
            cwd="/",
            env=self.variables,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    @property
    def variables(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        return {**kept, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that neither the checkout's old `build/` gets in nor a new one stays."""
    source = tmp_path_factory.mktemp("source") / "tandem"
    unwanted = (".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*unwanted))
    target = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target), str(source)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Fresh, with the wheel installed by pip. The dependencies (2 GB) are borrowed from where the tests run."""
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "--disable-pip-version-check"]
    install = [*pip, "install", "--quiet", "--no-deps", "--no-index", "--no-compile", str(wheel)]
    subprocess.run(install, env=Environment(folder).variables, check=True)  # else pip may find the checkout instead
    (site_packages,) = folder.glob("lib/python*/site-packages")
    # Paths from .pth files go behind the environment's own, and .pth files found there are not read: the editable
    # installation of the checkout stays out.
    (site_packages / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return Environment(folder)


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_top_level_names_are_the_five(wheel: Path) -> None:
    assert {name.partition("/")[0] for name in contents(wheel)} == TOP_LEVEL


def test_wheel_holds_all_files_of_the_packages_and_no_others(wheel: Path) -> None:
    on_disk = {
        str(path.relative_to(ROOT))
        for top in TOP_LEVEL
        for path in (ROOT / top).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert contents(wheel) == on_disk


def test_wheel_names_its_licence_command_and_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (folder,) = {name.partition("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        metadata = archive.read(f"{folder}/METADATA").decode()
        commands = archive.read(f"{folder}/entry_points.txt").decode()
        assert f"{folder}/licenses/LICENSE" in archive.namelist()
    assert "tandem = tandem.cli:main" in commands
    assert "Name: tandem-serving" in metadata
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Dist: torch<2.14,>=2.11" in metadata


def test_modules_come_from_the_fresh_environment(environment: Environment) -> None:
    code = f"import importlib\nfor name in {sorted(TOP_LEVEL)}: print(importlib.import_module(name).__file__)"
    files = environment.run("python", "-c", code).split()
    assert len(files) == len(TOP_LEVEL)
    assert all(Path(file).is_relative_to(environment.folder) for file in files), files


def test_command_runs_outside_the_checkout(environment: Environment) -> None:
    assert "serve" in environment.run("tandem", "--help")
    assert "0.1.0" in environment.run("tandem", "version")


def test_embedded_model_is_found_in_the_wheel(environment: Environment) -> None:
    code = "from tandem.core.model_path import resolve_model; print(resolve_model('embedded'))"
    model = Path(environment.run("python", "-c", code).strip())
    assert model.is_relative_to(environment.folder)
    assert (model / "model.safetensors").stat().st_size == (
        ROOT / "tandem/models/tiny/model.safetensors"
    ).stat().st_size


@pytest.mark.faults  # hosts of tests/hosts/test_one_of_each.py serve from it in `make test`
@pytest.mark.timeout(240)
def test_installed_wheel_serves(environment: Environment) -> None:
    port = free_port()
    serving = subprocess.Popen(
        [str(environment.folder / "bin" / "tandem"), "serve", "--port", str(port)],
        cwd="/",
        env=environment.variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert serving.stdout is not None
        heard: list[str] = []
        for line in serving.stdout:
            heard.append(line)
            if line.startswith("Ready: "):
                break
        else:
            pytest.fail("".join(heard))
        assert f"from {environment.folder}" in "".join(heard), "the embedded model is the wheel's own"
        url = f"http://127.0.0.1:{port}/v1/completions"
        body = {"model": "tandem-tiny", "prompt": "Once upon a time", "max_tokens": 8}
        answer = httpx.post(url, json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 8
        serving.send_signal(signal.SIGINT)
        remaining, _ = serving.communicate(timeout=60)
        assert serving.returncode == 0, remaining
        assert remaining.rstrip().endswith("Stopped.")
    finally:
        if serving.poll() is None:
            serving.terminate()
            serving.wait(timeout=60)
