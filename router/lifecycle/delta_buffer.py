"""Between the prompts of one HTTP request and the writer of its answer: a bounded buffer of deltas."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from router.request.mailbox import Mailbox
from router.request.request import Delta
from tandem.core.errors import CancelledError, TandemError


class DeltaBuffer(Mailbox[tuple[int, Delta]]):
    """Each prompt puts deltas with its number; one writer takes.

    A client that reads too slowly blocks the writer; the tokens that pile up meanwhile are bounded.

    Attributes:
        error: the first failure of a prompt, once all have ended.
        on_overflow: called once, when the bound is passed: the writer will not get free by itself.
        write_now: where the writer has set it, it is given what has come by the end of the loop's round, while the
            writer waits; it says whether that is written. What it raises is raised where the writer waits.
    """

    def __init__(self, max_tokens: int | None) -> None:
        """`max_tokens` bounds what waits while the writer is blocked; `None` for an answer sent whole."""
        super().__init__()
        self.error: TandemError | None = None
        self.has_overflowed = False
        self.on_overflow: Callable[[], object] = lambda: None
        self.write_now: Callable[[Sequence[tuple[int, Delta]]], bool] | None = None
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._is_due = False  # whether `_write` will run

    def put(self, item: tuple[int, Delta]) -> None:
        """Leave a delta. Raises `CancelledError` when the client reads too slowly."""
        if self.write_now is not None and self._reader is not None and not self._reader.done():
            self._items.append(item)
            if not self._is_due:
                self._is_due = True
                self._reader.get_loop().call_soon(self._write)
            return
        super().put(item)
        self._num_tokens += len(item[1].tokens)
        if not self.is_awaited and self._max_tokens is not None and self._num_tokens > self._max_tokens:
            self.has_overflowed = True
            self.on_overflow()
            raise CancelledError(f"the client reads too slowly: more than {self._max_tokens} tokens wait for it")

    def _write(self) -> None:
        """One write for all that came in this round of the loop; the writer does it where that is not possible."""
        self._is_due = False
        reader = self._reader
        if reader is None or reader.done() or self.write_now is None:  # it takes what is here
            return
        try:
            if self.write_now(self._items):
                self._items = []
                return
        except Exception as error:  # noqa: BLE001 - raised again, where the writer waits
            reader.set_exception(error)
            return
        self._wake()

    async def take(self) -> list[tuple[int, Delta]]:
        items = await super().take()
        self._num_tokens = 0
        return items
