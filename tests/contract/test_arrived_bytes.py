"""When a transport says at the target that a write has arrived, its bytes are there: their digests are taken then."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from transport_peer import Pair, PeerProcess

from kvtransfer.extents import Descriptor
from kvtransfer.transports.events import PeerId, WriteArrived
from kvtransfer.transports.registry import transport_names

PLACES = [("loopback", "here"), ("ucx", "here"), ("nccl", "here"), ("ucx", "process"), ("nccl", "process")]
SIZE = 1 << 20


@pytest.mark.parametrize(("name", "place"), PLACES, ids=["-".join(p) for p in PLACES])
def test_the_bytes_of_a_write_are_there_when_its_arrival_is_told(
    name: str, place: str, make_pair: Callable[..., Pair], peer_process: PeerProcess
) -> None:
    pair: Pair = make_pair(name, peer_process if place == "process" else None)
    for value in range(1, 25):
        pair.writer.arena[: 2 * SIZE] = value
        tag = b"write %d" % value
        # The last descriptor is a byte: what arrives last is looked at first.
        pair.writer.write(pair.peer, [Descriptor(0, 0, SIZE), Descriptor(SIZE, 2 * SIZE, 1)], tag)
        pair.wait(lambda tag=tag: tag in pair.reader.arrived(), f"{tag}")
        assert pair.reader.read(2 * SIZE, 1) == bytes([value])
        assert pair.reader.read(0, SIZE) == bytes([value]) * SIZE


@pytest.mark.parametrize("name", transport_names())
def test_an_arrival_names_its_writer(name: str, make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(name)
    pair.writer.write(pair.peer, [Descriptor(0, 0, 8)], b"mine")
    pair.wait(pair.reader.arrived, "the write")
    arrived = [event for event in pair.reader.events if isinstance(event, WriteArrived)]  # type: ignore[union-attr]
    assert arrived == [WriteArrived(PeerId(pair.writer.transport.agent_name), b"mine")]
