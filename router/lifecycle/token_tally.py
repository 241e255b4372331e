"""What tokens count for beside their text: figures, limits, turns. It is entered for many of them together, since for a
single one it would cost about as much as all else that the router does with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from router.lifecycle.request_load import RequestLoad
from router.lifecycle.tenants import Tenants
from router.lifecycle.turns import Turn, Turns
from router.observe.recorder import Recorder
from router.request.request import Request
from tandem.core.metrics import RouterMetrics

#: By so much what is counted may lag.
LATE_S = 0.01


@dataclass(slots=True, eq=False)
class Counted:
    """One request's."""

    request: Request
    turn: Turn
    num_untold: int = 0  # tokens that were given out and are not entered yet


class TokenTally:
    """Of one router. Not thread-safe. Whoever must not miss what was given a moment ago calls `settle` before."""

    def __init__(
        self,
        metrics: RouterMetrics,
        recorder: Recorder,
        load: RequestLoad,
        tenants: Tenants,
        turns: Turns,
        call_later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        """`call_later`: as a loop's."""
        self._call_later, self._is_due = call_later, False  # whether `_late` will be called
        self._metrics, self._recorder, self._load = metrics, recorder, load
        self._tenants, self._turns = tenants, turns
        # Invariant: has those whose `num_untold` is not 0.
        self._untold: list[Counted] = []
        self._gaps_s: list[float] = []
        self._since_s = 0.0  # when the first token was given out that is not entered; it has the others' second too

    def gave(self, counted: Counted, now_s: float, num_tokens: int, gap_s: float | None) -> None:
        """Tokens of one choice were given out together, `gap_s` after those before; `None`: they are its first."""
        if not self._untold:
            self._since_s = now_s
            if not self._is_due:
                self._is_due = True
                self._call_later(LATE_S, self._late)
        if not counted.num_untold:
            self._untold.append(counted)
        counted.num_untold += num_tokens
        if gap_s is not None:
            self._gaps_s.append(gap_s)
        if num_tokens > 1:  # the others had come early, so the client gets them in the same moment
            self._gaps_s += [0.0] * (num_tokens - 1)

    def _late(self) -> None:
        self._is_due = False
        self.settle()

    def settle(self) -> None:
        """Enter what is not entered yet."""
        if not self._untold:
            return
        untold, self._untold = self._untold, []
        gaps_s, self._gaps_s = self._gaps_s, []
        given = [(counted.turn, counted.num_untold) for counted in untold]
        for counted in untold:
            num_tokens, counted.num_untold = counted.num_untold, 0
            self._load.gave(counted.request, num_tokens)
            self._tenants.give(counted.request.tenant, num_tokens)
        self._turns.charge(given)
        total = sum(num_tokens for _, num_tokens in given)
        self._metrics.output_tokens.inc(total)
        self._metrics.itl_s.observe(gaps_s)
        self._recorder.tokens(self._since_s, total, gaps_s)
