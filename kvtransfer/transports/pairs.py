"""One direction between two agents of the `nccl` transport: a writer's and a reader's helper thread.

torch.distributed knows only two-sided, blocking transfers, so each direction has a thread at each end:

    writer                                                        reader
    header  ── set in the reader's store ──────────────────────>  waits for it, checks it against the grants
    waits   <────────────── "ok" or why not, in the writer's store
    packed frames  ════════════════ gloo or NCCL ══════════════>  receives, checks again, stores
    waits   <────────────── "ok" or why not, in the writer's store

Headers do not travel as tensors, because a receive that waits for one could not be ended (gloo) or would spin on the
device (NCCL). Each side waits on its own store only: a question to a stopped peer's store is never answered. The
communicator is made by the first write, and a new generation of it after a failure. A thread without work sleeps: a
writer on a condition, a reader on its store's socket.
"""

from __future__ import annotations

import logging
import socket
import struct
import threading
import time
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
from kvtransfer.transports.events import (
    LinkBroken,
    PeerId,
    TransportEvent,
    WriteArrived,
    WriteCompleted,
    WriteFailed,
    WriteHandle,
)
from kvtransfer.transports.own_stream import use_own_stream
from kvtransfer.transports.pair_wire import Header, frames
from tandem.core.errors import TransportError

_log = logging.getLogger(__name__)

# A reader waits for the next header as long as its peer lives; the wait is on a socket and costs nothing.
_FOREVER_S = 365 * 86400.0
# A writer that waits for an answer looks with pauses that grow from the first to the second, and asks now and then
# whether the peer still listens.
_PAUSES_S = (50e-6, 2e-3)
_PROBE_EVERY_S = 0.25
_OK = b"ok"
_DROPPED = b"dropped"


def joining(generation: int) -> str:
    """The key under which a writer says in its store whether it joins this communicator or has given it up."""
    return f"j/{generation}"


@contextmanager
def translated(what: str) -> Iterator[None]:
    """The one border where torch.distributed's errors become ours."""
    try:
        yield
    except TransportError:
        raise
    except (RuntimeError, ValueError, TypeError, OverflowError, OSError, struct.error) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TransportError(f"{what}: {first}") from error


@dataclass(frozen=True, slots=True)
class Side:
    """What both ends of every pair of one agent share.

    Attributes:
        arena: the registered memory as a flat uint8 tensor.
        owner: of that memory, which stays for as long as a helper thread may read it.
        host: address that peers can reach; gloo listens there.
        timeout_s: bound of each blocking step.
        report: hands an event to the transport; thread-safe.
    """

    agent_name: str
    arena: torch.Tensor
    owner: object
    host: str
    timeout_s: float
    frame_bytes: int
    report: Callable[[TransportEvent], None]

    def connect_store(self, host: str, port: int, timeout_s: float | None = None) -> TCPStore:
        timeout = timedelta(seconds=timeout_s or self.timeout_s)
        return TCPStore(host, port, None, False, timeout=timeout, wait_for_workers=False)

    def communicator(self, store: Store, rank: int, *, by_host: bool) -> ProcessGroup:
        """Join the two-party group of one direction: the writer is rank 0, the reader rank 1.

        `by_host`: its tensors are in host memory, wherever the arena is.
        """
        timeout = timedelta(seconds=self.timeout_s)
        if self.arena.is_cuda and not by_host:
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
        self._changed = threading.Condition()
        self._closing = False
        self._group: ProcessGroup | None = None
        # Daemon: a process that dies without `close` must not hang on a stopped peer.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def ask_to_close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; whether it has ended. What waits for the peer does so for `Side.timeout_s` at most."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def name(self) -> str:
        return self._thread.name

    def _run(self) -> None:
        use_own_stream(self._side.arena.device)
        self._main()

    @abstractmethod
    def _main(self) -> None: ...


def join_all(threads: Sequence[PairThread], timeout_s: float) -> None:
    """Wait for all of them, for so long together.

    Raises:
        TransportError: some did not end; names them.
    """
    deadline_s = time.monotonic() + timeout_s
    if late := [thread.name for thread in threads if not thread.join(max(0.0, deadline_s - time.monotonic()))]:
        raise TransportError(f"{', '.join(late)} did not end within {timeout_s:g} s")


@dataclass(frozen=True, slots=True)
class QueuedWrite:
    handle: WriteHandle
    descriptors: tuple[Descriptor, ...]


