"""The logs of a cluster's processes in one directory, `decode-0.log` and the like: their ends, and what comes after."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path
from typing import BinaryIO

_PROCESS = re.compile(r"(supervisor|watcher|router(-\d+)?|(prefill|decode)-\d+)\.log")
_BLOCK_BYTES = 64 << 10
_MOST_BYTES = 4 << 20  # read for one answer
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
        self._left: dict[str, int] = {}  # where the last lines end of those that have not been given yet

    def processes(self) -> list[str]:
        """Those that have logs there, wanted or not."""
        return sorted(path.stem for path in self._directory.glob("*.log") if _PROCESS.fullmatch(path.name))

    def tail(self, num_lines: int) -> dict[str, str]:
        """The last lines of each process, as far as one answer has them: `tail_on` goes on, and behind it `more`."""
        for process in self._wanted():
            self._offsets[process], self._left[process] = self._find_tail(process, num_lines)
        return self.tail_on()

    def tail_on(self) -> dict[str, str]:
        """More of the last lines, process by process; empty: those were all."""
        found: dict[str, str] = {}
        num_bytes = 0
        while self._left:
            process, end = next(iter(self._left.items()))
            num_left = end - self._offsets[process]
            if found and num_bytes + num_left > _MOST_BYTES:
                break
            block = self._read_on(process, min(_MOST_BYTES, num_left))
            num_bytes += len(block)
            lines = block if not self._holds else b"".join(ln for ln in block.splitlines(True) if self._holds in ln)
            found[process] = lines.decode(errors="replace")
            if self._offsets[process] < end and block:
                break
            del self._left[process]
        return found

    def more(self, wait_s: float) -> dict[str, str]:
        """What has come since, after at most `wait_s` if nothing has. A file that is new is read from its beginning."""
        deadline_s = time.monotonic() + wait_s
        while not (news := {p: block for p in self._wanted() if (block := self._read_on(p, _MOST_BYTES))}):
            if time.monotonic() >= deadline_s:
                break
            time.sleep(_LOOK_S)
        return {process: block.decode(errors="replace") for process, block in news.items()}

    def _wanted(self) -> list[str]:
        return [process for process in self.processes() if self._process in ("", process)]

    def _find_tail(self, process: str, num_lines: int) -> tuple[int, int]:
        """Where the last whole lines begin and end."""
        with self._opened(process) as file:
            at, end, num_left = file.seek(0, 2), 0, num_lines
            while at > 0:
                step = min(_BLOCK_BYTES, at)
                at = file.seek(at - step)
                block = file.read(step)
                place = len(block)
                while (place := block.rfind(b"\n", 0, place)) >= 0:
                    if not end:
                        end = at + place + 1
                    elif num_left == 1:
                        return at + place + 1, end
                    else:
                        num_left -= 1
                    if num_left == 0:
                        return end, end
        return 0, end

    def _read_on(self, process: str, most: int) -> bytes:
        """What comes behind what was read, up to so many bytes; whole lines, unless one is longer."""
        with self._opened(process) as file:
            begin = self._offsets.get(process, 0)
            if begin > file.seek(0, 2):
                begin = 0
            file.seek(begin)
            block = file.read(most)
        lines = block[: block.rfind(b"\n") + 1]
        if len(block) == most:  # the end of so long a line comes later
            lines = lines or block
        self._offsets[process] = begin + len(lines)
        return lines

    def _opened(self, process: str) -> BinaryIO:
        try:
            return (self._directory / f"{process}.log").open("rb")
        except FileNotFoundError:
            return io.BytesIO()
