"""A thread of its own for calls that may wait long: for a disk, or for copies."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Protocol

_log = logging.getLogger(__name__)


class Calls(Protocol):
    """Runs calls one after the other; see `Lane`."""

    def put(self, call: Callable[[], None]) -> None: ...

    def close(self) -> None: ...

    def join(self, timeout_s: float) -> bool: ...


class Lane:
    """A thread that runs calls in order; an idle one costs nothing.

    Args:
        begin: called first, in the thread.
        on_error: hears of a call that raised; the thread ends then.
    """

    def __init__(self, name: str, begin: Callable[[], None], on_error: Callable[[BaseException], None]) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._begin = begin
        self._on_error = on_error
        # A daemon: a disk that hangs does not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._is_closing = False
        self._thread.start()

    def put(self, call: Callable[[], None]) -> None:
        """Run it after those before it; from any thread. Once the lane is closed, it is not run."""
        self._calls.put(call)

    def close(self) -> None:
        """End after the call under way; what waits is dropped."""
        self._is_closing = True
        self._calls.put(None)

    def join(self, timeout_s: float) -> bool:
        """Whether it has ended within this time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._begin()
            while (call := self._calls.get()) is not None and not self._is_closing:
                call()
        except Exception as error:  # noqa: BLE001 - handed on; nobody is above a thread
            _log.exception("the thread %s failed", self._thread.name)
            self._on_error(error)
