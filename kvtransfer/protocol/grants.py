"""One grant of a receiver: its states, its record, and what a sender must say about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvtransfer.layout import differences
from kvtransfer.protocol.capability import is_capability_of
from kvtransfer.protocol.messages import AttemptKey, Commit, CommitPart, Grant, RefusalReason


class GrantState(Enum):
    WAITING = "waiting"  # no pages yet
    GRANTED = "granted"  # pages, and no writer knows of them
    OPEN = "open"  # a writer may write
    VERIFYING = "verifying"  # committed; the pages are being read
    ABANDONED = "abandoned"  # as VERIFYING, but the attempt was cancelled
    QUARANTINED = "quarantined"  # ended, but its writer may still write
    ADMITTED = "admitted"  # answer: ack. The pages are the request's
    REFUSED = "refused"  # answer: refusal. The pages are free


# Nothing follows these states; in time their records are forgotten.
ENDED = frozenset({GrantState.ADMITTED, GrantState.REFUSED})


@dataclass(frozen=True, slots=True)
class ReceiverLimits:
    """Times in seconds.

    Attributes:
        lease_s: how long a grant lives without a renewal or a commit.
        grace_s: how long after that a writer may stay silent before it is killed; also between repeated kills. One
            that says that fewer of its bytes are under way than before is not silent: it gets `lease_s` more.
        longest_drain_s: a writer is waited for no longer than this after its grant has ended, and `grace_s`.
        ask_again_s: between repeated requests to stop.
        remember_s: how long the answer to an ended attempt is kept for repeated messages.
        quarantine_cap_pages: more pages than this in quarantine for longer than `grace_s`, and the worker must be
            replaced.
    """

    lease_s: float = 30.0
    grace_s: float = 15.0
    ask_again_s: float = 1.0
    longest_drain_s: float = 60.0
    remember_s: float = 60.0
    quarantine_cap_pages: int = 1024


@dataclass(slots=True)
class GrantRecord:
    key: AttemptKey
    since_s: float  # when `state` was entered
    state: GrantState = GrantState.WAITING
    grant: Grant | None = None  # Invariant: set when the state is or was GRANTED
    sender: str | None = None  # incarnation that may write. Invariant: set from OPEN on
    lease_ends_s: float = 0.0
    asked_s: float = 0.0  # when the writer was last asked to stop
    # What the writer said last of its bytes that are still under way, and when that became less.
    # Invariant: set in QUARANTINED only.
    left_bytes: int | None = None
    drained_s: float = 0.0
    reason: RefusalReason | None = None  # Invariant: set exactly in ABANDONED, QUARANTINED and REFUSED
    commit: Commit | None = None  # Invariant: set exactly in VERIFYING and ABANDONED
    # Digests by layer of the pages that parts have verified, by index in the grant. Invariant: grows in OPEN only,
    # empty in ADMITTED and REFUSED.
    verified: dict[int, tuple[int, ...]] = field(default_factory=dict)
    history: list[str] = field(default_factory=list)

    @property
    def held(self) -> Grant:
        assert self.grant is not None, f"{self.key} has no grant in {self.state.value}"
        return self.grant

    def drains_until_s(self, limits: ReceiverLimits) -> float:
        """In QUARANTINED: until when the writer has time to drain further, since it did so last."""
        if self.left_bytes is None:
            return self.since_s
        return min(self.drained_s + limits.lease_s, self.since_s + limits.longest_drain_s)

    @property
    def verified_pages(self) -> tuple[tuple[int, int], ...]:
        """(index in the grant, page) of what was found right, by a part or a commit, and is not written again."""
        return tuple((index, self.held.pages[index]) for index in sorted(self.verified))

    @property
    def unverified_pages(self) -> tuple[int, ...]:
        """The grant's other pages, in order."""
        return tuple(page for index, page in enumerate(self.held.pages) if index not in self.verified)

    def forget_contents(self) -> None:
        """The grant is over. For what is repeated its record stays for a while, without the many digests."""
        self.commit, self.verified = None, {}

    def note_verified(self, part: CommitPart) -> None:
        """All bytes of a part are right."""
        self.verified |= dict(enumerate(zip(*part.digests, strict=True), start=part.first_index))

    def drop_mismatched(self, mismatches: tuple[tuple[int, int], ...]) -> None:
        """Take back what was verified and does not agree any more; `mismatches` are (layer, page)."""
        wrong = {page for _, page in mismatches}
        for index in [i for i in self.verified if self.held.pages[i] in wrong]:
            del self.verified[index]

    def drop_contradicted(self, first_index: int, digests: tuple[tuple[int, ...], ...]) -> list[int]:
        """Take back what was verified with other digests than these, `[layer][index - first_index]`.

        Returns:
            The pages: their sender says now that something else should be in them.
        """
        if not self.verified:
            return []
        # Of a part only its own pages are looked at: a long prompt comes in hundreds of parts.
        said = enumerate(zip(*digests, strict=True), start=first_index)
        wrong = [index for index, digest in said if self.verified.get(index, digest) != digest]
        for index in wrong:
            del self.verified[index]
        return [self.held.pages[index] for index in wrong]

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


