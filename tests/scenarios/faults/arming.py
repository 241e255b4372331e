"""The test's end of `tandem.core.fault_points`: arms a point in a process and learns that it was reached."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tests.support.waiting import wait_until

_LOOK_S = 0.002
_T = TypeVar("_T")


class PointNotReachedError(AssertionError):
    """The armed point did not come: the case has tested nothing."""


class Points:
    """Files of one directory; see `tandem.core.fault_points` for what they hold."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def arm(self, process: str, point: str, action: str, nth: int = 1) -> None:
        """`process` does `action` the `nth` time that it comes to `point` from now on."""
        self._write(self._file(process, point), action, nth)

    def hit_at(self, process: str, point: str) -> float | None:
        """Wall clock when the point was reached; `None`: not yet."""
        try:
            return self._file(process, point, ".hit").stat().st_ctime  # a rename changes this one
        except FileNotFoundError:
            return None

    def wait_hit(self, process: str, point: str, timeout_s: float = 20.0) -> float:
        """Until the point is reached; wall clock of that."""
        return self._wait(lambda: self.hit_at(process, point), f"{process} to {point}", timeout_s)

    def arm_any(self, point: str, action: str, nth: int = 1) -> None:
        """As `arm`, for whichever process comes to `point` first; for no other."""
        self._write(self.directory / point, action, nth)

    def hit_by(self, point: str) -> str | None:
        """The process that came to `point`; `None`: none yet."""
        return next((file.name.removesuffix(f".{point}.hit") for file in self.directory.glob(f"*.{point}.hit")), None)

    def wait_hit_by_any(self, point: str, timeout_s: float = 20.0) -> str:
        """Until a process comes to `point`; which one."""
        return self._wait(lambda: self.hit_by(point), f"a process to {point}", timeout_s)

    def _wait(self, look: Callable[[], _T | None], what: str, timeout_s: float) -> _T:
        try:
            found = wait_until(look, what, timeout_s, every_s=_LOOK_S)
        except AssertionError as error:
            raise PointNotReachedError(str(error)) from None
        assert found is not None
        return found

    def go(self, process: str, point: str) -> None:
        """Let a held process go on."""
        self._file(process, point, ".go").touch()

    def clear(self) -> None:
        """Disarm everything and forget what was reached; who is held goes on first."""
        for file in self.directory.iterdir():
            if file.suffix != ".hit":  # first, so that nobody comes to be held from now on
                file.unlink(missing_ok=True)
        for file in self.directory.glob("*.hit"):
            file.with_suffix(".go").touch()
        time.sleep(10 * _LOOK_S)  # whoever is held looks every 2 ms
        for file in self.directory.iterdir():
            file.unlink(missing_ok=True)

    def _write(self, file: Path, action: str, nth: int) -> None:
        partial = self.directory / "partial"
        partial.write_text(f"{nth} {action}")
        partial.rename(file)  # never seen half-written

    def _file(self, process: str, point: str, suffix: str = "") -> Path:
        return self.directory / f"{process}.{point}{suffix}"
