"""What reaches one reader, in order: a queue whose reader takes all that waits at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Mailbox(Generic[Item]):
    """Any code on the loop puts; one reader awaits. Not thread-safe.

    Attributes:
        at_once: where the reader has set it, it is offered each item that comes while the reader waits and nothing is
            before it; it says whether it has dealt with it, and the reader then goes on waiting. Waking up a task costs
            more than most items do. What it raises is raised where the reader waits.
    """

    def __init__(self) -> None:
        self.at_once: Callable[[Item], bool] | None = None
        self._items: list[Item] = []
        self._is_closed = False
        # Set exactly while the reader waits in `take`.
        self._reader: asyncio.Future[None] | None = None

    @property
    def is_awaited(self) -> bool:
        """Whether the reader waits, or was woken and has not run yet."""
        return self._reader is not None

    def put(self, item: Item) -> None:
        """Leave `item`; never waits."""
        if self.at_once is not None and not self._items and self._reader is not None and not self._reader.done():
            try:
                if self.at_once(item):
                    return
            except Exception as error:  # noqa: BLE001 - raised again, where the reader waits
                self._reader.set_exception(error)
                return
        self._items.append(item)
        self._wake()

    def close(self) -> None:
        """Nothing more will come."""
        self._is_closed = True
        self._wake()

    async def take(self) -> list[Item]:
        """All that waits, oldest first: at least one item, or none after the end."""
        if not self._items and not self._is_closed:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        items, self._items = self._items, []
        return items

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
