"""The states of a request and the one table of its legal transitions.

    QUEUED → PREFILLING → HANDOFF → DECODING → FINISHED
    PREFILLING → FINISHED                        ended by its first token
    any live state → CANCELLED | FAILED
    PREFILLING | HANDOFF | DECODING → QUEUED     retry
    DECODING → HANDOFF                           move
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from tandem.core.errors import IllegalTransitionError


class RequestState(Enum):
    QUEUED = "queued"
    PREFILLING = "prefilling"
    HANDOFF = "handoff"
    DECODING = "decoding"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


_BROKEN_OFF = frozenset({RequestState.CANCELLED, RequestState.FAILED})

LEGAL: dict[RequestState, frozenset[RequestState]] = {
    RequestState.QUEUED: _BROKEN_OFF | {RequestState.PREFILLING},
    RequestState.PREFILLING: _BROKEN_OFF | {RequestState.HANDOFF, RequestState.FINISHED, RequestState.QUEUED},
    RequestState.HANDOFF: _BROKEN_OFF | {RequestState.DECODING, RequestState.QUEUED},
    RequestState.DECODING: _BROKEN_OFF | {RequestState.FINISHED, RequestState.HANDOFF, RequestState.QUEUED},
    RequestState.FINISHED: frozenset(),
    RequestState.CANCELLED: frozenset(),
    RequestState.FAILED: frozenset(),
}


@dataclass
class RequestLife:
    """One request's state with a stamp for each transition, so that the parts of its latency add up."""

    request_id: str
    created_s: float
    state: RequestState = RequestState.QUEUED
    # Invariant: times never go back, and consecutive states are legal by LEGAL.
    stamps: list[tuple[float, RequestState]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stamps.append((self.created_s, self.state))

    def to(self, state: RequestState, now_s: float) -> None:
        """Move on to `state`.

        Raises:
            IllegalTransitionError: the table does not allow it; the message holds the history.
        """
        if state not in LEGAL[self.state]:
            history = " → ".join(s.value for _, s in self.stamps)
            raise IllegalTransitionError(
                f"request {self.request_id}: {self.state.value} → {state.value} is not legal; history: {history}",
                request_id=self.request_id,
            )
        self.state = state
        self.stamps.append((now_s, state))

    def seconds_in(self, state: RequestState) -> float:
        """Time spent in `state` over all visits that have ended."""
        pairs = zip(self.stamps, self.stamps[1:], strict=False)
        return sum(after - before for (before, s), (after, _) in pairs if s is state)
