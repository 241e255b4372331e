"""What proposals of a draft cost and how many are right, as learnt. Pure.

Only ratios count: what a pass of the draft takes in steps of the model.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

# Of a step's time: so much longer may a step begin for a prompt that the draft computes.
_CATCH_UP_SHARE = 0.5
# Tokens of prompts that the draft computes at once, at most.
_MOST_AT_ONCE = 512
# What is taken for known until something is: the share of proposals that is right, and a pass of the draft in steps.
_ACCEPTANCE, _PASS = 0.7, 0.2
# A step with proposals takes so many times as long as one without, at most.
_MOST_CHECKED = 1.5
# How much the newest proposal tells of the next.
_NEWEST = 0.15
# Seconds after which what was learnt is forgotten, and what did not pay is tried anew.
_HOLDS_S = 60.0
# Something that took time counts from so many times on.
_FEWEST_TIMES = 3


class Timing:
    """How long something takes, in seconds: the lower quartile of the last few times.

    What else the machine does adds to them, and never takes away.
    """

    def __init__(self) -> None:
        self._took: deque[float] = deque(maxlen=9)
        self._ends_s = float("-inf")

    def learn(self, seconds: float, now_s: float) -> None:
        if now_s >= self._ends_s:
            self._took.clear()
        self._took.append(seconds)
        self._ends_s = now_s + _HOLDS_S

    def at(self, now_s: float) -> float | None:
        """`None`: it is not known, or too long ago. The first time alone may be that of memory that was not there."""
        if len(self._took) < _FEWEST_TIMES or now_s >= self._ends_s:
            return None
        return sorted(self._took)[len(self._took) // 4]


@dataclass(slots=True)
class Acceptance:
    """The share of proposals that is right, behind others that are."""

    value: float = _ACCEPTANCE

    def learn(self, num: int, num_right: int) -> None:
        for is_right in [True] * num_right + [False] * (num_right < num):
            self.value += _NEWEST * (is_right - self.value)


@dataclass(frozen=True, slots=True)
class Costs:
    """How long things take, in seconds or all in steps: only their ratios count."""

    step_s: float  # without proposals
    checked_s: float  # with some
    pass_s: float  # of the draft, of few rows
    token_s: float  # of a prompt that the draft computes
    most_at_once: int  # of these tokens

    def rate(self, num_tokens: float, num_passes: int) -> float:
        """Tokens a second of steps that give so many behind so many passes."""
        return num_tokens / (self.checked_s + num_passes * self.pass_s if num_passes else self.step_s)


class Timings:
    """How long steps and passes take here.

    Attributes:
        plain, checked: steps of single tokens, without proposals and with some.
        draws: passes of the draft that propose.
        token: of a prompt that the draft computes.
    """

    def __init__(self) -> None:
        self.plain, self.checked, self.draws, self.token = Timing(), Timing(), Timing(), Timing()

    def costs(self, num_rows: int, now_s: float) -> Costs:
        """`num_rows`: tokens that a pass computes at hardly more cost than one."""
        checked_s, pass_s, token_s = self.checked.at(now_s), self.draws.at(now_s), self.token.at(now_s)
        step_s = self.plain.at(now_s) or checked_s
        if not step_s:
            step_s, checked_s, pass_s, token_s = 1.0, 1.0, _PASS, None
        pass_s = pass_s or _PASS * step_s  # too low at worst: then it is learnt
        # As long as nothing is known of prompts, they are read by chunks that take two passes at most.
        token_s, most = (token_s, _MOST_AT_ONCE) if token_s else (pass_s / num_rows, 2 * num_rows)
        most = max(num_rows, min(most, int(_CATCH_UP_SHARE * step_s / token_s)))
        # Both are of other moments: more than so much between them is what else the machine did.
        checked_s = min(checked_s or step_s, _MOST_CHECKED * step_s)
        return Costs(step_s, checked_s, pass_s, token_s, most)