class PairWriter(PairThread):
    """Sends this agent's writes to one peer, one after the other.

    `by_host`: through host memory; both ends must say the same.
    """

    def __init__(
        self, side: Side, peer: str, own_store: TCPStore, peer_at: tuple[str, int], *, by_host: bool
    ) -> None:
        self._peer = peer
        self._by_host = by_host
        self._peer_at = peer_at
        self._name = f"{side.agent_name}>{peer}"
        self._own = PrefixStore(self._name, own_store)
        self._theirs: Store | None = None
        # Guarded by _changed.
        self._queue: deque[QueuedWrite] = deque()
        self._under_way: QueuedWrite | None = None  # `None` also where it was given up
        self._begins_anew = False  # with the next write, by another communicator
        self._number = 0
        self._generation = 0  # of the communicator that the next write is sent by
        super().__init__(side, f"kv-writer-{side.agent_name}-{peer}")

    def enqueue(self, write: QueuedWrite) -> None:
        with self._changed:
            self._queue.append(write)
            self._changed.notify()

    def give_up(self) -> tuple[list[QueuedWrite], QueuedWrite | None]:
        """Give up the writes that have not begun, and the one under way. Their ends are the caller's to report.

        Neither library ends what waits for the peer already. The next write waits for that, for `timeout_s` at most.
        """
        with self._changed:
            unsent, self._queue = list(self._queue), deque()
            given_up, self._under_way = self._under_way, None
            self._begins_anew = True
        return unsent, given_up

    def _main(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closing:
                    self._changed.wait()
                if self._closing:
                    unsent, self._queue = list(self._queue), deque()
                    break
                write = self._under_way = self._queue.popleft()
                if self._begins_anew:
                    self._begins_anew = False
                    self._drop_communicator()
            events = self._send(write)
            with self._changed:
                is_wanted, self._under_way = self._under_way is write, None
            for event in events if is_wanted else ():
                self._side.report(event)
        for write in unsent:
            self._side.report(WriteFailed(write.handle, f"disconnected from {self._peer}", settled=True))
        self._group = self._theirs = None

    def _send(self, write: QueuedWrite) -> list[TransportEvent]:
        """Carry one write out and say how it ended."""
        number, self._number = self._number, self._number + 1
        has_sent = False
        try:
            with translated(f"write to {self._peer}"):
                self._announce(write, number)
                answer = self._answer(f"g/{number}")
                if answer == _DROPPED:
                    raise TransportError("it has closed the connection")
                if answer == _OK:
                    has_sent = True
                    self._send_frames(self._communicator(), write.descriptors)
                    answer = self._answer(f"d/{number}")
            if answer == _OK:
                return [WriteCompleted(write.handle)]
            # A spoken refusal: the reader is through with the write, and the communicator is in order.
            return [WriteFailed(write.handle, f"refused by {self._peer}: {answer.decode()}", settled=True)]
        except TransportError as error:
            self._drop_communicator()
            failed = WriteFailed(write.handle, str(error), settled=not has_sent, is_link_broken=has_sent)
            return [LinkBroken(PeerId(self._peer), str(error)), failed] if has_sent else [failed]

    def _drop_communicator(self) -> None:
        self._own.set(joining(self._generation), _DROPPED)  # type: ignore[arg-type]  # the reader may be about to join it
        self._group = self._theirs = None
        self._generation += 1

    def _check_wanted(self) -> None:
        """Raises `TransportError` where the write under way was given up."""
        if self._closing or self._under_way is None:
            raise TransportError("closing" if self._closing else "the connection was closed")

    def _announce(self, write: QueuedWrite, number: int) -> None:
        if self._theirs is None:
            self._probe()
            self._theirs = PrefixStore(self._name, self._side.connect_store(*self._peer_at))
        ranges = tuple((d.remote_offset, d.num_bytes) for d in write.descriptors)
        header = Header(number, self._generation, self._side.frame_bytes, write.handle.tag, ranges)
        self._theirs.queue_push("headers", header.pack())

    def _answer(self, key: str) -> bytes:
        """What the reader says in our store."""
        pause_s, longest_s = _PAUSES_S
        now_s = time.monotonic()
        deadline_s, probe_s = now_s + self._side.timeout_s, now_s + _PROBE_EVERY_S
        while not self._own.check([key]):
            now_s = time.monotonic()
            self._check_wanted()
            if now_s >= deadline_s:
                raise TransportError(f"no answer within {self._side.timeout_s} s")
            if now_s >= probe_s:
                self._probe()
                probe_s = now_s + _PROBE_EVERY_S
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)
        answer: bytes = self._own.get(key)
        self._own.delete_key(key)
        return answer

    def _probe(self) -> None:
        """Raises `OSError` when nobody listens where the peer's store was: the peer is gone."""
        socket.create_connection(self._peer_at, timeout=self._side.timeout_s).close()

    def _communicator(self) -> ProcessGroup:
        if self._group is None:
            self._own.set(joining(self._generation), _OK)  # type: ignore[arg-type]
            self._group = self._side.communicator(
                PrefixStore(f"c{self._generation}", self._own), 0, by_host=self._by_host
            )
        return self._group

    def _send_frames(self, group: ProcessGroup, descriptors: Sequence[Descriptor]) -> None:
        arena = self._side.arena
        for frame in frames([(d.local_offset, d.num_bytes) for d in descriptors], self._side.frame_bytes):
            self._check_wanted()
            packed = torch.cat([arena[start : start + size] for start, size in frame])
            if self._by_host:
                packed = packed.cpu()
            group.send([packed], 1, 0).wait()
        self._side.finish()


