"""Admission of what nobody waits for: it takes places that no other request wants, and never one's turn in a queue.

Its requests are counted here and not by the admission of all others, so these are let in, and refused, as if it were
not there. It begins one only where no other waits for its prompt and a place is free, and leaves a share of all places
free for those that come next. What it has begun has the lowest priority at the workers.
"""

from __future__ import annotations

from collections.abc import Callable

from router.policy.admission import Admission
from tandem.core.clock import Clock
from tandem.core.errors import DrainingError, OverloadedError

#: Prompts that may wait at the workers: enough that these find the next one, few enough that they are soon gone.
_MAX_WAITING = 8
_RETRY_AFTER_S = 1.0


class BackgroundAdmission(Admission):
    """Beside `others`, which is that of the requests that somebody waits for. Not thread-safe.

    Attributes:
        on_room: called when there may be room where there was none.
    """

    def __init__(self, others: Admission, clock: Clock, share: float) -> None:
        """`share`: of all places that may be taken here; one is, in any case."""
        super().__init__(_MAX_WAITING, clock, lambda: others.num_places)
        self._others, self._share = others, share
        self.on_room: Callable[[], None] = lambda: None
        others.on_freed = lambda: self.on_room()

    def may_begin(self, num_under_way: int) -> bool:
        """Whether one more may be sent, beside those sent that have not ended, whether or not they have come in."""
        if self._others.is_draining or self._others.num_waiting or self.num_waiting >= _MAX_WAITING:
            return False
        places = self.num_places
        return num_under_way < min(max(1.0, self._share * places), places - self._others.num_sequences)

    def leave(self, owner: str = "") -> None:
        super().leave(owner)
        self.on_room()

    def end(self, after_s: float, num_choices: int = 1) -> None:
        super().end(after_s, num_choices)
        self.on_room()

    def _is_below_share(self, *_: object) -> bool:
        return False  # nobody has a share of what others leave

    def _check(self, num_requests: int, num_choices: int) -> int:
        if self._others.is_draining:
            raise DrainingError("the router is shutting down; try another one")
        free = self.num_places - self._others.num_sequences - self.num_sequences
        # What is larger than all that is free is let in alone: it would wait for ever else.
        if num_requests * num_choices > free and self.num_sequences:
            raise OverloadedError("other requests take the places", retry_after_s=_RETRY_AFTER_S)
        return 0
