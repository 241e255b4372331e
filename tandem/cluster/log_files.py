"""The logs of a cluster's processes in one directory, `decode-0.log` and the like: their ends, and what comes after."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path
from typing import BinaryIO

_PROCESS = re.compile(r"(supervisor|watcher|router(-\d+)?|(prefill|decode)-\d+)\.log")
_BLOCK_BYTES = 64 << 10
_MOST_BYTES = 4 << 20  # of one file in one answer
_LOOK_S = 0.2  # again at files that may have grown, which is no event


class LogFiles:
    """Reads each file on from where it was read before, or anew where it has been cut back since. Whole lines only, but
    for those that are longer than what is read at once. Of a file that goes meanwhile nothing is read.

    Args:
        process: whose log alone is read; empty: all that lie there.
        holds: a text that lines must have to be among the last ones that `tail` gives.
    """

    def __init__(self, directory: Path, process: str = "", holds: str = "") -> None:
        self._directory, self._process, self._holds = directory, process, holds.encode()
        self._offsets: dict[str, int] = {}

    def processes(self) -> list[str]:
        """Those that have logs there, wanted or not."""
        return sorted(path.stem for path in self._directory.glob("*.log") if _PROCESS.fullmatch(path.name))

    def tail(self, num_lines: int) -> dict[str, str]:
        """Of the last lines of each process those that are asked for; `more` goes on behind them."""
        return {process: self._read_tail(process, num_lines) for process in self._wanted()}

    def more(self, wait_s: float) -> dict[str, str]:
        """What has come since, after at most `wait_s` if nothing has. A file that is new is read from its beginning."""
        deadline_s = time.monotonic() + wait_s
        while not (news := {p: text for p in self._wanted() if (text := self._read_on(p))}):
            if time.monotonic() >= deadline_s:
                break
            time.sleep(_LOOK_S)
        return news

    def _wanted(self) -> list[str]:
        return [process for process in self.processes() if self._process in ("", process)]

    def _read_tail(self, process: str, num_lines: int) -> str:
        found: list[bytes] = []  # the newest first
        num_seen = num_bytes = 0
        half: bytes | None = None  # of a line, at the end; `None`: not known yet
        rest = b""  # before the lines that were seen, as far as it has been read
        with self._opened(process) as file:
            begin = end = file.seek(0, 2)
            while begin > 0 and num_seen <= num_lines and num_bytes + len(rest) < _MOST_BYTES:
                step = min(_BLOCK_BYTES, begin)
                begin = file.seek(begin - step)
                rest, *lines = (file.read(step) + rest).split(b"\n")
                if half is None and lines:
                    half = lines.pop()
                if begin == 0 and half is not None:
                    lines = [rest, *lines]
                for line in reversed(lines):
                    num_seen += 1
                    if num_seen <= num_lines and self._holds in line:
                        found.append(line + b"\n")
                        num_bytes += len(line)
        self._offsets[process] = end - len(rest if half is None else half)
        return b"".join(reversed(found)).decode(errors="replace")

    def _read_on(self, process: str) -> str:
        with self._opened(process) as file:
            begin = self._offsets.get(process, 0)
            if begin > file.seek(0, 2):
                begin = 0
            file.seek(begin)
            block = file.read(_MOST_BYTES)
        whole = block[: block.rfind(b"\n") + 1]
        if len(block) == _MOST_BYTES:  # the end of so long a line comes later
            whole = whole or block
        self._offsets[process] = begin + len(whole)
        return whole.decode(errors="replace")

    def _opened(self, process: str) -> BinaryIO:
        try:
            return (self._directory / f"{process}.log").open("rb")
        except FileNotFoundError:
            return io.BytesIO()
