"""Between the prompts of one HTTP request and the writer of its answer: a bounded buffer of deltas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.request.request import Delta
from tandem.core.errors import CancelledError, TandemError


class DeltaBuffer:
    """Each prompt puts, one writer takes. Not thread-safe.

    A client that reads too slowly blocks the writer; what piles up meanwhile is bounded in tokens.
    """

    def __init__(self, max_tokens: int | None) -> None:
        """`max_tokens` bounds what waits while the writer is blocked; `None` for an answer sent whole."""
        self.error: TandemError | None = None
        #: Called once, when the bound is passed: the writer will not get free by itself.
        self.on_overflow: Callable[[], object] = lambda: None
        self._max_tokens = max_tokens
        self._items: list[tuple[int, Delta]] = []
        self._num_tokens = 0
        self._is_closed = False
        # Set exactly while the writer waits in `take`.
        self._writer: asyncio.Future[None] | None = None

    def put(self, prompt: int, delta: Delta) -> None:
        """Leave a delta of the prompt with this number. Raises `CancelledError` when the client reads too slowly."""
        self._items.append((prompt, delta))
        self._num_tokens += len(delta.tokens)
        if self._writer is not None:
            self._wake()
        elif self._max_tokens is not None and self._num_tokens > self._max_tokens:
            self.on_overflow()
            raise CancelledError(f"the client reads too slowly: more than {self._max_tokens} tokens wait for it")

    def close(self, error: TandemError | None = None) -> None:
        """All prompts have ended, the first failure being `error`."""
        self.error = error
        self._is_closed = True
        self._wake()

    async def take(self) -> list[tuple[int, Delta]]:
        """All that waits, oldest first; empty when the end is reached."""
        if not self._items and not self._is_closed:
            self._writer = asyncio.get_running_loop().create_future()
            try:
                await self._writer
            finally:
                self._writer = None
        items, self._items = self._items, []
        self._num_tokens = 0
        return items

    def _wake(self) -> None:
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)
