"""The faults that loopback can inject, each seen from both sides."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from transport_peer import EMPTY, Agent, Pair

from kvtransfer.extents import Descriptor
from kvtransfer.transports.events import Greeting, TransportEvent, WriteCompleted, WriteFailed, WriteHandle
from kvtransfer.transports.loopback import Fault, FaultPlan, LoopbackNetwork, LoopbackTransport
from tandem.core.errors import TransportError

WRITE = [Descriptor(0, 100, 10), Descriptor(50, 200, 10)]


@pytest.fixture
def network() -> LoopbackNetwork:
    return LoopbackNetwork()


@pytest.fixture
def make(network: LoopbackNetwork) -> Iterator[Callable[[Fault], Pair]]:
    made: list[Agent] = []

    def make_pair(fault: Fault) -> Pair:
        """A pair on a network of its own, whose first write has `fault`."""
        writer = Agent.make("loopback", "writer#1", {"network": network, "faults": FaultPlan({0: fault})})
        reader = Agent.make("loopback", "reader#1", {"network": network})
        made.extend((writer, reader))
        writer.arena[:] = 1
        return Pair("loopback", writer, reader, writer.connect(reader.metadata()))

    yield make_pair
    for agent in made:
        agent.close()


def poll(pair: Pair, handle: WriteHandle, times: int = 1) -> list[TransportEvent]:
    for _ in range(times):
        pair.writer.poll()
    return pair.writer.ends(handle)


def landed(pair: Pair) -> bytes:
    return pair.reader.read(100, 10) + pair.reader.read(200, 10)


def test_a_delayed_write_lands_late(make: Callable[[Fault], Pair]) -> None:
    pair = make(Fault(delay_polls=3))
    handle = pair.writer.write(pair.peer, WRITE)
    assert poll(pair, handle, 3) == []
    assert landed(pair) == bytes([EMPTY]) * 20
    assert poll(pair, handle) == [WriteCompleted(handle)]
    assert landed(pair) == bytes([1]) * 20


def test_a_lost_completion_leaves_the_bytes_and_the_write_outstanding(make: Callable[[Fault], Pair]) -> None:
    pair = make(Fault(lose_completion=True))
    handle = pair.writer.write(pair.peer, WRITE)
    assert poll(pair, handle, 50) == []
    assert landed(pair) == bytes([1]) * 20
    assert pair.writer.transport.wants_polling


def test_a_duplicate_lands_again_after_its_completion(make: Callable[[Fault], Pair]) -> None:
    pair = make(Fault(duplicate_after_polls=2))
    handle = pair.writer.write(pair.peer, WRITE)
    assert poll(pair, handle) == [WriteCompleted(handle)]
    assert isinstance(pair.reader, Agent)
    pair.reader.arena[:] = 7
    assert len(poll(pair, handle, 2)) == 1
    assert landed(pair) == bytes([7]) * 20
    assert len(poll(pair, handle, 5)) == 1
    assert landed(pair) == bytes([1]) * 20
    assert not pair.writer.transport.wants_polling


def test_corruption_and_truncation_count_as_complete(make: Callable[[Fault], Pair]) -> None:
    pair = make(Fault(corrupt=True, truncate=True))
    handle = pair.writer.write(pair.peer, WRITE)
    assert poll(pair, handle) == [WriteCompleted(handle)]
    half = bytes([0, 1, 1, 1, 1]) + bytes([EMPTY]) * 5
    assert landed(pair) == half + half


def test_a_write_that_fails_in_the_middle_is_not_settled(make: Callable[[Fault], Pair]) -> None:
    pair = make(Fault(fail_after_bytes=13))
    handle = pair.writer.write(pair.peer, WRITE)
    (end,) = poll(pair, handle)
    assert isinstance(end, WriteFailed)
    assert not end.settled
    assert landed(pair) == bytes([1]) * 13 + bytes([EMPTY]) * 7


def test_only_the_planned_write_is_hit(make: Callable[[Fault], Pair]) -> None:
    pair = make(Fault(lose_completion=True))
    pair.writer.write(pair.peer, WRITE)
    second = pair.writer.write(pair.peer, WRITE)
    assert poll(pair, second) == [WriteCompleted(second)]


def test_a_stopped_peer_takes_bytes_and_completes_when_it_resumes(
    make: Callable[[Fault], Pair], network: LoopbackNetwork
) -> None:
    pair = make(Fault())
    network.stop("reader#1")
    handle = pair.writer.write(pair.peer, WRITE)
    assert poll(pair, handle, 20) == []
    assert landed(pair) == bytes([1]) * 20
    network.resume("reader#1")
    assert poll(pair, handle) == [WriteCompleted(handle)]


def test_a_killed_agents_writes_never_land(make: Callable[[Fault], Pair], network: LoopbackNetwork) -> None:
    pair = make(Fault(delay_polls=1))
    handle = pair.writer.write(pair.peer, WRITE)
    network.kill("writer#1")
    poll(pair, handle, 5)
    assert landed(pair) == bytes([EMPTY]) * 20


def test_a_name_is_taken_once_on_a_network(make: Callable[[Fault], Pair], network: LoopbackNetwork) -> None:
    make(Fault())
    with pytest.raises(TransportError, match="is taken"):
        Agent.make("loopback", "reader#1", {"network": network})


def test_messages_get_lost_without_a_word(make: Callable[[Fault], Pair]) -> None:
    pair = make(Fault())
    transport = pair.writer.transport
    assert isinstance(transport, LoopbackTransport)
    transport.faults = FaultPlan(lose_messages=True)
    transport.send(pair.peer, b"lost")
    transport.faults = FaultPlan()
    transport.send(pair.peer, b"found")
    assert pair.reader.came() == [("writer#1", b"found")]


def test_a_message_to_an_agent_that_is_gone_is_refused(
    make: Callable[[Fault], Pair], network: LoopbackNetwork
) -> None:
    pair = make(Fault())
    network.kill("reader#1")
    with pytest.raises(TransportError, match="reader#1 is gone"):
        pair.writer.transport.send(pair.peer, b"hello")


def test_a_cut_connection_fails_writes_until_both_ends_have_hung_up_and_connected(
    network: LoopbackNetwork, make: Callable[[Fault], Pair]
) -> None:
    pair = make(Fault(delay_polls=3))
    writer, reader = pair.writer, pair.reader
    assert isinstance(reader, Agent)
    reader.connect(writer.metadata())
    under_way = writer.write(pair.peer, WRITE)
    network.cut("writer#1", "reader#1")
    assert poll(pair, under_way, 4) == [WriteFailed(under_way, "cut", settled=False, is_link_broken=True)]
    later = writer.write(pair.peer, WRITE)
    (end,) = poll(pair, later)
    assert isinstance(end, WriteFailed)
    assert (end.settled, end.is_link_broken) == (True, True)
    assert writer.broken() == [pair.peer], "it is told once"
    writer.hang_up(pair.peer)
    writer.connect(reader.metadata())
    assert isinstance(poll(pair, writer.write(pair.peer, WRITE))[0], WriteFailed), "one end alone does not mend it"
    reader.hang_up("writer#1")  # type: ignore[arg-type]
    reader.connect(writer.metadata())
    writer.hang_up(pair.peer)
    writer.connect(reader.metadata())
    writer.greet(pair.peer, Greeting(7))
    assert reader.greetings() == [Greeting(7)]
    (early,) = poll(pair, writer.write(pair.peer, WRITE))
    assert isinstance(early, WriteFailed)
    assert early.settled, "nothing goes by a connection before its greeting is known to have come through"
    writer.open_writes(pair.peer)
    assert isinstance(poll(pair, writer.write(pair.peer, WRITE))[0], WriteCompleted)
    assert landed(pair) == bytes([1]) * 20
