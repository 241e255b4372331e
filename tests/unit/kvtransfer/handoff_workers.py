"""The two ends of one handoff, each alone, for tests that feed events and look at what is instructed."""

from __future__ import annotations

from collections.abc import Callable

from handoff_examples import (
    FIRST,
    KEY,
    LAYOUT,
    PAGES,
    RECEIVER,
    SECRET,
    SENDER,
    a_grant,
    commit_for,
    digest_of,
    part_for,
)

from kvtransfer.protocol import receiver_events as rx
from kvtransfer.protocol import sender_events as tx
from kvtransfer.protocol.attempts import SenderLimits
from kvtransfer.protocol.grants import GrantState, ReceiverLimits
from kvtransfer.protocol.messages import AttemptKey, Grant, RefusalReason
from kvtransfer.protocol.receiver import ReceiverHandoffs
from kvtransfer.protocol.sender import SenderHandoff

RECEIVER_LIMITS = ReceiverLimits(lease_s=10, grace_s=5, ask_again_s=1, remember_s=60, quarantine_cap_pages=100)
MISMATCH = ((0, PAGES[1]),)


class ReceivingWorker:
    """A receiver with one attempt on its way, and what it was told to do last."""

    def __init__(self, limits: ReceiverLimits = RECEIVER_LIMITS) -> None:
        self.handoffs = ReceiverHandoffs(RECEIVER, LAYOUT, limits, secret=SECRET)
        self.now_s = 100.0

    def feed(self, *events: rx.ReceiverEvent) -> list[rx.ReceiverInstruction]:
        out: list[rx.ReceiverInstruction] = []
        for event in events:
            out = self.handoffs.handle(event, self.now_s)
        return out

    @property
    def grant(self) -> Grant:
        return self.grant_of(KEY)

    def grant_of(self, key: AttemptKey) -> Grant:
        record = self.handoffs.record(key)
        assert record is not None
        return record.held

    @property
    def state(self) -> GrantState:
        record = self.handoffs.record(KEY)
        assert record is not None
        return record.state

    def reach(self, state: str) -> ReceivingWorker:
        """Bring the attempt into a state by the shortest way."""
        grant_id = f"{RECEIVER}/1"
        steps: dict[str, Callable[[], rx.ReceiverEvent]] = {
            "waiting": lambda: rx.ReserveReceived(KEY),
            "granted": lambda: rx.ReservationGranted(KEY, PAGES),
            "open": lambda: self.event("attach"),
        }
        way = ["waiting", "granted", "open"]
        for name in way[: way.index(state) + 1] if state in way else way:
            self.feed(steps[name]())
        match state:
            case "verifying" | "abandoned" | "admitted":
                self.feed(rx.CommitReceived(commit_for(self.grant)))
                if state == "abandoned":
                    self.feed(rx.RequestCancelled(KEY))
                if state == "admitted":
                    self.feed(rx.DigestsVerified(grant_id))
            case "quarantined":
                self.feed(rx.RequestCancelled(KEY))
            case "refused":
                self.feed(rx.RequestCancelled(KEY), self.event("idle"))
        assert self.state.value == state
        return self

    def event(self, name: str) -> rx.ReceiverEvent:
        grant = self.grant
        return {
            "reserve": lambda: rx.ReserveReceived(KEY),
            "pages": lambda: rx.ReservationGranted(KEY, (1, 2)),
            "denied": lambda: rx.ReservationDenied(KEY, RefusalReason.NO_ROOM),
            "attach": lambda: rx.GrantGivenOut(grant.grant_id, SENDER, grant.capability),
            "attach-other": lambda: rx.GrantGivenOut(grant.grant_id, "prefill-9#1", grant.capability),
            "renew": lambda: rx.LeaseRenewed(grant.grant_id, SENDER, grant.capability),
            "part": lambda: rx.PartReceived(part_for(grant)),
            "part-right": lambda: rx.PartVerified(grant.grant_id, part_for(grant)),
            "part-wrong": lambda: rx.PartVerified(grant.grant_id, part_for(grant), MISMATCH),
            "commit": lambda: rx.CommitReceived(commit_for(grant)),
            "right": lambda: rx.DigestsVerified(grant.grant_id),
            "wrong": lambda: rx.DigestsVerified(grant.grant_id, MISMATCH),
            "cancel": lambda: rx.RequestCancelled(KEY),
            "idle": lambda: rx.WriterConfirmedIdle(grant.grant_id, SENDER, grant.capability),
            "draining": lambda: rx.WriterDraining(grant.grant_id, SENDER, 100),
            "link-closed": lambda: rx.LinkClosed(SENDER),
            "exit": lambda: rx.WriterExited(SENDER),
        }[name]()


SENDER_LIMITS = SenderLimits(lease_margin_s=1, write_timeout_s=4, resend_s=1, answer_timeout_s=5)
LOCAL = (20, 21, 30)
LEASE_ENDS_S = 110.0


class SendingWorker:
    """One handoff of three pages in two layers, and what it was told to do so far."""

    def __init__(self) -> None:
        self.handoff = SenderHandoff(KEY, SENDER, RECEIVER, LAYOUT, num_pages=3, limits=SENDER_LIMITS)
        self.now_s = 100.0
        self.room_bytes = 1 << 30
        self.told: list[tx.SenderInstruction] = []

    def feed(self, *events: tx.SenderEvent) -> list[tx.SenderInstruction]:
        """What the last one led to, on a link that always has room."""
        out: list[tx.SenderInstruction] = []
        for event in events:
            out = self.handoff.handle(event, self.now_s)
            while self.room_bytes and self.handoff.wants_room:
                out = [*out, *self.handoff.handle(tx.RoomGiven(self.room_bytes), self.now_s)]
            self.told += out
        return out

    def seal(self, layer: int, first: int = 0, last: int = 3) -> list[tx.SenderInstruction]:
        digests = tuple(digest_of(layer, i) for i in range(first, last))
        return self.feed(tx.PagesSealed(layer, first, LOCAL[first:last], (digests,)))

    def attach(self) -> list[tx.SenderInstruction]:
        return self.feed(tx.GrantAttached(a_grant(), LEASE_ENDS_S))

    def reach(self, state: str) -> SendingWorker:
        """Layer 0 is sealed in every state. DRAINING has write 0 outstanding, DONE was cancelled after attaching."""
        self.seal(0)
        if state == "waiting":
            return self
        self.attach()
        if state == "committed":
            self.seal(1)
            self.feed(tx.WriteCompleted(0), tx.WriteCompleted(1), tx.AllComputed(FIRST))
        if state in ("draining", "done"):
            self.feed(tx.CancelRequested())
        if state == "done":
            self.feed(tx.WriteCompleted(0))
        assert self.handoff.state.value == state
        return self