class PairReader(PairThread):
    """Stores one peer's writes, as far as `may_store` allows.

    Args:
        own_store: the agent's own store, to wake the thread with; the thread has a client of its own, since a
            client that waits is locked.
        peer_at: host and port of the writer's store.
        lock: held from `may_store`'s answer until the bytes are stored, so that the end of a grant is a fence.
        may_store: whether the peer may write all of these (offset, bytes) now; called with `lock` held.
        by_host: as of `PairWriter`.
    """

    def __init__(
        self,
        side: Side,
        peer: str,
        own_store: TCPStore,
        peer_at: tuple[str, int],
        lock: threading.Lock,
        may_store: Callable[[Sequence[tuple[int, int]]], bool],
        *,
        by_host: bool,
    ) -> None:
        self._peer = peer
        self._by_host = by_host
        self._peer_at = peer_at
        self._lock = lock
        self._may_store = may_store
        self._num_hang_ups = 0  # guarded by _lock
        self._num_begun_anew = 0  # of these, after which it has
        self._name = f"{peer}>{side.agent_name}"
        self._own_port = own_store.port
        self._wake = PrefixStore(self._name, own_store)
        self._theirs: Store | None = None
        self._joined_generation = -1  # the newest, whether it is closed or not
        super().__init__(side, f"kv-reader-{side.agent_name}-{peer}")

    def ask_to_close(self) -> None:
        super().ask_to_close()
        self._wake.queue_push("headers", "")  # what the thread waits for

    def hang_up(self) -> None:
        """Store nothing more of the write that is being received. A fence, as the end of a grant."""
        with self._lock:
            self._num_hang_ups += 1

    def _main(self) -> None:
        own = self._side.connect_store(self._side.host, self._own_port, _FOREVER_S)
        headers = PrefixStore(self._name, own)
        while True:
            data = headers.queue_pop("headers")
            if self._closing:
                break
            if headers.queue_len("headers"):  # its writer has given it up: it announces one at a time
                continue
            try:
                with translated(f"writes from {self._peer}"):
                    self._receive(Header.unpack(data))
            except TransportError as error:
                # The writer sees an error of its own and begins a new generation.
                _log.warning("%s", error)
                self._group = self._theirs = None
        self._group = self._theirs = None

    def _receive(self, header: Header) -> None:
        with self._lock:
            num_hang_ups = self._num_hang_ups
            allowed = self._may_store(header.ranges)
        if num_hang_ups != self._num_begun_anew:  # as the writer does
            self._num_begun_anew = num_hang_ups
            self._group = self._theirs = None
        if self._theirs is None:
            self._theirs = PrefixStore(self._name, self._side.connect_store(*self._peer_at))
        theirs, number = self._theirs, header.number
        is_new = header.generation != self._joined_generation
        group = None if is_new else self._group
        is_closed = group is None and not is_new  # here only, or at the writer too, which has given the write up
        refusal = b"no grant covers it" if not allowed else _DROPPED if is_closed else None
        theirs.set(f"g/{number}", refusal or _OK)  # type: ignore[arg-type]
        if refusal is not None:
            return
        if group is None:
            self._joined_generation = header.generation
            group = self._group = self._joined(header.generation, theirs)
        stored = True
        for frame in frames(header.ranges, header.frame_bytes):
            num_bytes = sum(size for _, size in frame)
            device = torch.device("cpu") if self._by_host else self._side.arena.device
            packed = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            group.recv([packed], 0, 0).wait()
            stored = self._scatter(packed, frame, num_hang_ups) and stored
        if stored:
            self._side.report(WriteArrived(self._peer, header.tag))  # type: ignore[arg-type]
        theirs.set(f"d/{number}", _OK if stored else b"its grant ended meanwhile")  # type: ignore[arg-type]

    def _joined(self, generation: int, theirs: Store) -> ProcessGroup:
        """The communicator that the writer joins too; one that it has given up is not waited for."""
        if theirs.get(joining(generation)) != _OK:
            raise TransportError(f"{self._peer} has given up what it announced")
        return self._side.communicator(PrefixStore(f"c{generation}", theirs), 1, by_host=self._by_host)

    def _scatter(self, packed: torch.Tensor, frame: Sequence[tuple[int, int]], num_hang_ups: int) -> bool:
        with self._lock:
            if num_hang_ups != self._num_hang_ups or not self._may_store(frame):
                return False
            at = 0
            for start, size in frame:
                self._side.arena[start : start + size].copy_(packed[at : at + size])
                at += size
            self._side.finish()
        return True
