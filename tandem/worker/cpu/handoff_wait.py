"""How long a decode step may begin later for a handoff that is about to be admitted.

A handoff that just misses a step waits for all of that step and then for its own. So its second token comes up to two
steps after its first. To avoid that, the transfer thread foresees from the layers that arrive when a handoff will be
complete. If that is soon, the runner waits and begins its next step with it. Where the workers share their cores, the
prefill that is about to end has the cores of both meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

# How much later a step may begin, in times of a usual one.
_MOST_OF_A_STEP = 0.5
# The shortest of so many is a usual one: not a replay's, nor one in which the process was stopped.
_NUM_STEPS = 4


class Due(NamedTuple):
    """An admission that is foreseen, on the monotonic clock; `sender`: incarnation of its prefill worker."""

    due_s: float
    sender: str


class StepDelayBudget:
    """How long the next step may begin later: a bounded part of a step, and `most_of_all` of the time of all steps."""

    def __init__(self, most_of_all: float) -> None:
        self._most_of_all = most_of_all
        self._steps_s: deque[float] = deque(maxlen=_NUM_STEPS)
        self._left_s = 0.0  # below 0 after a wait that took longer than it should have

    @property
    def left_s(self) -> float:
        return max(0.0, self._left_s)

    def stepped(self, step_s: float) -> None:
        """A step took so long."""
        self._steps_s.append(step_s)
        usual_s = min(self._steps_s)
        self._left_s = min(self._left_s + self._most_of_all * usual_s, _MOST_OF_A_STEP * usual_s)

    def waited(self, wait_s: float) -> None:
        """A step began so much later."""
        self._left_s -= wait_s


class ExpectedHandoffs:
    """The next admissions, as the transfer thread foresees them and the runner waits for them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._dues: Sequence[Due] = ()
        self._num_ended = 0

    # -- on the transfer thread

    def foresee(self, dues: Sequence[tuple[float, str]]) -> None:
        """All that is foreseen now."""
        self._dues = [Due(*due) for due in dues]

    def ended(self) -> None:
        """A handoff was admitted, or will not be; the runner has been told."""
        with self._changed:
            self._num_ended += 1
            self._changed.notify()

    # -- on the runner thread

    @property
    def num_ended(self) -> int:
        """How many handoffs have ended so far; the runner's inbox tells of each."""
        return self._num_ended

    def next_within(self, longest_s: float) -> Due | None:
        """The next admission that is due within `longest_s`. One that is overdue by as much may never come."""
        now_s = time.monotonic()
        near = (due for due in self._dues if abs(due.due_s - now_s) < longest_s)
        return min(near, key=lambda due: due.due_s, default=None)

    def wait(self, num_ended: int, longest_s: float) -> None:
        """Until more than `num_ended` handoffs have ended, for at most `longest_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_ended > num_ended, longest_s)
