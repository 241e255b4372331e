"""What only a two-sided transport does, gloo in place of NCCL: it stores what is granted, and waits a bounded time."""

from __future__ import annotations

import inspect
import signal
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from transport_peer import ARENA_BYTES, EMPTY, Agent, Pair, PeerProcess

from kvtransfer.extents import ArenaShape, Descriptor, PageArea
from kvtransfer.transfer_thread import TransferThread
from kvtransfer.transports import nccl
from kvtransfer.transports.events import PeerId, WriteCompleted, WriteFailed
from kvtransfer.transports.nccl import CLOSE_S, NcclTransport
from kvtransfer.transports.pairs import PairThread, Side
from tandem.core.errors import TransportError
from tests.support.waiting import LONG_S


def test_a_transport_without_messages_says_so(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair("nccl")
    assert not pair.writer.transport.carries_messages
    with pytest.raises(TransportError, match="nccl carries no messages: 5 bytes"):
        pair.writer.transport.send(pair.peer, b"hello")


def test_gloo_bounds_a_write_to_a_stopped_peer(
    make_pair: Callable[..., Pair], own_process: PeerProcess
) -> None:
    pair = make_pair("nccl", own_process, timeout_s=3.0)
    assert isinstance(pair.end_of(pair.writer.write(pair.peer, [Descriptor(0, 0, 10)])), WriteCompleted)
    own_process.signal(signal.SIGSTOP)
    end = pair.end_of(pair.writer.write(pair.peer, [Descriptor(0, 0, 8 << 20)]))
    assert isinstance(end, WriteFailed)
    own_process.signal(signal.SIGCONT)
    # A new generation of the communicator carries the next write.
    pair.wait(
        lambda: isinstance(pair.end_of(pair.writer.write(pair.peer, [Descriptor(0, 0, 10)])), WriteCompleted),
        "a write that comes through",
        20,
    )


class Stuck(PairThread):
    """A helper thread that waits for its peer, as in gloo or NCCL: it cannot be woken."""

    def __init__(self, name: str, peer_answers: threading.Event) -> None:
        self._peer_answers = peer_answers
        super().__init__(cast(Side, SimpleNamespace(arena=torch.zeros(1))), name)

    def _main(self) -> None:
        self._peer_answers.wait(LONG_S)


def test_closing_takes_no_longer_than_it_is_given_however_many_helpers_wait_for_their_peers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert inspect.signature(TransferThread.stop).parameters["timeout_s"].default > CLOSE_S
    monkeypatch.setattr(nccl, "CLOSE_S", 0.1)
    transport, peer_answers = NcclTransport("agent", timeout_s=30.0), threading.Event()
    transport._leaving += [Stuck(f"helper-{number}", peer_answers) for number in range(20)]
    began_s = time.monotonic()
    with pytest.raises(TransportError, match=r"helper-0, helper-1, .*, helper-19 did not end within 0.1 s"):
        transport.close()
    assert time.monotonic() - began_s < 1.5, "20 times as long, were they waited for one by one"
    transport.close()
    peer_answers.set()


def test_a_two_sided_transport_stores_only_what_is_granted(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair("nccl")
    pair.reader.end("grant")
    second_page = PageArea([1], ArenaShape(num_layers=1, num_pages=ARENA_BYTES // 4096, extent_bytes=4096))
    pair.reader.expect("other", str(pair.writer.transport.agent_name), second_page)
    pair.writer.arena[:] = 9
    inside = pair.writer.write(pair.peer, [Descriptor(0, 4096, 4096)])
    across = pair.writer.write(pair.peer, [Descriptor(0, 4096, 100), Descriptor(0, 8000, 4096)])
    assert isinstance(pair.end_of(inside), WriteCompleted)
    end = pair.end_of(across)
    assert isinstance(end, WriteFailed)
    assert end.settled
    pair.reader.end("other")
    late = pair.end_of(pair.writer.write(pair.peer, [Descriptor(0, 4096, 100)]))
    assert isinstance(late, WriteFailed)
    assert pair.reader.read(8192, 100) == bytes([EMPTY]) * 100


def test_ending_a_grant_is_a_fence_on_a_two_sided_transport(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair("nccl", frame_bytes=16 << 10)
    assert isinstance(pair.reader, Agent)
    pair.writer.arena[:] = 9
    handle = pair.writer.write(pair.peer, [Descriptor(0, 0, ARENA_BYTES)])
    pair.wait(lambda: pair.reader.arena[0] == 9, "its first byte")
    pair.reader.end("grant")
    at_the_fence = pair.reader.read()
    end = pair.end_of(handle)
    assert isinstance(end, WriteFailed), "the write was over before the grant ended: send more"
    assert end.settled
    assert pair.reader.read() == at_the_fence
    # The pair still works.
    pair.reader.expect("new", str(pair.writer.transport.agent_name))
    assert isinstance(pair.end_of(pair.writer.write(pair.peer, [Descriptor(0, 0, 64)])), WriteCompleted)


def test_gloo_fails_all_that_is_outstanding_at_once_when_it_hangs_up(
    make_pair: Callable[..., Pair], own_process: PeerProcess
) -> None:
    pair = make_pair("nccl", own_process, timeout_s=60.0)
    assert isinstance(pair.end_of(pair.writer.write(pair.peer, [Descriptor(0, 0, 10)])), WriteCompleted)
    own_process.signal(signal.SIGSTOP)
    handles = [pair.writer.write(pair.peer, [Descriptor(0, 0, 1 << 20)]) for _ in range(3)]
    pair.writer.poll_for(0.2)
    assert not any(pair.writer.ends(handle) for handle in handles)
    pair.writer.hang_up(pair.peer)
    pair.writer.poll()
    ends = [end for handle in handles for end in pair.writer.ends(handle) if isinstance(end, WriteFailed)]
    assert [(end.settled, end.is_link_broken) for end in ends] == [(False, True), (True, True), (True, True)]
    assert not pair.writer.transport.wants_polling
    own_process.signal(signal.SIGCONT)
    pair.connect_anew()
    pair.writer.arena[:10] = 4
    assert isinstance(pair.end_of(pair.writer.write(pair.peer, [Descriptor(0, 0, 10)])), WriteCompleted)
    assert pair.reader.read(0, 10) == bytes([4]) * 10
    assert all(len(pair.writer.ends(handle)) == 1 for handle in handles)
    assert not pair.writer.broken(), "what was given up says nothing of the new connection"


@pytest.mark.faults
def test_what_was_announced_and_given_up_holds_up_no_later_write(
    make_pair: Callable[..., Pair], own_process: PeerProcess
) -> None:
    """The reader hears of it when it has hung up too, and makes a communicator that nobody else would join."""
    pair = make_pair("nccl", own_process, timeout_s=60.0)
    assert isinstance(pair.end_of(pair.writer.write(pair.peer, [Descriptor(0, 0, 10)])), WriteCompleted)
    pair.reader.hang_up(PeerId(pair.writer.transport.agent_name))
    own_process.signal(signal.SIGSTOP)
    given_up = pair.writer.write(pair.peer, [Descriptor(0, 0, 10)])
    pair.writer.poll_for(0.2)
    pair.writer.hang_up(pair.peer)
    assert isinstance(pair.end_of(given_up), WriteFailed)
    own_process.signal(signal.SIGCONT)
    pair.connect_anew()
    assert isinstance(pair.end_of(pair.writer.write(pair.peer, [Descriptor(0, 0, 10)])), WriteCompleted)


def test_hanging_up_is_a_fence_on_a_two_sided_transport(make_pair: Callable[..., Pair]) -> None:
    """The same peer may have the same pages again by then."""
    pair = make_pair("nccl", frame_bytes=16 << 10)
    assert isinstance(pair.reader, Agent)
    pair.writer.arena[:] = 9
    handle = pair.writer.write(pair.peer, [Descriptor(0, 0, ARENA_BYTES)])
    pair.wait(lambda: pair.reader.arena[0] == 9, "its first byte")
    pair.reader.hang_up(PeerId(pair.writer.transport.agent_name))
    at_the_fence = pair.reader.read()
    assert isinstance(pair.end_of(handle), WriteFailed), "the write was over before: send more"
    assert pair.reader.read() == at_the_fence
    pair.writer.hang_up(pair.peer)
    pair.connect_anew()
    assert isinstance(pair.end_of(pair.writer.write(pair.peer, [Descriptor(0, 0, 64)])), WriteCompleted)


@pytest.mark.parametrize(
    ("ours", "theirs", "by_host"), [("a", "a", True), ("a", "b", False), ("", "", False), ("a", "", False)]
)
def test_pages_of_one_gpu_go_through_host_memory(ours: str, theirs: str, by_host: bool) -> None:
    """NCCL refuses two processes on one card. Both ends come to the same by what each says of itself."""
    arenas = [np.zeros(64, np.uint8) for _ in range(2)]
    ends = [NcclTransport(f"end#{number}") for number in range(2)]
    try:
        for transport, arena, gpu in zip(ends, arenas, (ours, theirs), strict=True):
            transport.register(arena.ctypes.data, arena.nbytes, owner=arena)
            transport._gpu = gpu
        first, second = ends
        assert first._shares_gpu(first.connect(second.metadata())) is by_host
        assert second._shares_gpu(second.connect(first.metadata())) is by_host
    finally:
        for transport in ends:
            transport.close()
