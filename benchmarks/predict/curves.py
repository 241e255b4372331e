"""A run and its simulation over time: tokens so far, and requests under way. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.line_plot import Line, Panel, svg
from tandem.bench.load.records import RequestRecord
from tandem.sim.outcome import Outcome

_NUM = 80
SAID, MEASURED = "simulated", "measured"
_TITLES = {"tokens": "output tokens so far", "running": "requests under way"}


@dataclass(frozen=True, slots=True)
class Span:
    """A request; seconds from the beginning of its run. Its tokens count as if they came evenly: of a simulated one no
    more is known, and what is compared is treated alike."""

    sent_s: float
    first_s: float
    last_s: float
    num_tokens: int

    @classmethod
    def of_record(cls, record: RequestRecord) -> Span:
        return cls(record.sent_s, record.event_s[0], record.event_s[-1], record.num_output)

    @classmethod
    def of_outcome(cls, outcome: Outcome, began_s: float = 0.0) -> Span:
        sent_s, first_s, last_s = outcome.arrival.arrived_s, outcome.first_token_s, outcome.last_token_s
        return cls(sent_s - began_s, first_s - began_s, last_s - began_s, outcome.num_tokens)

    def tokens_by(self, at_s: float) -> float:
        if at_s < self.first_s:
            return 0.0
        if at_s >= self.last_s:
            return float(self.num_tokens)
        return 1 + (self.num_tokens - 1) * (at_s - self.first_s) / (self.last_s - self.first_s)


def curves(said: Sequence[Span], measured: Sequence[Span]) -> dict[str, Any]:
    """Plain data: both at the same moments, up to the end of the longer one."""
    end_s = max(span.last_s for span in (*said, *measured))
    moments = [end_s * number / _NUM for number in range(_NUM + 1)]
    found: dict[str, Any] = {"at_s": [round(at_s, 4) for at_s in moments]}
    for name, spans in ((SAID, said), (MEASURED, measured)):
        found[name] = {
            "tokens": [round(sum(span.tokens_by(at_s) for span in spans), 1) for at_s in moments],
            "running": [sum(span.sent_s <= at_s < span.last_s for span in spans) for at_s in moments],
        }
    return found


def plot(content: Mapping[str, Any]) -> str:
    """An SVG: of each load of each model a row of two panels, its first run beside what was said of it."""
    loads = ((name, load) for name, model in content["models"].items() for load in model["loads"])
    panels = [_panel(name, load, what) for name, load in loads for what in _TITLES]
    return svg(panels, columns=len(_TITLES))


def _panel(model: str, load: Mapping[str, Any], what: str) -> Panel:
    found = load["curves"]
    lines = [Line(who, list(zip(found["at_s"], found[who][what], strict=True))) for who in (MEASURED, SAID)]
    return Panel(f"{model}, {load['load']}: {_TITLES[what]}", "seconds", lines, is_linear=True)
