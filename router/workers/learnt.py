"""What is learnt from what workers report. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

from router.policy.snapshot import TierReads

#: What reads from tiers take holds so long without another figure, and how fast prefill is counts as seen.
REMEMBERED_S = 30.0
# Of what was noted before, with each new note.
_KEPT = 15 / 16


class Learnt:
    """So much of one thing for each of another, tokens a second for one. The newest figures count most, and the large
    ones: a prompt of a few tokens, which takes what a step takes, says little of how fast tokens are computed.

    Args:
        holds_s: so long after the last figure it is forgotten. What was slow once might otherwise be avoided for ever,
            and so never be seen again.
    """

    def __init__(self, holds_s: float = math.inf) -> None:
        self._holds_s = holds_s
        self._amount, self._per = 0.0, 0.0
        self._noted_s = -math.inf

    def note(self, amount: float, per: float, now_s: float) -> None:
        """Where one of the two is nothing, nothing is learnt."""
        if amount <= 0 or per <= 0:
            return
        kept = _KEPT if self._holds(now_s) else 0.0
        self._amount, self._per = kept * self._amount + amount, kept * self._per + per
        self._noted_s = now_s

    def at(self, now_s: float) -> float:
        """0: it is not known."""
        return self._amount / self._per if self._per and self._holds(now_s) else 0.0

    def known_from(self, now_s: float) -> float:
        """So much was noted, the newest counting most; 0 where nothing was for a while."""
        return self._amount if now_s - self._noted_s <= REMEMBERED_S else 0.0

    def _holds(self, now_s: float) -> bool:
        return now_s - self._noted_s <= self._holds_s


class LearntReads:
    """How fast one worker reads pages back from each of its tiers."""

    def __init__(self) -> None:
        self._learnt: dict[str, Learnt] = {}
        self._counted: dict[str, tuple[int, float]] = {}

    def note(self, tiers: Iterable[tuple[str, int, float]], page_size: int, now_s: float) -> TierReads:
        """Take what it has counted since its start, of each tier, the nearest first: its name, pages that were read and
        the seconds that this took. Returns what is known now."""
        seconds = []
        for name, num, took_s in tiers:
            learnt = self._learnt.setdefault(name, Learnt(REMEMBERED_S))
            num_before, took_before_s = self._counted.get(name, (num, took_s))
            self._counted[name] = num, took_s
            if num > num_before:
                learnt.note((took_s - took_before_s) / page_size, num - num_before, now_s)
            seconds.append(learnt.at(now_s))
        return TierReads(seconds[0], seconds[-1]) if seconds else TierReads()