def find_contradiction(said: Commit | CommitPart, record: GrantRecord | None, incarnation: str) -> RefusalReason | None:
    """Why `said` is not about the grant in `record` at all; it then proves nothing about any write."""
    if said.receiver != incarnation:
        return RefusalReason.WRONG_RECEIVER
    if record is None:
        return RefusalReason.UNKNOWN_GRANT
    if not is_capability_of(record.held, said.capability):
        return RefusalReason.BAD_CAPABILITY
    if said.key != record.key:
        return RefusalReason.WRONG_ATTEMPT
    if said.epoch != record.held.epoch:
        return RefusalReason.WRONG_EPOCH
    if record.sender is not None and said.sender != record.sender:
        return RefusalReason.WRONG_SENDER
    return None


def find_problem(commit: Commit, grant: Grant) -> tuple[RefusalReason, str] | None:
    """Why the contents of a commit cannot be admitted into `grant`; `None` when its digests decide."""
    if commit.layout != grant.layout:
        names = differences(commit.layout, grant.layout)
        both = "; ".join(f"{n}: {getattr(commit.layout, n)!r} is not {getattr(grant.layout, n)!r}" for n in names)
        return RefusalReason.LAYOUT_MISMATCH, both
    if commit.pages != grant.pages:
        foreign = set(commit.pages) - set(grant.pages)
        if foreign:
            return RefusalReason.OUTSIDE_GRANT, f"pages {sorted(foreign)[:8]} were not granted"
        return RefusalReason.INCOMPLETE, f"{len(commit.pages)} of {len(grant.pages)} pages, or not in their order"
    return _find_missing(commit.digests, grant.layout.num_layers, len(grant.pages))


def find_part_problem(part: CommitPart, grant: Grant) -> tuple[RefusalReason, str] | None:
    """Why a part cannot be of `grant`; `None` when its digests decide."""
    num_pages = len(part.digests[0]) if part.digests else 0
    last = part.first_index + num_pages
    if part.first_index < 0 or last > len(grant.pages):
        return RefusalReason.OUTSIDE_GRANT, f"pages {part.first_index} to {last} of {len(grant.pages)}"
    return _find_missing(part.digests, grant.layout.num_layers, num_pages)


def _find_missing(
    digests: tuple[tuple[int, ...], ...], num_layers: int, num_pages: int
) -> tuple[RefusalReason, str] | None:
    if len(digests) != num_layers:
        return RefusalReason.INCOMPLETE, f"{len(digests)} of {num_layers} layers"
    for layer, of_layer in enumerate(digests):
        if len(of_layer) != num_pages:
            return RefusalReason.INCOMPLETE, f"layer {layer} has {len(of_layer)} of {num_pages} extents"
    return None
