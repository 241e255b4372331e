"""One direction between two agents of the `nccl` transport: a writer's and a reader's helper thread.

torch.distributed knows only two-sided, blocking transfers, so each direction has a thread at each end:

    writer                              the reader's store                       reader
    set  h/n   where the bytes go   ──────────────────────────────>   wait  h/n, check it against the grants
    wait g/n   <──────────────────────────────   set g/n              go, or why not
    send packed frames              ════ gloo or NCCL ════>           receive, check again, scatter
    wait d/n   <──────────────────────────────   set d/n              done, or why not

Headers and answers go through the reader's TCPStore, because a receive that waits for a header could not be ended
(gloo) or would spin on the device (NCCL). The communicator is made by the first write, and a new generation of it
after a failure. A thread without work sleeps: a writer on a condition, a reader on its store's socket.
"""

from __future__ import annotations

import logging
import struct
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import (  # type: ignore[attr-defined]  # public by documentation, not by __all__
    PrefixStore,
    ProcessGroup,
    ProcessGroupGloo,
    Store,
    TCPStore,
)

from kvtransfer.extents import Descriptor
from kvtransfer.transports.base import TransportEvent, WriteArrived, WriteCompleted, WriteFailed, WriteHandle
from tandem.core.errors import TransportError

_log = logging.getLogger(__name__)

# A reader waits for the next header as long as its peer lives; the wait is on a socket and costs nothing.
_FOREVER_S = 365 * 86400.0
_HEADER = struct.Struct("<qqqI")
_RANGE = struct.Struct("<qq")
_OK = b"ok"


