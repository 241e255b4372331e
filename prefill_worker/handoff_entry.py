"""What the sender driver keeps of one handoff beside its state machine."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtransfer.protocol.sender import SenderHandoff
from prefill_worker.events import HandoffStats
from tandem.worker.spans import Spans


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
    posted_s: dict[int, float] = field(default_factory=dict)  # by write
    committed_s: float | None = None
    spans: Spans = field(default_factory=Spans)
    num_descriptors: int = 0
    num_extents: int = 0

    @property
    def receiver(self) -> str | None:
        """Incarnation of the decode worker that gave the grant; `None`: there is no grant yet."""
        return self.handoff.grant.receiver if self.handoff.grant else None

    def write_ended(self, write_id: int, num_bytes: int, now_s: float) -> None:
        self.spans.add("transfer", self.posted_s.pop(write_id, now_s), now_s, num_bytes)

    def stats(self, now_s: float) -> HandoffStats:
        """Of a handoff that decode has just acknowledged."""
        self.spans.add("commit", self.committed_s or now_s, now_s, 0)
        return HandoffStats(
            num_bytes=self.handoff.num_bytes_posted,
            num_extents=self.num_extents,
            num_descriptors=self.num_descriptors,
            handoff_s=now_s - (self.first_post_s or now_s),
            exposed_s=now_s - self.computed_s,
            answer_s=now_s - (self.verified_at_s or now_s),
            spans=tuple(self.spans.kept),
        )
