"""Point-to-point of torch.distributed, made one-sided: NCCL between GPUs, gloo between CPUs.

NCCL refuses two processes that share one GPU: their pages go through host memory by gloo. That is for trying things out
on one card, and slower than NCCL.

For GPU fabrics without a usable NIC. The library is two-sided, so the reader's helper threads (see `pairs`) store what
arrives, and only into ranges that were announced by `expect_incoming`: here `end_incoming` is a fence. The transfer
thread itself never blocks. One communicator for each pair and direction, made by its first write.

A connection is closed (`hang_up`) without waiting: what is outstanding fails at once, and nothing of it is stored any
more. A helper thread that waits for the peer in gloo or NCCL cannot be woken; it is ready for the next connection when
that wait has ended, after `timeout_s` at most.
"""

from __future__ import annotations

import ctypes
import json
import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import ClassVar, Unpack

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public by documentation

from kvtransfer.extents import Descriptor, PageArea
from kvtransfer.transports.base import Place, Transport
from kvtransfer.transports.envelope import Envelope
from kvtransfer.transports.events import PeerId, TransportEvent, WriteCompleted, WriteFailed, WriteHandle
from kvtransfer.transports.pairs import PairReader, PairWriter, QueuedWrite, Side, join_all, translated
from tandem.core.errors import TransportError

#: How long closing waits for helper threads, all together: less than whoever closes waits (`TransferThread.stop`).
CLOSE_S = 4.0


