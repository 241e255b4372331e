"""Which requests may leave a draining decode worker now: a few at a time.

Each move is a handoff and a replay. All at once they would queue at the other workers, and every client would see its
stream halt. A few at a time, most clients see nothing, and requests that are nearly done end where they are. The bound
is for the whole cluster, and each router has its share of it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from router.request.events import Event, MayMove
from router.request.mailbox import Mailbox

MAX_AT_ONCE = 4


class MigrationSlots:
    """Slots for moves, given out in the order of asking. Not thread-safe."""

    def __init__(self, max_at_once: int = MAX_AT_ONCE, num_routers: Callable[[], int] = lambda: 1) -> None:
        """`max_at_once`: of all routers together. `num_routers`: how many there are now."""
        self._max_at_once, self._num_routers = max_at_once, num_routers
        # Invariant: nobody is in both; nobody waits while a slot is free, as of the last move.
        self._moving: set[Mailbox[Event]] = set()
        self._waiting: deque[Mailbox[Event]] = deque()

    def ask(self, inbox: Mailbox[Event]) -> None:
        """`inbox` gets `MayMove` when its turn has come; asking again changes nothing."""
        if inbox not in self._moving and inbox not in self._waiting:
            self._waiting.append(inbox)
            self._give_out()

    def leave(self, inbox: Mailbox[Event]) -> None:
        """The move is done or no longer wanted, if there was one."""
        if inbox in self._waiting:
            self._waiting.remove(inbox)
        self._moving.discard(inbox)
        self._give_out()

    def _give_out(self) -> None:
        while self._waiting and len(self._moving) < math.ceil(self._max_at_once / self._num_routers()):
            inbox = self._waiting.popleft()
            self._moving.add(inbox)
            inbox.put(MayMove())
