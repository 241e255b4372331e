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
#: As few requests as let a rate of one a second be searched in two minutes. Four rounds of the mix with the fewest long
#: prompts: these are still more than may be served badly, however long the probe.
_LENGTH = ProbeLength(least=32, least_s=20.0, most=1200)


@dataclass(frozen=True)
class Effort:
    """How carefully it is searched.

    Attributes:
        num_at_once: it begins at the rate at which a server has so many requests at a time, as slow as they may be.
        step: from one rate to the next until one is kept and one is not. Its fourth root is below `precision`: so two
            more probes are enough.
        precision: the lowest rate that fails is at most so many times the highest that does not.
        max_s: no rate is tried after so many seconds of load, whatever is not known by then, once a rate was too high.
    """

    length: ProbeLength = _LENGTH
    num_at_once: int = 8
    step: float = 1.45
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
        """Requests a second at which a server would have `num_at_once` at a time (Little's law), if each took as long
        as alone to its first token, and then as long a token as it may.

        That is near what a server of two cores keeps. A rate far above would not do: what is wrong with a request is
        known when it has ended, and with many at a time that takes longer than a whole probe that is kept.
        """
        seconds = [self.slo.alone_s(entry.num_input) + self.slo.tpot_s * entry.num_output for entry in self.entries]
        return round(self.effort.num_at_once * len(seconds) / math.fsum(seconds), 3)

    @property
    def told(self) -> tuple[float, float]:
        """What prompts as long as the longest kind's are on average must keep: a cluster has one TTFT for all."""
        alone_s = self.slo.alone_s(max(kind.num_input for kind in self.mix.kinds))
        return round(self.slo.factor * alone_s + self.slo.slack_s, 3), self.slo.tpot_s

    def settings(self) -> dict[str, Any]:
        """As JSON reads it back."""
        return {
            "told_s": list(self.told),
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
        rates = RateSearch(self.start_rate, precision=effort.precision, max_probes=effort.max_probes, step=effort.step)
        return GoodputSearch(self.slo, SHARE, rates, effort.length, effort.max_s)