class NcclTransport(Transport):
    """A write to a stopped peer fails after `timeout_s`.

    Args:
        frame_bytes: bytes that are packed and sent at once.

    Raises:
        TransportError: the rendezvous store cannot start.
    """

    name: ClassVar[str] = "nccl"

    def __init__(self, agent_name: str, *, frame_bytes: int = 16 << 20, **place: Unpack[Place]) -> None:
        super().__init__(agent_name, **place)
        host = self.doorbell.host
        if self.interface is not None:  # gloo listens on `host`
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={self.interface.name}")
            rdma = self.interface.devices()[1:]
            os.environ.setdefault(*(("NCCL_IB_HCA", "=" + ",".join(rdma)) if rdma else ("NCCL_IB_DISABLE", "1")))
        self._frame_bytes = frame_bytes
        with translated(f"cannot serve a store on {host}"):
            self._store: TCPStore | None = TCPStore(
                host, 0, None, True, timeout=timedelta(seconds=self.timeout_s), wait_for_workers=False
            )
        self._stores: dict[str, tuple[str, int]] = {}  # by peer: where its store listens
        self._gpus: dict[str, str] = {}  # by peer: which it has its arena on; empty: none
        self._gpu = ""
        self._side: Side | None = None
        self._writers: dict[str, PairWriter] = {}
        self._readers: dict[str, PairReader] = {}
        self._leaving: list[PairWriter | PairReader] = []  # asked to close, not joined
        # Guards _expected, _events and _outgoing; readers hold it while they store bytes.
        self._lock = threading.Lock()
        self._events: list[TransportEvent] = []
        # Invariant: all and only writes whose end was not returned by `poll`.
        self._outgoing: set[WriteHandle] = set()

    def _register(self, me: Envelope) -> None:
        arena = _as_bytes(me, self._owner)
        self._gpu = str(torch.cuda.get_device_properties(arena.device).uuid) if arena.is_cuda else ""
        self._side = Side(
            self.agent_name, arena, self._owner, self.doorbell.host, self.timeout_s, self._frame_bytes, self._report
        )

    def _blob(self) -> bytes:
        port = self._open().port
        return json.dumps([port, self._gpu] if self._gpu else port).encode()

    def _learn(self, peer: Envelope, blob: bytes) -> None:
        with translated(f"the description of {peer.agent_name} is damaged"):
            port, gpu = told if isinstance(told := json.loads(blob), list) else (told, "")
            self._stores[peer.agent_name] = (peer.host, int(port))
            self._gpus[peer.agent_name] = str(gpu)

    def _shares_gpu(self, peer: str) -> bool:
        return bool(self._gpu) and self._gpus[peer] == self._gpu

    def post_write(self, peer: PeerId, descriptors: Sequence[Descriptor], tag: bytes = b"") -> WriteHandle:
        handle = self._new_write(peer, descriptors, tag)
        with self._lock:
            self._outgoing.add(handle)
        if self._takes_no_writes(peer):
            error = f"the connection to {peer} is broken"
            self._report(WriteFailed(handle, error, settled=True, is_link_broken=True))
            return handle
        if peer not in self._writers:
            assert self._side is not None
            self._writers[peer] = PairWriter(
                self._side, peer, self._open(), self._stores[peer], by_host=self._shares_gpu(peer)
            )
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

    def _hang_up(self, peer: PeerId) -> None:
        if (reader := self._readers.get(peer)) is not None:
            reader.hang_up()
        if (writer := self._writers.get(peer)) is None:
            return
        error = f"disconnected from {peer}"
        unsent, given_up = writer.give_up()
        if given_up is not None:
            self._report(WriteFailed(given_up.handle, error, settled=False, is_link_broken=True))
        for write in unsent:
            self._report(WriteFailed(write.handle, error, settled=True, is_link_broken=True))

    def disconnect(self, peer: PeerId) -> None:
        if not self._forget(peer):
            return
        for thread in (self._writers.pop(peer, None), self._readers.pop(peer, None)):
            if thread is not None:
                if isinstance(thread, PairReader):
                    thread.hang_up()  # it may wait for the peer longer than anybody waits for it
                thread.ask_to_close()
                self._leaving.append(thread)

    def close(self) -> None:
        """Raises `TransportError`: a helper thread waits for its peer still. It stores nothing more, and keeps what it
        may read."""
        if self._store is None:
            return
        for peer in self._peers.names():
            self.disconnect(PeerId(peer))
        try:
            join_all(self._leaving, CLOSE_S)
        finally:
            self.doorbell.close()
            self._store = self._side = self._owner = None
            self._leaving.clear()

    @property
    def num_outgoing(self) -> int:
        with self._lock:
            return len(self._outgoing)

    # ---- the receiving side

    def expect_incoming(self, key: str, peer: PeerId, area: PageArea | None = None) -> None:
        self._open()
        self._peers.get(peer)
        with self._lock:
            super().expect_incoming(key, peer, area)
        if peer in self._readers:
            return
        self._registered()
        assert self._side is not None
        self._readers[peer] = PairReader(
            self._side,
            peer,
            self._open(),
            self._stores[peer],
            self._lock,
            lambda ranges: self._may_store(peer, ranges),
            by_host=self._shares_gpu(peer),
        )

    def end_incoming(self, key: str) -> None:
        with self._lock:
            super().end_incoming(key)

    def _may_store(self, peer: PeerId, ranges: Sequence[tuple[int, int]]) -> bool:
        """Whether the peer may write all of these now; with `_lock` held."""
        areas = [e.area for e in self._expected.values() if e.peer == peer and e.area is not None]
        return all(any(area.covers(*one) for area in areas) for one in ranges)

    def _open(self) -> TCPStore:
        if self._store is None:
            raise TransportError(f"{self.agent_name} is closed")
        return self._store


def _as_bytes(me: Envelope, owner: object) -> torch.Tensor:
    """Registered memory as a flat uint8 tensor that shares it.

    Raises:
        TransportError: device memory without the tensor that owns it.
    """
    if me.device == "cpu":
        return torch.frombuffer((ctypes.c_uint8 * me.num_bytes).from_address(me.address), dtype=torch.uint8)
    if not isinstance(owner, torch.Tensor) or not owner.is_contiguous():
        raise TransportError(f"memory of {me.device} needs the contiguous torch tensor that owns it as owner")
    start = me.address - owner.data_ptr()
    return owner.view(-1).view(torch.uint8)[start : start + me.num_bytes]
