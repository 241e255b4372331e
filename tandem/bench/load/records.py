"""One measured request, in the terms of the field. Pure.

    sent ──TTFT──> event 1 ──gap──> event 2 ──gap──> … event n        E2E = sent → event n

The definitions are those of vLLM's `bench serve`, so that figures of both tools compare: an event is a chunk of the
stream that holds a choice, and ITL is the gap between two events, however many tokens the later one brings. The number
of tokens is the server's own (`usage`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

TokenSource = Literal["usage", "limit", "events"]


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request of a run; seconds from the run's beginning. A failed one has no latencies."""

    number: int  # among the requests of the run, in order of arrival
    num_input_asked: int | None  # `None`: a text was sent, whose tokens the server counts
    num_output_asked: int
    sent_s: float
    ended_s: float
    own_s: float = 0.0  # of a good one, what of its time the load generator took for itself
    planned_s: float | None = None  # when it was to be sent; `None` in a closed loop
    failure: str | None = None  # its kind; `None`: it succeeded
    message: str = ""  # of the failure
    event_s: tuple[float, ...] = ()
    num_input: int | None = None  # by the server's word; `None`: it does not say
    num_output: int = 0
    token_source: TokenSource = "usage"  # where `num_output` comes from
    digest: str = ""  # of the text
    num_cached: int | None = None  # prompt tokens in the server's cache, by its word; `None`: it does not say
    num_repeated: int | None = None  # leading prompt tokens that were sent or answered before; `None`: not known
    turn: int | None = None  # of its conversation, from 1
    request_id: str = ""  # by which the server remembers it (`x-request-id`); empty: it does not say

    @property
    def is_good(self) -> bool:
        return self.failure is None

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.event_s[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        """From sending to the last token."""
        return self.event_s[-1] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; `None` where there is no second."""
        if self.num_output < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.num_output - 1)

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies: all gaps between events."""
        return [later - earlier for earlier, later in zip(self.event_s, self.event_s[1:], strict=False)]

    @property
    def second_gap_s(self) -> float | None:
        """From the first event to the second: where a handoff between workers shows."""
        return self.event_s[1] - self.event_s[0] if len(self.event_s) > 1 else None


class Objective(Protocol):
    """What a request must keep to count as good."""

    def is_met_by(self, record: RequestRecord) -> bool:
        """A failed request never meets it."""

    def as_json(self) -> dict[str, Any]:
        """Its bounds as plain data; seconds."""


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must keep to count as good; seconds, `None`: any value will do."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def is_met_by(self, record: RequestRecord) -> bool:
        """A failed request never meets it; one without a second token has no TPOT to miss."""
        if not record.is_good:
            return False
        if self.ttft_s is not None and record.ttft_s > self.ttft_s:
            return False
        return self.tpot_s is None or (record.tpot_s or 0.0) <= self.tpot_s

    def as_json(self) -> dict[str, Any]:
        """Its bounds as plain data."""
        return {"slo_ttft_s": self.ttft_s, "slo_tpot_s": self.tpot_s}
