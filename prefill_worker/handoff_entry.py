"""What the sender driver keeps of one handoff beside its state machine."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtransfer.protocol.sender import SenderHandoff
from prefill_worker.events import HandoffStats


@dataclass(slots=True)
class HandoffEntry:
    handoff: SenderHandoff
    number: int  # in the tags of its writes
    # All pages ever sealed for it: the driver holds them until the handoff is done.
    pages: set[int] = field(default_factory=set)
    released: bool = False
    # Set when the attempt has failed and its writes have not ended: since then, or since one of them has ended.
    draining_since_s: float | None = None
    has_committed: bool = False
    first_post_s: float | None = None
    computed_s: float = 0.0
    verified_at_s: float | None = None
    num_descriptors: int = 0
    num_extents: int = 0

    @property
    def receiver(self) -> str | None:
        """Incarnation of the decode worker that gave the grant; `None`: there is no grant yet."""
        return self.handoff.grant.receiver if self.handoff.grant else None

    def stats(self, now_s: float) -> HandoffStats:
        return HandoffStats(
            num_bytes=self.handoff.num_bytes_posted,
            num_extents=self.num_extents,
            num_descriptors=self.num_descriptors,
            handoff_s=now_s - (self.first_post_s or now_s),
            exposed_s=now_s - self.computed_s,
            answer_s=now_s - (self.verified_at_s or now_s),
        )
