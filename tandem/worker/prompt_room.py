"""How many tokens of prompts a step has beside what it generates, so that all together wait least. Pure.

A worker learns it from its own steps: what one takes that has no prompts, and what so many tokens of prompts add. That
need not be in proportion: a step that reads the weights for few sequences computes some tokens for nothing, and up to
how many depends on the processor. So what they add is kept by their number, and between two numbers taken as a line.

Of the numbers that leave all who wait for the step the time per token that they want, the best is the one with which a
token of a prompt delays all together least: the step itself delays the prompts that wait, and as many that will have
come behind them; what the tokens add delays them and each who generates. Where tokens add in proportion that is as many
as leaves the step itself little of the delay, where some are free it is these, and where many prompts wait it is more.
What is taken is the fewest that cost little more than that, so that steps are short where many generate.
A number that looks bad is not taken again, so what was not seen for long is forgotten: the step may have been held up.
And before a step without prompts was seen, all of a step's time counts as added: that is put right with the first one.

Reference: the budget of tokens by the wanted time per token is Sarathi-Serve's (Agrawal et al., OSDI 2024), which
profiles it beforehand.
"""

from __future__ import annotations

import math

from tandem.core.step_times import PromptSteps
from tandem.worker.step_budget import SHARE, StepBudget

# Tokens of a prompt in the first step that has some; more than was tried is tried by so many times at once.
_FIRST_TOKENS, _GROWTH = 16, 2
_WEIGHT = 1 / 8  # of the newest step
# The fewest tokens are taken that delay all by hardly more than the best number would, and by so much of what the
# tokens of that one cost those who generate. For these, and for whoever is handed off and waits for a step's end, many
# short steps are better than a long one.
_HARDLY, _FOR_SHORT_STEPS = 0.05, 0.2
# A step that takes more times what was expected counts as one of so many.
_HELD_UP = 2.0
# After so many steps a number that is not taken any more is tried again: it may have been held up when it was.
_STALE_STEPS = 2000

_Point = tuple[float, float]
"""Tokens of prompts, and the seconds that they add."""


