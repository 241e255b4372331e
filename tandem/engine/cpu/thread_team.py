"""The threads that compute a kernel together: one leads, others follow where they come in time.

A decode step is some hundred kernels of 1 to 500 µs. They come as programs, run without Python in between. Waking a
thread of Numba's own pool for each kernel costs 100 µs and eats what the second core gains; so followers here look
out for the next kernel for a while (`_SPINS`) before they sleep, and a leader waits for nobody who has not begun: it
takes pieces of the work, as the followers do, until none is left. A follower whose core is taken by another process
then costs nothing.

The board is a few words of shared memory:

- `STATE`: number of the kernel, seats that are free, followers within. A follower takes a seat by one compare-and-swap,
  so it is within only while the leader has not closed; the leader closes, waits until nobody is within, and only
  then writes the next kernel's function and arguments.
- `NEXT`: the first piece that nobody has taken.
- `SLEEPERS`: followers that sleep on the semaphore and that nobody has woken yet.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import sys
import threading
from pathlib import Path

import numba
import numpy as np
from numba import types

from tandem.engine.cpu.atomics import WORD_BYTES, add, call, compare_and_swap, keep_bits, pause, read, words, write
from tandem.engine.cpu.compiling import compile_function

_log = logging.getLogger(__name__)

#: Words of a call before its arguments; see `Team.run`.
CALL_WORDS = 4
_call_words = words(CALL_WORDS)

# Byte offsets of the words; those that change at different times lie on cache lines of their own.
_STATE, _NEXT, _SLEEPERS, _STOP, _SEMAPHORE, _WORK = 0, 128, 256, 384, 512, 640
_FUNCTION, _ARGUMENTS, _COUNT, _GRAIN = _WORK, _WORK + 8, _WORK + 16, _WORK + 24
_BOARD_BYTES, _ALIGNMENT = 1024, 128

# STATE: the kernel's number above, then 16 bits of free seats, then 16 of followers within.
_SEAT, _NUMBER = 1 << 16, 1 << 32
_WITHIN_BITS, _SEAT_BITS = _SEAT - 1, _NUMBER - _SEAT
_NOT_SEATS = ~_SEAT_BITS
_LAST_NUMBER = (1 << 30) - 1

# Pauses before a follower sleeps: 0.1 to 0.3 ms, a few times the Python between two programs of a step.
_SPINS = 5_000
# Pauses of a leader before it lets others run: one of them may be the follower that it waits for.
_SPINS_BEFORE_YIELD = 2_000

# Few, because each piece begins without what the piece before it would have prefetched. Enough that a thread which came
# late leaves the rest to the others.
_PIECES_OF_A_THREAD = 2

_sem_wait = types.ExternalFunction("sem_wait", types.intc(types.intp))
_sem_post = types.ExternalFunction("sem_post", types.intc(types.intp))
_sched_yield = types.ExternalFunction("sched_yield", types.intc())


@numba.njit(nogil=True)
def _take_pieces(board, function, arguments, count, grain):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    while True:
        first = add(board + _NEXT, grain)
        if first >= count:
            return
        call(function, first, min(first + grain, count), arguments)


@numba.njit(nogil=True)
def _claim_sleeper(board):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Take one off the count of sleepers. Return whether there was one."""
    while True:
        sleepers = read(board + _SLEEPERS)
        if sleepers <= 0:
            return False
        if compare_and_swap(board + _SLEEPERS, sleepers, sleepers - 1):
            return True


