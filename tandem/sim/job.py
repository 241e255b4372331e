"""A request of a simulation, as its router knows it, and each attempt at it, as both of its workers do."""

from __future__ import annotations

from dataclasses import dataclass

from decode_worker.ledger import Attempt
from router.lifecycle.turns import Turn
from tandem.core.identity import WorkerKey
from tandem.sim.outcome import Outcome
from tandem.worker.sequence import Sequence


@dataclass(slots=True, eq=False)
class InFlight:
    """One request, over all its attempts.

    Attributes:
        turn: in the router.
        slack_s: of its prompt, as of when it was placed first.
    """

    outcome: Outcome
    turn: Turn
    slack_s: float = 0.0


@dataclass(slots=True, kw_only=True, eq=False)
class Job(Attempt):
    """Attributes:
    own_turn: of what it generates: without the slack that its prompt has.
    prefill: `None` where decode computes the prompt.
    prompt: at prefill, until its pages have been sent.
    began_s: since when its first chunk is computed.
    granted_s: since when prefill knows of its pages at decode.
    """

    request: InFlight
    own_turn: float
    decode: WorkerKey
    prefill: WorkerKey | None
    prompt: Sequence | None = None
    began_s: float | None = None
    granted_s: float | None = None
    is_computed: bool = False

    @property
    def outcome(self) -> Outcome:
        return self.request.outcome
