"""The thread that owns a transport: delivery, guards, errors, sleep and a clean end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvtransfer.extents import ArenaShape, Descriptor, PageArea
from kvtransfer.transfer_thread import TransferThread, _pause_s
from kvtransfer.transports.base import Transport
from kvtransfer.transports.events import (
    PeerId,
    ThreadEvent,
    TransportEvent,
    WriteArrived,
    WriteCompleted,
    WriteFailed,
    WritePosted,
)
from kvtransfer.transports.loopback import Fault, FaultPlan, LoopbackNetwork, LoopbackTransport
from tandem.core.errors import TransportError
from tests.support.slices import SHORT_NS, needs_slices, slice_ns
from tests.support.waiting import wait_until

ONE = [Descriptor(0, 8, 8)]


@dataclass
class Worker:
    """A transport in its thread, and all that came out."""

    transport: LoopbackTransport
    arena: np.ndarray = field(default_factory=lambda: np.zeros(64, np.uint8))
    events: list[ThreadEvent] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.transport.register(self.arena.ctypes.data, self.arena.nbytes, owner=self.arena)
        self.thread = TransferThread(self.transport, self.take, self.errors.append, name="kv-test", idle_poll_s=None)

    def take(self, event: ThreadEvent) -> None:
        self.threads.add(threading.current_thread().name)
        self.events.append(event)

    def kinds(self, tag: bytes) -> list[str]:
        return [type(e).__name__ for e in self.events if not isinstance(e, WriteArrived) and e.handle.tag == tag]

    def wait(self, tag: bytes, *kinds: str) -> None:
        """Until exactly this has been told of a write."""
        wait_until(lambda: self.kinds(tag), f"{kinds} of {tag!r}", wanted=lambda seen: seen == [*kinds])


@pytest.fixture
def pair() -> Iterator[tuple[Worker, Worker, PeerId]]:
    network = LoopbackNetwork()
    faults = FaultPlan({1: Fault(lose_completion=True)})
    here = Worker(LoopbackTransport("here#1", network=network, faults=faults))
    there = Worker(LoopbackTransport("there#1", network=network))
    here.arena[:] = 3
    peer = here.transport.connect(there.transport.metadata())
    for worker in (here, there):
        worker.thread.start()
    yield here, there, peer
    for worker in (here, there):
        worker.thread.stop()
        assert not worker.thread.is_alive


def test_a_write_is_posted_and_ends_once_with_its_tag(pair: tuple[Worker, Worker, PeerId]) -> None:
    here, there, peer = pair
    here.thread.write(peer, ONE, b"a")
    here.wait(b"a", "WritePosted", "WriteCompleted")
    assert bytes(there.arena[8:16]) == bytes([3]) * 8
    assert here.threads == {"kv-test"}
    assert isinstance(here.events[0], WritePosted)
    there.thread.submit(lambda transport: transport.expect_incoming("g", PeerId("here#1"))).result(5)
    arrived = [WriteArrived(PeerId("here#1"), b"a")]
    wait_until(lambda: there.events, "the word of it", wanted=lambda seen: seen == arrived)


def test_each_write_is_polled_for_before_the_next_one_is_posted(pair: tuple[Worker, Worker, PeerId]) -> None:
    """Its receiver reads it meanwhile."""
    here, _, peer = pair
    entered, leave = threading.Event(), threading.Event()
    here.thread.submit(lambda t: (entered.set(), leave.wait(5)))
    assert entered.wait(5)
    tags = [b"a", b"never completes", b"c", b"d"]
    for tag in tags:
        here.thread.write(peer, ONE, tag)
    leave.set()
    here.wait(b"d", "WritePosted", "WriteCompleted")
    ends = [(type(e).__name__, e.handle.tag) for e in here.events if not isinstance(e, WriteArrived)]
    assert ends == [
        ("WritePosted", b"a"),
        ("WriteCompleted", b"a"),
        ("WritePosted", b"never completes"),
        ("WritePosted", b"c"),
        ("WriteCompleted", b"c"),
        ("WritePosted", b"d"),
        ("WriteCompleted", b"d"),
    ]


def test_what_has_come_is_delivered_before_the_commands_behind_it() -> None:
    """So a commit finds that its pages have arrived."""
    network = LoopbackNetwork()
    here = Worker(LoopbackTransport("here#1", network=network))
    there = Worker(LoopbackTransport("there#1", network=network))
    here.transport.post_write(here.transport.connect(there.transport.metadata()), ONE, b"a")
    here.transport.poll()
    seen = there.thread.submit(lambda _: list(there.events))
    there.thread.start()
    assert seen.result(5) == [WriteArrived(PeerId("here#1"), b"a")]
    for worker in (here, there):
        worker.thread.stop()


def test_the_grant_is_checked_right_before_the_post(pair: tuple[Worker, Worker, PeerId]) -> None:
    here, there, peer = pair
    asked: list[str] = []

    def may_post() -> bool:
        asked.append(threading.current_thread().name)
        return False

    here.thread.write(peer, ONE, b"a", may_post=may_post)
    here.wait(b"a", "WriteFailed")
    assert isinstance(here.events[0], WriteFailed)
    assert here.events[0].settled
    assert asked == ["kv-test"]
    assert not there.arena.any()


def test_misuse_ends_the_write_too(pair: tuple[Worker, Worker, PeerId]) -> None:
    here, _, _ = pair
    here.thread.write(PeerId("nobody#1"), ONE, b"a")
    here.wait(b"a", "WriteFailed")


def test_commands_run_in_the_thread_and_give_back_what_they_did(pair: tuple[Worker, Worker, PeerId]) -> None:
    here, _, _ = pair
    assert here.thread.submit(lambda t: (t.name, threading.current_thread().name)).result(5) == ("loopback", "kv-test")
    with pytest.raises(TransportError, match="not connected"):
        here.thread.submit(lambda t: t.post_write(PeerId("nobody"), ONE)).result(5)


@pytest.mark.long
def test_idle_it_sleeps_and_outstanding_it_polls(pair: tuple[Worker, Worker, PeerId]) -> None:
    here, _, peer = pair
    here.thread.write(peer, ONE, b"a")
    here.wait(b"a", "WritePosted", "WriteCompleted")
    time.sleep(0.05)
    polls, cpu_s = here.thread.num_polls, time.process_time()
    time.sleep(0.3)
    assert here.thread.num_polls == polls
    assert time.process_time() - cpu_s < 0.05
    here.thread.write(peer, ONE, b"lost")  # never completes
    assert _polls_per_s(here) < 10_000


@pytest.mark.long
def test_what_comes_soon_is_looked_for_often_and_what_takes_long_seldom(pair: tuple[Worker, Worker, PeerId]) -> None:
    quiet = (0.0, 1e-4, 2e-3, 8e-3, 0.5, 1.5)
    assert [_pause_s(quiet_s, drives=True) for quiet_s in quiet] == [50e-6, 50e-6, 250e-6, 1e-3, 5e-3, 5e-3]
    assert [_pause_s(quiet_s, drives=False) for quiet_s in quiet] == pytest.approx(
        [50e-6, 3e-4, 6e-3, 10e-3, 10e-3, 10e-3]
    )
    here, there, peer = pair
    here.thread.write(peer, ONE, b"a")
    here.thread.write(peer, ONE, b"never completes")
    here.wait(b"never completes", "WritePosted")
    there.transport.expect_incoming("a grant", PeerId("here#1"), PageArea((0,), ArenaShape(1, 8, 8)))
    there.transport.doorbell.ring()
    time.sleep(0.1)
    assert _polls_per_s(here) < 260
    assert _polls_per_s(there) < 120
    there.transport.expect_incoming("messages", PeerId("here#1"))
    assert there.transport.drives
    there.transport.end_incoming("messages")
    assert not there.transport.drives


@pytest.mark.long
def test_who_only_expects_looks_soon_again_where_a_peer_has_rung_and_not_for_commands_of_its_own(
    pair: tuple[Worker, Worker, PeerId],
) -> None:
    here, there, _ = pair
    door = there.transport.doorbell
    area = PageArea((0,), ArenaShape(1, 8, 8))
    there.thread.submit(lambda transport: transport.expect_incoming("g", PeerId("here#1"), area)).result(5)

    def until_next_look(call: Callable[[], object]) -> float:
        """Seconds from the look that `call` causes to the one behind it."""
        time.sleep(0.03)  # it has been quiet: the pauses are as long as they get
        polls = there.thread.num_polls
        call()
        wait_until(lambda: there.thread.num_polls > polls, "a look", every_s=1e-4)
        polls, begun_s = there.thread.num_polls, time.monotonic()
        wait_until(lambda: there.thread.num_polls > polls, "another look", every_s=1e-4)
        return time.monotonic() - begun_s

    # One in five may have been counted between the two looks of a turn with commands.
    behind_commands = sorted(until_next_look(lambda: there.thread.submit(lambda _: None).result(5)) for _ in range(5))
    assert behind_commands[1] > 5e-3
    assert min(until_next_look(lambda: here.transport.doorbell.ring_at(door.host, door.port)) for _ in range(20)) < 5e-3


@pytest.mark.long
def test_who_finds_something_looks_soon_again_though_nobody_has_rung(
    pair: tuple[Worker, Worker, PeerId], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there, peer = pair
    for tag in (b"a", b"never completes"):
        here.thread.write(peer, ONE, tag)
    here.wait(b"never completes", "WritePosted")
    area = PageArea((0,), ArenaShape(1, 8, 8))
    there.thread.submit(lambda transport: transport.expect_incoming("g", PeerId("here#1"), area)).result(5)
    assert not there.transport.drives
    monkeypatch.setattr(there.transport.doorbell, "ring", lambda: None)

    def looks_behind_a_write(tag: bytes) -> int:
        time.sleep(0.03)
        here.thread.write(peer, ONE, tag)
        wait_until(lambda: WriteArrived(PeerId("here#1"), tag) in there.events, f"{tag!r}", every_s=1e-4)
        polls = there.thread.num_polls
        time.sleep(8e-3)
        return there.thread.num_polls - polls

    # At once, and 0.05, 0.2, 0.8 and 3.2 ms later; else at most one.
    assert max(looks_behind_a_write(b"%d" % number) for number in range(20)) >= 3
    monkeypatch.undo()  # it is woken to stop


def _polls_per_s(worker: Worker) -> float:
    """While the thread makes at least twenty-one polls and 0.3 s pass, however long a busy machine takes for them."""
    polls, begun_s = worker.thread.num_polls, time.monotonic()
    wait_until(lambda: worker.thread.num_polls > polls + 20 and time.monotonic() > begun_s + 0.3, "21 polls")
    return (worker.thread.num_polls - polls) / (time.monotonic() - begun_s)


def test_a_failing_callback_is_reported_and_does_not_stop_the_others(pair: tuple[Worker, Worker, PeerId]) -> None:
    here, _, peer = pair
    take = here.take

    def fail_once(event: ThreadEvent) -> None:
        here.thread._on_event = take
        raise RuntimeError("a defect")

    here.thread._on_event = fail_once
    here.thread.write(peer, ONE, b"a")
    here.wait(b"a", "WriteCompleted")
    assert [str(e) for e in here.errors] == ["a defect"]


def test_a_failing_guard_is_reported(pair: tuple[Worker, Worker, PeerId]) -> None:
    here, _, peer = pair
    here.thread.write(peer, ONE, b"a", may_post=lambda: 1 / 0 > 0)
    wait_until(lambda: here.errors, "the error")
    assert isinstance(here.errors[0], ZeroDivisionError)
    assert here.kinds(b"a") == ["WriteFailed"]


def test_a_transport_that_cannot_poll_ends_the_thread_loudly(pair: tuple[Worker, Worker, PeerId]) -> None:
    here, _, _ = pair

    def break_poll(transport: Transport) -> None:
        transport.close()

    here.thread.submit(break_poll).result(5)
    wait_until(lambda: not here.thread.is_alive, "its end")
    assert isinstance(here.errors[0], TransportError)
    with pytest.raises(TransportError, match="has stopped"):
        here.thread.submit(lambda t: None)


def test_what_was_taken_ends_too_when_the_transport_cannot_poll(pair: tuple[Worker, Worker, PeerId]) -> None:
    """Commands that were about to run when the poll before them failed: somebody waits for their futures."""
    here, _, _ = pair
    entered, leave = threading.Event(), threading.Event()

    def break_second_poll(transport: Transport) -> None:
        inner, left = transport.poll, [1]

        def poll() -> list[TransportEvent]:
            if not left:
                raise TransportError("broken")
            left.pop()
            return inner()

        transport.poll = poll  # type: ignore[method-assign]
        entered.set()
        leave.wait(5)

    here.thread.submit(break_second_poll)
    assert entered.wait(5)
    queued = here.thread.submit(lambda t: None)
    leave.set()
    with pytest.raises(TransportError, match="has stopped"):
        queued.result(5)


def test_stopping_closes_the_transport_and_fails_what_is_queued(pair: tuple[Worker, Worker, PeerId]) -> None:
    here, _, peer = pair
    entered, leave = threading.Event(), threading.Event()
    here.thread.submit(lambda t: (entered.set(), leave.wait(5)))
    assert entered.wait(5)
    given_up = here.thread.submit(lambda t: None)
    queued = here.thread.submit(lambda t: None)
    assert given_up.cancel()
    stopper = threading.Thread(target=here.thread.stop)
    stopper.start()
    wait_until(lambda: here.thread._stopping, "the wish to stop")
    leave.set()
    stopper.join(5)
    with pytest.raises(TransportError, match="has stopped"):
        queued.result(5)
    with pytest.raises(TransportError, match="has stopped"):
        here.thread.write(peer, ONE, b"a")
    with pytest.raises(TransportError, match="closed"):
        here.transport.poll()
    here.thread.stop()
    assert not here.errors


def test_that_nothing_more_is_written_while_it_stops_is_no_failure(pair: tuple[Worker, Worker, PeerId]) -> None:
    """A window has room again, and who waited for it writes: just then its worker is stopped, in order."""
    here, _, peer = pair
    completed, is_stopping = threading.Event(), threading.Event()
    refused: list[TransportError] = []

    def write_once_more(event: ThreadEvent) -> None:
        if not isinstance(event, WriteCompleted):
            return
        completed.set()
        assert is_stopping.wait(5)
        with pytest.raises(TransportError) as caught:
            here.thread.write(peer, ONE, b"b")
        refused.append(caught.value)
        raise caught.value

    here.thread._on_event = write_once_more
    here.thread.write(peer, ONE, b"a")
    assert completed.wait(5)
    stopper = threading.Thread(target=here.thread.stop)
    stopper.start()
    wait_until(lambda: here.thread._stopping, "the stop")
    is_stopping.set()
    stopper.join(5)
    assert not here.thread.is_alive
    assert refused
    assert not here.errors


def test_a_thread_that_hangs_in_a_call_does_not_stop_silently(pair: tuple[Worker, Worker, PeerId]) -> None:
    here, _, _ = pair
    entered, leave = threading.Event(), threading.Event()
    here.thread.submit(lambda t: (entered.set(), leave.wait(5)))
    assert entered.wait(5)
    with pytest.raises(TransportError, match="did not end"):
        here.thread.stop(timeout_s=0.1)
    leave.set()


def test_stopping_before_the_start_closes_the_transport() -> None:
    transport = LoopbackTransport("never#1", network=LoopbackNetwork())
    thread = TransferThread(transport, lambda e: None, lambda e: None)
    thread.stop()
    with pytest.raises(TransportError, match="closed"):
        transport.poll()


def test_it_stays_on_its_cores() -> None:
    thread = TransferThread(LoopbackTransport("stays#1", network=LoopbackNetwork()), lambda e: None, lambda e: None,
                            cores={min(os.sched_getaffinity(0))})  # fmt: skip
    thread.start()
    assert thread.submit(lambda _: os.sched_getaffinity(0)).result(5) == {min(os.sched_getaffinity(0))}
    thread.stop()


@needs_slices
def test_it_gets_a_core_soon() -> None:
    thread = TransferThread(LoopbackTransport("soon#1", network=LoopbackNetwork()), lambda e: None, lambda e: None)
    thread.start()
    assert thread.submit(lambda _: slice_ns()).result(5) == SHORT_NS
    thread.stop()


def test_cores_that_are_gone_are_said_and_not_kept_to(caplog: pytest.LogCaptureFixture) -> None:
    transport = LoopbackTransport("strays#1", network=LoopbackNetwork())
    thread = TransferThread(transport, lambda e: None, lambda e: None, cores={1 << 12})
    thread.start()
    assert thread.submit(lambda _: os.sched_getaffinity(0)).result(5) == os.sched_getaffinity(0)
    thread.stop()
    assert "runs on any core" in caplog.text
