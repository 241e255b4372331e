"""Shares the cores of a node among its workers, by their load.

Each worker has CPU threads of its own. A worker that has nothing to compute lends them, and the others share them in
proportion to their own. When it computes again it tells the others, which look between any two kernels. A kernel of a
decode step takes 0.05 to 0.5 ms. The longest kernel of a chunk of 512 tokens takes 0.1 s, on one thread with a model of
0.5 B weights.

The workers share a small mapped file with a slot for each of them. A slot belongs to the process that holds the lock on
its bytes, so the operating system frees it when the process dies. A busy worker writes until when it is busy, so a
stopped or dead one counts as idle after ten seconds. No result depends on any of this: results are the same bits on any
number of threads.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from tandem.core.errors import ConfigError

# A slot is a cache line: how many threads its worker has (0: it is free); until when it is busy, in ns of the monotonic
# clock, which all processes of a host share; whether somebody wants back what was lent to it; whether somebody came to
# rest since it borrowed. The first line holds how many slots were ever taken.
_THREADS, _BUSY_UNTIL, _WANTED_BACK, _OFFERED = range(4)
_SLOT_WORDS = 8
_SLOT_BYTES = 8 * _SLOT_WORDS
_NUM_SLOTS = 255
_FILE_BYTES = (_NUM_SLOTS + 1) * _SLOT_BYTES

# Longer than a layer of a large chunk, or a step of few tokens: a worker that computes says so at each. One that rests
# says that too, so this is how long the threads of one that died are not used.
_BUSY_NS = 10_000_000_000


def lent_threads(own: int, others: Iterable[tuple[int, bool]]) -> int:
    """How many threads a busy worker may use beyond its own: its share of those whose workers are idle.

    Args:
        others: for each other worker of the node its threads and whether it is busy.
    """
    idle, busy = 0, own
    for num_threads, is_busy in others:
        if is_busy:
            busy += num_threads
        else:
            idle += num_threads
    return idle * own // busy


class CoreShares:
    """This worker's place among those of its node.

    Args:
        path: the file; the same for all workers of a node, made by the first.
        num_threads: the worker's own.

    Raises:
        ConfigError: the file cannot be used, or all its slots are taken.
    """

    def __init__(self, path: Path, num_threads: int) -> None:
        self._own = num_threads
        self._most = max(0, len(os.sched_getaffinity(0)) - num_threads)
        with contextlib.ExitStack() as undo:
            try:
                self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                undo.callback(os.close, self._file)
                os.posix_fallocate(self._file, 0, _FILE_BYTES)  # a hole in a full disk would be a fatal signal later
                memory = mmap.mmap(self._file, _FILE_BYTES)
                self._words = memoryview(memory).cast("q")
                self._slot = self._claim(path)
            except OSError as error:
                raise ConfigError(
                    f"{path}, where the workers of this node share their cores: {error.strerror}; free some room or "
                    "set scheduling.share_cores: false",
                    key="scheduling.share_cores",
                ) from error
            undo.pop_all()
        start = np.frombuffer(memory, dtype=np.int64).ctypes.data
        self._start: int = start
        self.wanted_back_at = self._address(self._slot + _WANTED_BACK)
        self.offered_at = self._address(self._slot + _OFFERED)
        self.rest()
        self._words[self._slot + _THREADS] = num_threads

    def borrow(self) -> int:
        """How many threads beyond its own the worker may use, until the word at `wanted_back_at` is set.

        There may be more from when the word at `offered_at` is set. Says that it is busy, and wants its own back.
        """
        words, mine = self._words, self._slot
        now = time.monotonic_ns()
        were_lent = words[mine + _BUSY_UNTIL] <= now  # it rested, or was stopped for long
        words[mine + _BUSY_UNTIL] = now + _BUSY_NS
        words[mine + _WANTED_BACK] = words[mine + _OFFERED] = 0  # before looking around: what comes later is not missed
        if were_lent:
            for slot in self._others():
                words[slot + _WANTED_BACK] = 1
        return min(self._most, self._lent_to(mine, now))

    def rest(self) -> None:
        """The others may have this worker's threads: there is nothing to compute."""
        words, mine, now = self._words, self._slot, time.monotonic_ns()
        if words[mine + _BUSY_UNTIL]:
            words[mine + _BUSY_UNTIL] = 0
            for slot in self._others():
                if words[slot + _BUSY_UNTIL] > now and self._gains(slot, now):
                    words[slot + _OFFERED] = 1

    def leave(self) -> None:
        """Give the slot back. The memory stays mapped: a kernel that runs on may still look at it."""
        self._words[self._slot + _THREADS] = 0
        self._lock(self._slot // _SLOT_WORDS, fcntl.F_UNLCK)
        os.close(self._file)

    def _address(self, word: int) -> int:
        return self._start + word * 8

    def _others(self) -> list[int]:
        """Slots that were ever taken, but for this worker's."""
        return [s for s in range(_SLOT_WORDS, (self._words[0] + 1) * _SLOT_WORDS, _SLOT_WORDS) if s != self._slot]

    def _lent_to(self, slot: int, now: int, *, rests: bool = False) -> int:
        """What the worker of a slot may use beyond its own; `rests`: as if this one rested, and else as it computes."""
        words, mine = self._words, self._slot
        own = words[slot + _THREADS]
        if not own:  # it has left meanwhile
            return 0
        others = [s for s in (mine, *self._others()) if s != slot]
        are_busy = (not rests if s == mine else words[s + _BUSY_UNTIL] > now for s in others)
        return lent_threads(own, zip((words[s + _THREADS] for s in others), are_busy, strict=True))

    def _gains(self, slot: int, now: int) -> bool:
        """Whether the worker of a slot may use more threads when this one rests than when it computes."""
        return self._lent_to(slot, now, rests=True) > self._lent_to(slot, now)

    def _claim(self, path: Path) -> int:
        """The first slot that is free; clears those whose workers died. One worker at a time."""
        self._lock(0, fcntl.F_WRLCK, waits=True)
        try:
            return self._claim_alone(path)
        finally:
            self._lock(0, fcntl.F_UNLCK)

    def _claim_alone(self, path: Path) -> int:
        mine = 0
        for index in range(1, _NUM_SLOTS + 1):
            if mine and index > self._words[0]:
                break
            if self._lock(index, fcntl.F_WRLCK):
                self._words[index * _SLOT_WORDS + _THREADS] = 0
                if mine:
                    self._lock(index, fcntl.F_UNLCK)
                else:
                    mine = index
                    self._words[0] = max(self._words[0], index)
        if not mine:
            raise ConfigError(
                f"{path} has no slot left: more than {_NUM_SLOTS} workers on this node share their cores; set "
                "scheduling.share_cores: false",
                key="scheduling.share_cores",
            )
        return mine * _SLOT_WORDS

    def _lock(self, index: int, kind: int, *, waits: bool = False) -> bool:
        """Whether the lock on a line could be had or given back. It is of the open file, and ends with it.

        Raises `OSError` where files cannot be locked.
        """
        request = struct.pack("hhqqi", kind, os.SEEK_SET, index * _SLOT_BYTES, _SLOT_BYTES, 0)
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLKW if waits else fcntl.F_OFD_SETLK, request)
        except (BlockingIOError, PermissionError):  # whichever the system says of a lock that is held
            return False
        return True
