"""How long this host itself stalls: a bound that was missed on a host that did not run tests nothing."""

from __future__ import annotations

import threading
import time
from collections import deque

_PERIOD_S = 0.01


class StallMonitor:
    """A thread that wants to wake every 10 ms and notes by how much it came late."""

    def __init__(self) -> None:
        self._late: deque[tuple[float, float]] = deque(maxlen=60_000)  # (wall clock, seconds late)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stall", daemon=True)

    def __enter__(self) -> StallMonitor:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def worst_since(self, since: float) -> float:
        """The worst delay, in seconds, since a time of the wall clock."""
        return max((late for at, late in list(self._late) if at >= since), default=0.0)

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            late = time.monotonic() - due
            self._late.append((time.time(), late))
            due = time.monotonic() + _PERIOD_S
