"""Point-to-point of torch.distributed, made one-sided: NCCL between GPUs, gloo between CPUs.

For GPU fabrics without a usable NIC. The library is two-sided, so the reader's helper threads (see `pairs`) store what
arrives, and only into ranges that were announced by `expect_incoming`: here `end_incoming` is a fence. The transfer
thread itself never blocks. One communicator for each pair and direction, made by its first write.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import ClassVar

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public by documentation

from kvtransfer.extents import Descriptor
from kvtransfer.transports.base import Transport, check_descriptors
from kvtransfer.transports.envelope import Envelope, PeerBook
from kvtransfer.transports.events import PeerId, TransportEvent, WriteCompleted, WriteFailed, WriteHandle
from kvtransfer.transports.pairs import PairReader, PairWriter, QueuedWrite, Side, translated
from tandem.core.errors import TransportError


class NcclTransport(Transport):
    """Args:
        timeout_s: bound of each blocking step of a transfer; a stopped peer fails a write after it.
        frame_bytes: bytes that are packed and sent at once.

    Raises:
        TransportError: the rendezvous store cannot start.
    """

    name: ClassVar[str] = "nccl"

    def __init__(
        self, agent_name: str, *, host: str = "127.0.0.1", timeout_s: float = 10.0, frame_bytes: int = 16 << 20
    ) -> None:
        super().__init__(agent_name, host)
        self._timeout_s = timeout_s
        self._frame_bytes = frame_bytes
        with translated(f"cannot serve a store on {host}"):
            self._store: TCPStore | None = TCPStore(
                host, 0, None, True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
            )
        self._peers = PeerBook(self.name, agent_name)
        self._stores: dict[str, tuple[str, int]] = {}  # by peer: where its store listens
        self._me: Envelope | None = None
        self._side: Side | None = None
        self._owner: object = None
        self._numbers = itertools.count()
        self._writers: dict[str, PairWriter] = {}
        self._readers: dict[str, PairReader] = {}
        self._leaving: list[PairWriter | PairReader] = []  # asked to close, not joined
        # Guards _expected, _events and _outgoing; readers hold it while they store bytes.
        self._lock = threading.Lock()
        self._events: list[TransportEvent] = []
        # Invariant: all and only writes whose end was not returned by `poll`.
        self._outgoing: set[WriteHandle] = set()

    def register(self, address: int, num_bytes: int, *, owner: object, device: str = "cpu") -> None:
        self._open()
        if self._me is not None:
            raise TransportError(f"{self.agent_name} has registered its arena already")
        arena = _as_bytes(address, num_bytes, owner, device)
        self._owner = owner
        self._me = Envelope(
            self.name, self.agent_name, address, num_bytes, device, self.doorbell.host, self.doorbell.port
        )
        self._side = Side(
            self.agent_name, arena, self.doorbell.host, self._timeout_s, self._frame_bytes, self._report
        )

    def metadata(self) -> bytes:
        return self._registered().pack(json.dumps(self._open().port).encode())

    def connect(self, metadata: bytes) -> PeerId:
        self._open()
        envelope, blob, is_new = self._peers.enter(metadata)
        if is_new:
            self._stores[envelope.agent_name] = (envelope.host, int(json.loads(blob)))
        return PeerId(envelope.agent_name)

    def post_write(self, peer: PeerId, descriptors: Sequence[Descriptor], tag: bytes = b"") -> WriteHandle:
        self._open()
        there = self._peers.get(peer)
        problem = check_descriptors(descriptors, self._registered().num_bytes, there.num_bytes)
        if problem:
            raise TransportError(problem)
        handle = WriteHandle(next(self._numbers), peer, tag, sum(d.num_bytes for d in descriptors))
        with self._lock:
            self._outgoing.add(handle)
        if peer not in self._writers:
            assert self._side is not None
            self._writers[peer] = PairWriter(self._side, peer, self._open(), self._stores[peer])
        self._writers[peer].enqueue(QueuedWrite(handle, tuple(descriptors)))
        return handle

    def poll(self) -> list[TransportEvent]:
        self._open()
        with self._lock:
            events, self._events = self._events, []
            for event in events:
                if isinstance(event, WriteCompleted | WriteFailed):
                    self._outgoing.discard(event.handle)
        return events

    def _report(self, event: TransportEvent) -> None:
        with self._lock:
            self._events.append(event)
        self.doorbell.ring()

    def abort(self, handle: WriteHandle) -> None:
        """Takes back a write that has not begun; one that has ends by itself within the time-out."""
        writer = self._writers.get(handle.peer)
        if writer is not None and writer.withdraw(handle):
            self._report(WriteFailed(handle, "aborted", settled=True))

    def disconnect(self, peer: PeerId) -> None:
        if not self._peers.leave(peer):
            return
        for thread in (self._writers.pop(peer, None), self._readers.pop(peer, None)):
            if thread is not None:
                thread.ask_to_close()
                self._leaving.append(thread)

    def close(self) -> None:
        if self._store is None:
            return
        for peer in self._peers.names():
            self.disconnect(PeerId(peer))
        try:
            for thread in self._leaving:
                thread.join()
        finally:
            self.doorbell.close()
            self._store = self._side = self._owner = None
            self._leaving.clear()

    @property
    def num_outgoing(self) -> int:
        with self._lock:
            return len(self._outgoing)

    # ---- the receiving side

    def expect_incoming(self, key: str, peer: PeerId | None, ranges: Sequence[tuple[int, int]]) -> None:
        self._open()
        if peer is not None:
            self._peers.get(peer)
        with self._lock:
            super().expect_incoming(key, peer, ranges)
        if peer is None or peer in self._readers:
            return
        self._registered()
        assert self._side is not None
        self._readers[peer] = PairReader(
            self._side,
            peer,
            self._open(),
            self._stores[peer],
            self._lock,
            lambda start, size: any(e.covers(peer, start, size) for e in self._expected.values()),
        )

    def end_incoming(self, key: str) -> None:
        with self._lock:
            super().end_incoming(key)

    def _open(self) -> TCPStore:
        if self._store is None:
            raise TransportError(f"{self.agent_name} is closed")
        return self._store

    def _registered(self) -> Envelope:
        if self._me is None:
            raise TransportError(f"{self.agent_name} has registered no memory")
        return self._me


def _as_bytes(address: int, num_bytes: int, owner: object, device: str) -> torch.Tensor:
    """Registered memory as a flat uint8 tensor that shares it.

    Raises:
        TransportError: device memory without the tensor that owns it.
    """
    if device == "cpu":
        return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)
    if not isinstance(owner, torch.Tensor) or not owner.is_contiguous():
        raise TransportError(f"memory of {device} needs the contiguous torch tensor that owns it as owner")
    start = address - owner.data_ptr()
    return owner.view(-1).view(torch.uint8)[start : start + num_bytes]
