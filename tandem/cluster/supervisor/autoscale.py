"""How many workers a pool that follows its load shall have: the law. Pure: figures in, sizes and reasons out.

The load is in workers that would have to compute all the time (`demand`). With `n` workers wanted, those that still
start among them, and a *mark* for the share of their time that they shall compute (`pools.utilisation`):

    load > n × 1.15 × mark                   ─>  grow to load / mark, at once
    what waits will not be done by the time
      that another worker has started        ─>  grow
    load ≤ (n - 1) × mark, and it was never
      more since a while (`shrink_delay_s`)  ─>  shrink: by one, a large pool by a tenth
    else                                     ─>  stay

So between growing and shrinking lies a band, and a worker that was just added is not given up for a chance. The rise of
a load is believed as far as chance does not explain it; its fall, only when all of the while has passed, which growing
begins anew. Between two times that it shrinks a part of a start passes, for a load that comes again soon.

*Its own SLO corrects it.* Where more than a tenth of the requests miss the pool's target (TTFT with all its queueing
for prefill, TPOT for decode) although nothing waits and nobody starts, the mark was too high for this load: it is put
below what the pool had then, and one worker more is wanted. The mark recovers slowly. It does not sink below half of
what was configured: a pool that idles so much misses its targets for another reason, and more workers would not help.

Where workers may change their role (`role_law`), it also tells what it lacks, and what it has to spare.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from tandem.cluster.supervisor.demand import PoolLoad, Recent
from tandem.core.identity import Role

BAND = 1.15
"""A pool grows where its load is this much above its mark."""

_ROUNDING = 1e-9
_LATE_SHARE, _KEPT_SHARE = 0.1, 0.05
_NUM_LATE_KNOWN = 20
_LATE_S = 60.0
#: After a change of the pool's size its requests say nothing of the new one for so long.
_SETTLE_S = 15.0
_LEAST_MARK = 0.5
_RECOVERY_S = 1800.0
#: Between two times that it shrinks passes this share of what a start takes: a load may come again, and what was given
#: up in a moment takes that long to come back.
_PAUSE = 0.25
#: What a pool gives up at a time, but for the one that any may: one by one, two hundred workers went in an hour.
_GIVEN_SHARE = 0.1
#: What a start takes where none has been seen.
_START_S = 30.0
#: Who was needed at no time of so long may help the other pool.
SPARE_S = 10.0
#: What waits, and would still wait when a worker that is ordered now has started, is to be computed in so long, or in
#: as long as a start takes, where that is longer.
_DRAIN_S = 60.0


NUM_REMEMBERED = 10
"""Changes of each pool that are shown."""


@dataclass(frozen=True, slots=True)
class Range:
    """Sizes that a pool may have."""

    least: int
    most: int

    @property
    def follows_load(self) -> bool:
        return self.least < self.most


@dataclass(frozen=True, slots=True)
class Settings:
    """Attributes:
    utilisation: the mark.
    shrink_delay_s: as the configuration has it.
    """

    utilisation: float = 0.7
    shrink_delay_s: float = 120.0


@dataclass(frozen=True, slots=True)
class PoolSize:
    """A pool as it is.

    Attributes:
        wanted: workers that it shall have.
        ready: lives that serve and shall stay.
        starting: lives that start.
        num_leaving: workers that have been given up, and have not ended.
        num_unplaced: of those that start, that no node has begun.
        changing: of those that start, lives that go on in a process of the other pool.
    """

    wanted: int
    ready: frozenset[str] = frozenset()
    starting: frozenset[str] = frozenset()
    num_leaving: int = 0
    num_unplaced: int = 0
    changing: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Decision:
    """What a pool shall be like, and why.

    Attributes:
        inputs: the figures that it was made from.
        refused: why it could not be carried out as a whole; empty: it could.
        num_far: of those that it had, that start and will not serve within `SPARE_S`, as far as that is known.
        lacks: workers that it needs beyond the others that it had, whatever its range.
        spares: of those that served, workers that it needed at no time of the last `SPARE_S`, whatever its range.
    """

    role: Role
    at_s: float
    before: int
    wanted: int
    why: str
    inputs: Mapping[str, float] = field(default_factory=dict)
    refused: str = ""
    num_far: int = 0
    lacks: int = 0
    spares: int = 0

    @property
    def is_change(self) -> bool:
        return self.wanted != self.before


class PoolLaw:
    """Of one pool. Not thread-safe."""

    def __init__(self, role: Role, range_: Range, settings: Settings) -> None:
        self.role, self.range = role, range_
        self._settings = settings
        self._mark = settings.utilisation
        self._needs = Most(settings.shrink_delay_s)
        self._lacks = 0
        self._lately = Most(SPARE_S)
        self._late, self._timed = Recent(_LATE_S), Recent(_LATE_S)
        self._known_since_s: float | None = None  # without a gap
        self._changed_s = self._grown_s = self._shrunk_s = -math.inf
        self._ready: frozenset[str] = frozenset()
        self._begun_s: dict[str, float] = {}  # of lives that start
        self._changing: frozenset[str] = frozenset()  # of these: how long they take says nothing of a start
        self._start_taken_s = _START_S  # by the last one that was seen
        self._decided_s: float | None = None
        self._num_wanted = 0  # that it was to have then

    def decide(self, load: PoolLoad | None, size: PoolSize, now_s: float) -> Decision:
        """To be called every few seconds. `load`: `None` while there are no figures: once they come again, the pool may
        shrink when as much time has passed as after a growth."""
        self._look_at(size, now_s)
        self._lacks = 0
        wanted, why = self._wanted(load, size, now_s)
        if size.num_unplaced:
            why = f"{why}; {size.num_unplaced} of {size.wanted} have no node yet"
        self._decided_s = now_s
        inputs = {**load.inputs, "load": load.likely, "certain_load": load.certain} if load is not None else {}
        inputs |= {"ready": len(size.ready), "coming": max(0, size.wanted - len(size.ready)), "mark": self._mark}
        return Decision(
            self.role, now_s, size.wanted, wanted, why, inputs,
            num_far=self._num_far(size, now_s), lacks=self._lacks, spares=self._spares(size, now_s),
        )  # fmt: skip

    def _num_far(self, size: PoolSize, now_s: float) -> int:
        """Of one that takes much longer than the last one did nothing is known; one that changes its role is near."""
        left_s = [self._start_taken_s - (now_s - self._begun_s[life]) for life in size.starting - size.changing]
        return max(size.num_unplaced, sum(abs(seconds) > SPARE_S for seconds in left_s))

    def _spares(self, size: PoolSize, now_s: float) -> int:
        """One is kept for what comes."""
        if self._lacks or self._known_since_s is None or now_s - self._known_since_s < SPARE_S:
            return 0
        return max(0, len(size.ready) - max(1, math.ceil(self._lately.most - _ROUNDING)))

    def _wanted(self, load: PoolLoad | None, size: PoolSize, now_s: float) -> tuple[int, str]:
        num, least, most = size.wanted, self.range.least, self.range.most
        if not least <= num <= most:
            return min(max(num, least), most), f"it shall have {least} to {most}"
        if load is None:
            self._known_since_s = None
            return num, "there are no figures now"
        if self._known_since_s is None:
            self._known_since_s = now_s
        is_late = self._correct(load, size, now_s)
        left_s = self._left_s(load, size, now_s)
        by_backlog = load.certain + left_s / max(_DRAIN_S, self._start_taken_s) if left_s > 0 else 0.0
        self._needs.note(now_s, max(load.likely / self._mark, by_backlog))
        self._lately.note(now_s, max(load.recent / self._mark, by_backlog))
        need, why = 0.0, ""
        if load.certain > num * BAND * self._mark:
            need = load.certain / self._mark
            why = f"{load.bound} need {load.certain:.2f} workers, which is more than {num} × {BAND * self._mark:.2f}"
        if by_backlog > max(num, need):
            need = by_backlog
            why = f"{load.backlog_s:.1f} s of one worker's work wait, and {left_s:.1f} s of it would be left"
        if is_late and need <= num:
            need = num + 1.0
            why = f"{self._late_share:.0%} of its requests missed their target; the mark is {self._mark:.2f} now"
        soon = num - self._num_far(size, now_s)
        at_least = max(need, load.certain / self._mark if load.certain > soon * BAND * self._mark else 0.0)
        self._lacks = max(0, math.ceil(at_least - _ROUNDING) - soon)
        if need > num:
            wanted = min(most, math.ceil(need - _ROUNDING))
            return wanted, why if wanted > num else f"it has its most; {why}"
        return self._shrunk(load, size, now_s)

    def _left_s(self, load: PoolLoad, size: PoolSize, now_s: float) -> float:
        """Seconds of one worker's work that will wait when a worker which is ordered now has started.

        Those that are ready compute all the while, those that start from then on when they will be ready.
        """
        if not load.backlog_s:
            return 0.0
        start_s = self._start_taken_s
        done_s = start_s * len(size.ready) + sum(min(start_s, now_s - at_s) for at_s in self._begun_s.values())
        return load.backlog_s + load.certain * start_s - done_s

    def _shrunk(self, load: PoolLoad, size: PoolSize, now_s: float) -> tuple[int, str]:
        num, delay_s = size.wanted, self._settings.shrink_delay_s
        used = f"{load.bound} need {load.likely:.2f} workers of {num}, the mark is {self._mark:.2f}"
        assert self._known_since_s is not None
        since_s = max(self._known_since_s, self._grown_s)
        if self._needs.most > num - 1:
            return num, used
        if num == self.range.least:
            return num, f"it has its fewest; {used}"
        if now_s - since_s < delay_s:
            return num, f"{used}; it shrinks {delay_s:.0f} s after it has grown, at the earliest"
        pause_s = self._start_taken_s * _PAUSE
        if size.num_leaving or now_s - self._shrunk_s < pause_s:
            return num, f"{used}; it shrinks when who leaves is gone, and not sooner than {pause_s:.1f} s later"
        needed = max(self.range.least, math.ceil(self._needs.most - _ROUNDING))
        wanted = max(needed, num - max(1, int(num * _GIVEN_SHARE)))
        return wanted, f"for {delay_s:.0f} s it needed at most {self._needs.most:.2f} workers at {self._mark:.2f}"

    # -- what the pool's own target says

    @property
    def _late_share(self) -> float:
        return self._late.sum / self._timed.sum if self._timed.sum else 0.0

    @property
    def _is_late(self) -> bool:
        """Whether more are late than may be, and than chance explains where just as many were late as may be."""
        may_be = _LATE_SHARE * self._timed.sum
        is_known = self._timed.sum >= _NUM_LATE_KNOWN
        return is_known and self._late.sum > may_be + 2 * math.sqrt(may_be * (1 - _LATE_SHARE))

    def _correct(self, load: PoolLoad, size: PoolSize, now_s: float) -> bool:
        """Whether the mark was too high for this load; it is lower now."""
        configured = self._settings.utilisation
        is_settled = len(size.ready) == size.wanted and now_s - self._changed_s >= _SETTLE_S
        if not is_settled or load.backlog_s:
            self._late, self._timed = Recent(_LATE_S), Recent(_LATE_S)
            return False
        self._late.note(now_s, load.num_late)
        self._timed.note(now_s, load.num_timed)
        used = load.likely / size.wanted
        if self._is_late:
            if used * BAND < _LEAST_MARK * configured:
                return False
            self._mark = max(_LEAST_MARK * configured, min(self._mark, used / BAND))
            return True
        if self._late_share <= _KEPT_SHARE and self._decided_s is not None:
            self._mark += (configured - self._mark) * min(1.0, (now_s - self._decided_s) / _RECOVERY_S)
        return False

    # -- what becomes of its workers

    def _look_at(self, size: PoolSize, now_s: float) -> None:
        self._look_at_wanted(size.wanted)
        for life in size.ready & self._begun_s.keys() - self._changing:
            self._start_taken_s = now_s - self._begun_s[life]
        self._begun_s = {life: self._begun_s.get(life, now_s) for life in size.starting}
        self._changing = size.changing
        if size.ready != self._ready:
            self._ready = size.ready
            self._settle(now_s)

    def _look_at_wanted(self, wanted: int) -> None:
        """It has grown or shrunk where its size says so, by whomever: not all that is decided is done."""
        if self._decided_s is not None and wanted != self._num_wanted:
            if wanted > self._num_wanted:
                self._grown_s = self._decided_s
            else:
                self._shrunk_s = self._decided_s
            self._settle(self._decided_s)
        self._num_wanted = wanted

    def _settle(self, now_s: float) -> None:
        self._changed_s = now_s


class Most:
    """The largest value of the last seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        # Invariant: values fall from left to right; none is older than `seconds`, as of the last one.
        self._values: deque[tuple[float, float]] = deque()

    def note(self, now_s: float, value: float) -> None:
        while self._values and self._values[-1][1] <= value:
            self._values.pop()
        self._values.append((now_s, value))
        while self._values[0][0] < now_s - self._seconds:
            self._values.popleft()

    @property
    def most(self) -> float:
        return self._values[0][1] if self._values else 0.0


@dataclass
class Followed:
    """One pool that follows its load.

    Attributes:
        latest: the last decision; `None`: there was none yet.
        changes: the last that changed its size, or were to, the newest last.
    """

    law: PoolLaw
    latest: Decision | None = None
    changes: deque[Decision] = field(default_factory=lambda: deque(maxlen=NUM_REMEMBERED))
