"""What can happen to a receiver's grants (past tense), and what it tells its worker to do (imperative)."""

from __future__ import annotations

from dataclasses import dataclass

from kvtransfer.protocol.messages import AttemptKey, Commit, CommitPart, Grant, RefusalReason

# ---- events


class ReceiverEvent:
    """Something has happened to a receiver's grants."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class ReserveReceived(ReceiverEvent):
    """The router asks for pages. Idempotent by key."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class ReservationGranted(ReceiverEvent):
    """The worker's page accounting took `pages` out of the pool for this attempt."""

    key: AttemptKey
    pages: tuple[int, ...]
    first_page: int = 0


@dataclass(frozen=True, slots=True)
class ReservationDenied(ReceiverEvent):
    """The worker will never give pages to this attempt."""

    key: AttemptKey
    reason: RefusalReason


@dataclass(frozen=True, slots=True)
class GrantGivenOut(ReceiverEvent):
    """A writer asks to attach to the grant; from here on it may write.

    Feed this *before* any answer leaves that lets it post. `sender` is its incarnation.
    """

    grant_id: str
    sender: str
    capability: bytes


@dataclass(frozen=True, slots=True)
class LeaseRenewed(ReceiverEvent):
    """The writer still means to use the grant; the lease starts anew."""

    grant_id: str
    sender: str
    capability: bytes


@dataclass(frozen=True, slots=True)
class PartReceived(ReceiverEvent):
    part: CommitPart


@dataclass(frozen=True, slots=True)
class PartVerified(ReceiverEvent):
    """The check that `VerifyPart` asked for is over. `mismatches` are (layer, page); none means all agree."""

    grant_id: str
    part: CommitPart
    mismatches: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class CommitReceived(ReceiverEvent):
    commit: Commit


@dataclass(frozen=True, slots=True)
class DigestsVerified(ReceiverEvent):
    """The check that `VerifyDigests` asked for is over. `mismatches` are (layer, page); none means all agree."""

    grant_id: str
    mismatches: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class RequestCancelled(ReceiverEvent):
    """The attempt was cancelled: its client left, or the router released it."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class WriterConfirmedIdle(ReceiverEvent):
    """A fence: the writer has nothing outstanding for this grant and will post nothing more."""

    grant_id: str
    sender: str
    capability: bytes


@dataclass(frozen=True, slots=True)
class WriterDraining(ReceiverEvent):
    """The writer answers that it has stopped, and that so many bytes of the grant are still under way. No fence."""

    grant_id: str
    sender: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class LinkClosed(ReceiverEvent):
    """The writer has closed the connection by which it wrote, as we have. No fence: bytes may have to land yet. But
    it is not silent, and nothing more goes by that connection."""

    sender: str


@dataclass(frozen=True, slots=True)
class WriterExited(ReceiverEvent):
    """A fence for all its grants: the writer's process has ended, seen on its own host."""

    sender: str


@dataclass(frozen=True, slots=True)
class Tick(ReceiverEvent):
    """Time has passed; see `ReceiverHandoffs.next_deadline_s`."""


# ---- instructions


class ReceiverInstruction:
    """Something is to be done."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class QueueReservation(ReceiverInstruction):
    """Answer with `ReservationGranted` or `ReservationDenied` when the pool has decided."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class DropReservation(ReceiverInstruction):
    """Take the attempt out of the reservation queue."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class SendGrant(ReceiverInstruction):
    """Answer the router's Reserve."""

    grant: Grant


@dataclass(frozen=True, slots=True)
class ConfirmAttached(ReceiverInstruction):
    """Answer the writer that asked to attach: it may post until its lease ends."""

    grant: Grant
    sender: str


@dataclass(frozen=True, slots=True)
class ConfirmRenewed(ReceiverInstruction):
    """Answer the writer's renewal."""

    grant_id: str
    lease_s: float


@dataclass(frozen=True, slots=True)
class ExpectWrites(ReceiverInstruction):
    """Writes into `pages` of every layer may arrive: poll the transport and, where it checks, allow them."""

    grant_id: str
    sender: str
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EndWrites(ReceiverInstruction):
    """No write of this grant can arrive any more. Follows each `ExpectWrites` exactly once."""

    grant_id: str


@dataclass(frozen=True, slots=True)
class VerifyPart(ReceiverInstruction):
    """Compare these pages with the part's digests (see `ArrivedDigests`), answer with `PartVerified`.

    The grant may end meanwhile, and its pages go: then the answer changes nothing.
    """

    grant_id: str
    part: CommitPart
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ConfirmPart(ReceiverInstruction):
    """Answer the part: these pages are verified."""

    grant_id: str


@dataclass(frozen=True, slots=True)
class VerifyDigests(ReceiverInstruction):
    """Compare the pages with these digests (see `ArrivedDigests`), answer with `DigestsVerified`.

    The pages stay until then. `digests` are `[layer][index into pages]`.
    """

    grant_id: str
    pages: tuple[int, ...]
    digests: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class AdmitRequest(ReceiverInstruction):
    """The pages are right and belong to the request from now on."""

    grant: Grant
    commit: Commit


@dataclass(frozen=True, slots=True)
class SendAck(ReceiverInstruction):
    """Answer the commit: admitted; the sender may release its pages."""

    key: AttemptKey
    grant_id: str


@dataclass(frozen=True, slots=True)
class SendRefusal(ReceiverInstruction):
    """Answer whatever was asked about this attempt: no."""

    key: AttemptKey | None
    grant_id: str | None
    reason: RefusalReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class QuarantinePages(ReceiverInstruction):
    """The grant has ended. Reserved `pages` may still be written: nobody gets them before `LiftQuarantine`.

    `verified`, as (index in the grant, page) in order, hold what was sealed and no write can reach them: they may be
    kept for what is in them. Same in `FreePages`.
    """

    key: AttemptKey
    grant_id: str
    pages: tuple[int, ...]
    verified: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class LiftQuarantine(ReceiverInstruction):
    """A fence was seen: these quarantined pages are free."""

    key: AttemptKey
    grant_id: str
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FreePages(ReceiverInstruction):
    """The grant has ended. Reserved pages go back to the pool: no write can reach them."""

    key: AttemptKey
    grant_id: str | None
    pages: tuple[int, ...]
    verified: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class AskWriterToStop(ReceiverInstruction):
    """Ask for a confirmation that nothing is outstanding.

    The grant's capability goes along: the writer confirms with it, also when it never heard the grant's answer.
    """

    grant: Grant
    sender: str
    reason: RefusalReason


@dataclass(frozen=True, slots=True)
class KillWriter(ReceiverInstruction):
    """The writer stayed silent beyond lease and grace, or drains no further: have it killed on its node.

    Answer with `WriterExited` when it is gone, also when it was gone long before: its attach may have been late.
    """

    sender: str


@dataclass(frozen=True, slots=True)
class ReplaceSelf(ReceiverInstruction):
    """Quarantine is above its cap: only a new process of this worker frees the pages."""

    num_quarantined_pages: int
