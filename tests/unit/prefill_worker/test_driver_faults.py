"""Both drivers over a transport that delays, repeats, reorders and loses: what a fault costs, and what it never can."""

from __future__ import annotations

from typing import Any

import pytest

from decode_worker.landing import IN_FLIGHT_S
from kvtransfer.protocol import receiver_events as rev
from kvtransfer.protocol.messages import FailureReason, RefusalReason
from kvtransfer.transports.events import MessageArrived, PeerId, TransportEvent, WriteArrived
from tests.support.driver_world import GRACE_S, KEY, RECEIVER, SENDER, THEIRS, World
from tests.support.link import LinkSpec
from tests.support.scripted_model import LAYOUT

EXTENT = LAYOUT.extent_bytes


@pytest.fixture
def world(request: pytest.FixtureRequest) -> World:
    return World(request.param)


def plan(name: str, *faults: str, late_s: float = 0.02) -> Any:
    """Faults of the first, the second write and so on."""
    return pytest.param(LinkSpec(faults_of_writes=dict(enumerate(faults)), late_s=late_s), id=name)


HARMLESS = [
    plan("delayed", "late write", "late write"),
    plan("reordered", "late write"),
    plan("duplicated", "late copy", "late copy", late_s=0.001),
]


@pytest.mark.parametrize("world", HARMLESS, indirect=True)
def test_writes_that_come_late_twice_or_out_of_order_are_admitted_as_they_were_sealed(world: World) -> None:
    world.open()
    world.attach(world.grant())
    world.seal((1,), 0)
    world.seal((2, 5), 1)
    world.computed()
    world.sending.wait("succeeded", KEY)
    world.check_bytes((1, 2, 5), (7, 3, 4))


def late_bytes(world: World, page: int) -> bytes:
    return bytes(world.receiving.memory.data[THEIRS.offset(0, page) : THEIRS.offset(0, page) + EXTENT])


@pytest.mark.parametrize("world", [plan("late", "late write", late_s=30.0)], indirect=True)
def test_a_write_after_its_lease_lands_in_quarantine_and_only_its_end_frees_the_page(world: World) -> None:
    world.open(2)
    world.attach(world.grant((7, 3)))
    world.seal((1, 2), 0, layers=(0,))
    world.sending.wait("failed", FailureReason.WRITE_TIMEOUT)
    world.receiving.wait("over", (7, 3), RefusalReason.LEASE_EXPIRED, True)
    world.receiving.wait("kill_writer")
    before = late_bytes(world, 7)
    world.receiving.wait("lift", (7, 3))
    assert late_bytes(world, 7) != before, "it did land, and nobody else had the page"


@pytest.mark.parametrize("world", [plan("broken", "unsettled write", late_s=1000.0)], indirect=True)
def test_a_write_that_fails_in_the_middle_is_settled_by_an_exit_only(world: World) -> None:
    world.open(2)
    world.attach(world.grant((7, 3)))
    world.seal((1, 2), 0, layers=(0,))
    world.sending.wait("failed", FailureReason.WRITE_FAILED)
    world.sending.wait("quarantine", (1, 2))
    world.receiving.run(lambda: world.receiving.driver.happened(rev.RequestCancelled(KEY)))
    world.receiving.wait("kill_writer")
    assert not any(t[0] == "lift" for t in world.receiving.told)
    exited_s = world.now_s
    world.receiving.run(lambda: world.receiving.driver.writer_exited(SENDER, is_here=True))
    world.receiving.wait("lift")
    assert world.now_s >= exited_s + IN_FLIGHT_S, "what was on its way had no time to land"
    world.sending.run(lambda: world.sending.driver.receiver_lost("decode-0#1"))
    world.sending.wait("closed", KEY)


