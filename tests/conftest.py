"""Which tests start processes: they carry the mark `processes`, and `make quick` leaves them out."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

try:
    from xdist.scheduler import LoadFileScheduling
except ModuleNotFoundError:  # on a machine with a GPU alone
    LoadFileScheduling = object

# The products in tests are small: a second thread gains nothing, and waits for the other one where the cores are busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# As the workers of a cluster have it: an answer of DNS that was lost is asked for again soon (`WORKER_ENVIRONMENT`).
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")

# No client here asks a server that has to be trusted: to read all authorities of the world takes each client 70 ms.
# The folder holds none.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)

# A shell without job control has what it starts behind `&` ignore Ctrl-C, and what that starts would, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Helpers assert too, and some are imported before pytest would find them as plugins.
pytest.register_assert_rewrite("tests.support")

UNIT, GPU = Path(__file__).parent / "unit", Path(__file__).parent / "gpu"

_STARTS = {"subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty"}

# `platform` asks for the processor's name, in the first test of a process that wants to know; matplotlib for the fonts,
# in the first test of a machine that draws.
_ASKED_ONCE = {("uname",), ("fc-list",)}

_started: list[str] = []  # what the test under way has started


def _note_start(event: str, args: tuple[Any, ...]) -> None:
    if event in _STARTS and args[:1] not in _ASKED_ONCE:
        _started.append(f"{event} {args[:2]}")


sys.addaudithook(_note_start)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out where a phase of `make test` finds nothing, by the marks that files name: to import all takes 20 s."""
    phase = config.getoption("markexpr")
    files = collection_path.rglob("test_*.py") if collection_path.is_dir() else [collection_path]
    return not any(_may_hold(phase, file) for file in files if file.suffix == ".py") or None


def _may_hold(phase: str, file: Path) -> bool:
    """Whether the file may hold tests of a phase, which is known by how its expression of marks begins."""
    is_unit, marks = UNIT in file.parents, re.findall(r"mark\.(processes|alone)", file.read_text())
    if phase.startswith("not processes"):
        return is_unit
    if phase.startswith("interpreted"):
        return GPU in file.parents
    if phase.startswith("alone"):
        return "alone" in marks
    return not phase.startswith("processes") or not is_unit or "processes" in marks


class OneLaneForClusters(LoadFileScheduling):
    """Files run beside each other, but those with whole clusters one after the other: clusters that start hold up one
    that serves until its workers count as dead."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return "clusters" if file.startswith(("tests/cluster/", "tests/hosts/")) else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneLaneForClusters | None:
    return OneLaneForClusters(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever is no unit test starts processes or whole workers."""
    for item in items:
        if UNIT not in item.path.parents:
            item.add_marker(pytest.mark.processes)


def pytest_collection_finish() -> None:
    """Libraries and collected tests, millions of objects, stay: to go through all of them takes a second of each test
    that collects garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _starts_what_it_says(request: pytest.FixtureRequest) -> Iterator[None]:
    _started.clear()
    yield
    if request.node.get_closest_marker("processes") is None:
        assert not _started, "a test that starts a process carries the mark `processes`"
