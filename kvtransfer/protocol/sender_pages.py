"""What a sender knows of one attempt: its grant, and which extents are sealed, posted and written. Pure."""

from __future__ import annotations

from itertools import repeat

from kvtransfer.extents import PageWrite
from kvtransfer.layout import LayoutId
from kvtransfer.protocol import sender_events as ev
from kvtransfer.protocol.arrivals import ExtentRun
from kvtransfer.protocol.attempts import (
    Batch,
    SealedExtents,
    SenderLimits,
    SenderState,
    UnpostedExtents,
    WrittenExtents,
)
from kvtransfer.protocol.messages import AttemptKey, Commit, Grant
from tandem.core.errors import IllegalTransitionError


class SenderPages:
    """One attempt; what events do to it is `SenderHandoff`'s.

    Args:
        sender: this worker's incarnation.
        receiver: incarnation that the pages are for; only its grant is ever attached.
        num_pages: pages of the whole prompt, those included that the receiver may have already.
    """

    def __init__(
        self,
        key: AttemptKey,
        sender: str,
        receiver: str,
        layout: LayoutId,
        num_pages: int,
        limits: SenderLimits | None = None,
    ) -> None:
        self.key = key
        self.sender = sender
        self.receiver = receiver
        self.layout = layout
        self.num_pages = num_pages
        self.limits = limits or SenderLimits()
        self.state = SenderState.WAITING
        self.grant: Grant | None = None
        self.num_bytes_posted = 0
        self._lease_ends_s = 0.0
        self._sealed = SealedExtents(layout.num_layers, num_pages)
        # Invariant: sealed extents of the grant are in exactly one of _unposted, one batch of _outstanding, _written;
        # after a failed write, or an end, in any or none.
        self._unposted = UnpostedExtents()
        self._outstanding: dict[int, Batch] = {}
        self._written = WrittenExtents(layout.num_layers, num_pages)
        self._parted = 0  # pages of the prompt before this one were told as parts, or are not of the grant
        self._next_write_id = 0
        # Invariant: all and only local pages that this handoff keeps from being evicted or overwritten.
        self._held: set[int] = set()
        self._all_computed: ev.AllComputed | None = None
        self._commit: Commit | None = None
        self._committed_s = 0.0
        self._sent_s = 0.0
        self._history: list[str] = []
        self._out: list[ev.SenderInstruction] = []

    # ---- looking

    def may_post(self, now_s: float) -> bool:
        """Whether the grant holds; ask right before each post, from any thread."""
        return self.state is SenderState.SENDING and now_s < self._lease_ends_s - self.limits.lease_margin_s

    @property
    def needs_lease(self) -> bool:
        """Whether it may still post, or its commit is unanswered; from any thread. Else a renewal is of no use."""
        return self.state in (SenderState.WAITING, SenderState.SENDING, SenderState.COMMITTED)

    @property
    def num_held_pages(self) -> int:
        """Local pages that it keeps; in DRAINING those that outstanding writes may still read."""
        return len(self._held)

    @property
    def wants_room(self) -> bool:
        """Whether it has something to post: `RoomGiven` is for those who do."""
        return self.state is SenderState.SENDING and self._unposted.num_extents > 0

    def num_bytes_draining(self, grant_id: str) -> int:
        """Bytes of this grant that may still arrive, though the attempt has failed."""
        if self.state is not SenderState.DRAINING or self.grant is None or self.grant.grant_id != grant_id:
            return 0
        return sum(batch.num_bytes for batch in self._outstanding.values())

    def next_deadline_s(self) -> float | None:
        """When the next `Tick` is due; `None` while time alone changes nothing."""
        if self.state is SenderState.SENDING:
            return self._lease_ends_s - self.limits.lease_margin_s
        if self.state is SenderState.COMMITTED:
            return min(self._sent_s + self.limits.resend_s, self._committed_s + self.limits.answer_timeout_s)
        return None

    # ---- its state

    def _illegal(self, what: str) -> IllegalTransitionError:
        history = " → ".join([*self._history, self.state.value])
        return IllegalTransitionError(f"handoff {self.key}: {what}; history: {history}", request_id=self.key.request_id)

    def _move(self, state: SenderState) -> None:
        self._history.append(self.state.value)
        self.state = state

    # ---- extents

    def _take_sealed(self, event: ev.PagesSealed) -> list[ExtentRun]:
        try:
            fresh = self._sealed.add(event.first_layer, event.first_index, event.local_pages, event.digests)
        except ValueError as error:
            raise self._illegal(str(error)) from error
        self._held.update(event.local_pages)
        return fresh

    def _post_batch(self, grant: Grant, runs: tuple[ExtentRun, ...]) -> None:
        first_page, writes = grant.first_page, list[PageWrite]()
        for layer, first, num in runs:
            local = self._sealed.local_pages(first, num)
            writes += map(PageWrite, repeat(layer), local, grant.pages[first - first_page :])
        write_id = self._next_write_id
        self._next_write_id += 1
        num_bytes = len(writes) * self.layout.extent_bytes
        self._outstanding[write_id] = Batch(runs, frozenset(w.local_page for w in writes), num_bytes)
        self.num_bytes_posted += num_bytes
        in_grant = tuple(ExtentRun(layer, first - first_page, num) for layer, first, num in runs)
        self._out.append(ev.PostWrites(write_id, grant, tuple(writes), in_grant, num_bytes))

    def _require_issued(self, write_id: int) -> None:
        if not 0 <= write_id < self._next_write_id:
            raise self._illegal(f"write {write_id} was never asked for")

    def _busy_pages(self) -> set[int]:
        return {page for batch in self._outstanding.values() for page in batch.pages}

    def _release(self, pages: set[int]) -> None:
        if pages:
            self._out.append(ev.ReleasePages(self.key, tuple(sorted(pages))))
            self._held = self._held - pages