@pytest.mark.parametrize("world", [plan("none")], indirect=True)
@pytest.mark.parametrize("is_here", [True, False])
def test_an_exit_on_another_host_waits_for_the_grace_and_the_connection_lasts_until_then(
    world: World, is_here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decode_worker.landing.IN_FLIGHT_S", 0.02)
    world.open(2)
    world.attach(world.grant((7, 3)))
    driver = world.receiving.driver
    wait_s = 0.02 if is_here else GRACE_S
    world.receiving.run(lambda: driver.writer_exited(SENDER, is_here=is_here))
    assert world.receiving.timer.due_s == world.now_s + wait_s
    world.receiving.wait("disconnect")
    kinds = [t[0] for t in world.receiving.told]
    assert kinds.index("over") < kinds.index("disconnect")


@pytest.mark.parametrize("world", [plan("none")], indirect=True)
def test_an_exit_frees_nothing_before_the_transport_was_polled(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A receiver that was stopped meanwhile: time has passed, and what came is not stored yet."""
    world.open(2)
    world.attach(world.grant((7, 3)))
    polls: list[bool] = []
    receiving = world.receiving
    receiving.run(lambda: receiving.driver.writer_exited(SENDER, is_here=True))
    world.kernel.clock.advance(IN_FLIGHT_S + 0.05)

    def watched() -> Any:
        polls.append(any(t[0] == "over" for t in receiving.told))
        return []

    monkeypatch.setattr(receiving, "poll", watched)
    receiving.driver.tick()
    assert polls == [False]
    world.receiving.wait("over", (7, 3), RefusalReason.WRITER_EXITED, False)


@pytest.mark.parametrize("world", [plan("none")], indirect=True)
def test_what_arrives_with_the_last_polls_for_a_departed_writer_is_heard(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be of another writer, whose commit would have to read it all; or that commit itself."""
    receiving, driver = world.receiving, world.receiving.driver
    arrived: list[TransportEvent] = [WriteArrived(PeerId("another"), b"no tag of ours")]
    arrived.append(MessageArrived(PeerId("another"), b"its commit"))
    monkeypatch.setattr(receiving, "poll", lambda: [arrived.pop()] if arrived else [])
    receiving.run(lambda: driver.writer_exited("departed", is_here=True))
    world.kernel.clock.advance(IN_FLIGHT_S + 0.05)
    driver.tick()
    assert not arrived
    assert driver.num_arrivals_ignored == 1
    assert receiving.messages == [b"its commit"]


@pytest.mark.parametrize("world", [plan("broken", "unsettled write", late_s=1000.0)], indirect=True)
@pytest.mark.parametrize("is_here", [True, False])
def test_a_connection_closed_at_both_ends_settles_its_writes_once_they_had_time_to_land(
    world: World, is_here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody ends for it: no writer is suspected, and the pages come back at both ends."""
    monkeypatch.setattr("decode_worker.landing.IN_FLIGHT_S", 0.02)
    world.open(2)
    world.attach(world.grant((7, 3)))
    world.seal((1, 2), 0, layers=(0,))
    world.sending.wait("quarantine", (1, 2))
    receiving, sending = world.receiving, world.sending
    receiving.run(lambda: receiving.driver.happened(rev.RequestCancelled(KEY)))
    closed_s = world.now_s
    receiving.run(lambda: receiving.driver.link_closed(SENDER, is_here=is_here))
    sending.run(lambda: sending.driver.link_closed(RECEIVER))
    sending.wait("closed", KEY)
    receiving.wait("lift", (7, 3))
    assert world.now_s >= closed_s + (0.02 if is_here else GRACE_S)
    assert not any(told[0] == "kill_writer" for told in receiving.told)
    assert not receiving.expected


@pytest.mark.parametrize("world", [plan("broken", "unsettled write", late_s=1000.0)], indirect=True)
def test_pages_come_back_over_a_link_that_breaks_again_and_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decode_worker.landing.IN_FLIGHT_S", 0.02)
    world.open(2)
    world.attach(world.grant((7, 3)))
    world.seal((1, 2), 0, layers=(0,))
    world.sending.wait("quarantine", (1, 2))
    receiving, sending = world.receiving, world.sending
    receiving.run(lambda: receiving.driver.happened(rev.RequestCancelled(KEY)))

    def breaks() -> None:
        receiving.driver.link_closed(SENDER, is_here=True)
        world.kernel.after(0.015, breaks)

    breaks()
    sending.driver.link_closed(RECEIVER)
    said_s = world.now_s
    receiving.wait("lift", (7, 3))
    assert world.now_s < said_s + 0.05
    assert not any(told[0] == "kill_writer" for told in receiving.told)


@pytest.mark.parametrize("world", [plan("late", "late write", late_s=30.0)], indirect=True)
def test_what_has_failed_is_drained_when_its_last_write_has_ended_and_not_before(world: World) -> None:
    sending, told = world.sending, list[float]()
    tell = lambda: told.append(world.now_s)  # noqa: E731
    world.open(2)
    world.attach(world.grant((7, 3)))
    world.seal((1, 2), 0, layers=(0,))
    sending.run(lambda: sending.driver.when_drained(RECEIVER, tell))
    assert len(told) == 1, "it has not failed, and is not waited for"
    sending.wait("failed", FailureReason.WRITE_TIMEOUT)
    failed_s = world.now_s
    sending.run(lambda: sending.driver.when_drained(RECEIVER, tell))
    sending.run(lambda: sending.driver.when_drained("another decode worker", tell))
    assert len(told) == 2, "nothing has failed there"
    sending.wait("closed", KEY)
    assert len(told) == 3
    assert told[-1] > failed_s
    assert not sending.driver._drains
