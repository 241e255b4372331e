"""How long a step of a worker takes, by what is in it. Pure.

All models see the same terms of a step (`Terms`), and so a measured one can be put beside a computed one.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from tandem.core.windows import NO_WINDOWS, Windows, num_pairs_in_window, num_read_in_window


@dataclass(frozen=True, slots=True)
class Terms:
    """What a step computes.

    Attributes:
        num_tokens: of all sequences, those of prompts among them.
        num_rows: sequences that generate.
        num_read: tokens of context whose K and V are read: by each sequence once, however many tokens it computes.
        num_pairs: of a computed token and one that it attends to.

    Where some layers have a window, `num_read` and `num_pairs` are means over the layers: so a sum over these is the
    number of layers times as much, whatever each of them sees.
    """

    num_tokens: int
    num_rows: int
    num_read: float
    num_pairs: float

    @classmethod
    def of(cls, parts: Iterable[tuple[int, int, bool]], windows: Windows = NO_WINDOWS) -> Terms:
        """Of each sequence in the step: its tokens that are computed already, those that are now (one or more), and
        whether it generates."""
        window = windows.window
        num_tokens = num_rows = num_read = num_read_windowed = 0
        num_pairs = num_pairs_windowed = 0.0
        for start, num_new, generates in parts:
            num_tokens += num_new
            num_rows += generates
            num_read += start + num_new
            num_pairs += num_new * (start + (num_new + 1) / 2)
            if window:
                num_read_windowed += num_read_in_window(start, num_new, window)
                num_pairs_windowed += num_pairs_in_window(start, num_new, window)
        if not window:
            return cls(num_tokens, num_rows, num_read, num_pairs)
        read, pairs = windows.mean(num_read, num_read_windowed), windows.mean(num_pairs, num_pairs_windowed)
        return cls(num_tokens, num_rows, read, pairs)


@dataclass(frozen=True, slots=True)
class PromptSteps:
    """What prompts take in the steps of a worker that generates, as it foresees it now.

    Attributes:
        num_tokens: of prompts, that a step has at most; 0: it computes none.
        step_s: of a step without prompts; 0: it is not known yet.
        token_s: that a token of a prompt adds.
    """

    num_tokens: int = 0
    step_s: float = 0.0
    token_s: float = 0.0

    def seconds(self, num_tokens: int) -> float:
        """Until so many tokens are computed, one prompt after the other; 0 where it is not known."""
        if not self.num_tokens:
            return math.inf
        return math.ceil(num_tokens / self.num_tokens) * self.step_s + num_tokens * self.token_s


NO_PROMPTS = PromptSteps()


class StepTimes(Protocol):
    """A model of the time of steps.

    Attributes:
        windows: with which the terms are to be counted whose time it tells.
    """

    @property
    def windows(self) -> Windows: ...

    def seconds(self, terms: Terms) -> float: ...


Points = tuple[tuple[float, float], ...]
"""Numbers, which grow, and the seconds that so many add: between two of them, and from none to the first, as a line;
beyond the last as between the last two."""


def at_points(points: Points, number: float) -> float:
    """Seconds that so many add. There is a point."""
    right = min(bisect_left(points, (number,)), len(points) - 1)
    left_number, left_s = points[right - 1] if right else (0.0, 0.0)
    right_number, right_s = points[right]
    return left_s + (right_s - left_s) * (number - left_number) / (right_number - left_number)


@dataclass(frozen=True, slots=True)
class Fitted:
    """A sum of seconds: for the step, and for each of its terms. What `of_row` adds is beside `of_token`.

    Attributes:
        only_prompts_s: of one that generates for nobody, beside `base_s`.
        of_rows: of sequences that generate, with their tokens; none: `of_token` and `of_row` say it.
        of_prompts: of tokens of prompts; none: `of_token` says it.
    """

    base_s: float
    of_token_s: float = 0.0
    of_row_s: float = 0.0
    of_read_s: float = 0.0
    of_pair_s: float = 0.0
    windows: Windows = NO_WINDOWS
    of_rows: Points = ()
    of_prompts: Points = ()
    only_prompts_s: float = 0.0

    def seconds(self, terms: Terms) -> float:
        num_rows, num_of_prompts = terms.num_rows, terms.num_tokens - terms.num_rows
        rows_s = at_points(self.of_rows, num_rows) if self.of_rows else (self.of_token_s + self.of_row_s) * num_rows
        prompts_s = at_points(self.of_prompts, num_of_prompts) if self.of_prompts else self.of_token_s * num_of_prompts
        base_s = self.base_s if num_rows else self.base_s + self.only_prompts_s
        return base_s + rows_s + prompts_s + self.of_read_s * terms.num_read + self.of_pair_s * terms.num_pairs


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What of a model decides how long its steps take.

    Attributes:
        num_parameters: that each token is multiplied with.
        weight_bytes: that each step reads.
        token_bytes: of K and V of one token, in all layers.
        num_layers, hidden_size: of its attention, whose heads fill the hidden size.
        windows: of its layers.
    """

    num_parameters: float
    weight_bytes: float
    token_bytes: float
    num_layers: int
    hidden_size: int
    windows: Windows = NO_WINDOWS

    def flops(self, terms: Terms) -> float:
        """Two a parameter and token; of attention four a pair and number of the hidden size in each layer."""
        of_attention = 4 * self.num_layers * self.hidden_size * terms.num_pairs
        return 2 * self.num_parameters * terms.num_tokens + of_attention

    def num_bytes(self, terms: Terms) -> float:
        """That are read."""
        return self.weight_bytes + self.token_bytes * terms.num_read


@dataclass(frozen=True, slots=True)
class Card:
    """A processor: its peaks, the shares of them that are reached, and what a step takes beside."""

    flops: float
    bytes_per_s: float
    flops_share: float = 0.6
    bytes_share: float = 0.8
    overhead_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Roofline:
    """Whichever takes longer: to compute, or to read weights and context.

    Reference: Williams et al., "Roofline: an insightful visual performance model", CACM 2009.
    """

    model: ModelSize
    card: Card

    @property
    def windows(self) -> Windows:
        return self.model.windows

    def seconds(self, terms: Terms) -> float:
        card = self.card
        compute_s = self.model.flops(terms) / (card.flops * card.flops_share)
        return card.overhead_s + max(compute_s, self.model.num_bytes(terms) / (card.bytes_per_s * card.bytes_share))
