"""Kernels of a fresh install, where several workers of a host want them at once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from numba.core import config

from tandem.engine.cpu import compiling
from tests.support.waiting import LONG_S

ROOT = Path(__file__).resolve().parents[3]
FUNCTIONS = """
def whole(first, end, arguments):
    for _ in range(first, end):
        pass


def half(x):
    return x / 2
"""
NO_HALF = """

def no_half(x, y, z):
    return x.half
"""
WORKER = """
import sys
from numba.core.ccallback import CFunc
from numba.core.dispatcher import _FunctionCompiler
from functions import half, whole
from tandem.engine.cpu.compiling import compile_function, compile_piece


def noted(cls, name):
    inner = getattr(cls, name)

    def compile(self, *args):
        print(name, flush=True)
        return inner(self, *args)

    setattr(cls, name, compile)


noted(CFunc, "_compile_uncached")
noted(_FunctionCompiler, "_compile_core")
print("ready", flush=True)
sys.stdin.read()
assert compile_piece(whole, fast_math=True)
assert compile_function(half)(3) == 1.5
print("served", flush=True)
"""
FAILING = """
import sys
from numba.core.errors import NumbaError
from functions import no_half
from tandem.engine.cpu.compiling import compile_function, compile_piece


def refused(call, *arguments, **options):
    try:
        call(*arguments, **options)
    except NumbaError:
        return True
    return False


for _ in range(2):
    assert refused(compile_piece, no_half, fast_math=True)
    assert refused(compile_function(no_half), 1, 2, 3)
print("tried", flush=True)
sys.stdin.read()
"""


@pytest.mark.processes
def test_who_could_not_compile_a_function_keeps_nobody_from_it(tmp_path: Path) -> None:
    """Neither itself nor others, who find the same."""
    (tmp_path / "functions.py").write_text(FUNCTIONS + NO_HALF)
    (tmp_path / "failing.py").write_text(FAILING)
    with ExitStack() as stack:
        for _ in range(2):
            worker = stack.enter_context(started("failing.py", tmp_path))
            stack.callback(worker.kill)
            assert worker.stdout is not None
            assert worker.stdout.readline() == "tried\n"


@pytest.mark.processes
def test_what_another_checkout_has_compiled_of_the_same_text_is_not_compiled_again(tmp_path: Path) -> None:
    """A package that Ray unpacks for a session, a wheel, a second environment: each is a new folder."""
    compiled = []
    for name, change in (("one", ""), ("two", ""), ("three", "# another text\n")):
        folder = tmp_path / name
        shutil.copytree(ROOT / "tandem", folder / "tandem", ignore=shutil.ignore_patterns("__pycache__", "models"))
        source = folder / "tandem" / "engine" / "cpu" / "vector_ir.py"
        source.write_text(source.read_text() + change)
        (folder / "functions.py").write_text(FUNCTIONS)
        (folder / "worker.py").write_text(WORKER)
        worker = started("worker.py", folder, code=folder, kept=tmp_path / "kept")
        said, _ = worker.communicate(timeout=LONG_S)
        assert worker.returncode == 0
        compiled.append("_compile_core" in said)
    assert compiled == [True, False, True]


def test_nobody_else_may_write_where_machine_code_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who could would have this user run what they like."""
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    before = os.umask(0o002)
    try:
        directory = compiling.kept_code.__wrapped__()
    finally:
        os.umask(before)
    assert directory is not None
    for place in (directory, directory.parent):
        assert place.stat().st_mode & 0o077 == 0
        place.chmod(0o770)
        assert compiling.kept_code.__wrapped__() is None
        place.chmod(0o700)
    assert compiling.kept_code.__wrapped__() == directory


def started(script: str, directory: Path, *, code: Path = ROOT, kept: Path | None = None) -> subprocess.Popen[str]:
    """A process with nothing in its input, that keeps machine code in `kept`."""
    return subprocess.Popen(
        [sys.executable, script],
        cwd=directory,
        env={
            **os.environ,
            "NUMBA_CACHE_DIR": str(kept or directory / "kept"),
            "PYTHONPATH": f"{directory}:{code}",
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.processes
def test_one_of_those_that_start_together_compiles_and_the_others_wait(tmp_path: Path) -> None:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    (tmp_path / "worker.py").write_text(WORKER)
    workers = [started("worker.py", tmp_path) for _ in range(3)]
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.close()
    said = [worker.stdout.read().split() for worker in workers if worker.stdout is not None]
    assert [worker.wait() for worker in workers] == [0, 0, 0]
    compiled = [word for words in said for word in words if word != "served"]
    assert compiled.count("_compile_uncached") == 1
    assert compiled.count("_compile_core") == 2, "of the C function and of the other one"
    assert all(words[-1] == "served" for words in said)
