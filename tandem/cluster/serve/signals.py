"""Ctrl-C and SIGTERM while `tandem serve` runs: the first stops in order, the second at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

HANDLED = (signal.SIGINT, signal.SIGTERM)


class StopRequested(BaseException):
    """The user wants `tandem serve` to end. Not an `Exception`: nothing on the way may take it for a failure."""


class StopSignals:
    """Raises `StopRequested` in the main thread, or sets an event where a loop waits for one.

    Args:
        on_stop: says that the first signal was heard.
        on_force: called at the second; does not return.
    """

    def __init__(self, on_stop: Callable[[], None], on_force: Callable[[], None]) -> None:
        self._on_stop, self._on_force = on_stop, on_force
        self._waiting: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._cleaning_up = False
        self._postponed = False
        self.stopped = False

    def install(self) -> None:
        """Take the signals; again after Ray has started, which takes SIGTERM for itself."""
        for number in HANDLED:
            signal.signal(number, self._handle)

    def begin_cleanup(self) -> None:
        """From here on a first signal no longer interrupts: what it asks for is being done."""
        self._cleaning_up = True

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """A first signal interrupts at the end of the block: what begins in it is known before it is to be ended."""
        self._postponed = True
        try:
            yield
        finally:
            self._postponed = False
        if self.stopped:
            raise StopRequested

    async def wait(self) -> None:
        """Until the first signal."""
        event = asyncio.Event()
        self._waiting = asyncio.get_running_loop(), event
        try:
            if not self.stopped:
                await event.wait()
        finally:
            self._waiting = None

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self.stopped:
            self._on_force()
        self.stopped = True
        self._on_stop()
        if self._waiting:
            loop, event = self._waiting
            loop.call_soon_threadsafe(event.set)
        elif not self._cleaning_up and not self._postponed:
            raise StopRequested
