"""A request of a simulation, as its router knows it, and each attempt at it, as both of its workers do."""

from __future__ import annotations

from dataclasses import dataclass, field

from decode_worker.ledger import Attempt
from router.lifecycle.tenant_limits import TenantLimits
from router.lifecycle.turns import Turn
from router.policy.recovery import FIRST, Plan, Recovery
from router.request.journal import Journal
from router.request.request import Request, TokenGiven
from router.workers.known_pages import Foreseen
from tandem.core.identity import WorkerKey
from tandem.core.page_keys import PageKeys
from tandem.sim.outcome import Outcome
from tandem.worker.sequence import Sequence


@dataclass(slots=True, eq=False)
class InFlight:
    """One request, over all its attempts.

    Attributes:
        asked: what the router was asked.
        limits: of its tenant and the others.
        turn: in the router.
        recovery: what follows when an attempt fails; `None`: none has.
        journal: what its client has been given; `None`: nobody dies, so each token comes once.
        plan: of the attempt that is to be placed, or was placed last.
        slack_s: of its prompt, as of when it was placed first.
        give_up_s: until when it waits for a worker; `None`: it does not.
        kept_at: prefill workers that may keep pages of its prompt.
        page_keys: of the full pages of its prompt, and of its answer behind that; none without prefix caches.
        num_uncharged: tokens of its answer that its tenant and its session do not count yet.
        is_over: it has ended, or failed.
        is_waiting: admission counts it as one that waits for the computation of its prompt.
    """

    outcome: Outcome
    asked: Request
    limits: TenantLimits
    turn: Turn
    recovery: Recovery | None = None
    journal: Journal | None = None
    plan: Plan = FIRST
    slack_s: float = 0.0
    give_up_s: float | None = None
    kept_at: set[WorkerKey] = field(default_factory=set)
    page_keys: PageKeys = field(default_factory=PageKeys)
    num_uncharged: int = 0
    is_over: bool = False
    is_waiting: bool = False

    @property
    def attempt(self) -> int:
        """The number of the present one."""
        return self.journal.attempt if self.journal is not None else 1

    def charge(self) -> None:
        """What it was given counts for its tenant and its session."""
        if self.num_uncharged:
            self.turn.charge(self.num_uncharged)
            self.limits.give(self.asked.tenant, self.num_uncharged)
            self.num_uncharged = 0

    def takes(self, attempt: int, first: int, num: int, token_id: int) -> bool:
        """Whether its client gets `num` tokens of one attempt, the `first`th of its output and those behind it."""
        if (journal := self.journal) is None:
            return True
        taken = [journal.accept(TokenGiven(attempt, 0, first + number, token_id)) for number in range(num)]
        return all(taken)


@dataclass(slots=True, kw_only=True, eq=False)
class Job(Attempt):
    """Attributes:
    own_turn: of what it generates: without the slack that its prompt has.
    prefill: `None` where decode computes the prompt.
    num_known: tokens that its client had when this attempt began.
    prompt: at prefill, until its pages have been sent.
    sequence: in decode's batch.
    began_s: since when its first page is computed of those that an output sees.
    granted_s: since when prefill knows of its pages at decode.
    is_admitted: decode has all that it needs.
    is_over: for the router: it has ended, or a worker of it has died.
    foreseen: pages that its workers are about to have.
    """

    request: InFlight
    own_turn: float
    decode: WorkerKey
    prefill: WorkerKey | None
    num_known: int = 0
    prompt: Sequence | None = None
    sequence: Sequence | None = None
    began_s: float | None = None
    granted_s: float | None = None
    is_computed: bool = False
    is_admitted: bool = False
    is_over: bool = False
    foreseen: Foreseen = field(default_factory=dict)

    @property
    def outcome(self) -> Outcome:
        return self.request.outcome
