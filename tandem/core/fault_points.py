"""Named points in a request's life at which tests inject faults: killed here, stopped here, held here.

In normal runs a point is one comparison with `None`. Where the variable `TANDEM_POINTS` names a directory, each
process looks there as it comes to a point: the file `PROCESS.POINT` (`prefill-0.prefill.chunk`) arms it, once; the file
`POINT` arms it in whichever process comes there first. Its text says what happens:

    kill      the process ends by SIGKILL
    stop      the process stops by SIGSTOP
    hold      the thread waits until the file `PROCESS.POINT.go` is there
    raise     `InternalError` is raised
    N ACTION  as ACTION, the Nth time this process reaches the point (counted from when it was armed)

Either file is renamed to `PROCESS.POINT.hit` right before that, so that the test sees it.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Final

from tandem.core.errors import InternalError

VARIABLE: Final = "TANDEM_POINTS"
_POLL_S = 0.002


class _Armed:
    """The points of one process."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.process = ""
        # How often an armed point was passed, by its file: arming it anew counts anew. An inode alone may come back.
        self._passed: dict[tuple[str, int, int], int] = {}

    def reach(self, point: str) -> None:
        for name in (f"{self.process}.{point}", point):
            self._look(self._directory / name, point)

    def _look(self, armed: Path, point: str) -> None:
        try:
            text, stat = armed.read_text(), armed.stat()
        except FileNotFoundError:
            return
        count, _, action = text.strip().rpartition(" ")
        key = point, stat.st_ino, stat.st_mtime_ns
        passed = self._passed[key] = self._passed.get(key, 0) + 1
        if passed < int(count or 1):
            return
        file = self._directory / f"{self.process}.{point}"
        try:
            armed.rename(file.with_name(file.name + ".hit"))
        except FileNotFoundError:  # another thread, or another process, was first
            return
        self._act(action, file)

    def _act(self, action: str, file: Path) -> None:
        match action:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "hold":
                go = file.with_name(file.name + ".go")
                while not go.exists():
                    time.sleep(_POLL_S)
            case "raise":
                raise InternalError(f"a test wanted an error at {file.name}")
            case _:
                raise ValueError(f"{file} holds {action!r}: kill, stop, hold or raise")


_armed: _Armed | None = _Armed(Path(os.environ[VARIABLE])) if VARIABLE in os.environ else None


def name_process(name: str) -> None:
    """Say who this process is: a worker's id, `router` or `supervisor`."""
    if _armed is not None:
        _armed.process = name


def reach(point: str) -> None:
    """The process comes to `point` (see `docs/failure-contract.md` for their names)."""
    if _armed is not None:
        _armed.reach(point)
