"""How many requests of batches are under way at a time: as many as the others leave room for, each owner's in turn."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from router.policy.background import BackgroundAdmission

#: So many requests of an owner may wait to be tried again while new ones are begun: each holds its body.
_MAX_BACKING_OFF = 64


class Room:
    """Shared by all batches of one router; runs on its loop."""

    def __init__(self, admission: BackgroundAdmission) -> None:
        self._admission = admission
        self._changed = asyncio.Event()
        admission.on_room = self._change
        self._num_under_way = 0
        # By owner, without those that have none.
        self._under_way, self._backing_off = Counter[str](), Counter[str]()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._num_turns = 0
        self._last_turns: dict[str, int] = {}  # of each owner that ever had one

    async def may_begin(self, owner: str) -> None:
        """Wait until a line of this owner may be begun that was not tried yet: it may wait for room, and nobody else of
        its owner does."""
        while not self._may_begin(owner):
            self._changed.clear()
            await self._changed.wait()

    @asynccontextmanager
    async def one(self, owner: str) -> AsyncIterator[None]:
        """Inside, a request may be sent; waits for room. It goes to whoever has least of it."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        self._give_turns()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it had come meanwhile
                self._end(owner)
            self._drop_cancelled(owner)
            raise
        try:
            yield
        finally:
            self._end(owner)

    async def back_off(self, owner: str, for_s: float) -> None:
        """Time passes in which a request is not tried; it needs no room."""
        self._backing_off[owner] += 1
        try:
            await asyncio.sleep(for_s)
        finally:
            _take_one(self._backing_off, owner)
            self._change()

    def _may_begin(self, owner: str) -> bool:
        return self._backing_off[owner] < _MAX_BACKING_OFF and owner not in self._waiting

    def _has_room(self) -> bool:
        return self._admission.may_begin(self._num_under_way)

    def _give_turns(self) -> None:
        while self._waiting and self._has_room():
            owner = min(self._waiting, key=lambda each: (self._under_way[each], self._last_turns.get(each, 0)))
            turn = self._waiting[owner].popleft()
            if not self._waiting[owner]:
                del self._waiting[owner]
            if turn.cancelled():  # its task has not heard of it yet
                continue
            self._num_turns += 1
            self._last_turns[owner] = self._num_turns
            self._under_way[owner] += 1
            self._num_under_way += 1
            turn.set_result(None)

    def _drop_cancelled(self, owner: str) -> None:
        if (waiting := self._waiting.get(owner)) is None:
            return
        self._waiting[owner] = left = deque(turn for turn in waiting if not turn.cancelled())
        if not left:
            del self._waiting[owner]
        self._changed.set()

    def _end(self, owner: str) -> None:
        self._num_under_way -= 1
        _take_one(self._under_way, owner)
        self._change()

    def _change(self) -> None:
        self._changed.set()
        self._give_turns()


def _take_one(counts: Counter[str], owner: str) -> None:
    counts[owner] -= 1
    if not counts[owner]:
        del counts[owner]
