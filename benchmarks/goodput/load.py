"""A mix whose highest rate is searched. Pure."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.goodput.mixes import SPREAD, Mix
from benchmarks.goodput.slo import SloByPrompt
from tandem.bench.goodput import GoodputSearch, ProbeLength
from tandem.bench.load.trace_entry import TraceEntry
from tandem.bench.rate_search import RateSearch

SHARE = 0.9
_LENGTH = ProbeLength(least=60, least_s=20.0, most=1200)


@dataclass(frozen=True)
class Effort:
    """How carefully it is searched.

    Attributes:
        precision: the lowest rate that fails is at most so many times the highest that does not.
        max_s: no rate is tried after so many seconds of load, whatever is not known by then.
    """

    length: ProbeLength = _LENGTH
    precision: float = 1.1
    max_probes: int = 16
    max_s: float = 120.0


@dataclass(frozen=True)
class MixLoad:
    """A mix, what its requests must keep, and how it is searched."""

    mix: Mix
    slo: SloByPrompt
    effort: Effort

    @property
    def entries(self) -> list[TraceEntry]:
        """As many as the longest probe sends."""
        return self.mix.entries(self.effort.length.most)

    @property
    def start_rate(self) -> float:
        """Requests a second at which prompts alone, one after the other, fill the server that was asked alone.

        It is more than that server keeps. A rate far too high fails in seconds, one that is kept takes a whole probe:
        so a search is short that begins above.
        """
        alone_s = [self.slo.alone_s(entry.num_input) for entry in self.entries]
        return round(len(alone_s) / math.fsum(alone_s), 3)

    def settings(self) -> dict[str, Any]:
        """As JSON reads it back."""
        return {
            "mix": self.mix.name,
            "kinds": [asdict(kind) for kind in self.mix.kinds],
            "spread": SPREAD,
            "alone_ttft_s": {str(num_input): ttft_s for num_input, ttft_s in self.slo.alone},
            **self.slo.as_json(),
            "share": SHARE,
            **asdict(self.effort),
        }

    def search(self) -> GoodputSearch:
        """One that has not begun."""
        effort = self.effort
        rates = RateSearch(self.start_rate, precision=effort.precision, max_probes=effort.max_probes)
        return GoodputSearch(self.slo, SHARE, rates, effort.length, effort.max_s)