@contextmanager
def translated(what: str) -> Iterator[None]:
    """The one border where torch.distributed's errors become ours."""
    try:
        yield
    except TransportError:
        raise
    except (RuntimeError, ValueError, OSError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TransportError(f"{what}: {first}") from error


@dataclass(frozen=True, slots=True)
class Header:
    """What a write is about to bring. `ranges` are (offset, bytes) in the reader's arena."""

    generation: int
    frame_bytes: int
    tag: bytes
    ranges: tuple[tuple[int, int], ...]

    def pack(self) -> bytes:
        fixed = _HEADER.pack(self.generation, self.frame_bytes, len(self.ranges), len(self.tag))
        return fixed + self.tag + b"".join(_RANGE.pack(*r) for r in self.ranges)

    @classmethod
    def unpack(cls, data: bytes) -> Header:
        generation, frame_bytes, num_ranges, tag_bytes = _HEADER.unpack_from(data)
        at = _HEADER.size + tag_bytes
        ranges = tuple(_RANGE.iter_unpack(data[at : at + num_ranges * _RANGE.size]))
        return cls(generation, frame_bytes, data[_HEADER.size : at], ranges)


def frames(ranges: Sequence[tuple[int, int]], frame_bytes: int) -> Iterator[list[tuple[int, int]]]:
    """Cut `ranges` into groups of at most `frame_bytes`; both ends cut alike."""
    frame: list[tuple[int, int]] = []
    room = frame_bytes
    for start, size in ranges:
        offset, left = start, size
        while left:
            num = min(left, room)
            frame.append((offset, num))
            offset, left, room = offset + num, left - num, room - num
            if not room:
                yield frame
                frame, room = [], frame_bytes
    if frame:
        yield frame


@dataclass(frozen=True, slots=True)
class Side:
    """What both ends of every pair of one agent share.

    Attributes:
        arena: the registered memory as a flat uint8 tensor.
        host: address that peers can reach; gloo listens there.
        timeout_s: bound of each blocking step.
        report: hands an event to the transport; thread-safe.
    """

    agent_name: str
    arena: torch.Tensor
    host: str
    timeout_s: float
    frame_bytes: int
    report: Callable[[TransportEvent], None]

    def connect_store(self, host: str, port: int) -> TCPStore:
        return TCPStore(
            host, port, None, False, timeout=timedelta(seconds=self.timeout_s), wait_for_workers=False
        )

    def communicator(self, store: Store, rank: int) -> ProcessGroup:
        """Join the two-party group of one direction: the writer is rank 0, the reader rank 1."""
        timeout = timedelta(seconds=self.timeout_s)
        if self.arena.is_cuda:
            from torch.distributed import ProcessGroupNCCL

            torch.cuda.set_device(self.arena.device)
            options = ProcessGroupNCCL.Options()
            options._timeout = timeout
            nccl: ProcessGroup = ProcessGroupNCCL(store, rank, 2, options)  # type: ignore[assignment]
            return nccl
        gloo: Any = ProcessGroupGloo  # its options are private, and there is no other way to choose the interface
        gloo_options = gloo._Options()
        gloo_options._timeout = timeout
        gloo_options._threads = 1
        gloo_options._devices = [gloo.create_device(hostname=self.host)]
        group: ProcessGroup = gloo(store, rank, 2, gloo_options)
        return group

    def finish(self) -> None:
        """NCCL's waits are on the stream; the bytes are there when the stream says so."""
        if self.arena.is_cuda:
            torch.cuda.current_stream(self.arena.device).synchronize()


class PairThread(ABC):
    """The helper thread of one direction. Its loop sleeps on `_changed` while there is nothing to do."""

    def __init__(self, side: Side, name: str) -> None:
        self._side = side
        self._changed = threading.Condition(threading.RLock())
        self._closing = False
        self._group: ProcessGroup | None = None
        self._generation = 0
        # Daemon: a process that dies without `close` must not hang on a stopped peer.
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def ask_to_close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()

    def join(self) -> None:
        """Wait for the thread; bounded, since each of its blocking steps is.

        Raises:
            TransportError: it did not end.
        """
        self._thread.join(2 * self._side.timeout_s)
        if self._thread.is_alive():
            raise TransportError(f"{self._thread.name} did not end")

    @abstractmethod
    def _main(self) -> None: ...


def _take(store: Store, key: str, timeout_s: float) -> bytes:
    """The value of `key` as soon as it is set; the key is gone afterwards."""
    store.wait([key], timedelta(seconds=timeout_s))
    value: bytes = store.get(key)
    store.delete_key(key)
    return value


@dataclass(frozen=True, slots=True)
class QueuedWrite:
    handle: WriteHandle
    descriptors: tuple[Descriptor, ...]


class PairWriter(PairThread):
    """Sends this agent's writes to one peer, one after the other."""

    def __init__(self, side: Side, peer: str, store_host: str, store_port: int) -> None:
        self._peer = peer
        self._store_at = (store_host, store_port)
        self._store: Store | None = None
        # Guarded by _changed.
        self._queue: deque[QueuedWrite] = deque()
        self._number = 0
        super().__init__(side, f"kv-writer-{side.agent_name}-{peer}")

    def enqueue(self, write: QueuedWrite) -> None:
        with self._changed:
            self._queue.append(write)
            self._changed.notify()

    def withdraw(self, handle: WriteHandle) -> bool:
        """Take a write back that has not begun; whether that was possible."""
        with self._changed:
            for write in self._queue:
                if write.handle == handle:
                    self._queue.remove(write)
                    return True
        return False

    def _main(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closing:
                    self._changed.wait()
                if self._closing:
                    unsent, self._queue = list(self._queue), deque()
                    break
                write = self._queue.popleft()
            self._side.report(self._send(write))
        for write in unsent:
            self._side.report(WriteFailed(write.handle, f"disconnected from {self._peer}", settled=True))
        self._group = self._store = None

    def _send(self, write: QueuedWrite) -> TransportEvent:
        """Carry one write out and say how it ended."""
        number, self._number = self._number, self._number + 1
        has_sent = False
        try:
            with translated(f"write to {self._peer}"):
                store = self._announce(write, number)
                self._demand_ok(_take(store, f"g/{number}", self._side.timeout_s), "refused")
                group = self._communicator(store)
                has_sent = True
                self._send_frames(group, write.descriptors)
                answer = _take(store, f"d/{number}", self._side.timeout_s)
                has_sent = answer == _OK  # a spoken refusal means that the reader is through with it
                self._demand_ok(answer, "not stored")
            return WriteCompleted(write.handle)
        except TransportError as error:
            self._group = None
            self._generation += 1
            return WriteFailed(write.handle, str(error), settled=not has_sent)

    def _announce(self, write: QueuedWrite, number: int) -> Store:
        if self._store is None:
            prefix = f"{self._side.agent_name}>{self._peer}"
            self._store = PrefixStore(prefix, self._side.connect_store(*self._store_at))
        ranges = tuple((d.remote_offset, d.num_bytes) for d in write.descriptors)
        header = Header(self._generation, self._side.frame_bytes, write.handle.tag, ranges)
        self._store.set(f"h/{number}", header.pack())  # type: ignore[arg-type]  # bytes are fine
        return self._store

    def _communicator(self, store: Store) -> ProcessGroup:
        if self._group is None:
            self._group = self._side.communicator(PrefixStore(f"c{self._generation}", store), 0)
        return self._group

    def _send_frames(self, group: ProcessGroup, descriptors: Sequence[Descriptor]) -> None:
        arena = self._side.arena
        for frame in frames([(d.local_offset, d.num_bytes) for d in descriptors], self._side.frame_bytes):
            packed = torch.cat([arena[start : start + size] for start, size in frame])
            group.send([packed], 1, 0).wait()
        self._side.finish()

    def _demand_ok(self, answer: bytes, what: str) -> None:
        if answer != _OK:
            raise TransportError(f"{what}: {answer.decode()}")


class PairReader(PairThread):
    """Stores one peer's writes, as far as `may_store` allows.

    Args:
        own_store: the agent's own store, to wake the thread with; the thread has a client of its own, since a
            client that waits is locked.
        lock: held by `may_store`'s answer until the bytes are stored, so that a grant that ends is a fence.
        may_store: whether the peer may write (offset, bytes) now; called with `lock` held.
    """

    def __init__(
        self, side: Side, peer: str, own_store: TCPStore, lock: threading.Lock, may_store: Callable[[int, int], bool]
    ) -> None:
        self._peer = peer
        self._lock = lock
        self._may_store = may_store
        self._prefix = f"{peer}>{side.agent_name}"
        self._own = PrefixStore(self._prefix, own_store)
        self._port = own_store.port
        self._number = 0
        super().__init__(side, f"kv-reader-{side.agent_name}-{peer}")

    def ask_to_close(self) -> None:
        with self._changed:
            super().ask_to_close()
            self._own.set(f"h/{self._number}", "")  # what the thread waits for

    def _main(self) -> None:
        store: Store | None = None
        while not self._closing:
            try:
                with translated(f"writes from {self._peer}"):
                    if store is None:
                        store = PrefixStore(self._prefix, self._side.connect_store(self._side.host, self._port))
                    self._receive_next(store)
            except TransportError as error:
                # The writer sees an error of its own and begins a new generation.
                _log.warning("%s", error)
                self._group = store = None
        self._group = None

    def _receive_next(self, store: Store) -> None:
        data = _take(store, f"h/{self._number}", _FOREVER_S)
        with self._changed:
            if self._closing:
                return
            number, self._number = self._number, self._number + 1
        self._receive(store, number, Header.unpack(data))

    def _receive(self, store: Store, number: int, header: Header) -> None:
        with self._lock:
            allowed = all(self._may_store(start, size) for start, size in header.ranges)
        if not allowed:
            store.set(f"g/{number}", b"no grant covers it")  # type: ignore[arg-type]
            return
        if header.generation != self._generation:
            self._group, self._generation = None, header.generation
        store.set(f"g/{number}", _OK)  # type: ignore[arg-type]
        if self._group is None:
            self._group = self._side.communicator(PrefixStore(f"c{header.generation}", store), 1)
        stored = True
        for frame in frames(header.ranges, header.frame_bytes):
            packed = torch.empty(sum(size for _, size in frame), dtype=torch.uint8, device=self._side.arena.device)
            self._group.recv([packed], 0, 0).wait()
            stored = self._scatter(packed, frame) and stored
        if stored:
            self._side.report(WriteArrived(self._peer, header.tag))  # type: ignore[arg-type]
        store.set(f"d/{number}", _OK if stored else b"its grant ended meanwhile")  # type: ignore[arg-type]

    def _scatter(self, packed: torch.Tensor, frame: Sequence[tuple[int, int]]) -> bool:
        with self._lock:
            if not all(self._may_store(start, size) for start, size in frame):
                return False
            at = 0
            for start, size in frame:
                self._side.arena[start : start + size].copy_(packed[at : at + size])
                at += size
            self._side.finish()
        return True
