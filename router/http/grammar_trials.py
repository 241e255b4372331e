"""Grammars tried in a process of their own, where the kernel bounds what that may take (`grammar_trial_process`)."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from router.http.grammar_trial_process import BEGUN, MAX_BYTES
from tandem.core.errors import CancelledError, InternalError
from tandem.core.vocabulary import Description

# A trial that has not ended by then has got no processor: nothing in it waits. So much, or so many times what it may
# take.
_MAX_WAIT_S, _MAX_WAIT_FACTOR = 60.0, 10
_END_S = 5.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a trial.

    Attributes:
        refusal: why the grammar cannot be followed; empty: it can.
        cpu_s: what the trial took of a processor.
    """

    refusal: str
    cpu_s: float


class TrialEnd:
    """Ends a trial for which nobody waits any more. From any thread, at any time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._is_over = False

    def end(self) -> None:
        with self._lock:
            self._is_over = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)  # the fork's end is that of its socket

    def check(self) -> None:
        """Raises `CancelledError`: it was ended."""
        if self._is_over:
            raise CancelledError("nobody waits for this grammar any more")

    @contextlib.contextmanager
    def of(self, ours: socket.socket) -> Iterator[None]:
        """While this goes on, the trial at the other end of the socket is what is to be ended. Raises as `check`."""
        with self._lock:
            self.check()
            self._socket = ours
        try:
            yield
        finally:
            with self._lock:
                self._socket = None
        self.check()


class GrammarTrials:
    """Tries grammars, from any number of threads. The process starts with the first one.

    Args:
        vocabulary: made into text here and now, which holds up all threads.
        max_s: what a trial may take of a processor, in seconds.
    """

    def __init__(self, vocabulary: Description, max_s: float) -> None:
        self._vocabulary = json.dumps(asdict(vocabulary)).encode()
        self._max_s = max_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._door: socket.socket | None = None
        self._is_closed = False

    def try_out(self, text: str, end: TrialEnd | None = None) -> Verdict:
        """Compile the grammar, and make its first masks.

        Raises:
            InternalError: the process cannot be started, or has no processor, or the trial failed; or this is closed.
            CancelledError: it was ended.
        """
        end = end or TrialEnd()
        end.check()
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self._hand_over(theirs)
            ours.settimeout(max(_MAX_WAIT_S, _MAX_WAIT_FACTOR * self._max_s))
            try:
                with end.of(ours):
                    ours.sendall(json.dumps({"text": text, "max_s": self._max_s}).encode())
                    ours.shutdown(socket.SHUT_WR)
                    said = b""
                    while part := ours.recv(1 << 16):
                        said += part
            except OSError as error:
                end.check()
                self._end_if_gone()
                raise InternalError(f"the grammar could not be checked: {error}") from error
        if not said:
            self._end_if_gone()
            raise InternalError("the grammar could not be checked: the process that checks grammars has ended")
        if said != BEGUN:
            found = json.loads(said)
            if found["failure"]:
                raise InternalError(f"the grammar could not be checked: {found['failure']}")
            return Verdict(found["said"], found["cpu_s"])
        refusal = (
            f"takes more than {self._max_s:g} s of computation (limits.max_grammar_compile_s) or {MAX_BYTES >> 20} MiB "
            "of memory to be compiled"
        )
        return Verdict(refusal, self._max_s)

    def close(self) -> None:
        """End the process, and what is tried in it loses its verdict."""
        with self._lock:
            self._is_closed = True  # a search in a schema may be under way, and would begin with the next part
            self._end()

    def _hand_over(self, theirs: socket.socket) -> None:
        with self._lock:
            if self._is_closed:
                raise InternalError("the grammar could not be checked: the router ends")
            try:
                if self._process is not None and self._process.poll() is not None:
                    self._end()
                if self._door is None:
                    self._start()
                assert self._door is not None
                socket.send_fds(self._door, [b"\n"], [theirs.fileno()])
            except OSError as error:
                self._end()
                raise InternalError(f"the grammar could not be checked: {error}") from error

    def _start(self) -> None:
        self._door, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "router.http.grammar_trial_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # a Ctrl-C at the terminal is for the router, and this ends with it
            )
        ours, theirs = socket.socketpair()
        with ours, theirs:
            socket.send_fds(self._door, [b"\n"], [theirs.fileno()])
            theirs.close()
            ours.settimeout(_MAX_WAIT_S)
            ours.sendall(self._vocabulary)

    def _end_if_gone(self) -> None:
        """What has ended is started again by the next grammar."""
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._end()

    def _end(self) -> None:
        if self._door is not None:
            self._door.close()
            self._door = None
        if self._process is not None:
            self._process.kill()
            self._process.wait(_END_S)
            self._process = None
