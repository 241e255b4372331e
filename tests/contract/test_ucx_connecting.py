"""Readers that are killed while a writer's connection to them is being made: the writer outlives them all."""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Iterator

import pytest
from transport_peer import PeerProcess, RemoteAgent

from kvtransfer.extents import Descriptor
from kvtransfer.transports.events import WriteCompleted, WriteFailed
from tandem.core.errors import TransportError

NUM_KILLED = 12
NUM_EACH = 3  # of them are killed at the same moment of their connection, the first ones at its beginning
LATEST_KILL_S = 6e-3  # after the writer begins to connect; a first write has ended by then
NUM_AHEAD = 2  # processes that start while others are killed
WRITE = [Descriptor(0, 0, 4096), Descriptor(8192, 8192, 65536)]
END_S = 60.0


@pytest.fixture
def hosts() -> Iterator[deque[PeerProcess]]:
    """The writer's process, those of the readers to be killed, and that of one more; few run at a time."""
    made: deque[PeerProcess] = deque()
    yield made
    for host in made:
        host.end()


@pytest.mark.faults
def test_a_writer_survives_peers_that_are_killed_while_it_connects(hosts: deque[PeerProcess]) -> None:
    """What the kills hit: the TCP connection, the handshakes of both sides, the first write, its notification."""
    writing = PeerProcess()
    hosts.extend(PeerProcess() for _ in range(NUM_AHEAD))
    hosts.append(writing)
    writer = RemoteAgent.make(writing, "ucx", "survivor#1", {})
    for number in range(NUM_KILLED):
        hosts.appendleft(PeerProcess())
        reader = RemoteAgent.make(hosts[NUM_AHEAD], "ucx", f"killed-{number}#1", {})
        after_s = LATEST_KILL_S * (number // NUM_EACH) / (NUM_KILLED // NUM_EACH)
        _kill_while_connecting(writer, reader, after_s, also_back=number % 2 == 0)
        del hosts[NUM_AHEAD]
        assert writing.process.is_alive(), f"the writer died with peer {number}"

    fresh = RemoteAgent.make(hosts[0], "ucx", "fresh#1", {})
    peer = writer.connect(fresh.metadata())
    fresh.expect("grant", fresh.connect(writer.metadata()))
    writing.call("fill", writer.agent_name, 7)
    assert isinstance(writing.call("end_of", writer.agent_name, peer, WRITE, END_S), WriteCompleted)
    assert fresh.read(8192, 65536) == bytes([7]) * 65536
    fresh.close()
    writer.close()


def test_a_writer_survives_connecting_to_a_peer_that_connected_and_died(
    own_process: PeerProcess, hosts: deque[PeerProcess]
) -> None:
    writer = RemoteAgent.make(own_process, "ucx", "survivor#2", {})
    for number in range(3):
        hosts.append(PeerProcess(is_child=True))  # UCX refuses at once to connect to whoever the kernel has forgotten
        reader = RemoteAgent.make(hosts[-1], "ucx", f"died-{number}#1", {})
        metadata, own_metadata = reader.metadata(), writer.metadata()
        own_process.signal(signal.SIGSTOP)
        reader.connect(own_metadata)
        reader.host.signal(signal.SIGSTOP)  # before it sees an answer, and says which endpoint it is
        own_process.signal(signal.SIGCONT)
        own_process.call("poll_for", writer.agent_name, 0.05)  # the peer's connection is taken in
        peer = own_process.call("connect_to_killed", writer.agent_name, metadata, hosts[-1].process.pid)
        assert isinstance(own_process.call("end_of", writer.agent_name, peer, WRITE, END_S), WriteFailed)
        hosts.pop().process.join()
    assert own_process.process.is_alive()
    writer.close()


def _kill_while_connecting(writer: RemoteAgent, reader: RemoteAgent, after_s: float, *, also_back: bool) -> None:
    """Connect and write; the reader's process is killed `after_s` later, whatever the two are doing by then."""
    metadata = reader.metadata()
    if also_back:
        reader.expect("grant", reader.connect(writer.metadata()))
    kill = threading.Timer(after_s, reader.host.process.kill)
    kill.start()
    try:
        peer = writer.connect(metadata)
        end = writer.host.call("end_of", writer.agent_name, peer, WRITE, END_S)
        assert isinstance(end, WriteCompleted | WriteFailed), f"a write to {peer} has no end"
    except TransportError:  # killed so early that nothing could be begun
        return
    finally:
        kill.join()
        reader.host.process.join()
    assert isinstance(writer.host.call("end_of", writer.agent_name, peer, WRITE, END_S), WriteFailed)
