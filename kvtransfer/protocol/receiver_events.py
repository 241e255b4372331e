"""What can happen to a receiver's grants (past tense), and what it tells its worker to do (imperative)."""

from __future__ import annotations

from dataclasses import dataclass

from kvtransfer.protocol.messages import AttemptKey, Commit, CommitPart, Grant, RefusalReason

# ---- events


@dataclass(frozen=True, slots=True)
class ReserveReceived:
    """The router asks for pages. Idempotent by key."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class ReservationGranted:
    """The worker's page accounting took `pages` out of the pool for this attempt."""

    key: AttemptKey
    pages: tuple[int, ...]
    first_page: int = 0


@dataclass(frozen=True, slots=True)
class ReservationDenied:
    """The worker will never give pages to this attempt."""

    key: AttemptKey
    reason: RefusalReason


@dataclass(frozen=True, slots=True)
class GrantGivenOut:
    """A writer asks to attach to the grant; from here on it may write.

    Feed this *before* any answer leaves that lets it post. `sender` is its incarnation.
    """

    grant_id: str
    sender: str
    capability: bytes


@dataclass(frozen=True, slots=True)
class LeaseRenewed:
    """The writer still means to use the grant; the lease starts anew."""

    grant_id: str
    sender: str
    capability: bytes


@dataclass(frozen=True, slots=True)
class PartReceived:
    part: CommitPart


@dataclass(frozen=True, slots=True)
class PartVerified:
    """The check that `VerifyPart` asked for is over. `mismatches` are (layer, page); none means all agree."""

    grant_id: str
    part: CommitPart
    mismatches: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class CommitReceived:
    commit: Commit


@dataclass(frozen=True, slots=True)
class DigestsVerified:
    """The check that `VerifyDigests` asked for is over. `mismatches` are (layer, page); none means all agree."""

    grant_id: str
    mismatches: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The attempt was cancelled: its client left, or the router released it."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class WriterConfirmedIdle:
    """A fence: the writer has nothing outstanding for this grant and will post nothing more."""

    grant_id: str
    sender: str
    capability: bytes


@dataclass(frozen=True, slots=True)
class WriterExited:
    """A fence for all its grants: the writer's process has ended, seen on its own host."""

    sender: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; see `ReceiverHandoffs.next_deadline_s`."""


ReceiverEvent = (
    ReserveReceived
    | ReservationGranted
    | ReservationDenied
    | GrantGivenOut
    | LeaseRenewed
    | PartReceived
    | PartVerified
    | CommitReceived
    | DigestsVerified
    | RequestCancelled
    | WriterConfirmedIdle
    | WriterExited
    | Tick
)

# ---- instructions


@dataclass(frozen=True, slots=True)
class QueueReservation:
    """Answer with `ReservationGranted` or `ReservationDenied` when the pool has decided."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class DropReservation:
    """Take the attempt out of the reservation queue."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class SendGrant:
    """Answer the router's Reserve."""

    grant: Grant


@dataclass(frozen=True, slots=True)
class ConfirmAttached:
    """Answer the writer that asked to attach: it may post until its lease ends."""

    grant: Grant
    sender: str


@dataclass(frozen=True, slots=True)
class ConfirmRenewed:
    """Answer the writer's renewal."""

    grant_id: str
    lease_s: float


@dataclass(frozen=True, slots=True)
class ExpectWrites:
    """Writes into `pages` of every layer may arrive: poll the transport and, where it checks, allow them."""

    grant_id: str
    sender: str
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EndWrites:
    """No write of this grant can arrive any more. Follows each `ExpectWrites` exactly once."""

    grant_id: str


@dataclass(frozen=True, slots=True)
class VerifyPart:
    """Compare these pages with the part's digests (see `ArrivedDigests`), answer with `PartVerified`.

    The grant may end meanwhile, and its pages go: then the answer changes nothing.
    """

    grant_id: str
    part: CommitPart
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ConfirmPart:
    """Answer the part: these pages are verified."""

    grant_id: str


@dataclass(frozen=True, slots=True)
class VerifyDigests:
    """Compare the pages with these digests (see `ArrivedDigests`), answer with `DigestsVerified`.

    The pages stay until then. `digests` are `[layer][index into pages]`.
    """

    grant_id: str
    pages: tuple[int, ...]
    digests: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class AdmitRequest:
    """The pages are right and belong to the request from now on."""

    grant: Grant
    commit: Commit


@dataclass(frozen=True, slots=True)
class SendAck:
    """Answer the commit: admitted; the sender may release its pages."""

    key: AttemptKey
    grant_id: str


@dataclass(frozen=True, slots=True)
class SendRefusal:
    """Answer whatever was asked about this attempt: no."""

    key: AttemptKey | None
    grant_id: str | None
    reason: RefusalReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class QuarantinePages:
    """The grant has ended. Reserved `pages` may still be written: nobody gets them before `LiftQuarantine`.

    `verified`, as (index in the grant, page) in order, hold what was sealed and no write can reach them: they may be
    kept for what is in them. Same in `FreePages`.
    """

    key: AttemptKey
    grant_id: str
    pages: tuple[int, ...]
    verified: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class LiftQuarantine:
    """A fence was seen: these quarantined pages are free."""

    key: AttemptKey
    grant_id: str
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FreePages:
    """The grant has ended. Reserved pages go back to the pool: no write can reach them."""

    key: AttemptKey
    grant_id: str | None
    pages: tuple[int, ...]
    verified: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class AskWriterToStop:
    """Ask for a confirmation that nothing is outstanding.

    The grant's capability goes along: the writer confirms with it, also when it never heard the grant's answer.
    """

    grant: Grant
    sender: str
    reason: RefusalReason


@dataclass(frozen=True, slots=True)
class KillWriter:
    """The writer stayed silent beyond lease and grace: have it killed on its node.

    Answer with `WriterExited` when it is gone, also when it was gone long before: its attach may have been late.
    """

    sender: str


@dataclass(frozen=True, slots=True)
class ReplaceSelf:
    """Quarantine is above its cap: only a new process of this worker frees the pages."""

    num_quarantined_pages: int


ReceiverInstruction = (
    QueueReservation
    | DropReservation
    | SendGrant
    | ConfirmAttached
    | ConfirmRenewed
    | ExpectWrites
    | EndWrites
    | VerifyPart
    | ConfirmPart
    | VerifyDigests
    | AdmitRequest
    | SendAck
    | SendRefusal
    | QuarantinePages
    | LiftQuarantine
    | FreePages
    | AskWriterToStop
    | KillWriter
    | ReplaceSelf
)
