"""What the two ends of a handoff say to each other, and the reasons for which one ends without pages.

    router   ── Reserve ──> receiver       receiver ── Grant ──> router ──> sender
    sender   ── Attach ───> receiver       the receiver learns who will write; only then may the sender post
    sender   ══ pages ════> receiver       one-sided writes, while the prefill computes
    sender   ── CommitPart> receiver       whole pages that are written already, while others are still computed
    sender   ── Commit ───> receiver       receiver ── Ack | Refusal ──> sender
    receiver ── Stop ─────> sender         sender   ── Idle ──> receiver

The *receiver* is the decode worker, the *sender* the prefill worker. No message is trusted to arrive, to arrive once
or to arrive in order. All that a sender says about a grant carries the grant's capability.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvtransfer.layout import LayoutId


@dataclass(frozen=True, slots=True)
class AttemptKey:
    """One try at one request. A retry is a new attempt with new pages at both ends."""

    request_id: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id}#{self.attempt}"


@dataclass(frozen=True, slots=True)
class Grant:
    """What decode lets prefill write.

    Attributes:
        grant_id: unique over all incarnations.
        epoch: rises with every grant of one receiver; a commit must name it.
        receiver: incarnation of the decode worker; also its transport's agent name.
        pages: the receiver's pages, in prompt order.
        first_page: how many leading prompt pages the receiver has already; `pages[0]` takes prompt page `first_page`.
        lease_s: how long the grant holds from the moment the receiver learns of its writer, in seconds. The sender
            counts from when it *sent* that message, so its lease ends first.
        capability: proof of having been given this grant; see `kvtransfer.protocol.capability`.
    """

    grant_id: str
    key: AttemptKey
    epoch: int
    receiver: str
    layout: LayoutId
    pages: tuple[int, ...]
    lease_s: float
    first_page: int = 0
    capability: bytes = b""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The token that prefill sampled for one choice."""

    choice: int
    token_id: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Every write of this grant has completed and none will follow.

    Attributes:
        sender: incarnation of the prefill worker.
        pages: the granted pages that were written, in prompt order.
        digests: `[layer][index into pages]`, of the bytes as they were sealed.
    """

    grant_id: str
    key: AttemptKey
    epoch: int
    receiver: str
    sender: str
    layout: LayoutId
    pages: tuple[int, ...]
    digests: tuple[tuple[int, ...], ...]
    first_tokens: tuple[FirstToken, ...] = ()
    capability: bytes = b""


@dataclass(frozen=True, slots=True)
class CommitPart:
    """Every write of these pages has completed and none will follow, whatever becomes of the others.

    Best effort: sent once, and a lost one costs nothing, because the commit names all pages.

    Attributes:
        first_index: of the part's first page among the grant's pages; the others follow it.
        digests: `[layer][index in the part]`, of the bytes as they were sealed.
    """

    grant_id: str
    key: AttemptKey
    epoch: int
    receiver: str
    sender: str
    first_index: int
    digests: tuple[tuple[int, ...], ...]
    capability: bytes = b""


class RefusalReason(Enum):
    """Why a receiver will not take the pages of an attempt."""

    UNKNOWN_GRANT = "unknown_grant"  # never given, or forgotten long after it ended
    STALE_ATTEMPT = "stale_attempt"  # a newer attempt of the same request was reserved here
    WRONG_EPOCH = "wrong_epoch"
    WRONG_ATTEMPT = "wrong_attempt"  # the message names a grant of another attempt
    WRONG_RECEIVER = "wrong_receiver"  # meant for another incarnation
    WRONG_SENDER = "wrong_sender"  # another writer is attached to the grant
    BAD_CAPABILITY = "bad_capability"  # the message does not prove that its sender was given the grant
    NOT_ATTACHED = "not_attached"  # written without telling the receiver
    LAYOUT_MISMATCH = "layout_mismatch"
    INCOMPLETE = "incomplete"  # an extent of the grant is missing from the commit
    OUTSIDE_GRANT = "outside_grant"  # the commit names an extent that was not granted
    DIGEST_MISMATCH = "digest_mismatch"
    LEASE_EXPIRED = "lease_expired"
    CANCELLED = "cancelled"
    WRITER_STOPPED = "writer_stopped"  # the writer said it would not go on
    WRITER_EXITED = "writer_exited"
    ALREADY_ENDED = "already_ended"  # attach or renewal after the commit
    NO_ROOM = "no_room"  # the reservation queue is full, or the prompt can never fit
    DRAINING = "draining"  # the receiver takes no new work

    @property
    def retryable(self) -> bool:
        """Whether a new attempt makes sense."""
        return self not in (RefusalReason.CANCELLED, RefusalReason.STALE_ATTEMPT, RefusalReason.LAYOUT_MISMATCH)


class FailureReason(Enum):
    """Why a sender gave an attempt up."""

    CANCELLED = "cancelled"
    REFUSED = "refused"  # the receiver said no; the refusal reason goes with it
    LEASE_LOST = "lease_lost"
    STOP_ASKED = "stop_asked"
    WRITE_FAILED = "write_failed"
    LINK_BROKEN = "link_broken"  # the connection broke while both workers live; it is being made anew
    WRITE_TIMEOUT = "write_timeout"
    NO_ANSWER = "no_answer"  # commits went unanswered
    RECEIVER_EXITED = "receiver_exited"
    GRANT_MISMATCH = "grant_mismatch"  # layout or number of pages is not what the prompt needs
    INCOMPLETE = "incomplete"  # computing ended without sealing every granted page
    OUT_OF_ORDER = "out_of_order"  # an acknowledgement for something never committed

    @property
    def retryable(self) -> bool:
        """Whether a new attempt makes sense (`REFUSED` depends on the refusal)."""
        return self not in (FailureReason.CANCELLED, FailureReason.GRANT_MISMATCH, FailureReason.INCOMPLETE)
