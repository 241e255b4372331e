"""What can happen to a sender's handoff (past tense), and what it tells its worker to do (imperative)."""

from __future__ import annotations

from dataclasses import dataclass

from kvtransfer.extents import PageWrite
from kvtransfer.protocol.arrivals import ExtentRun
from kvtransfer.protocol.messages import AttemptKey, Commit, CommitPart, FailureReason, FirstToken, Grant, RefusalReason

# ---- events


class SenderEvent:
    """Something has happened to a sender's handoff."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class GrantAttached(SenderEvent):
    """The receiver confirmed that it knows this worker as the grant's writer.

    `lease_ends_s`: this worker's clock when it *sent* the attach message, plus the grant's lease.
    """

    grant: Grant
    lease_ends_s: float


@dataclass(frozen=True, slots=True)
class LeaseExtended(SenderEvent):
    """The receiver confirmed a renewal; counted like `GrantAttached.lease_ends_s`."""

    grant_id: str
    lease_ends_s: float


@dataclass(frozen=True, slots=True)
class PagesSealed(SenderEvent):
    """Nothing will change these extents any more; their digests were taken now, before any post.

    Attributes:
        first_layer: of one or several layers.
        first_index: place of `local_pages[0]` among the prompt's pages; the others follow it.
        digests: `[layer - first_layer][index into local_pages]`.
    """

    first_layer: int
    first_index: int
    local_pages: tuple[int, ...]
    digests: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class RoomGiven(SenderEvent):
    """The turn of this handoff on the link to its receiver has come: one batch of at most `num_bytes` may be posted."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class WriteCompleted(SenderEvent):
    """Every byte of the batch is in the receiver's memory."""

    write_id: int


@dataclass(frozen=True, slots=True)
class WriteFailed(SenderEvent):
    """The batch will not complete.

    Attributes:
        settled: no byte of it moves any more (also: it was never posted).
        is_link_broken: because the connection to the receiver is broken.
    """

    write_id: int
    error: str
    settled: bool
    is_link_broken: bool = False


@dataclass(frozen=True, slots=True)
class LinkClosed(SenderEvent):
    """This worker has closed the connection to the receiver, and the receiver knows it: what was outstanding on it is
    settled here. The receiver counts a confirmation only once nothing can be under way any more."""


@dataclass(frozen=True, slots=True)
class WriteOverdue(SenderEvent):
    """A write has had its time and has not ended, or the link carries nothing."""

    detail: str


@dataclass(frozen=True, slots=True)
class AllComputed(SenderEvent):
    """The prefill has ended and every page is sealed; the first token of each choice is sampled."""

    first_tokens: tuple[FirstToken, ...]


@dataclass(frozen=True, slots=True)
class AckReceived(SenderEvent):
    grant_id: str


@dataclass(frozen=True, slots=True)
class RefusalReceived(SenderEvent):
    """The receiver said no: to the attach, a renewal, a part or the commit."""

    reason: RefusalReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class CancelRequested(SenderEvent):
    """The attempt was cancelled, or its first token was its last."""


@dataclass(frozen=True, slots=True)
class StopAsked(SenderEvent):
    """The receiver wants to hear that nothing of this grant is outstanding, with this capability."""

    grant_id: str
    receiver: str
    capability: bytes


@dataclass(frozen=True, slots=True)
class ReceiverExited(SenderEvent):
    """The receiver's process has ended: nothing that is outstanding can do harm there."""


@dataclass(frozen=True, slots=True)
class Tick(SenderEvent):
    """Time has passed; see `SenderHandoff.next_deadline_s`."""


# ---- instructions


class SenderInstruction:
    """Something is to be done."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class PostWrites(SenderInstruction):
    """Post these extents as one batch, if `SenderHandoff.may_post` still says so at that moment.

    From this instruction on the batch counts as outstanding, until `WriteCompleted` or a settled `WriteFailed`.

    Attributes:
        runs: the same extents as the receiver names them, for the write's tag.
        num_bytes: of all of them.
    """

    write_id: int
    grant: Grant
    writes: tuple[PageWrite, ...]
    runs: tuple[ExtentRun, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SendCommitPart(SenderInstruction):
    """Send once; what becomes of it matters only if it is refused."""

    part: CommitPart


@dataclass(frozen=True, slots=True)
class SendCommit(SenderInstruction):
    """Send, or send again."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class ReleasePages(SenderInstruction):
    """The handoff's hold on these source pages ends. Each sealed page is released exactly once."""

    key: AttemptKey
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class QuarantinePages(SenderInstruction):
    """The attempt is over but writes may still read these source pages: keep the hold until `ReleasePages`."""

    key: AttemptKey
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ConfirmIdle(SenderInstruction):
    """Tell the receiver: nothing of this grant is outstanding and nothing will be posted. Repeat until it is heard."""

    key: AttemptKey
    grant_id: str
    receiver: str
    capability: bytes


@dataclass(frozen=True, slots=True)
class Succeed(SenderInstruction):
    """The receiver has admitted the request."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class Fail(SenderInstruction):
    """The attempt is over; said exactly once. `retryable`: a new attempt makes sense."""

    key: AttemptKey
    reason: FailureReason
    retryable: bool
    detail: str = ""
    refusal: RefusalReason | None = None


@dataclass(frozen=True, slots=True)
class IgnoreStop(SenderInstruction):
    """Somebody asks for a stop who was not given the grant: note it, and do nothing."""

    grant_id: str
