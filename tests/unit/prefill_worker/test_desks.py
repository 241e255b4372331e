"""Sending desk and receiving desk, each on a transfer thread of its own, over the loopback transport.

No model, no gRPC: the outlets pass what the desks say to each other, and write down what they tell their workers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from decode_worker.receiving import Answer, ReceivingDesk
from kvtransfer.digest import read_from
from kvtransfer.extents import ArenaShape
from kvtransfer.layout import LayoutId
from kvtransfer.protocol import receiver_events as rev
from kvtransfer.protocol import sender_events as sev
from kvtransfer.protocol.attempts import SenderLimits
from kvtransfer.protocol.grants import ReceiverLimits
from kvtransfer.protocol.messages import AttemptKey, Commit, FailureReason, FirstToken, Grant, RefusalReason
from kvtransfer.transfer_thread import TransferThread
from kvtransfer.transports.base import PeerId
from kvtransfer.transports.loopback import Fault, FaultPlan, LoopbackNetwork, LoopbackTransport
from prefill_worker.sending import HandoffStats, SealedPages, SendingDesk

LAYOUT = LayoutId("ab" * 32, "float32", num_layers=2, num_kv_heads=1, head_dim=2, page_size=4)
KEY = AttemptKey("request", 1)
SENDER, RECEIVER = "prefill-0#1", "decode-0#1"
MINE, THEIRS = ArenaShape(2, 8, LAYOUT.extent_bytes), ArenaShape(2, 12, LAYOUT.extent_bytes)
FIRST = (FirstToken(0, 17),)
LEASE_S, WAIT_S = 0.5, 5.0


class End:
    """A transfer thread with its arena, and a record of what its desk told the worker."""

    def __init__(self, name: str, shape: ArenaShape, network: LoopbackNetwork, faults: FaultPlan | None = None) -> None:
        self.arena = np.random.default_rng(len(name)).integers(0, 255, shape.num_bytes, dtype=np.uint8)
        self.transport = LoopbackTransport(name, network=network, faults=faults)
        self.transport.register(self.arena.ctypes.data, shape.num_bytes, owner=self.arena)
        self.errors: list[BaseException] = []
        self.thread = TransferThread(self.transport, self.on_event, self.errors.append, name=name)
        self.told: list[tuple[Any, ...]] = []
        self._changed = threading.Condition()
        self.due_s: float | None = None

    def on_event(self, event: Any) -> None: ...

    def tell(self, *what: Any) -> None:
        with self._changed:
            self.told.append(what)
            self._changed.notify_all()

    def wait(self, *what: Any) -> tuple[Any, ...]:
        """Until the worker was told something that begins so."""

        def find() -> tuple[Any, ...] | None:
            return next((t for t in self.told if t[: len(what)] == what), None)

        with self._changed:
            assert self._changed.wait_for(find, WAIT_S), (what, self.told, self.errors)
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
        limits = SenderLimits(lease_margin_s=0.05, write_timeout_s=0.3, resend_s=0.1, answer_timeout_s=0.4)
        self.knows_receiver = True
        self.desk = SendingDesk(
            SENDER, LAYOUT, MINE, read_from(memoryview(self.arena), MINE), limits, self, self.thread.write, self.peer
        )

    def peer(self, receiver: str) -> tuple[PeerId, ArenaShape] | None:
        return (PeerId(receiver), THEIRS) if self.knows_receiver else None

    def on_event(self, event: Any) -> None:
        self.desk.on_transport(event)

    def commit(self, commit: Commit) -> None:
        self.tell("commit", commit)
        self.world.on_commit(commit)

    def confirm_idle(self, key: AttemptKey, grant_id: str, receiver: str) -> None:
        self.tell("confirm_idle", grant_id)
        self.world.receiving.thread.submit(lambda _: self.world.receiving.desk.confirm_idle(grant_id, SENDER))

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


class Receiving(End):
    def __init__(self, world: World) -> None:
        super().__init__(RECEIVER, THEIRS, world.network)
        self.world = world
        limits = ReceiverLimits(lease_s=LEASE_S, grace_s=0.1, ask_again_s=0.05, quarantine_cap_pages=3)
        self.desk = ReceivingDesk(RECEIVER, LAYOUT, THEIRS, read_from(memoryview(self.arena), THEIRS), limits, self)
        self.stops = True

    def queue(self, key: AttemptKey) -> None:
        self.tell("queue", key)

    def drop(self, key: AttemptKey) -> None:
        self.tell("drop", key)

    def grant(self, grant: Grant) -> None:
        self.tell("grant", grant.key, grant)

    def admit(self, grant: Grant, commit: Commit) -> None:
        self.tell("admit", grant, commit)

    def over(self, key: AttemptKey, pages: tuple[int, ...], reason: RefusalReason, *, quarantined: bool) -> None:
        self.tell("over", pages, reason, quarantined)

    def lift(self, pages: tuple[int, ...]) -> None:
        self.tell("lift", pages)

    def refused(self, key: AttemptKey, reason: RefusalReason, detail: str) -> None:
        self.tell("refused", key, reason)

    def ask_to_stop(self, sender: str, key: AttemptKey, grant_id: str, reason: RefusalReason) -> None:
        self.tell("ask_to_stop", sender)
        if self.stops:
            desk = self.world.sending.desk
            self.world.sending.thread.submit(lambda _: desk.stop_asked(key, grant_id, RECEIVER))

    def kill_writer(self, sender: str) -> None:
        self.tell("kill_writer", sender)

    def replace_self(self, num_quarantined: int) -> None:
        self.tell("replace_self", num_quarantined)


class World:
    """Both ends, connected."""

    def __init__(self, faults: FaultPlan | None = None) -> None:
        self.network = LoopbackNetwork()
        self.sending = Sending(self, faults)
        self.receiving = Receiving(self)
        self.commits_arrive = True
        for end, other in ((self.sending, self.receiving), (self.receiving, self.sending)):
            end.transport.connect(other.transport.metadata())
            end.thread.start()
        self.receiving.thread.submit(self.receiving.desk.bind).result()

    def on_commit(self, commit: Commit) -> None:
        def answer(_: Any) -> None:
            found: Answer = self.receiving.desk.commit(commit)
            event: sev.SenderEvent = sev.AckReceived(commit.grant_id)
            if found.refusal is not None:
                event = sev.RefusalReceived(found.refusal, found.detail)
            self.sending.thread.submit(lambda _: self.sending.desk.happened(commit.key, event))

        if self.commits_arrive:
            self.receiving.thread.submit(answer)

    def grant(self, pages: tuple[int, ...] = (7, 3, 4), first_page: int = 0) -> Grant:
        receiving = self.receiving
        receiving.run(lambda: receiving.desk.happened(rev.ReserveReceived(KEY)))
        receiving.run(lambda: receiving.desk.happened(rev.ReservationGranted(KEY, pages, first_page)))
        grant: Grant = receiving.wait("grant", KEY)[2]
        return grant

    def attach(self, grant: Grant) -> None:
        asked_s = time.monotonic()
        answer = self.receiving.run(lambda: self.receiving.desk.attach(grant.grant_id, SENDER, renew=False))
        assert answer.refusal is None
        self.sending.run(lambda: self.sending.desk.attached(KEY, grant, asked_s + LEASE_S))

    def open(self, num_pages: int = 3) -> None:
        self.sending.run(lambda: self.sending.desk.open(KEY, num_pages))

    def seal(self, pages: tuple[int, ...] = (1, 2, 5), first: int = 0, layers: tuple[int, ...] = (0, 1)) -> None:
        parts = [SealedPages(KEY, layer, first, pages) for layer in layers]
        self.sending.run(lambda: self.sending.desk.sealed(parts))

    def computed(self) -> None:
        self.sending.run(lambda: self.sending.desk.computed(KEY, FIRST))

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
        end.run(end.desk.tick)  # type: ignore[attr-defined]

    def check_bytes(self, local: tuple[int, ...], remote: tuple[int, ...]) -> None:
        for layer in range(2):
            for here, there in zip(local, remote, strict=True):
                size, at, to = LAYOUT.extent_bytes, MINE.offset(layer, here), THEIRS.offset(layer, there)
                assert (self.sending.arena[at : at + size] == self.receiving.arena[to : to + size]).all()

    def close(self) -> None:
        for end in (self.sending, self.receiving):
            end.thread.stop()
            assert not end.errors, end.errors


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(getattr(request, "param", None))
    yield world
    world.close()


def faulty(**fields: Any) -> Any:
    return pytest.param(FaultPlan(default=Fault(**fields)), id=next(iter(fields)))


def num_released(world: World) -> dict[int, int]:
    counts: dict[int, int] = {}
    for what in world.sending.told:
        for page in what[1] if what[0] == "release" else ():
            counts[page] = counts.get(page, 0) + 1
    return counts


@pytest.mark.parametrize("grant_first", [True, False])
def test_pages_are_written_committed_admitted_and_released_once(world: World, grant_first: bool) -> None:
    world.open()
    grant = world.grant()
    if grant_first:
        world.attach(grant)
    world.seal((1, 2), 0)
    world.seal((5,), 2)
    if not grant_first:
        world.attach(grant)
    world.computed()
    stats: HandoffStats = world.sending.wait("succeeded", KEY)[2]
    world.sending.wait("closed", KEY)
    assert (stats.num_extents, stats.num_bytes) == (6, 6 * LAYOUT.extent_bytes)
    assert world.sending.desk.num_bytes_written == stats.num_bytes
    assert stats.num_descriptors <= 6
    assert world.receiving.wait("admit", grant)[2].first_tokens == FIRST
    world.check_bytes((1, 2, 5), (7, 3, 4))
    assert num_released(world) == {1: 1, 2: 1, 5: 1}
    assert world.sending.desk.num_handoffs == 0
    assert not world.receiving.transport.wants_polling
    assert world.receiving.desk.num_refused == 0


def test_cached_pages_are_not_written_but_released(world: World) -> None:
    world.open()
    world.attach(world.grant((4,), first_page=2))
    world.seal()
    world.computed()
    assert world.sending.wait("succeeded", KEY)[2].num_extents == 2
    world.check_bytes((5,), (4,))
    world.sending.wait("closed", KEY)
    assert num_released(world) == {1: 1, 2: 1, 5: 1}


@pytest.mark.parametrize("world", [faulty(corrupt=True), faulty(truncate=True)], indirect=True)
def test_bytes_that_arrive_wrong_are_refused(world: World) -> None:
    world.open()
    world.attach(world.grant())
    world.seal()
    world.computed()
    world.sending.wait("failed", FailureReason.REFUSED, RefusalReason.DIGEST_MISMATCH)
    world.receiving.wait("over", (7, 3, 4), RefusalReason.DIGEST_MISMATCH, False)
    world.sending.wait("closed", KEY)
    assert num_released(world) == {1: 1, 2: 1, 5: 1}
    assert world.receiving.desk.num_refused == 1


@pytest.mark.parametrize("world", [faulty(lose_completion=True)], indirect=True)
def test_a_write_that_never_ends_keeps_its_pages_in_quarantine(world: World) -> None:
    world.open()
    grant = world.grant()
    world.attach(grant)
    world.seal()
    world.tick_until(world.sending, "failed")
    world.sending.wait("failed", FailureReason.WRITE_TIMEOUT)
    world.sending.wait("quarantine", (1, 2, 5))
    assert num_released(world) == {}
    world.tick_until(world.receiving, "over")
    world.receiving.wait("over", (7, 3, 4), RefusalReason.LEASE_EXPIRED, True)
    world.tick_until(world.receiving, "kill_writer")
    assert ("lift", (7, 3, 4)) not in world.receiving.told
    # The receiver's process ends: nothing of this can do harm there any more.
    world.sending.run(lambda: world.sending.desk.receiver_lost(RECEIVER))
    world.sending.wait("closed", KEY)
    assert num_released(world) == {1: 1, 2: 1, 5: 1}


def test_a_lease_that_lapses_is_noticed_by_both_ends(world: World) -> None:
    world.open()
    world.attach(world.grant())
    world.seal((1, 2), 0)
    world.tick_until(world.sending, "failed")
    world.sending.wait("failed", FailureReason.LEASE_LOST)
    world.receiving.wait("over", (7, 3, 4), RefusalReason.WRITER_STOPPED, False)
    assert world.sending.due_s is None


def test_a_silent_writer_is_asked_then_suspected_and_its_exit_lifts_the_quarantine(world: World) -> None:
    world.receiving.stops = False
    world.open(4)
    world.attach(world.grant((7, 3, 4, 5)))
    world.receiving.run(lambda: world.receiving.desk.happened(rev.RequestCancelled(KEY)))
    world.receiving.wait("over", (7, 3, 4, 5), RefusalReason.CANCELLED, True)
    world.receiving.wait("replace_self", 4)
    world.tick_until(world.receiving, "kill_writer")
    assert world.receiving.told.count(("ask_to_stop", SENDER)) > 1
    world.receiving.run(lambda: world.receiving.desk.happened(rev.WriterExited(SENDER)))
    world.receiving.wait("lift", (7, 3, 4, 5))


def test_a_cancel_at_the_receiver_stops_the_writer(world: World) -> None:
    world.open()
    world.attach(world.grant())
    world.seal((1, 2), 0)
    world.receiving.run(lambda: world.receiving.desk.happened(rev.RequestCancelled(KEY)))
    world.sending.wait("failed", FailureReason.STOP_ASKED)
    world.receiving.wait("lift", (7, 3, 4))
    world.seal((5,), 2)
    assert num_released(world) == {1: 1, 2: 1, 5: 1}, "late pages go straight back"


def test_a_receiver_that_is_gone(world: World) -> None:
    world.open()
    world.attach(world.grant())
    world.sending.knows_receiver = False
    world.seal()
    world.sending.wait("failed", FailureReason.WRITE_FAILED)
    world.sending.wait("closed", KEY)
    assert num_released(world) == {1: 1, 2: 1, 5: 1}


def test_a_grant_of_pages_that_do_not_exist_ends_the_attempt_only(world: World) -> None:
    world.open()
    grant = world.grant((7, 3, 12))
    world.sending.run(lambda: world.sending.desk.attached(KEY, grant, time.monotonic() + LEASE_S))
    world.seal()
    world.sending.wait("failed", FailureReason.WRITE_FAILED)
    world.sending.wait("closed", KEY)


def test_a_commit_is_sent_again_and_given_up_in_the_end(world: World) -> None:
    world.commits_arrive = False
    world.open()
    world.attach(world.grant())
    world.seal()
    world.computed()
    world.sending.wait("commit")
    world.tick_until(world.sending, "failed")
    world.sending.wait("failed", FailureReason.NO_ANSWER)
    assert sum(t[0] == "commit" for t in world.sending.told) > 1
    world.receiving.wait("over", (7, 3, 4), RefusalReason.WRITER_STOPPED, False)


def test_what_comes_for_an_attempt_that_has_ended(world: World) -> None:
    world.open()
    world.open()
    world.sending.run(lambda: world.sending.desk.happened(KEY, sev.CancelRequested()))
    world.sending.wait("closed", KEY)
    world.sending.run(lambda: world.sending.desk.happened(KEY, sev.CancelRequested()))
    world.computed()
    world.attach(grant := world.grant())
    world.sending.wait("confirm_idle", grant.grant_id)
    world.receiving.wait("over", (7, 3, 4), RefusalReason.WRITER_STOPPED, False)


def test_answers_to_those_who_ask_about_the_wrong_grant(world: World) -> None:
    desk, run = world.receiving.desk, world.receiving.run
    grant = world.grant()
    assert run(lambda: desk.attach("x/1", SENDER, renew=False)).refusal is RefusalReason.UNKNOWN_GRANT
    world.open()
    world.attach(grant)
    other = "prefill-1#1"
    assert run(lambda: desk.attach(grant.grant_id, other, renew=False)).refusal is RefusalReason.WRONG_SENDER
    assert run(lambda: desk.attach(grant.grant_id, other, renew=True)).refusal is RefusalReason.WRONG_SENDER
    assert run(lambda: desk.attach(grant.grant_id, SENDER, renew=True)).refusal is None
    run(lambda: desk.confirm_idle(grant.grant_id, other))
    assert not any(t[0] == "over" for t in world.receiving.told)


def test_a_late_reserve_is_answered_also_when_it_had_a_grant(world: World) -> None:
    world.grant()
    world.receiving.run(lambda: world.receiving.desk.happened(rev.RequestCancelled(KEY)))
    world.receiving.wait("over", (7, 3, 4), RefusalReason.CANCELLED, False)
    world.receiving.run(lambda: world.receiving.desk.happened(rev.ReserveReceived(KEY)))
    world.receiving.wait("refused", KEY, RefusalReason.CANCELLED)
