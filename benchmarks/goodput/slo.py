"""What a request of a mix must keep: a TTFT by how long a request with such a prompt takes alone, and a TPOT. Pure."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

from tandem.bench.load.records import RequestRecord, Slo

#: Lengths of the prompts whose TTFT is measured alone, in tokens: from below the shortest of a mix to the longest.
LENGTHS = (32, 128, 512, 1024, 2048, 3072)


@dataclass(frozen=True)
class SloByPrompt:
    """TTFT at most `factor` times that of the request alone and `slack_s`; TPOT at most `tpot_s`.

    Attributes:
        alone: prompt lengths, at least two that rise, and the TTFT of each alone in seconds; between them, and beyond,
            it is on a straight line through the two next.
    """

    alone: tuple[tuple[int, float], ...]
    factor: float = 3.0
    slack_s: float = 0.5
    tpot_s: float = 0.06

    def alone_s(self, num_input: int) -> float:
        """TTFT of a request alone with a prompt of so many tokens."""
        at = bisect_left(self.alone, (num_input, 0.0))
        (before, before_s), (after, after_s) = self.alone[max(0, min(at, len(self.alone) - 1) - 1) :][:2]
        return before_s + (after_s - before_s) * (num_input - before) / (after - before)

    def of(self, num_input: int) -> Slo:
        """Of a request with a prompt of so many tokens."""
        return Slo(self.factor * self.alone_s(num_input) + self.slack_s, self.tpot_s)

    def is_met_by(self, record: RequestRecord) -> bool:
        """By the length that was asked for. A failed request never meets it."""
        return self.of(record.num_input_asked or 0).is_met_by(record)

    def as_json(self) -> dict[str, Any]:
        """Its bounds as plain data."""
        return {"slo_ttft_factor": self.factor, "slo_ttft_slack_s": self.slack_s, "slo_tpot_s": self.tpot_s}
