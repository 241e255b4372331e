"""Which tests start processes: they carry the mark `processes`, run alone, and `make quick` leaves them out."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# The products in tests are small: a second thread gains nothing, and waits for the other one where the cores are busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")

UNIT = Path(__file__).parent / "unit"

_STARTS = {"subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty"}

_started: list[str] = []  # what the test under way has started


def _note_start(event: str, args: tuple[Any, ...]) -> None:
    # `platform` asks `uname` for the processor's name, in the first test of a process that wants to know.
    if event in _STARTS and args[:1] != ("uname",):
        _started.append(f"{event} {args[:2]}")


sys.addaudithook(_note_start)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever is no unit test starts processes or whole workers."""
    for item in items:
        if UNIT not in item.path.parents:
            item.add_marker(pytest.mark.processes)


@pytest.fixture(autouse=True)
def _starts_what_it_says(request: pytest.FixtureRequest) -> Iterator[None]:
    _started.clear()
    yield
    if request.node.get_closest_marker("processes") is None:
        assert not _started, "a test that starts a process carries the mark `processes`"
