"""How many requests of batches are under way at a time: as many as the others leave room for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from router.policy.background import BackgroundAdmission

#: So many requests may wait to be tried again while new ones are begun: each holds its body.
_MAX_BACKING_OFF = 64


class Room:
    """Shared by all batches of one router; runs on its loop."""

    def __init__(self, admission: BackgroundAdmission) -> None:
        self._admission = admission
        self._changed = asyncio.Event()
        admission.on_room = self._changed.set
        self._num_under_way = self._num_backing_off = 0

    async def may_begin(self) -> None:
        """Wait until a line may be begun that was not tried yet."""
        while self._num_backing_off >= _MAX_BACKING_OFF or not self._admission.may_begin(self._num_under_way):
            await self._wait()

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Inside, a request may be sent; waits for room."""
        while not self._admission.may_begin(self._num_under_way):
            await self._wait()
        self._num_under_way += 1
        try:
            yield
        finally:
            self._num_under_way -= 1
            self._changed.set()

    async def back_off(self, for_s: float) -> None:
        """Time passes in which a request is not tried; it needs no room."""
        self._num_backing_off += 1
        try:
            await asyncio.sleep(for_s)
        finally:
            self._num_backing_off -= 1
            self._changed.set()

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()
