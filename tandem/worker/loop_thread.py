"""An event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import uvloop

from tandem.core.errors import InternalError
from tandem.core.slices import computing_threads, take_short_slices

_T = TypeVar("_T")


class LoopThread:
    """Runs an event loop from `start` to `stop`."""

    def __init__(self, name: str) -> None:
        # A daemon, so that a process that ends without `stop` does not hang on it.
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)

    def start(self) -> asyncio.AbstractEventLoop:
        self.loop = self._runner.get_loop()
        self.loop.set_default_executor(computing_threads())
        self._thread.start()
        return self.loop

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Start a coroutine in the loop; from any other thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the loop and its thread; what still runs in it is cancelled.

        Raises:
            InternalError: it did not end in time.
        """
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise InternalError(f"the event loop did not end within {timeout_s} s")

    def _main(self) -> None:
        take_short_slices()
        with self._runner:
            self.loop.run_forever()