class PromptRoom:
    """Learns from steps; asked by the scheduler."""

    def __init__(self) -> None:
        self._plain = StepBudget()  # of steps without prompts
        self._knows_plain = False
        # Of steps whose numbers of tokens of prompts have so many binary digits, the mean as the newest count most.
        self._added: dict[int, _Point] = {}
        self._num_steps = 0
        self._seen_at: dict[int, int] = {}  # of each number of binary digits, by steps

    def note(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """A step that generated for `num_rows` sequences, and computed `num_tokens` tokens of prompts."""
        self._num_steps += 1
        if self._num_steps % _STALE_STEPS == 0:
            self._forget_stale()
        if not num_tokens:
            self._plain.note(num_rows, 0, seconds)
            if not self._knows_plain and seconds > 0:
                self._knows_plain = True
                self._take_off(self._plain.seconds(num_rows, 0))
            return
        plain_s, size = self._plain.seconds(num_rows, 0), num_tokens.bit_length()
        self._seen_at[size] = self._num_steps
        known = self._added.get(size)
        if known is None:
            added_s = max(0.0, seconds - plain_s)
            smaller = max((other for other in self._added if other < size), default=None)
            if smaller is not None:  # as many times as long as it has tokens, and that so many times, is the most
                tokens, smaller_s = self._added[smaller]
                in_proportion = (plain_s + smaller_s) * num_tokens / tokens
                added_s = max(0.0, min(seconds, _HELD_UP * in_proportion) - plain_s)
            self._added[size] = float(num_tokens), added_s
            return
        added_s = max(0.0, min(seconds, _HELD_UP * (plain_s + known[1])) - plain_s)
        tokens, mean_s = known
        self._added[size] = tokens + _WEIGHT * (num_tokens - tokens), mean_s + _WEIGHT * (added_s - mean_s)

    def _take_off(self, plain_s: float) -> None:
        """Of what tokens seem to add, what the step takes by itself. Else few tokens would look bad for ever, as they
        are when they take a step of their own."""
        self._added = {size: (tokens, max(0.0, added_s - plain_s)) for size, (tokens, added_s) in self._added.items()}

    def _forget_stale(self) -> None:
        """What was not seen for long and is more than what is taken now; all, where nothing is."""
        fresh = [size for size, at in self._seen_at.items() if at > self._num_steps - _STALE_STEPS]
        for size in [size for size in self._added if size > max(fresh, default=0)]:
            del self._added[size], self._seen_at[size]

    def tokens(self, num_rows: int, num_prompts: int, target_s: float, most: int) -> int:
        """Of prompts, for a step that generates for `num_rows` sequences while `num_prompts` are to be computed, and
        that is to take `target_s` at most; `most`: whatever the time."""
        return int(self._chosen(num_rows, num_prompts, target_s, most)[0])

    def steps(self, num_rows: int, num_prompts: int, target_s: float, most: int) -> PromptSteps:
        """What prompts would take in such steps."""
        if not self._added:
            return PromptSteps(most)
        tokens, added_s = self._chosen(num_rows, num_prompts, target_s, most)
        num_tokens = int(tokens)
        return PromptSteps(num_tokens, self._plain.seconds(num_rows, 0), added_s / tokens if num_tokens else 0.0)

    def _chosen(self, num_rows: int, num_prompts: int, target_s: float, most: int) -> _Point:
        """The fewest tokens that delay all together little more than the best number would; nothing where no time is
        left."""
        if not self._added:
            return min(_FIRST_TOKENS, most), 0.0
        plain_s = self._plain.seconds(num_rows, 0)

        def delay(point: _Point) -> float:
            tokens, added_s = point
            return (2 * num_prompts * (plain_s + added_s) + num_rows * added_s) / tokens

        points, last = self._points(plain_s, target_s, most)
        delays = {point: delay(point) for point in points if point[0] >= 1}
        if not delays:
            return 0.0, 0.0
        if len(self._added) == 1:  # of one number alone nothing is known that would speak against more
            return max(delays)
        tokens, added_s = best = min((*delays, last), key=delay)
        enough = (1 + _HARDLY) * delay(best) + _FOR_SHORT_STEPS * num_rows * added_s / tokens
        able = [point for point, value in delays.items() if value <= enough]
        return min(able) if able else min(delays, key=lambda point: delays[point])

    def _points(self, plain_s: float, target_s: float, most: int) -> tuple[list[_Point], _Point]:
        """What was tried, as far as it leaves the time and is no more than `most`; where that ends; and what is to be
        tried next. Beside them the last one there could be, if more tokens go on to add what the last ones did."""
        left_s, points = SHARE * target_s - plain_s, list[_Point]()
        tokens, added_s, slope = 0.0, 0.0, 0.0
        for size in sorted(self._added):
            next_tokens, next_s = self._added[size]
            next_s = max(added_s, next_s)
            slope = (next_s - added_s) / (next_tokens - tokens)
            if next_s > left_s or next_tokens > most:
                fits = (left_s - added_s) / slope if slope else math.inf
                end = min(tokens + fits, float(most))
                if not plain_s and not tokens:  # what a step takes by itself is within what its tokens seem to add
                    end = min(end, float(_FIRST_TOKENS))
                if end > tokens:
                    points.append((end, added_s + slope * (end - tokens)))
                return points, points[-1] if points else (0.0, 0.0)
            tokens, added_s = next_tokens, next_s
            points.append((tokens, added_s))
        # As if all of the step's time grew with its tokens: so that it takes less.
        growth = min(_GROWTH, SHARE * target_s / (plain_s + added_s)) if plain_s + added_s else _GROWTH
        end = min(tokens * growth, float(most))
        if end > tokens:
            points.append((end, added_s + slope * (end - tokens)))
        last = max(end, min(tokens + (left_s - added_s) / slope, float(most)) if slope else float(most))
        return points, (last, added_s + slope * (last - tokens))
