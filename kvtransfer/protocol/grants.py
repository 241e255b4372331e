"""One grant of a receiver: its states, its record, and what its commit must say."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvtransfer.layout import differences
from kvtransfer.protocol.messages import AttemptKey, Commit, Grant, RefusalReason


class GrantState(Enum):
    WAITING = "waiting"  # no pages yet
    GRANTED = "granted"  # pages, and no writer knows of them
    OPEN = "open"  # a writer may write
    VERIFYING = "verifying"  # committed; the pages are being read
    ABANDONED = "abandoned"  # as VERIFYING, but nobody wants the result
    QUARANTINED = "quarantined"  # ended, but its writer may still write
    ADMITTED = "admitted"  # answer: ack. The pages are the request's
    REFUSED = "refused"  # answer: refusal. The pages are free


@dataclass(frozen=True, slots=True)
class ReceiverLimits:
    """Times in seconds.

    Attributes:
        lease_s: how long a grant lives without a renewal or a commit.
        grace_s: how long after that a writer may stay silent before it is killed; also between repeated kills.
        ask_again_s: between repeated requests to stop.
        remember_s: how long the answer to an ended attempt is kept for repeated messages.
        quarantine_cap_pages: more quarantined pages than this and the worker must be replaced.
    """

    lease_s: float = 30.0
    grace_s: float = 15.0
    ask_again_s: float = 1.0
    remember_s: float = 60.0
    quarantine_cap_pages: int = 1024


@dataclass(slots=True)
class GrantRecord:
    key: AttemptKey
    since_s: float  # when `state` was entered
    state: GrantState = GrantState.WAITING
    grant: Grant | None = None  # Invariant: set when the state is or was GRANTED
    sender: str | None = None  # incarnation that may write; None in OPEN: it is not known who
    lease_ends_s: float = 0.0
    asked_s: float = 0.0  # when the writer was last asked to stop
    reason: RefusalReason | None = None  # Invariant: set exactly in ABANDONED, QUARANTINED and REFUSED
    commit: Commit | None = None  # Invariant: set exactly in VERIFYING and ABANDONED
    history: list[str] = field(default_factory=list)

    @property
    def held(self) -> Grant:
        assert self.grant is not None, f"{self.key} has no grant in {self.state.value}"
        return self.grant

    def deadline_s(self, limits: ReceiverLimits) -> float | None:
        """When time alone changes this record; `None`: never."""
        match self.state:
            case GrantState.GRANTED | GrantState.OPEN:
                return self.lease_ends_s
            case GrantState.QUARANTINED:
                return self.asked_s + limits.ask_again_s
            case GrantState.ADMITTED | GrantState.REFUSED:
                return self.since_s + limits.remember_s
            case _:
                return None


def find_contradiction(commit: Commit, record: GrantRecord | None, incarnation: str) -> RefusalReason | None:
    """Why `commit` is not about the grant in `record` at all; such a commit proves nothing about its writes."""
    if commit.receiver != incarnation:
        return RefusalReason.WRONG_RECEIVER
    if record is None:
        return RefusalReason.UNKNOWN_GRANT
    if commit.key != record.key:
        return RefusalReason.WRONG_ATTEMPT
    if commit.epoch != record.held.epoch:
        return RefusalReason.WRONG_EPOCH
    if record.sender is not None and commit.sender != record.sender:
        return RefusalReason.WRONG_SENDER
    return None


def find_problem(commit: Commit, grant: Grant) -> tuple[RefusalReason, str] | None:
    """Why the contents of a commit cannot be admitted into `grant`; `None` when its digests decide."""
    names = differences(commit.layout, grant.layout)
    if names:
        both = "; ".join(f"{n}: {getattr(commit.layout, n)!r} is not {getattr(grant.layout, n)!r}" for n in names)
        return RefusalReason.LAYOUT_MISMATCH, both
    foreign = set(commit.pages) - set(grant.pages)
    if foreign:
        return RefusalReason.OUTSIDE_GRANT, f"pages {sorted(foreign)[:8]} were not granted"
    if commit.pages != grant.pages:
        return RefusalReason.INCOMPLETE, f"{len(commit.pages)} of {len(grant.pages)} pages, or not in their order"
    if len(commit.digests) != grant.layout.num_layers:
        return RefusalReason.INCOMPLETE, f"{len(commit.digests)} of {grant.layout.num_layers} layers"
    for layer, digests in enumerate(commit.digests):
        if len(digests) != len(grant.pages):
            return RefusalReason.INCOMPLETE, f"layer {layer} has {len(digests)} of {len(grant.pages)} extents"
    return None
