"""The results of one batch as they come: appended, never changed. One process writes at a time; it blocks.

Each line is `NUMBER KIND JSON`: the number of the line in the input (from 0), `+` where it was answered with 200 and
`-` where not, and the line for the output file. What a crash left at the end, of the process a part of a line and of
the host perhaps zeros, is cut off, and its requests are run again. Of two results of one line the first counts.
"""

from __future__ import annotations

import os
import re
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

_FSYNC_EACH_S = 1.0
_PROGRESS = b"%012d %012d\n"
_PROGRESS_BYTES = 26
_NONE = -1
_ENTRY = re.compile(rb"(\d{1,12}) ([+-]) \{.*\}\n")


class ResultsJournal:
    """Open for one batch of `num_lines`. Its memory is 8 bytes a line of the input.

    A result outlasts the end of the process as soon as `append` returns, and that of the host a second later: the disk
    is waited for once a second at most. What the host's end takes is run again.
    """

    def __init__(self, results: Path, progress: Path, num_lines: int) -> None:
        self._results, self._num_lines = results, num_lines
        self._file = os.open(results, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self._recover()
        self._progress = os.open(progress, os.O_WRONLY | os.O_CREAT, 0o600)
        self._synced_s = time.monotonic()
        self._write_progress()

    def _recover(self) -> None:
        """Read what is there, and cut off the rest: from the first line on that is not whole."""
        self.num_completed = self.num_failed = self._size = 0
        # For each line of the input where its result begins in the file; `_NONE`: it has none.
        self._begins = array("q", [_NONE]) * self._num_lines
        with self._results.open("rb") as file:
            for line in file:
                if (entry := _ENTRY.match(line)) is None or int(entry[1]) >= self._num_lines:
                    os.ftruncate(self._file, self._size)
                    break
                self._note(int(entry[1]), self._size, is_good=entry[2] == b"+")
                self._size += len(line)

    def _note(self, number: int, begin: int, *, is_good: bool) -> None:
        if self._begins[number] == _NONE:
            self._begins[number] = begin
            self.num_completed += is_good
            self.num_failed += not is_good

    def has(self, number: int) -> bool:
        return self._begins[number] != _NONE

    def append(self, number: int, line: bytes, *, is_good: bool) -> None:
        """The result of line `number`; `line` is JSON without a newline."""
        entry = b"%d %s %s\n" % (number, b"+" if is_good else b"-", line)
        _write_all(self._file, entry)
        self._note(number, self._size, is_good=is_good)
        self._size += len(entry)
        self._write_progress()
        if time.monotonic() - self._synced_s >= _FSYNC_EACH_S:
            self.sync()

    def sync(self) -> None:
        os.fdatasync(self._file)
        self._synced_s = time.monotonic()

    def settle(self) -> None:
        """No more is appended: know all results, also those of a writer that lost the queue unseen. They outlast the
        host's end then."""
        self._recover()
        self._write_progress()
        self.sync()

    def in_order(self) -> Iterator[tuple[int, bool, bytes] | tuple[int, bool, None]]:
        """For each line of the input its number, whether it was answered with 200, and its result, if it has one.

        Where another may have written too, after `settle`.
        """
        with os.fdopen(os.dup(self._file), "rb") as file:
            for number, begin in enumerate(self._begins):
                if begin == _NONE:
                    yield number, False, None
                    continue
                file.seek(begin)
                _, kind, line = file.readline().split(b" ", 2)
                yield number, kind == b"+", line

    def close(self) -> None:
        self.sync()
        os.close(self._file)
        os.close(self._progress)

    def _write_progress(self) -> None:
        os.pwrite(self._progress, _PROGRESS % (self.num_completed, self.num_failed), 0)


def read_progress(progress: Path) -> tuple[int, int]:
    """How many lines were answered with 200, and how many otherwise, by now."""
    try:
        with progress.open("rb") as file:
            completed, _, failed = file.read(_PROGRESS_BYTES).partition(b" ")
    except FileNotFoundError:
        return 0, 0
    return int(completed or 0), int(failed or 0)


def _write_all(file: int, content: bytes) -> None:
    """A write may take a part only."""
    view = memoryview(content)
    while view:
        view = view[os.write(file, view) :]
