"""Drives the sender's half of every handoff: what the protocol instructs becomes writes, calls and events.

In a worker all of it runs on the transfer thread, which alone owns the handoffs and the transport. Calls to decode
workers and events to routers leave through the event loop, pages go back through the runner.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kvtransfer.extents import ArenaShape, TakeDigests, merge_extents
from kvtransfer.layout import LayoutId
from kvtransfer.protocol import sender_events as ev
from kvtransfer.protocol.arrivals import WriteTag
from kvtransfer.protocol.attempts import SenderLimits, SenderState
from kvtransfer.protocol.link import Link
from kvtransfer.protocol.link_window import LinkLimits
from kvtransfer.protocol.messages import AttemptKey, FirstToken, Grant
from kvtransfer.protocol.sender import SenderHandoff
from kvtransfer.transports.events import (
    GreetingArrived,
    LinkBroken,
    MessageArrived,
    PeerId,
    ThreadEvent,
    WriteArrived,
    WriteCompleted,
    WriteFailed,
    WritePosted,
)
from prefill_worker.handoff_entry import HandoffEntry
from prefill_worker.links import Links
from prefill_worker.sealed_digests import SealedDigests
from prefill_worker.sending import SealedPages, SenderCallbacks
from tandem.core import fault_points
from tandem.core.clock import Clock

_log = logging.getLogger(__name__)

# What is under way to a decode worker may take this long to drain, in seconds, also where there is no time of grace.
_LEAST_DRAIN_S = 0.1


class SenderDriver:
    """All handoffs that this worker sends.

    Args:
        take_digests: of extents of this worker's arena.
        write: queues a write on the transport (`TransferThread.write`).
        peer: the transport's peer and the shape of its arena, for a receiver's incarnation that is paired.
    """

    def __init__(
        self,
        *,
        incarnation: str,
        layout: LayoutId,
        shape: ArenaShape,
        take_digests: TakeDigests,
        limits: SenderLimits,
        callbacks: SenderCallbacks,
        write: Callable[..., None],
        peer: Callable[[str], tuple[PeerId, ArenaShape] | None],
        clock: Clock,
    ) -> None:
        self._incarnation = incarnation
        self._layout = layout
        self._shape = shape
        # Of all pages that this worker computed: a page that is sent later, or once more, is not read again.
        self._digests = SealedDigests(take_digests, shape)
        self._limits = limits
        self._callbacks = callbacks
        self._write = write
        self._peer = peer
        self._now = clock.now
        self._entries: dict[AttemptKey, HandoffEntry] = {}
        self._by_number: dict[int, HandoffEntry] = {}
        self._next_number = 0
        self._replacement_asked = False
        link_limits = LinkLimits(
            batch_bytes=limits.batch_bytes,
            drain_s=max(_LEAST_DRAIN_S, limits.grace_s / 4),
            write_timeout_s=limits.write_timeout_s,
        )
        self._links = Links(link_limits, callbacks.links_changed)
        self._is_giving_turns = False
        self._due_s: float | None = None  # when the next tick is. Invariant: nothing is due before it
        # Who waits for failed handoffs, and for which. Invariant: each for one that is here.
        self._drains: list[tuple[set[AttemptKey], Callable[[], object]]] = []
        self.num_bytes_written = 0
        self.num_stops_ignored = 0  # asked for without the grant's capability

    @property
    def num_handoffs(self) -> int:
        return len(self._entries)

    # -- what happens to a handoff

    def open(self, key: AttemptKey, num_pages: int, receiver: str) -> None:
        """A prompt of `num_pages` pages may be computed here for decode worker `receiver`; idempotent."""
        if key in self._entries:
            return
        handoff = SenderHandoff(key, self._incarnation, receiver, self._layout, num_pages, self._limits)
        entry = HandoffEntry(handoff, self._next_number)
        self._next_number += 1
        self._entries[key] = entry
        self._by_number[entry.number] = entry

    def attached(self, key: AttemptKey, grant: Grant, lease_ends_s: float) -> None:
        """Decode took this worker as the grant's writer."""
        if key not in self._entries:
            # The attempt ended while decode was asked: tell decode that nothing will be written.
            self._callbacks.confirm_idle(ev.ConfirmIdle(key, grant.grant_id, grant.receiver, grant.capability))
            return
        self._handle(key, ev.GrantAttached(grant, lease_ends_s))

    def computed_layers(self, layers: range, pages: Sequence[int], sealed: Sequence[SealedPages] = ()) -> None:
        """A step has filled these pages, of any prompts, in these layers, and of these some are sealed by that; comes
        before `sealed` tells of others."""
        for layer in layers:
            self._digests.take(layer, pages)
        self.sealed(sealed)

    def sealed(self, pages: Sequence[SealedPages]) -> None:
        """Send, as soon as there is a grant."""
        for part in pages:
            # Pages are shared with the driver once, with their first layer.
            entry, is_first = self._entries.get(part.key), part.layers[0] == 0
            if entry is None or entry.released:
                if is_first:
                    self._callbacks.release(part.local_pages)
                continue
            if not is_first and not entry.pages.issuperset(part.local_pages):
                continue  # of a handoff that ended during this step; the attempt's start came again, and opened another
            entry.pages.update(part.local_pages)
            digests = self._digests.of(part.layers, part.local_pages)
            self._handle(part.key, ev.PagesSealed(part.layers[0], part.first_index, part.local_pages, digests))

    def computed(self, key: AttemptKey, first_tokens: tuple[FirstToken, ...], computed_s: float) -> None:
        """The prompt was computed at `computed_s` of this clock, and all its pages were sealed."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.computed_s = computed_s
            self._handle(key, ev.AllComputed(first_tokens))

    def wait_taken(self) -> None:
        """Nothing to wait for: the caller runs in the driver's own thread."""

    def cancel(self, key: AttemptKey) -> None:
        """End this attempt, whether it had begun or not."""
        self.happened(key, ev.CancelRequested())

    def verified(self, key: AttemptKey, verified_at_s: float) -> None:
        """Decode, on this host, has verified the pages at this time of the clock that both share."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.verified_at_s = verified_at_s

    def has_asked(self, key: AttemptKey, receiver: str, grant_id: str) -> bool:
        """Whether the attempt goes on and has this grant of this decode worker, so that its answer counts."""
        entry = self._entries.get(key)
        grant = entry.handoff.grant if entry is not None else None
        return grant is not None and (grant.receiver, grant.grant_id) == (receiver, grant_id)

    def happened(self, key: AttemptKey, event: ev.SenderEvent) -> None:
        """Any other event: answers of decode, for one."""
        if key in self._entries:
            self._handle(key, event)

    def stop_asked(self, key: AttemptKey, asked: ev.StopAsked) -> int:
        """Decode wants to hear that nothing of the grant is outstanding.

        Returns:
            Bytes of the grant that are still under way. 0 is no answer: that nothing is outstanding is confirmed by
            itself.
        """
        entry = self._entries.get(key)
        if entry is None:
            self._callbacks.confirm_idle(ev.ConfirmIdle(key, asked.grant_id, asked.receiver, asked.capability))
            return 0
        self._handle(key, asked)
        return entry.handoff.num_bytes_draining(asked.grant_id)

    def needs_lease(self, key: AttemptKey) -> bool:
        """Whether renewing the lease of this attempt is of any use; from any thread."""
        entry = self._entries.get(key)
        return entry is not None and entry.handoff.needs_lease

    def receiver_lost(self, receiver: str) -> None:
        """A decode worker's process has ended."""
        self._links.forget(receiver)
        for key in [k for k, e in self._entries.items() if e.receiver == receiver]:
            self._handle(key, ev.ReceiverExited())

    def link_closed(self, receiver: str) -> None:
        """The connection to a decode worker that lives was closed, and decode knows it."""
        # All hear of it before any of them posts again.
        for entry in [e for e in self._entries.values() if e.receiver == receiver]:
            self._feed(entry, ev.LinkClosed())
        if (link := self._links.get(receiver)) is not None:
            link.close()
            self._give_turns(link)

    def when_drained(self, receiver: str, tell: Callable[[], object]) -> None:
        """Call `tell` once no write is outstanding to this decode worker of handoffs that have failed by now."""
        staying = {
            key for key, e in self._entries.items() if e.receiver == receiver and e.draining_since_s is not None
        }
        if staying:
            self._drains.append((staying, tell))
        else:
            tell()

    def _note_drained(self, key: AttemptKey) -> None:
        for staying, tell in list(self._drains):
            staying.discard(key)
            if not staying:
                self._drains.remove((staying, tell))
                tell()

    def on_transport(self, event: ThreadEvent) -> None:
        """A write was posted, ended or failed."""
        if isinstance(event, LinkBroken):  # its writes fail one by one
            return
        if isinstance(event, WriteArrived | MessageArrived | GreetingArrived):
            _log.warning("%s wrote or spoke to a prefill worker, which takes no pages: ignored", event.peer)
            return
        tag = WriteTag.unpack(event.handle.tag)
        entry = self._by_number.get(tag.handoff)
        if entry is None:
            return
        key, write_id, link, now_s = entry.handoff.key, tag.write_id, self._link_of(entry), self._now()
        match event:
            case WritePosted():
                fault_points.reach("prefill.sending")
                return
            case WriteCompleted():
                self.num_bytes_written += event.handle.num_bytes
                entry.write_ended(write_id, event.handle.num_bytes, now_s)
                if entry.draining_since_s is not None:
                    entry.draining_since_s = now_s
                if link is not None:
                    link.complete(key, write_id, now_s)
                self._handle(key, ev.WriteCompleted(write_id))
            case WriteFailed():
                if link is not None:
                    link.fail(key, write_id)
                failed = ev.WriteFailed(write_id, event.error, event.settled, event.is_link_broken)
                self._handle(key, failed)
        self._links.tell_news(event.handle.peer, now_s)

    def tick(self) -> None:
        """A deadline may have come."""
        for receiver in dict.fromkeys(entry.receiver for entry in self._entries.values()):
            if receiver is not None and (link := self._links.get(receiver)) is not None:
                self._end_overdue(receiver, link)
        for key in list(self._entries):
            self._handle(key, ev.Tick())
        self._check_quarantine()
        self._due_s = None
        self._callbacks.deadline(None)
        for entry in self._entries.values():
            self._expect_ticks_of(entry)

    def _end_overdue(self, receiver: str, link: Link) -> None:
        """Give up the handoffs whose writes have had their time, and have the connection tried, and closed if it does
        not carry: else what hangs of attempts that have ended already would never end."""
        now_s = self._now()
        overdue = link.find_overdue(now_s)
        if overdue is None:
            return
        for key in overdue.keys:
            if (entry := self._entries.get(key)) is not None:
                self._feed(entry, ev.WriteOverdue(overdue.detail))
        self._callbacks.link_hangs(receiver, overdue.detail)
        self._give_turns(link)
        self._links.tell_news(receiver, now_s)

    def _check_quarantine(self) -> None:
        """Ask for a new process where writes of failed attempts do not end: they may never do so if a host is lost."""
        before_s = self._now() - self._limits.grace_s
        entries = self._entries.values()
        staying = (e for e in entries if e.draining_since_s is not None and e.draining_since_s <= before_s)
        num_pages = sum(entry.handoff.num_held_pages for entry in staying)
        over = num_pages > self._limits.quarantine_cap_pages
        if over and not self._replacement_asked:
            self._callbacks.replace_self(num_pages)
        self._replacement_asked = over

    # -- carrying out

    def _handle(self, key: AttemptKey, event: ev.SenderEvent) -> None:
        entry = self._entries[key]
        self._feed(entry, event)
        if (link := self._link_of(entry)) is not None:
            self._give_turns(link)

    def _give_turns(self, link: Link) -> None:
        """Let those post who wait for this link, as far as it has room."""
        if self._is_giving_turns:  # whoever does goes on
            return
        self._is_giving_turns = True
        try:
            while (turn := link.next_turn()) is not None:
                key, num_bytes = turn
                self._feed(self._entries[key], ev.RoomGiven(num_bytes))
        finally:
            self._is_giving_turns = False

    def _feed(self, entry: HandoffEntry, event: ev.SenderEvent) -> None:
        key, handoff = entry.handoff.key, entry.handoff
        for instruction in handoff.handle(event, self._now()):
            self._carry_out(entry, instruction)
        if handoff.wants_room and handoff.grant is not None:
            self._links.open(handoff.grant.receiver).want(key)
        elif (link := self._link_of(entry)) is not None:
            link.leave(key)
        if handoff.state is SenderState.DONE and not entry.released:
            entry.released = True
            self._callbacks.release(tuple(sorted(entry.pages)))
            # Unsettled writes keep the handoff in DRAINING, so nothing can refer to it now but late messages.
            del self._entries[key]
            del self._by_number[entry.number]
            self._callbacks.closed(key)
            self._note_drained(key)
        elif handoff.state is SenderState.DRAINING and entry.draining_since_s is None:
            entry.draining_since_s = self._now()
        self._expect_ticks_of(entry)

    def _link_of(self, entry: HandoffEntry) -> Link | None:
        receiver = entry.receiver
        return self._links.get(receiver) if receiver is not None else None

    def _expect_ticks_of(self, entry: HandoffEntry) -> None:
        self._expect_tick(entry.handoff.next_deadline_s())
        # An overdue write matters to whoever waits for it, for its room, or for its end after a failure.
        if (link := self._link_of(entry)) is not None:
            self._expect_tick(link.next_deadline_s())
        if entry.draining_since_s is not None and entry.handoff.state is SenderState.DRAINING:
            due_s = entry.draining_since_s + self._limits.grace_s
            self._expect_tick(due_s if due_s > self._now() else None)

    def _expect_tick(self, due_s: float | None) -> None:
        """Have `tick` called then, if it is not called sooner. No event looks at other handoffs than its own: that
        something is due later by now, or not any more, is found by the tick that it was due for."""
        if due_s is not None and (self._due_s is None or due_s < self._due_s):
            self._due_s = due_s
            self._callbacks.deadline(due_s)

    def _carry_out(self, entry: HandoffEntry, instruction: ev.SenderInstruction) -> None:
        key = entry.handoff.key
        match instruction:
            case ev.PostWrites():
                self._post(entry, instruction)
            case ev.SendCommitPart():
                self._callbacks.commit_part(instruction.part)
            case ev.SendCommit():
                again, entry.has_committed = entry.has_committed, True
                entry.committed_s = entry.committed_s or self._now()
                if not again:
                    fault_points.reach("prefill.written")
                self._callbacks.commit(instruction.commit, again=again)
            case ev.ConfirmIdle():
                self._callbacks.confirm_idle(instruction)
            case ev.IgnoreStop():
                self.num_stops_ignored += 1
                _log.warning("a stop of %s without its capability is ignored", instruction.grant_id)
            case ev.Succeed():
                self._callbacks.succeeded(key, entry.stats(self._now()))
                fault_points.reach("prefill.acked")
            case ev.Fail():
                self._callbacks.failed(instruction)
            case ev.QuarantinePages():
                self._callbacks.quarantine(instruction.pages)
            case ev.ReleasePages():
                pass  # all at once when the handoff is done, see `_handle`

    def _post(self, entry: HandoffEntry, post: ev.PostWrites) -> None:
        key, write_id = entry.handoff.key, post.write_id
        tag = WriteTag(entry.number, write_id, post.grant.epoch, post.runs).pack()
        peer = self._peer(post.grant.receiver)
        if peer is None:
            self._feed(entry, ev.WriteFailed(write_id, "the receiver is gone", settled=True))
            self._links.forget(post.grant.receiver)
            return
        name, remote_shape = peer
        try:
            descriptors = merge_extents(post.writes, self._shape, remote_shape)
        except ValueError as error:  # the grant names pages that its receiver does not have
            self._feed(entry, ev.WriteFailed(write_id, str(error), settled=True))
            return
        self._links.open(post.grant.receiver).post(key, write_id, post.num_bytes, self._now())
        entry.num_descriptors += len(descriptors)
        entry.num_extents += len(post.writes)

        def may_post() -> bool:
            # Before the post: over shared memory the post itself copies the pages.
            now_s = self._now()
            if not entry.handoff.may_post(now_s):
                return False
            entry.first_post_s = entry.first_post_s or now_s
            entry.posted_s[write_id] = now_s
            return True

        self._write(name, descriptors, tag, may_post=may_post)
