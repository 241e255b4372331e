"""How many bytes one sender keeps under way to one receiver, and what that teaches of the link between them. Pure.

What is posted cannot be taken back: a cancelled handoff waits for all of it. So only a window is posted, of what the
link carries in a tenth of a second, or in two round trips where that is longer. The link stays full, and a cancel
drains quickly.

The rate is learnt from completions: bytes over the time in which some were under way. Transports report them late and
several at once, so each counts towards a sum that fades, and never as a rate of its own. While nobody waits for room,
the link may be idle in part: then the sum can only show that the link is faster than was known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# How long what was learnt of a busy link counts, in seconds of its busy time.
_FADE_S = 0.5
# A busy time that carried less than this shows how long a write takes, and not what the link carries.
_LEAST_BYTES = 1 << 20
# A write is at most this share of the window, so that several are under way while one completes.
_WRITES_IN_WINDOW = 4


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Sizes in bytes, times in seconds.

    Attributes:
        batch_bytes: one write carries at most this much.
        first_bytes: the window while the rate is unknown.
        least_bytes: the smallest window.
        ahead_s: the window is what the link carries in this time, if two round trips are not longer,
        drain_s: but at most what it carries in this time: after a cancel, what is under way takes so long.
        write_timeout_s: what a write may take from when its turn on the wire has come, besides the time for its bytes.
        slowest_bytes_per_s: a write gets no more time than it takes at this rate, whatever was learnt.
    """

    batch_bytes: int = 8 << 20
    first_bytes: int = 4 << 20
    least_bytes: int = 512 << 10
    ahead_s: float = 0.1
    drain_s: float = 0.5
    write_timeout_s: float = 10.0
    slowest_bytes_per_s: float = 1e6


class LinkWindow:
    """The bytes under way on one link.

    Attributes:
        num_bytes: that are posted and have not ended.
        bytes_per_s: what the link carries; `None` while unknown.
    """

    def __init__(self, limits: LinkLimits) -> None:
        self._limits = limits
        self.num_bytes = 0
        self.bytes_per_s: float | None = None
        self._round_trip_s = 0.0  # of a write that finds nothing under way
        # Of the present busy time, or the last one; what is longer ago counts less.
        self._done_bytes = self._done_s = 0.0
        self._period_bytes = 0
        self._counted_s = 0.0  # until when the busy time is counted
        self._num_full_bytes = 0  # still under way of those that were when room was refused last

    @property
    def size_bytes(self) -> int:
        limits = self._limits
        if self.bytes_per_s is None:
            return limits.first_bytes
        ahead_s = min(max(limits.ahead_s, 2 * self._round_trip_s), limits.drain_s)
        return max(limits.least_bytes, int(self.bytes_per_s * ahead_s))

    @property
    def write_bytes(self) -> int:
        """The most that one write should carry now."""
        return min(self._limits.batch_bytes, self.size_bytes // _WRITES_IN_WINDOW)

    def ask_room(self) -> bool:
        """Whether a further write may be posted now; somebody has one. One is allowed on an idle link in any case."""
        if not self.num_bytes or self.num_bytes + self.write_bytes <= self.size_bytes:
            return True
        self._num_full_bytes = self.num_bytes
        return False

    def acquire(self, num_bytes: int, now_s: float) -> None:
        """A write is handed to the transport."""
        if not self.num_bytes:
            self._done_bytes = self._done_s = 0.0
            self._period_bytes = self._num_full_bytes = 0
            self._counted_s = now_s
        self.num_bytes += num_bytes

    def complete(self, num_bytes: int, now_s: float, *, alone_s: float | None = None) -> None:
        """All bytes of a write have arrived.

        Args:
            alone_s: how long that took, if nothing was under way when it was handed over.
        """
        self.num_bytes -= num_bytes
        passed_s = max(0.0, now_s - self._counted_s)
        fade = math.exp(-passed_s / _FADE_S)
        self._done_bytes = self._done_bytes * fade + num_bytes
        self._done_s = self._done_s * fade + passed_s
        self._counted_s = now_s
        self._period_bytes += num_bytes
        if alone_s is not None:
            is_shorter = not self._round_trip_s or alone_s < self._round_trip_s
            self._round_trip_s += (alone_s - self._round_trip_s) * (1 if is_shorter else 0.25)
        self._learn()
        self._num_full_bytes = max(0, self._num_full_bytes - num_bytes)

    def forget(self, num_bytes: int) -> None:
        """A write failed, or is not waited for any more."""
        self.num_bytes -= num_bytes
        self._num_full_bytes = max(0, self._num_full_bytes - num_bytes)

    def allowed_s(self, num_bytes: int) -> float:
        """How long a write of this size may take once its turn has come."""
        slowest = self._limits.slowest_bytes_per_s
        return self._limits.write_timeout_s + num_bytes / max(slowest, self.bytes_per_s or slowest)

    def _learn(self) -> None:
        is_full = self._num_full_bytes > 0
        if not self._done_s or not (is_full or self._period_bytes >= _LEAST_BYTES):
            return
        rate = self._done_bytes / self._done_s
        if is_full or self.bytes_per_s is None or rate > self.bytes_per_s:
            self.bytes_per_s = rate
