"""One attempt of a sender: its states, its limits, and what it remembers of extents and batches."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class SenderState(Enum):
    WAITING = "waiting"  # no grant yet; sealed extents pile up
    SENDING = "sending"  # granted: extents are posted as they are sealed
    COMMITTED = "committed"  # every extent is written; waiting for the answer
    DRAINING = "draining"  # failed, and writes are outstanding
    DONE = "done"  # released everything


@dataclass(frozen=True, slots=True)
class SenderLimits:
    """Times in seconds.

    Attributes:
        lease_margin_s: nothing is posted this close to the end of the lease.
        write_timeout_s: a batch may take this long; a stopped receiver shows as "in progress" for ever.
        resend_s: between repeated commits while no answer comes.
        answer_timeout_s: how long the first commit may go unanswered.
    """

    lease_margin_s: float = 0.5
    write_timeout_s: float = 10.0
    resend_s: float = 1.0
    answer_timeout_s: float = 10.0


@dataclass(slots=True)
class SealedExtent:
    local_page: int
    digest: int


@dataclass(slots=True)
class Batch:
    """One `PostWrites` that is not settled."""

    extents: tuple[tuple[int, int], ...]  # (layer, index)
    pages: frozenset[int]
    since_s: float  # issued, or posted when that is known
