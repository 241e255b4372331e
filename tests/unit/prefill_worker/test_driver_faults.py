"""Both drivers over a transport that delays, repeats, reorders and loses: what a fault costs, and what it never can."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from driver_ends import GRACE_S, KEY, LAYOUT, SENDER, THEIRS, World

from decode_worker.receiver_driver import IN_FLIGHT_S
from kvtransfer.protocol import receiver_events as rev
from kvtransfer.protocol.messages import FailureReason, RefusalReason
from kvtransfer.transports.events import MessageArrived, PeerId, TransportEvent, WriteArrived
from kvtransfer.transports.loopback import Fault, FaultPlan

EXTENT = LAYOUT.extent_bytes


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(request.param)
    yield world
    world.close()


def plan(name: str, **faults: Fault) -> Any:
    """Faults of the first, the second write and so on, by `w0`, `w1`."""
    return pytest.param(FaultPlan({int(key[1:]): fault for key, fault in faults.items()}), id=name)


HARMLESS = [
    plan("delayed", w0=Fault(delay_polls=40), w1=Fault(delay_polls=80)),
    plan("reordered", w0=Fault(delay_polls=60), w1=Fault(delay_polls=1), w2=Fault(delay_polls=30)),
    plan("duplicated", w0=Fault(duplicate_after_polls=1), w1=Fault(duplicate_after_polls=3)),
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
    return bytes(world.receiving.arena[THEIRS.offset(0, page) : THEIRS.offset(0, page) + EXTENT])


@pytest.mark.parametrize("world", [plan("late", w0=Fault(delay_polls=10**9))], indirect=True)
def test_a_write_after_its_lease_lands_in_quarantine_and_only_its_end_frees_the_page(world: World) -> None:
    world.open(2)
    world.attach(world.grant((7, 3)))
    world.seal((1, 2), 0, layers=(0,))
    world.tick_until(world.sending, "failed")
    world.sending.wait("failed", FailureReason.WRITE_TIMEOUT)
    world.tick_until(world.receiving, "over")
    world.receiving.wait("over", (7, 3), RefusalReason.LEASE_EXPIRED, True)
    world.tick_until(world.receiving, "kill_writer")
    before = late_bytes(world, 7)

    def arrive() -> None:
        for pending in world.sending.transport._pending:
            pending.polls_left = 0

    world.sending.run(arrive)
    world.receiving.wait("lift", (7, 3))
    assert late_bytes(world, 7) != before, "it did land, and nobody else had the page"


@pytest.mark.parametrize("world", [plan("broken", w0=Fault(fail_after_bytes=EXTENT + 3))], indirect=True)
def test_a_write_that_fails_in_the_middle_is_settled_by_an_exit_only(world: World) -> None:
    world.open(2)
    world.attach(world.grant((7, 3)))
    world.seal((1, 2), 0, layers=(0,))
    world.sending.wait("failed", FailureReason.WRITE_FAILED)
    world.sending.wait("quarantine", (1, 2))
    world.receiving.run(lambda: world.receiving.driver.happened(rev.RequestCancelled(KEY)))
    world.tick_until(world.receiving, "kill_writer")
    assert not any(t[0] == "lift" for t in world.receiving.told)
    exited_s = time.monotonic()
    world.receiving.run(lambda: world.receiving.driver.writer_exited(SENDER, is_here=True))
    world.tick_until(world.receiving, "lift")
    assert time.monotonic() >= exited_s + IN_FLIGHT_S, "what was on its way had no time to land"
    world.sending.run(lambda: world.sending.driver.receiver_lost("decode-0#1"))
    world.sending.wait("closed", KEY)


@pytest.mark.parametrize("world", [plan("none")], indirect=True)
@pytest.mark.parametrize("is_here", [True, False])
def test_an_exit_on_another_host_waits_for_the_grace_and_the_connection_lasts_until_then(
    world: World, is_here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decode_worker.receiver_driver.IN_FLIGHT_S", 0.02)
    world.open(2)
    world.attach(world.grant((7, 3)))
    driver, transport = world.receiving.driver, world.receiving.transport
    real = transport.disconnect

    def disconnect(peer: Any) -> None:
        world.receiving.tell("disconnect", peer)
        real(peer)

    monkeypatch.setattr(transport, "disconnect", disconnect)
    wait_s = 0.02 if is_here else GRACE_S
    before_s = time.monotonic()
    world.receiving.run(lambda: driver.writer_exited(SENDER, is_here=is_here))
    assert world.receiving.due_s is not None
    assert before_s + wait_s <= world.receiving.due_s <= time.monotonic() + wait_s
    world.tick_until(world.receiving, "disconnect")
    kinds = [t[0] for t in world.receiving.told]
    assert kinds.index("over") < kinds.index("disconnect")


@pytest.mark.parametrize("world", [plan("none")], indirect=True)
def test_an_exit_frees_nothing_before_the_transport_was_polled(world: World) -> None:
    """A receiver that was stopped meanwhile: time has passed, and what came is not stored yet."""
    world.open(2)
    world.attach(world.grant((7, 3)))
    polls: list[bool] = []
    transport = world.receiving.transport
    poll = transport.poll
    driver = world.receiving.driver
    stopped = world.receiving.run(
        lambda: (driver.writer_exited(SENDER, is_here=True), time.sleep(IN_FLIGHT_S + 0.05)),
    )
    assert stopped is not None

    def watched() -> Any:
        polls.append(any(t[0] == "over" for t in world.receiving.told))
        return poll()

    def tick_alone() -> None:
        transport.poll = watched  # type: ignore[method-assign]
        world.receiving.driver.tick()
        transport.poll = poll  # type: ignore[method-assign]

    world.receiving.run(tick_alone)
    assert polls == [False]
    world.receiving.wait("over", (7, 3), RefusalReason.WRITER_EXITED, False)


@pytest.mark.parametrize("world", [plan("none")], indirect=True)
def test_what_arrives_with_the_last_polls_for_a_departed_writer_is_heard(world: World) -> None:
    """It may be of another writer, whose commit would have to read it all; or that commit itself."""
    receiving, driver = world.receiving, world.receiving.driver
    arrived: list[TransportEvent] = [WriteArrived(PeerId("another"), b"no tag of ours")]
    arrived.append(MessageArrived(PeerId("another"), b"its commit"))

    def tick() -> None:
        inner = receiving.transport.poll
        receiving.transport.poll = lambda: [arrived.pop()] if arrived else inner()  # type: ignore[method-assign]
        driver.tick()
        receiving.transport.poll = inner  # type: ignore[method-assign]

    receiving.run(lambda: (driver.writer_exited("departed", is_here=True), time.sleep(IN_FLIGHT_S + 0.05), tick()))
    assert not arrived
    assert driver.num_arrivals_ignored == 1
    assert receiving.messages == [b"its commit"]
