"""Sender driver and receiver driver, each on a transfer thread of its own, over the loopback transport.

No model, no gRPC: the callbacks pass what the drivers say to each other, and write down what they tell their workers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from decode_worker.receiver_driver import Answer, ReceiverDriver
from kvtransfer.digest import read_from
from kvtransfer.extents import ArenaShape
from kvtransfer.layout import LayoutId
from kvtransfer.protocol import receiver_events as rev
from kvtransfer.protocol import sender_events as sev
from kvtransfer.protocol.attempts import SenderLimits
from kvtransfer.protocol.grants import ReceiverLimits
from kvtransfer.protocol.messages import AttemptKey, Commit, CommitPart, FirstToken, Grant, RefusalReason
from kvtransfer.transfer_thread import TransferThread
from kvtransfer.transports.events import MessageArrived, PeerId
from kvtransfer.transports.loopback import FaultPlan, LoopbackNetwork, LoopbackTransport
from prefill_worker.events import HandoffStats
from prefill_worker.sender_driver import SealedPages, SenderDriver
from tandem.core.clock import MonotonicClock

LAYOUT = LayoutId("ab" * 32, "float32", num_layers=2, num_kv_heads=1, head_dim=2, page_size=4)
KEY = AttemptKey("request", 1)
SENDER, RECEIVER = "prefill-0#1", "decode-0#1"
MINE, THEIRS = ArenaShape(2, 8, LAYOUT.extent_bytes), ArenaShape(2, 12, LAYOUT.extent_bytes)
FIRST = (FirstToken(0, 17),)
LEASE_S, GRACE_S, WAIT_S = 0.5, 0.1, 5.0
SECRET = b"the receiver's own secret"


class End:
    """A transfer thread with its arena, and a record of what its driver told the worker."""

    def __init__(self, name: str, shape: ArenaShape, network: LoopbackNetwork, faults: FaultPlan | None = None) -> None:
        self.arena = np.random.default_rng(len(name)).integers(0, 255, shape.num_bytes, dtype=np.uint8)
        self.transport = LoopbackTransport(name, network=network, faults=faults)
        self.transport.register(self.arena.ctypes.data, shape.num_bytes, owner=self.arena)
        self.errors: list[BaseException] = []
        self.thread = TransferThread(self.transport, self.on_event, self.errors.append, name=name)
        self.told: list[tuple[Any, ...]] = []
        self._changed = threading.Condition()
        self.due_s: float | None = None
        self.reads: list[tuple[int, int]] = []  # (layer, page), for digests
        self._read = read_from(memoryview(self.arena), shape)

    def read_extent(self, layer: int, page: int) -> memoryview:
        self.reads.append((layer, page))
        return self._read(layer, page)

    def on_event(self, event: Any) -> None: ...

    def tick(self) -> None: ...

    def tell(self, *what: Any) -> None:
        with self._changed:
            self.told.append(what)
            self._changed.notify_all()

    def wait_for(self, condition: Callable[[], Any]) -> None:
        """Until what is told makes it true."""
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_S), (self.told, self.errors)

    def wait(self, *what: Any) -> tuple[Any, ...]:
        """Until the worker was told something that begins so."""

        def find() -> tuple[Any, ...] | None:
            return next((t for t in self.told if t[: len(what)] == what), None)

        self.wait_for(find)
        found = find()
        assert found is not None
        return found

    def run(self, call: Callable[[], Any]) -> Any:
        return self.thread.submit(lambda _: call()).result(WAIT_S)

    def deadline(self, deadline_s: float | None) -> None:
        self.due_s = deadline_s


class Sending(End):
    def __init__(self, world: World, faults: FaultPlan | None) -> None:
        super().__init__(SENDER, MINE, world.network, faults)
        self.world = world
        limits = SenderLimits(
            lease_margin_s=0.05,
            write_timeout_s=0.3,
            resend_s=0.1,
            answer_timeout_s=0.4,
            grace_s=GRACE_S,
            quarantine_cap_pages=1,
        )
        self.knows_receiver = True
        self.driver = SenderDriver(
            incarnation=SENDER,
            layout=LAYOUT,
            shape=MINE,
            read_extent=self.read_extent,
            limits=limits,
            callbacks=self,
            write=self.thread.write,
            peer=self.peer,
            clock=MonotonicClock(),
        )

    def peer(self, receiver: str) -> tuple[PeerId, ArenaShape] | None:
        return (PeerId(receiver), THEIRS) if self.knows_receiver else None

    def on_event(self, event: Any) -> None:
        self.driver.on_transport(event)

    def tick(self) -> None:
        self.driver.tick()

    def commit_part(self, part: CommitPart) -> None:
        self.tell("part", part)
        if self.world.parts_arrive:
            self.world.answer(part.key, lambda driver: driver.commit_part(part), None)

    def commit(self, commit: Commit, *, again: bool) -> None:
        self.tell("commit", commit, again)
        if self.world.commits_arrive:
            self.world.answer(
                commit.key, lambda driver: driver.commit(commit, time.monotonic()), sev.AckReceived(commit.grant_id)
            )

    def confirm_idle(self, idle: sev.ConfirmIdle) -> None:
        self.tell("confirm_idle", idle.grant_id)
        driver = self.world.receiving.driver
        self.world.receiving.thread.submit(lambda _: driver.confirm_idle(idle.grant_id, SENDER, idle.capability))

    def succeeded(self, key: AttemptKey, stats: HandoffStats) -> None:
        self.tell("succeeded", key, stats)

    def failed(self, failure: sev.Fail) -> None:
        self.tell("failed", failure.reason, failure.refusal)

    def quarantine(self, pages: tuple[int, ...]) -> None:
        self.tell("quarantine", pages)

    def release(self, pages: tuple[int, ...]) -> None:
        self.tell("release", pages)

    def closed(self, key: AttemptKey) -> None:
        self.tell("closed", key)

    def replace_self(self, num_quarantined: int) -> None:
        self.tell("replace_self", num_quarantined)


class Receiving(End):
    def __init__(self, world: World) -> None:
        super().__init__(RECEIVER, THEIRS, world.network)
        self.world = world
        limits = ReceiverLimits(lease_s=LEASE_S, grace_s=GRACE_S, ask_again_s=0.05, quarantine_cap_pages=3)
        self.driver = ReceiverDriver(RECEIVER, LAYOUT, THEIRS, self.read_extent, limits, self, SECRET, MonotonicClock())
        self.stops = True
        self.hears_arrivals = True
        self.num_arrived = 0
        self.messages: list[bytes] = []

    def on_event(self, event: Any) -> None:
        if isinstance(event, MessageArrived):  # the worker's, not the driver's
            self.messages.append(event.content)
            return
        if self.hears_arrivals:
            self.driver.on_transport(event)
            self.num_arrived += 1
            self.tell("arrived")

    def tick(self) -> None:
        self.driver.tick()

    def queue(self, key: AttemptKey) -> None:
        self.tell("queue", key)

    def grant(self, grant: Grant) -> None:
        self.tell("grant", grant.key, grant)

    def admit(self, grant: Grant, commit: Commit, committed_s: float) -> None:
        self.tell("admit", grant, commit, committed_s)

    def over(
        self,
        key: AttemptKey,
        pages: tuple[int, ...],
        verified: tuple[tuple[int, int], ...],
        reason: RefusalReason,
        *,
        quarantined: bool,
    ) -> None:
        self.tell("over", pages, reason, quarantined)
        self.tell("verified", verified)

    def lift(self, pages: tuple[int, ...]) -> None:
        self.tell("lift", pages)

    def refused(self, key: AttemptKey, reason: RefusalReason, detail: str) -> None:
        self.tell("refused", key, reason)

    def carried_out(self) -> None: ...

    def ask_to_stop(self, sender: str, grant: Grant, reason: RefusalReason) -> None:
        self.tell("ask_to_stop", sender)
        if self.stops:
            driver, asked = self.world.sending.driver, sev.StopAsked(grant.grant_id, RECEIVER, grant.capability)
            self.world.sending.thread.submit(lambda _: driver.stop_asked(grant.key, asked))

    def kill_writer(self, sender: str) -> None:
        self.tell("kill_writer", sender)

    def replace_self(self, num_quarantined: int) -> None:
        self.tell("replace_self", num_quarantined)

    def foresee(self, dues: Sequence[tuple[float, str]]) -> None:
        self.tell("foresee", list(dues))


class World:
    """Both ends, connected."""

    def __init__(self, faults: FaultPlan | None = None) -> None:
        self.network = LoopbackNetwork()
        self.sending = Sending(self, faults)
        self.receiving = Receiving(self)
        self.commits_arrive = True
        self.parts_arrive = True
        for end, other in ((self.sending, self.receiving), (self.receiving, self.sending)):
            end.transport.connect(other.transport.metadata())
            end.thread.start()
        receiving = self.receiving
        receiving.thread.submit(
            lambda transport: receiving.driver.bind(transport, receiving, receiving.on_event)
        ).result()

    def answer(self, key: AttemptKey, ask: Callable[[ReceiverDriver], Answer], yes: sev.SenderEvent | None) -> None:
        """Ask the receiver driver, and tell the sender driver what it said."""

        def call(_: Any) -> None:
            found = ask(self.receiving.driver)
            event = yes if found.refusal is None else sev.RefusalReceived(found.refusal, found.detail)
            if found.verified_at_s:
                self.sending.thread.submit(lambda _: self.sending.driver.verified(key, found.verified_at_s))
            if event is not None:
                self.sending.thread.submit(lambda _: self.sending.driver.happened(key, event))

        self.receiving.thread.submit(call)

    def grant(self, pages: tuple[int, ...] = (7, 3, 4), first_page: int = 0, key: AttemptKey = KEY) -> Grant:
        receiving = self.receiving
        receiving.run(lambda: receiving.driver.happened(rev.ReserveReceived(key)))
        receiving.run(lambda: receiving.driver.happened(rev.ReservationGranted(key, pages, first_page)))
        grant: Grant = receiving.wait("grant", key)[2]
        return grant

    def attach(self, grant: Grant) -> None:
        asked_s = time.monotonic()
        driver = self.receiving.driver
        answer = self.receiving.run(lambda: driver.attach(grant.grant_id, SENDER, grant.capability, renew=False))
        assert answer.refusal is None
        self.sending.run(lambda: self.sending.driver.attached(KEY, grant, asked_s + LEASE_S))

    def open(self, num_pages: int = 3) -> None:
        self.sending.run(lambda: self.sending.driver.open(KEY, num_pages, RECEIVER))

    def seal(self, pages: tuple[int, ...] = (1, 2, 5), first: int = 0, layers: tuple[int, ...] = (0, 1)) -> None:
        parts = [SealedPages(KEY, range(layer, layer + 1), first, pages) for layer in layers]
        for layer in layers:
            self.sending.run(lambda layer=layer: self.sending.driver.computed_layer(layer, pages))
        self.sending.run(lambda: self.sending.driver.sealed(parts))

    def computed(self, ago_s: float = 0.0) -> None:
        self.sending.run(lambda: self.sending.driver.computed(KEY, FIRST, time.monotonic() - ago_s))

    def tick_until(self, end: End, kind: str) -> None:
        """Pass the time of an end until it has told its worker of `kind`."""
        give_up_s = time.monotonic() + WAIT_S
        while not any(t[0] == kind for t in end.told):
            assert time.monotonic() < give_up_s, (kind, end.told)
            self.tick_when_due(end)

    def tick_when_due(self, end: End) -> None:
        """What the ticker does."""
        assert end.due_s is not None
        time.sleep(max(0.0, end.due_s - time.monotonic()) + 0.001)
        end.run(end.tick)

    def check_bytes(self, local: tuple[int, ...], remote: tuple[int, ...]) -> None:
        for layer in range(2):
            for here, there in zip(local, remote, strict=True):
                size, at, to = LAYOUT.extent_bytes, MINE.offset(layer, here), THEIRS.offset(layer, there)
                assert (self.sending.arena[at : at + size] == self.receiving.arena[to : to + size]).all()

    def close(self) -> None:
        for end in (self.sending, self.receiving):
            end.thread.stop()
            assert not end.errors, end.errors
