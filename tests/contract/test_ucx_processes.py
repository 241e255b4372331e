"""Writes over real UCX into processes that are stopped, killed or replaced, and from ones that are: what a fence is."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest
from transport_peer import ARENA_BYTES, EMPTY, Pair, PeerProcess, RemoteAgent

from kvtransfer.extents import Descriptor
from kvtransfer.transports.events import Greeting, WriteCompleted, WriteFailed
from tandem.core.errors import TransportError
from tests.support.waiting import wait_until

SMALL = [Descriptor(0, 0, 4096)]


@pytest.fixture
def replacement() -> Iterator[PeerProcess]:
    host = PeerProcess()
    yield host
    host.end()


def test_nothing_that_was_meant_for_a_killed_process_reaches_its_replacement(
    make_pair: Callable[..., Pair], own_process: PeerProcess, replacement: PeerProcess
) -> None:
    pair = make_pair("ucx", own_process)
    pair.writer.arena[:] = 3
    assert isinstance(pair.end_of(pair.writer.write(pair.peer, SMALL)), WriteCompleted)
    own_process.signal(signal.SIGSTOP)
    under_way = pair.writer.write(pair.peer, SMALL)
    own_process.kill()

    same_name = RemoteAgent.make(replacement, "ucx", str(pair.peer), {})
    with pytest.raises(TransportError, match="is taken"):
        pair.writer.connect(same_name.metadata())
    same_name.close()
    successor = RemoteAgent.make(replacement, "ucx", "successor#2", {})
    peer = pair.writer.connect(successor.metadata())
    successor.expect("grant", successor.connect(pair.writer.metadata()))

    pair.end_of(under_way)  # it may have landed in the stopped process; it has an end either way
    assert isinstance(pair.end_of(pair.writer.write(pair.peer, SMALL)), WriteFailed)
    assert successor.read() == bytes([EMPTY]) * ARENA_BYTES
    assert isinstance(pair.end_of(pair.writer.write(peer, [Descriptor(0, 8192, 4096)])), WriteCompleted)
    assert successor.read(8192, 4096) == bytes([3]) * 4096
    assert successor.read(0, 8192) == bytes([EMPTY]) * 8192
    pair.writer.transport.disconnect(pair.peer)
    with pytest.raises(TransportError, match="not connected"):
        pair.writer.write(pair.peer, SMALL)
    successor.close()


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[PeerProcess, PeerProcess]]:
    """A reader's and a writer's process with nothing but TCP between them, as on two hosts without RDMA."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    hosts = (PeerProcess(), PeerProcess())
    yield hosts
    for host in hosts:
        host.end()


def test_the_exit_of_a_writer_is_no_fence_before_its_bytes_were_polled(
    over_tcp: tuple[PeerProcess, PeerProcess],
) -> None:
    """So the receiver driver waits and polls before it frees pages: see `ReceiverDriver.writer_exited`."""
    reading, writing = over_tcp
    reader = RemoteAgent.make(reading, "ucx", "tcp-reader#1", {})
    writer = RemoteAgent.make(writing, "ucx", "tcp-writer#1", {})
    peer = writer.connect(reader.metadata())
    reader.expect("grant", reader.connect(writer.metadata()))
    writing.call("fill", writer.agent_name, 3)
    writing.call("write", writer.agent_name, peer, SMALL, b"first")
    wait_until(reader.arrived, "the first write")

    reading.signal(signal.SIGSTOP)
    writing.call("write", writer.agent_name, peer, [Descriptor(0, 4096, 1 << 20)])
    writing.call("poll_for", writer.agent_name, 0.2)
    writing.kill()
    reading.signal(signal.SIGCONT)
    reading.call("poll_for", reader.agent_name, 0.2)
    assert reader.read(4096, 64) == bytes([3]) * 64
    at_rest = reader.read()
    reading.call("poll_for", reader.agent_name, 0.5)
    assert reader.read() == at_rest, "bytes still come long after the writer's exit"
    reader.close()


def test_a_broken_connection_costs_only_the_writes_that_were_under_way(
    over_tcp: tuple[PeerProcess, PeerProcess],
) -> None:
    reading, writing = over_tcp
    reader = RemoteAgent.make(reading, "ucx", "cut-reader#1", {})
    writer = RemoteAgent.make(writing, "ucx", "cut-writer#1", {})
    peer = writer.connect(reader.metadata())
    reader.expect("grant", reader.connect(writer.metadata()))
    assert isinstance(writing.call("end_of", writer.agent_name, peer, SMALL, 10), WriteCompleted)
    assert writing.call("break_connections", writer.agent_name) > 0
    cut = writing.call("end_of", writer.agent_name, peer, SMALL, 25)
    assert isinstance(cut, WriteFailed)
    assert not cut.settled, "NIXL cannot say what of it still lands"
    later = writing.call("end_of", writer.agent_name, peer, SMALL, 10)
    assert isinstance(later, WriteFailed)
    assert later.settled, "nothing was posted: its pages are free at once, at both ends"
    assert writing.call("broken", writer.agent_name) == [peer], "it is told once"
    reader.close()
    writer.close()


@pytest.mark.parametrize("has_noticed", [True, False])
def test_a_connection_that_broke_is_made_anew_by_both_ends(
    over_tcp: tuple[PeerProcess, PeerProcess], has_noticed: bool
) -> None:
    reading, writing = over_tcp
    reader = RemoteAgent.make(reading, "ucx", "anew-reader#1", {})
    writer = RemoteAgent.make(writing, "ucx", "anew-writer#1", {})
    metadata = {"reader": reader.metadata(), "writer": writer.metadata()}
    peer = writer.connect(metadata["reader"])
    reader.expect("grant", reader.connect(metadata["writer"]))
    for number in range(1, 4):
        writing.call("fill", writer.agent_name, number)
        assert isinstance(writing.call("end_of", writer.agent_name, peer, SMALL, 10), WriteCompleted)
        assert writing.call("break_connections", writer.agent_name) > 0
        if has_noticed:
            assert isinstance(writing.call("end_of", writer.agent_name, peer, SMALL, 25), WriteFailed)
        writing.call("hang_up", writer.agent_name, peer)
        reading.call("hang_up", reader.agent_name, "anew-writer#1")
        reader.connect(metadata["writer"])
        assert writer.connect(metadata["reader"]) == peer
        for greeting in (Greeting(number), Greeting(number, trial=7)):
            writing.call("greet", writer.agent_name, peer, greeting)

            def heard(greeting: Greeting = greeting) -> bool:
                writing.call("poll", writer.agent_name)
                return greeting in reading.call("greetings", reader.agent_name)

            wait_until(heard, "the greeting", 10)
        writing.call("open_writes", writer.agent_name, peer)
        writing.call("fill", writer.agent_name, 100 + number)
        large = [Descriptor(0, 4096, 4 << 20)]
        assert isinstance(writing.call("end_of", writer.agent_name, peer, large, 10), WriteCompleted)
        assert reader.read(4096, 4 << 20) == bytes([100 + number]) * (4 << 20)
    reader.close()
    writer.close()
