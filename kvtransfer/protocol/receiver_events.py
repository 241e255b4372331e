"""What can happen to a receiver's grants (past tense), and what it tells its worker to do (imperative)."""

from __future__ import annotations

from dataclasses import dataclass

from kvtransfer.protocol.messages import AttemptKey, Commit, Grant, RefusalReason

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
    """A writer was told of the grant, or asks to attach to it; from here on it may write.

    Feed this *before* any answer leaves that lets a writer post. `sender` is its incarnation; `None` when
    the grant leaves the process and nobody knows yet who will write.
    """

    grant_id: str
    sender: str | None


@dataclass(frozen=True, slots=True)
class LeaseRenewed:
    """The writer (or, before one is attached, the router) still means to use the grant; the lease starts anew."""

    grant_id: str


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
    """Nobody wants this attempt any more: the client left, the router released it."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class WriterConfirmedIdle:
    """A fence: the writer has nothing outstanding for this grant and will post nothing more.

    Also the right event when the router vouches that no writer was ever told of the grant.
    """

    grant_id: str


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
    sender: str | None


@dataclass(frozen=True, slots=True)
class ConfirmRenewed:
    """Answer the writer's renewal."""

    grant_id: str
    lease_s: float


@dataclass(frozen=True, slots=True)
class ExpectWrites:
    """Writes into `pages` of every layer may arrive: poll the transport and, where it checks, allow them."""

    grant_id: str
    sender: str | None
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EndWrites:
    """No write of this grant can arrive any more. Follows each `ExpectWrites` exactly once."""

    grant_id: str


@dataclass(frozen=True, slots=True)
class VerifyDigests:
    """Read the pages, compare, answer with `DigestsVerified`. The pages stay until then."""

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
    """Reserved pages that a writer may still write: nobody gets them before `LiftQuarantine`."""

    key: AttemptKey
    grant_id: str
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LiftQuarantine:
    """A fence was seen: these quarantined pages are free."""

    key: AttemptKey
    grant_id: str
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FreePages:
    """Reserved pages go back to the pool: no write can reach them."""

    key: AttemptKey
    grant_id: str | None
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AskWriterToStop:
    """Ask for a confirmation that nothing is outstanding. `sender` `None`: ask the router who it is."""

    grant_id: str
    key: AttemptKey
    sender: str | None
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
