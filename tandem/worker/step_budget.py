"""How many tokens of prompts a step may have beside what it generates, for it to keep a time. Pure.

A worker learns it from its own steps: their time is taken for a sum of three parts, one that every step has, one for
each sequence that generates, and one for each token of a prompt. What it knows follows what it sees, and forgets: the
context grows, other processes take its cores, and a mixed step of long prompts costs more than one of short ones.

Reference: recursive least squares with forgetting (Åström and Wittenmark, "Adaptive Control", section 2.3); a budget of
tokens by the wanted time per token is Sarathi-Serve's (Agrawal et al., OSDI 2024), which profiles it beforehand.
"""

from __future__ import annotations

_FORGETTING = 0.98
# Below so many steps with prompts nothing is known, and nothing is bounded.
_FEWEST = 8
# A step that took so many times what was expected was held up by something else.
_HELD_UP = 4.0
# Of the time that is to be kept: steps are not all alike.
SHARE = 0.9
# Units in which the three parts are of a like size.
_ROWS, _TOKENS = 16.0, 128.0
_MOST_DOUBT = 1e6
# Steps without prompts that are like the one before teach little: one of so many is taken.
_ALIKE = 16

_Vector = tuple[float, float, float]


class StepBudget:
    """Learns from steps; asked by the scheduler."""

    def __init__(self) -> None:
        self._parts: _Vector = (0.0, 0.0, 0.0)  # seconds: of a step, of `_ROWS` sequences, of `_TOKENS` tokens
        self._doubt = [[1e4 * (i == j) for j in range(3)] for i in range(3)]
        self._num_with_prompts = 0
        self._num_rows, self._num_alike = -1, 0  # of the newest step without prompts; how many like it were left out

    def note(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """A step that generated for `num_rows` sequences, and computed `num_tokens` tokens of prompts."""
        if seconds <= 0 or self._is_alike(num_rows, num_tokens):
            return
        self._num_with_prompts += num_tokens > 0
        expected = self.seconds(num_rows, num_tokens)
        if self._num_with_prompts >= _FEWEST and expected > 0:
            seconds = min(seconds, _HELD_UP * expected)
        # Errors relative to the step's time, so that short steps count as much as long ones.
        x = (1 / seconds, num_rows / _ROWS / seconds, num_tokens / _TOKENS / seconds)
        doubt = self._doubt
        toward = [sum(doubt[i][j] * x[j] for j in range(3)) for i in range(3)]
        weight = _FORGETTING + sum(x[i] * toward[i] for i in range(3))
        gain = [value / weight for value in toward]
        error = 1.0 - sum(part * value for part, value in zip(self._parts, x, strict=True))
        one, two, three = (part + value * error for part, value in zip(self._parts, gain, strict=True))
        self._parts = one, two, three
        # Where steps are all alike nothing is learnt of the parts alone: then nothing is forgotten either.
        forgetting = _FORGETTING if doubt[0][0] + doubt[1][1] + doubt[2][2] < _MOST_DOUBT else 1.0
        # Each pair is computed once: of two, rounding makes two numbers, and forgetting takes them apart, step by step.
        for i in range(3):
            for j in range(i, 3):
                doubt[i][j] = doubt[j][i] = (doubt[i][j] - gain[i] * toward[j]) / forgetting

    def _is_alike(self, num_rows: int, num_tokens: int) -> bool:
        """Whether such a step was seen just now."""
        if num_tokens or num_rows != self._num_rows or self._num_alike + 1 >= _ALIKE:
            self._num_rows, self._num_alike = (-1 if num_tokens else num_rows), 0
            return False
        self._num_alike += 1
        return True

    def seconds(self, num_rows: int, num_tokens: int) -> float:
        """That such a step is expected to take."""
        of_step, of_rows, of_tokens = self._parts
        return max(0.0, of_step + of_rows * num_rows / _ROWS + of_tokens * num_tokens / _TOKENS)

    def most_tokens(self, num_rows: int, target_s: float) -> int | None:
        """Of prompts, in a step that generates for `num_rows` sequences and takes `target_s` at most; `None`: it is
        not known yet."""
        of_token = self._parts[2] / _TOKENS
        if self._num_with_prompts < _FEWEST or of_token <= 0:
            return None
        return max(0, int((SHARE * target_s - self.seconds(num_rows, 0)) / of_token))
