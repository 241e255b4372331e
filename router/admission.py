"""The bounded queue in front of both pools: who may wait, and what the others are told.

A request counts as waiting until its prompt is being computed. Counting, not queueing: the workers keep the queues,
this bound keeps them short.
"""

from __future__ import annotations

import math
from collections import deque

from tandem.core.clock import Clock
from tandem.core.errors import DrainingError, OverloadedError

_MAX_RETRY_AFTER_S = 60.0
_NUM_SAMPLES = 64


class Admission:
    """Counts waiting requests against a bound. Not thread-safe."""

    def __init__(self, max_waiting: int, clock: Clock) -> None:
        self.max_waiting = max_waiting
        self.is_draining = False
        self.num_waiting = 0
        self._clock = clock
        # When the last waiting requests left the queue, oldest first.
        self._left_s: deque[float] = deque(maxlen=_NUM_SAMPLES)

    def enter(self, num_requests: int = 1) -> None:
        """Take places for `num_requests`, all or none; each is given back by one `leave`.

        Raises:
            OverloadedError: not so many places are left; says when to try again.
            DrainingError: the router takes no new requests.
        """
        if self.is_draining:
            raise DrainingError("the router is shutting down; try another one")
        if self.num_waiting + num_requests > self.max_waiting:
            raise OverloadedError(
                f"{self.num_waiting} requests are waiting and the bound is {self.max_waiting}; try again later",
                retry_after_s=self.retry_after_s(),
            )
        self.num_waiting += num_requests

    def leave(self) -> None:
        """One request waits no longer."""
        if self.num_waiting < 1:
            raise ValueError("nobody is waiting")
        self.num_waiting -= 1
        self._left_s.append(self._clock.now())

    def retry_after_s(self) -> float:
        """Whole seconds until about half of the queue will have gone, by the recent rate; at least 1."""
        if len(self._left_s) < 2:
            return 1.0
        rate = len(self._left_s) / max(self._clock.now() - self._left_s[0], 1e-3)
        return min(max(1.0, math.ceil(self.num_waiting / 2 / rate)), _MAX_RETRY_AFTER_S)
