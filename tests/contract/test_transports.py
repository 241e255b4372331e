"""What every transport must do. One suite for ucx, nccl (its gloo form) and loopback; readers in this process and in
another."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from transport_peer import ARENA_BYTES, EMPTY, Agent, Pair, PeerProcess

from kvtransfer.extents import Descriptor
from kvtransfer.transports.events import PeerId, WriteCompleted, WriteFailed
from kvtransfer.transports.registry import create_transport, transport_names
from tandem.core.errors import ConfigError, TransportError
from tests.support.waiting import wait_until

PLACES = [("loopback", "here"), ("ucx", "here"), ("nccl", "here"), ("ucx", "process"), ("nccl", "process")]


@pytest.fixture(params=PLACES, ids=["-".join(p) for p in PLACES])
def pair(
    request: pytest.FixtureRequest, make_pair: Callable[..., Pair], peer_process: PeerProcess
) -> Pair:
    name, place = request.param
    pair = make_pair(name, peer_process if place == "process" else None)
    pair.writer.arena[:] = np.random.default_rng(7).integers(0, EMPTY, ARENA_BYTES, dtype=np.uint8)
    return pair


@pytest.fixture(params=transport_names())
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# ---- bytes


def test_many_extents_arrive_exactly_and_their_neighbours_stay(pair: Pair) -> None:
    rng = np.random.default_rng(1)
    descriptors, here, there = [], 0, 5
    for num_bytes in (int(n) for n in rng.integers(1, 40_000, 200)):
        descriptors.append(Descriptor(here, there, num_bytes))
        here += num_bytes + 11
        there += num_bytes + 7
    expected = np.full(ARENA_BYTES, EMPTY, np.uint8)
    for local, remote, num_bytes in descriptors:
        expected[remote : remote + num_bytes] = pair.writer.arena[local : local + num_bytes]

    handle = pair.writer.write(pair.peer, descriptors, b"batch")
    assert handle.num_bytes == sum(d.num_bytes for d in descriptors)
    assert pair.end_of(handle) == WriteCompleted(handle)
    assert pair.reader.read() == expected.tobytes()


@pytest.mark.parametrize("num_bytes", [1, 4096, 1 << 20, (16 << 20) + 3])
def test_one_extent_of_any_size(pair: Pair, num_bytes: int) -> None:
    handle = pair.writer.write(pair.peer, [Descriptor(100, 200, num_bytes)])
    assert isinstance(pair.end_of(handle), WriteCompleted)
    assert pair.reader.read(200, num_bytes) == pair.writer.read(100, num_bytes)
    assert pair.reader.read(199, 1) == pair.reader.read(200 + num_bytes, 1) == bytes([EMPTY])


def test_several_writes_in_flight_end_once_each_and_announce_their_tags(pair: Pair) -> None:
    step = 1 << 16
    tags = [b"tag-%d" % n for n in range(20)]
    handles = [
        pair.writer.write(pair.peer, [Descriptor(n * step, (n + 1) * step, step)], tag) for n, tag in enumerate(tags)
    ]
    assert len(set(handles)) == 20
    for handle in handles:
        assert isinstance(pair.end_of(handle), WriteCompleted)
    assert [h.tag for h in handles] == tags
    pair.wait(lambda: len(pair.reader.arrived()) >= 20, "20 writes")
    assert sorted(pair.reader.arrived()) == sorted(tags)
    assert pair.reader.read(step, 20 * step) == pair.writer.read(0, 20 * step)
    for _ in range(10):
        pair.writer.poll()
    assert all(len(pair.writer.ends(h)) == 1 for h in handles)


def test_a_page_may_be_written_again(pair: Pair) -> None:
    for value in (1, 2, 3):
        pair.writer.arena[:64] = value
        handle = pair.writer.write(pair.peer, [Descriptor(0, 0, 64)])
        assert isinstance(pair.end_of(handle), WriteCompleted)
        assert pair.reader.read(0, 64) == bytes([value]) * 64


# ---- messages

SPEAKING = [place for place in PLACES if place[0] != "nccl"]


@pytest.fixture(params=SPEAKING, ids=["-".join(p) for p in SPEAKING])
def speaking(request: pytest.FixtureRequest, make_pair: Callable[..., Pair], peer_process: PeerProcess) -> Pair:
    name, place = request.param
    return make_pair(name, peer_process if place == "process" else None)


def test_messages_arrive_whole_and_once_behind_the_writes_that_have_completed(speaking: Pair) -> None:
    pair, sender = speaking, str(speaking.writer.transport.agent_name)
    assert pair.writer.transport.carries_messages
    for tag in (b"first", b"second"):
        handle = pair.writer.write(pair.peer, [Descriptor(0, 0, 1 << 20)], tag)
        assert isinstance(pair.end_of(handle), WriteCompleted)
        pair.writer.transport.send(pair.peer, b"after " + tag)
    pair.wait(lambda: len(pair.reader.came()) >= 4, "two writes and two messages")
    for _ in range(20):
        pair.writer.poll()
    expected = [b"first", b"after first", b"second", b"after second"]
    assert pair.reader.came() == [(sender, content) for content in expected]


@pytest.mark.parametrize("num_bytes", [0, 1, 8192, 100_000, 3 << 20])
def test_a_message_of_any_size_before_any_write(speaking: Pair, num_bytes: int) -> None:
    content = np.random.default_rng(3).bytes(num_bytes)
    speaking.writer.transport.send(speaking.peer, content)
    speaking.wait(speaking.reader.came, "the message")
    assert speaking.reader.came() == [(speaking.writer.transport.agent_name, content)]


def test_a_message_to_nobody_is_refused(speaking: Pair) -> None:
    with pytest.raises(TransportError, match="not connected"):
        speaking.writer.transport.send(PeerId("nobody#1"), b"hello")
    speaking.writer.transport.disconnect(speaking.peer)
    with pytest.raises(TransportError, match="not connected"):
        speaking.writer.transport.send(speaking.peer, b"hello")
    speaking.writer.close()
    with pytest.raises(TransportError):
        speaking.writer.transport.send(speaking.peer, b"hello")


def test_a_message_to_a_killed_peer_is_refused_once_that_is_known(
    make_pair: Callable[..., Pair], own_process: PeerProcess
) -> None:
    pair = make_pair("ucx", own_process)
    pair.writer.transport.send(pair.peer, b"alive")
    pair.wait(pair.reader.came, "the message")
    own_process.kill()
    pair.writer.expect("answer", str(pair.peer), None)

    def is_refused() -> bool:
        try:
            pair.writer.transport.send(pair.peer, b"dead")
        except TransportError:
            return True
        return False

    pair.wait(is_refused, "the refusal")


# ---- peers


def test_connecting_again_changes_nothing(pair: Pair) -> None:
    metadata = pair.reader.metadata()
    assert metadata == pair.reader.metadata()
    assert pair.writer.connect(metadata) == pair.peer
    assert isinstance(pair.end_of(pair.writer.write(pair.peer, [Descriptor(0, 0, 10)])), WriteCompleted)


def test_misuse_is_refused_at_once(pair: Pair) -> None:
    good = Descriptor(0, 0, 10)
    misuses: list[tuple[str, PeerId, list[Descriptor]]] = [
        ("not connected", PeerId("nobody#1"), [good]),
        ("at least one", pair.peer, []),
        ("beyond the local", pair.peer, [Descriptor(ARENA_BYTES - 5, 0, 10)]),
        ("beyond the peer", pair.peer, [good, Descriptor(0, ARENA_BYTES - 5, 10)]),
        ("not a range", pair.peer, [Descriptor(0, 0, 0)]),
        ("not a range", pair.peer, [Descriptor(-1, 0, 10)]),
    ]
    for problem, peer, descriptors in misuses:
        with pytest.raises(TransportError, match=problem):
            pair.writer.write(peer, descriptors)
    assert not pair.writer.transport.num_outgoing


def test_a_restarted_peer_needs_a_new_name(make_pair: Callable[..., Pair], name: str) -> None:
    pair = make_pair(name)
    old = pair.peer
    pair.reader.close()
    again = Agent.make(name, str(old), {})
    try:
        with pytest.raises(TransportError, match="is taken"):
            pair.writer.connect(again.metadata())
        pair.writer.transport.disconnect(old)
        pair.writer.transport.disconnect(old)
        with pytest.raises(TransportError, match="is taken"):
            pair.writer.connect(again.metadata())
        with pytest.raises(TransportError, match="not connected"):
            pair.writer.write(old, [Descriptor(0, 0, 1)])
    finally:
        again.close()


def test_descriptions_that_are_none_are_refused(make_pair: Callable[..., Pair], name: str) -> None:
    pair = make_pair(name)
    other = make_pair("ucx" if name == "loopback" else "loopback")
    good = pair.reader.metadata()
    for metadata in (b"", b"junk", good[:20], other.reader.metadata(), pair.writer.metadata()):
        with pytest.raises(TransportError):
            pair.writer.connect(metadata)
    assert pair.writer.connect(good) == pair.peer


@pytest.mark.parametrize("port", [b"}", b"null", b"Infinity"])
def test_a_peer_whose_own_part_of_the_description_is_damaged_may_connect_later(
    make_pair: Callable[..., Pair], port: bytes
) -> None:
    pair = make_pair("nccl")
    fresh = Agent.make("nccl", "fresh#1", {})
    described, blob = fresh.metadata(), fresh.transport._blob()
    assert described.endswith(blob)
    try:
        with pytest.raises(TransportError, match=r"the description of fresh#1 is damaged"):
            pair.writer.connect(described[: -len(blob)] + port)
        assert pair.writer.connect(fresh.metadata()) == "fresh#1"
    finally:
        fresh.close()


def test_memory_is_registered_once_and_first(name: str) -> None:
    transport = create_transport(name, "lonely#1")
    arena = np.zeros(4096, np.uint8)
    try:
        with pytest.raises(TransportError, match="registered no memory"):
            transport.metadata()
        with pytest.raises(TransportError):
            transport.register(arena.ctypes.data, arena.nbytes, owner=arena, device="abacus")
        transport.register(arena.ctypes.data, arena.nbytes, owner=arena)
        with pytest.raises(TransportError, match="already"):
            transport.register(arena.ctypes.data, arena.nbytes, owner=arena)
    finally:
        transport.close()


def test_an_unknown_transport_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="known: loopback, nccl, ucx"):
        create_transport("ucx-py", "x")


# ---- polling


def test_it_wants_polling_exactly_while_something_may_happen(pair: Pair) -> None:
    transport = pair.writer.transport
    assert not transport.wants_polling
    handle = pair.writer.write(pair.peer, [Descriptor(0, 0, 1000)])
    assert transport.wants_polling
    pair.end_of(handle)
    assert not transport.wants_polling
    for _ in range(2):
        pair.writer.expect("incoming", str(pair.peer))
        assert transport.wants_polling
    for _ in range(2):
        pair.writer.end("incoming")
        assert not transport.wants_polling


def test_it_rings_at_a_reader_when_a_write_has_arrived(pair: Pair) -> None:
    assert not pair.reader.hears(0.0)
    for tag in (b"first", b"second"):
        assert isinstance(pair.end_of(pair.writer.write(pair.peer, [Descriptor(0, 0, 1000)], tag)), WriteCompleted)
        assert pair.reader.hears(5.0)
        assert not pair.reader.hears(0.0)
        pair.wait(lambda t=tag: t in pair.reader.arrived(), f"{tag!r}")  # type: ignore[misc]


def test_it_rings_at_a_reader_for_as_long_as_a_write_needs_its_polls(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair("ucx")
    handle = pair.writer.write(pair.peer, [Descriptor(0, 0, 1000)], b"first")
    assert not pair.reader.hears(0.0)
    for _ in range(3):
        pair.writer.poll()  # it has not ended, as its reader does not poll
        assert pair.reader.hears(5.0)
        assert not pair.reader.hears(0.0)
    assert isinstance(pair.end_of(handle), WriteCompleted)


def test_it_rings_at_a_reader_with_every_message(speaking: Pair) -> None:
    for content in (b"", b"hello"):
        speaking.writer.transport.send(speaking.peer, content)
        assert speaking.reader.hears(5.0)
        assert not speaking.reader.hears(0.0)


def test_a_message_rings_once(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair("ucx")
    pair.writer.transport.send(pair.peer, b"hello")
    assert pair.reader.hears(5.0)
    assert not pair.reader.hears(0.0)
    assert pair.reader.transport.doorbell.num_from_peers == 1


# ---- trouble


def test_a_killed_peer_fails_writes_in_bounded_time(
    make_pair: Callable[..., Pair], own_process: PeerProcess, name: str
) -> None:
    if name == "loopback":
        pair = make_pair(name)
        assert isinstance(pair.end_of(pair.writer.write(pair.peer, [Descriptor(0, 0, 10)])), WriteCompleted)
        pair.reader.close()
    else:
        pair = make_pair(name, own_process)
        assert isinstance(pair.end_of(pair.writer.write(pair.peer, [Descriptor(0, 0, 10)])), WriteCompleted)
        own_process.kill()
    for _ in range(2):
        started_s = time.monotonic()
        end = pair.end_of(pair.writer.write(pair.peer, [Descriptor(0, 0, 1 << 20)]))
        assert isinstance(end, WriteFailed)
        assert end.error
        assert time.monotonic() - started_s < 8
    assert not pair.writer.transport.wants_polling


def test_a_peer_that_is_killed_under_a_write_fails_it(
    make_pair: Callable[..., Pair], own_process: PeerProcess
) -> None:
    pair = make_pair("ucx", own_process)
    own_process.signal(signal.SIGSTOP)
    handle = pair.writer.write(pair.peer, [Descriptor(0, 0, 1 << 20)])
    pair.writer.poll_for(0.3)
    assert not pair.writer.ends(handle), "a stopped peer shows no end"
    own_process.kill()
    end = pair.end_of(handle)
    assert isinstance(end, WriteFailed)
    assert not end.settled


def test_a_write_to_a_stopped_peer_ends_only_when_it_goes_on(
    make_pair: Callable[..., Pair], own_process: PeerProcess
) -> None:
    pair = make_pair("ucx", own_process)
    pair.writer.arena[:] = 5
    own_process.signal(signal.SIGSTOP)
    handle = pair.writer.write(pair.peer, [Descriptor(0, 0, 1 << 20)])
    pair.writer.poll_for(0.5)
    assert not pair.writer.ends(handle)
    own_process.signal(signal.SIGCONT)
    assert isinstance(pair.end_of(handle), WriteCompleted)
    assert pair.reader.read(0, 1 << 20) == bytes([5]) * (1 << 20)


def test_a_connection_that_both_ends_have_closed_is_made_anew(pair: Pair) -> None:
    assert isinstance(pair.end_of(pair.writer.write(pair.peer, [Descriptor(0, 0, 1 << 20)])), WriteCompleted)
    for value in (1, 2):
        pair.writer.hang_up(pair.peer)
        late = pair.end_of(pair.writer.write(pair.peer, [Descriptor(0, 0, 64)]))
        assert isinstance(late, WriteFailed)
        assert (late.settled, late.is_link_broken) == (True, True)
        pair.connect_anew()
        pair.writer.arena[:64] = value
        assert isinstance(pair.end_of(pair.writer.write(pair.peer, [Descriptor(0, 0, 64)])), WriteCompleted)
        assert pair.reader.read(0, 64) == bytes([value]) * 64


# ---- closing


def test_a_closed_transport_refuses_and_closes_again(make_pair: Callable[..., Pair], name: str) -> None:
    pair = make_pair(name)
    for _ in range(2):
        pair.writer.close()
    for call in (
        pair.writer.transport.poll,
        lambda: pair.writer.connect(pair.reader.metadata()),
        lambda: pair.writer.write(pair.peer, [Descriptor(0, 0, 1)]),
    ):
        with pytest.raises(TransportError):
            call()


def test_a_disconnect_that_cannot_be_carried_out_raises_nothing(make_pair: Callable[..., Pair], name: str) -> None:
    pair = make_pair(name)
    pair.writer.close()
    pair.writer.transport.disconnect(pair.peer)


def open_things() -> tuple[int, int, set[str]]:
    tasks = len(os.listdir("/proc/self/task"))
    return len(os.listdir("/proc/self/fd")), tasks, {t.name for t in threading.enumerate()}


def test_closing_leaves_no_thread_and_no_file_descriptor(make_pair: Callable[..., Pair], name: str) -> None:
    def use_and_close() -> None:
        pair = make_pair(name)
        assert isinstance(pair.end_of(pair.writer.write(pair.peer, [Descriptor(0, 0, 1000)])), WriteCompleted)
        pair.writer.close()
        pair.reader.close()

    use_and_close()  # what a library starts once for the process stays
    # Threads of the libraries, of earlier tests too, end on their own time: so three more rounds than one may leave no
    # more than one did, and what ends meanwhile is no fault.
    files, tasks, names = open_things()

    def is_no_more(now: tuple[int, int, set[str]]) -> bool:
        return now[0] <= files and now[1] <= tasks and now[2] <= names

    for _ in range(3):
        use_and_close()
    wait_until(open_things, f"no more than {files, tasks, names}", 15, wanted=is_no_more)