@numba.njit(nogil=True)
def _share(board, function, arguments, count, num_threads):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Compute `[0, count)` by `function(first, end, arguments)` with up to `num_threads - 1` followers."""
    seats = num_threads - 1
    grain = max(1, count // (num_threads * _PIECES_OF_A_THREAD))
    write(board + _FUNCTION, function)
    write(board + _ARGUMENTS, arguments)
    write(board + _COUNT, count)
    write(board + _GRAIN, grain)
    write(board + _NEXT, 0)
    number = (read(board + _STATE) // _NUMBER + 1) & _LAST_NUMBER
    write(board + _STATE, number * _NUMBER + seats * _SEAT)
    for _ in range(seats):
        if not _claim_sleeper(board):
            break
        _sem_post(board + _SEMAPHORE)
    _take_pieces(board, function, arguments, count, grain)
    keep_bits(board + _STATE, _NOT_SEATS)
    spins = 0
    while read(board + _STATE) & _WITHIN_BITS:
        spins += 1
        if spins < _SPINS_BEFORE_YIELD:
            pause()
        else:
            _sched_yield()


@compile_function
def _lead(board, program, num_threads, num_own, wanted_at, offered_at):  # type: ignore[no-untyped-def] # pragma: no cover
    """Compute the calls of a program (`CALL_WORDS`), each on up to `num_threads` threads; see `Team.run`."""
    start = at = program.ctypes.data
    end = start + program.size * WORD_BYTES
    while at < end:
        if num_threads > num_own and read(wanted_at):
            num_threads = num_own
        function, num_words, count, count_to_share = _call_words(at)
        arguments = at + CALL_WORDS * WORD_BYTES
        if num_threads > 1 and count >= count_to_share:
            _share(board, function, arguments, count, min(num_threads, count))
        else:
            call(function, 0, count, arguments)
        at += num_words * WORD_BYTES
        if offered_at and read(offered_at):
            break
    return (at - start) // WORD_BYTES


@compile_function
def _follow(board):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    spins, last = 0, -1
    while read(board + _STOP) == 0:
        state = read(board + _STATE)
        number = state // _NUMBER
        if state & _SEAT_BITS and number != last:
            if compare_and_swap(board + _STATE, state, state - _SEAT + 1):
                last, spins = number, 0
                function, arguments = read(board + _FUNCTION), read(board + _ARGUMENTS)
                _take_pieces(board, function, arguments, read(board + _COUNT), read(board + _GRAIN))
                add(board + _STATE, -1)
            continue
        spins += 1
        if spins < _SPINS:
            pause()
            continue
        spins = 0
        add(board + _SLEEPERS, 1)
        # A leader that opened before it could see this sleeper wakes nobody: so look once more.
        state = read(board + _STATE)
        is_wanted = (state & _SEAT_BITS and state // _NUMBER != last) or read(board + _STOP)
        if is_wanted and _claim_sleeper(board):
            continue
        while _sem_wait(board + _SEMAPHORE) != 0:  # interrupted by a signal
            pass


@compile_function
def _dismiss(board):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    write(board + _STOP, 1)
    while _claim_sleeper(board):
        _sem_post(board + _SEMAPHORE)


class Team:
    """Followers, made when they are first asked for; they end with the process."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.aligned_alloc.restype = ctypes.c_void_p
        libc.aligned_alloc.argtypes = (ctypes.c_size_t, ctypes.c_size_t)
        # Never freed: a follower may look at it until the process is gone.
        self._board: int = libc.aligned_alloc(_ALIGNMENT, _BOARD_BYTES)
        ctypes.memset(self._board, 0, _BOARD_BYTES)
        if libc.sem_init(ctypes.c_void_p(self._board + _SEMAPHORE), 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "sem_init")
        self._followers: list[threading.Thread] = []
        self._most_followers = sys.maxsize
        # Compiled now, and not when a request first needs it.
        _follow.compile((types.intp,))
        # Held by the leader: a second one, of another engine in this process, computes alone.
        self._leading = threading.Lock()
        atexit.register(self._end)

    def run(
        self, program: np.ndarray, *, num_threads: int, num_own: int, wanted_back_at: int = 0, offered_at: int = 0
    ) -> int:
        """Compute the calls of a program one after the other, until all are done or more threads can be had.

        Args:
            program: int64 words. A call is the address of a C function `function(first, end, arguments)` that needs no
                GIL; how many words the call has, these among them; the count of items `[0, count)`; from which count on
                several threads share them, at least 2; then the arguments, of which the function is given the address.
            num_threads: how many threads may compute, the caller among them.
            num_own: how many of them compute the calls that begin once the word at the address `wanted_back_at` is no
                longer 0. If that is all of them, the word is not read.
            offered_at: address of a word; once it is no longer 0 the run ends with the call under way. 0: none.

        Returns how many words of the program are done.
        """
        if num_threads > 1 and self._leading.acquire(blocking=False):
            try:
                self._hire(num_threads - 1)
                return int(_lead(self._board, program, num_threads, num_own, wanted_back_at, offered_at))
            finally:
                self._leading.release()
        return int(_lead(self._board, program, 1, 1, 0, offered_at))

    def _hire(self, num_followers: int) -> None:
        while len(self._followers) < min(num_followers, self._most_followers):
            name = f"kernel-{len(self._followers) + 1}"
            thread = threading.Thread(target=self._follow, args=(name,), name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the process may have no more threads
                self._most_followers = len(self._followers)
                _log.warning("kernels have %d threads only: %s", self._most_followers + 1, error)
            else:
                self._followers.append(thread)

    def _follow(self, name: str) -> None:
        with contextlib.suppress(OSError):  # for `top -H`; nothing else needs it
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
        _follow(self._board)

    def _end(self) -> None:
        with self._leading:
            _dismiss(self._board)
            for thread in self._followers:
                thread.join()
