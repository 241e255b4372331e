"""What happened in each of the last seconds. Pure: its caller tells the time."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from router.observe.histogram import Histogram

NUM_SECONDS = 300


@dataclass(slots=True)
class Second:
    """Args: second: since the epoch, whole."""

    second: int
    num_tokens: int = 0
    num_arrived: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    ttft: Histogram = field(default_factory=Histogram)
    itl: Histogram = field(default_factory=Histogram)

    def describe(self) -> dict[str, Any]:
        """As JSON; the histograms by their buckets, so that those of several routers can be added."""
        return {
            "tokens": self.num_tokens,
            "arrived": self.num_arrived,
            "outcomes": dict(self.outcomes),
            "ttft": {str(bucket): count for bucket, count in self.ttft.counts.items()},
            "itl": {str(bucket): count for bucket, count in self.itl.counts.items()},
        }


class History:
    """The last `NUM_SECONDS`, also those in which nothing happened. Times are on the router's clock."""

    def __init__(self, epoch_s: float = 0.0) -> None:
        """`epoch_s`: since the epoch, when the clock was at zero. Clocks of hosts begin when those do: only by the
        epoch is a second the same one for routers of several hosts."""
        self._epoch_s = epoch_s
        # Invariant: by ascending second, at most `NUM_SECONDS` of them; seconds in which nothing happened are left out.
        self._seconds: deque[Second] = deque(maxlen=NUM_SECONDS)

    def second(self, now_s: float) -> int:
        """The number of the present second."""
        return int(now_s + self._epoch_s)

    def at(self, now_s: float) -> Second:
        """The second that is being counted. A clock that steps back counts in the newest one."""
        second = self.second(now_s)
        if not self._seconds or self._seconds[-1].second < second:
            self._seconds.append(Second(second))
        return self._seconds[-1]

    def since(self, first: int, until: int) -> list[Second]:
        """Each second from `first` to the one before `until`, at most `NUM_SECONDS`."""
        last = until - 1
        first = max(first, last - NUM_SECONDS + 1)
        known = {second.second: second for second in self._seconds if second.second >= first}
        return [known.get(number) or Second(number) for number in range(first, last + 1)]
