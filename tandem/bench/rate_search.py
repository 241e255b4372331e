"""The search for the highest rate that still goes well. Pure: it says which rate to try, and is told how that went."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class RateSearch:
    """Goes from `rate` up while that goes well, or down until it does, by `step` each time, then bisects
    (geometrically, as rates are ratios).

    It is done when the bounds lie within `precision` of each other, or `max_probes` were told.
    """

    rate: float  # to try next
    precision: float = 1.05
    max_probes: int = 12
    best: float = 0.0  # the highest that went well; 0: none has
    worst: float = math.inf  # the lowest that did not
    num_probes: int = 0
    step: float = 2.0  # where a rate near the limit is known a smaller one leaves less to bisect

    def __post_init__(self) -> None:
        if self.rate <= 0 or min(self.precision, self.step) <= 1 or self.max_probes < 1:
            raise ValueError("a search needs a rate above 0, a precision and a step above 1 and a probe")

    @property
    def is_close(self) -> bool:
        """The bounds are as near to each other as was asked for."""
        return self.worst <= self.best * self.precision

    @property
    def is_done(self) -> bool:
        return self.num_probes >= self.max_probes or self.is_close

    def tell(self, *, went_well: bool) -> None:
        """How `rate` went."""
        self.num_probes += 1
        if went_well:
            self.best = max(self.best, self.rate)
        else:
            self.worst = min(self.worst, self.rate)
        if self.worst == math.inf:
            self.rate = self.best * self.step
        elif self.best:
            self.rate = math.sqrt(self.best * self.worst)
        else:
            self.rate = self.worst / self.step
