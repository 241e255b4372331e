"""The one thread that owns a transport: it alone posts and polls.

While no transfer is outstanding or expected, the thread sleeps. Otherwise it polls when the doorbell rings, and also by
itself, after a pause that grows:

- While its polls drive on a write or a message of its own: an eighth of the time since the last event, command or ring,
  at most 5 ms. Nobody rings when these have ended.
- While it only expects writes of others, which may be as long as a prompt is computed: three times the time since the
  last event or ring, at most 10 ms. Who rings has just written, and what tells of it may come a little later. The limit
  is how much later something comes that nobody has rung for.

Why it polls: with their progress threads off, none of the libraries offers a file descriptor to wait for. A busy loop
would take a core from the model. A timed wait costs 50 µs in any case.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from kvtransfer.extents import Descriptor
from kvtransfer.transports.base import Transport
from kvtransfer.transports.events import PeerId, ThreadEvent, WriteFailed, WriteHandle, WritePosted
from tandem.core.errors import TransportError
from tandem.core.slices import take_short_slices

_log = logging.getLogger(__name__)

T = TypeVar("T")

SHORTEST_PAUSE_S = 50e-6
# The pause until the next poll: as a share of the time since something happened that more may follow, and at most.
_WHILE_DRIVING = 1 / 8, 5e-3
_WHILE_EXPECTING = 3.0, 10e-3


@dataclass(slots=True)
class _Command:
    run: Callable[[Transport], Any]
    future: Future[Any]


class TransferThread:
    """Drives `transport` from `start` to `stop`, which also closes it.

    Args:
        on_event: called in this thread with every event; it must be quick and hand over to its own loop.
        on_error: called in this thread with errors that no caller sees. After an error of `on_event` the thread goes
            on. After an error of the transport's `poll` it ends, and every further command fails.
        idle_poll_s: seconds between two polls while nothing is outstanding, so that the library notices peers that
            have left; `None`: no such polls.
        cores: cores that the thread may run on; `None`: all cores of the process.
    """

    def __init__(
        self,
        transport: Transport,
        on_event: Callable[[ThreadEvent], None],
        on_error: Callable[[BaseException], None],
        *,
        name: str = "kv-transfer",
        idle_poll_s: float | None = 1.0,
        cores: Collection[int] | None = None,
    ) -> None:
        self._transport = transport
        self._on_event = on_event
        self._on_error = on_error
        self._idle_poll_s = idle_poll_s
        self._cores = cores
        self._lock = threading.Lock()
        # Guarded by _lock. Invariant: it stays empty once _stopping is set and the thread has ended.
        self._commands: deque[_Command] = deque()
        self._taken: deque[_Command] = deque()  # commands that the thread has taken and not run yet
        self._stopping = False
        # A daemon, so that a process that ends without `stop` does not wait for it.
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._has_posted = False  # since the last poll; only the thread itself uses it
        self.num_polls = 0
        # When the present turn (commands, poll, deliveries) began, on the monotonic clock; `None` while the thread
        # waits. The worker's watchdog reads it.
        self.busy_since_s: float | None = None

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread and close the transport. Queued commands fail; outstanding writes end without an event.

        Idempotent, also before `start`.

        Raises:
            TransportError: the thread did not end in time: the transport hangs in a call.
        """
        with self._lock:
            self._stopping = True
        self._transport.doorbell.ring()
        if self._thread.ident is None:
            self._end()
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TransportError(f"the transfer thread did not end within {timeout_s} s")

    def submit(self, command: Callable[[Transport], T]) -> Future[T]:
        """Run `command(transport)` in the thread; the future gets its result or error.

        Raises:
            TransportError: the thread is stopping or has ended.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._stopping:
                raise TransportError("the transfer thread has stopped")
            self._commands.append(_Command(command, future))
        self._transport.doorbell.ring()
        return future

    def write(
        self,
        peer: PeerId,
        descriptors: Sequence[Descriptor],
        tag: bytes,
        *,
        may_post: Callable[[], bool] | None = None,
    ) -> None:
        """Queue one write. Unless the thread stops first, it ends in exactly one of `WriteCompleted` and
        `WriteFailed`, both with `tag`.

        Args:
            may_post: called in the thread right before posting. If it returns `False`, the write fails as settled. It
                checks the grant.

        Raises:
            TransportError: the thread is stopping or has ended.
        """

        def post(transport: Transport) -> None:
            unposted = WriteHandle(-1, peer, tag, sum(d.num_bytes for d in descriptors))
            settled = True
            try:
                if may_post is not None and not may_post():
                    raise TransportError("its grant no longer holds")
                settled = False
                handle = transport.post_write(peer, descriptors, tag)
            except TransportError as error:  # by the transport's contract nothing was posted
                self._deliver(WriteFailed(unposted, str(error), settled=True))
            except Exception as error:
                self._deliver(WriteFailed(unposted, repr(error), settled))
                raise
            else:
                self._has_posted = True
                self._deliver(WritePosted(handle))

        self.submit(post).add_done_callback(self._report)

    # ---- the thread

    def _report(self, posted: Future[None]) -> None:
        """No caller waits for the future of a write, so its error goes to `on_error`."""
        error = posted.exception()
        if error is not None and not self._stopping:
            self._on_error(error)

    def _main(self) -> None:
        take_short_slices()
        try:
            self._stay_on_cores()
            self._loop()
        except Exception as error:  # noqa: BLE001 - handed on; nobody is above a thread
            _log.exception("the transfer thread ends")
            self._on_error(error)
        finally:
            self._end()

    def _stay_on_cores(self) -> None:
        if self._cores is not None:
            try:
                os.sched_setaffinity(0, self._cores)
            except OSError as error:  # a core was taken away since `cores` were looked up
                _log.warning("the transfer thread runs on any core; binding it to %s failed: %s", self._cores, error)

    def _loop(self) -> None:
        pause_s = SHORTEST_PAUSE_S
        last_s = time.monotonic()
        doorbell = self._transport.doorbell
        while True:
            self.busy_since_s = None
            num_heard = doorbell.num_from_peers
            has_rung = doorbell.wait(pause_s if self._transport.wants_polling else self._idle_poll_s)
            if not self._take_commands():
                return
            self.busy_since_s = time.monotonic()
            # A command rings too; without one it was a library's own thread, or a peer in this process.
            is_called = has_rung and (doorbell.num_from_peers != num_heard or not self._taken)
            has_commands = bool(self._taken)
            has_events = self._turn()
            now_s, drives = time.monotonic(), self._transport.drives
            if is_called or has_events or (has_commands and drives):
                last_s = now_s
            pause_s = _pause_s(now_s - last_s, drives=drives)

    def _turn(self) -> bool:
        """Run the commands that were taken, and poll. Return whether there were events."""
        has_commands = bool(self._taken)
        # Deliver earlier events before the commands: then a commit finds that its pages have arrived.
        has_events = has_commands and self._poll()
        while self._taken:
            _run(self._taken.popleft(), self._transport)
            if self._has_posted:
                # A library reports a write to the receiver only when it is polled. Polling here lets the receiver hear
                # of this write while the next one, which may take long, is posted.
                self._has_posted = False
                has_events |= self._poll()
        has_events |= self._poll()
        return has_events

    def _poll(self) -> bool:
        self.num_polls += 1
        events = self._transport.poll()
        for event in events:
            self._deliver(event)
        return bool(events)

    def _take_commands(self) -> bool:
        """Take all queued commands; `False`: the thread is to end."""
        with self._lock:
            if self._stopping:
                return False
            self._taken.extend(self._commands)
            self._commands.clear()
            return True

    def _deliver(self, event: ThreadEvent) -> None:
        try:
            self._on_event(event)
        except Exception as error:  # noqa: BLE001 - handed on; one bad callback must not stop the other transfers
            if self._stopping and isinstance(error, TransportError):  # it wanted to write once more
                _log.info("what follows on %s is not begun: %s", type(event).__name__, error)
                return
            _log.exception("the receiver of transfer events failed")
            self._on_error(error)

    def _end(self) -> None:
        """Close the transport and fail all queued commands."""
        with self._lock:
            self._stopping = True
            commands = [*self._taken, *self._commands]
            self._taken.clear()
            self._commands.clear()
        for command in commands:
            if command.future.set_running_or_notify_cancel():  # else whoever asked has given it up
                command.future.set_exception(TransportError("the transfer thread has stopped"))
        try:
            self._transport.close()
        except Exception as error:  # noqa: BLE001 - handed on; nobody is above a thread
            _log.exception("the transport did not close")
            self._on_error(error)


def _pause_s(quiet_s: float, *, drives: bool) -> float:
    """Seconds until the next poll when for `quiet_s` nothing has happened that more may follow."""
    share, longest_s = _WHILE_DRIVING if drives else _WHILE_EXPECTING
    return min(max(SHORTEST_PAUSE_S, quiet_s * share), longest_s)


def _run(command: _Command, transport: Transport) -> None:
    if not command.future.set_running_or_notify_cancel():
        return
    try:
        command.future.set_result(command.run(transport))
    except Exception as error:  # noqa: BLE001 - the future carries it
        command.future.set_exception(error)
