"""What every transport offers: one-sided writes into a peer's registered memory; some carry messages as well.

One transfer thread owns a transport and alone calls it (see `kvtransfer.transfer_thread`). Nothing here blocks.

A write has exactly one end, `WriteCompleted` or `WriteFailed` (`kvtransfer.transports.events`), reported by `poll`, or
none yet: to a peer that has stopped it stays outstanding for ever, so time-outs belong to the caller. `abort` asks for
an early end and is no fence; `WriteFailed.settled` says whether the transport vouches that no byte moves any more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvtransfer.doorbell import Doorbell
from kvtransfer.extents import Descriptor
from kvtransfer.transports.events import PeerId, TransportEvent, WriteHandle
from tandem.core.errors import TransportError


@dataclass(frozen=True, slots=True)
class Expectation:
    """Ranges (offset, bytes) of the local arena into which `peer` may write; `None`: it is not known who."""

    peer: PeerId | None
    ranges: tuple[tuple[int, int], ...]

    def covers(self, peer: PeerId, offset: int, num_bytes: int) -> bool:
        """Whether `peer` may write this range."""
        inside = any(start <= offset and offset + num_bytes <= start + size for start, size in self.ranges)
        return peer == self.peer and inside


class Transport(ABC):
    """One worker's end of the KV plane.

    Args of every implementation begin with `agent_name`, which must be new for each incarnation of a worker: peers
    refuse a restarted one under an old name. `host` is this host's address, as peers reach it.

    Attributes:
        doorbell: rung when it is worth polling at once.

    Raises:
        TransportError: the library is missing or cannot start, or `host` is not this host.
    """

    name: ClassVar[str]
    carries_messages: ClassVar[bool] = False  # whether there is `send`

    def __init__(self, agent_name: str, host: str) -> None:
        self.agent_name = agent_name
        self.doorbell = Doorbell(host)
        # Grants whose writes may arrive, by key; while there is one the target must be polled, or writers do not see
        # their completions.
        self._expected: dict[str, Expectation] = {}

    @abstractmethod
    def register(self, address: int, num_bytes: int, *, owner: object, device: str = "cpu") -> None:
        """Register the arena: once, before `metadata`. All offsets are relative to `address`.

        Args:
            owner: kept referenced for as long as the memory is registered.
            device: `cpu` or `cuda:N`, where the memory lies.

        Raises:
            TransportError: registered before, or the memory cannot be used.
        """

    @abstractmethod
    def metadata(self) -> bytes:
        """Describe this agent and its memory to a peer. Send it over the authenticated control channel only.

        Raises:
            TransportError: nothing is registered.
        """

    @abstractmethod
    def connect(self, metadata: bytes) -> PeerId:
        """Learn a peer. Idempotent. Both sides connect before the first write between them.

        Raises:
            TransportError: the blob is unusable, or its agent's name belonged to another incarnation.
        """

    @abstractmethod
    def post_write(self, peer: PeerId, descriptors: Sequence[Descriptor], tag: bytes = b"") -> WriteHandle:
        """Start one write of all `descriptors`; `poll` tells how it ends, failure at once included.

        Raises:
            TransportError: misuse only: unknown peer, no descriptors, a range outside registered memory, closed.
        """

    def send(self, peer: PeerId, content: bytes) -> None:
        """Send a message: behind the writes to this peer that have completed, whole, at most once, and maybe never.

        Poll until it is known by other means that it has arrived: a long one, or the first to a peer, takes progress.

        Raises:
            TransportError: nothing was sent: an unknown peer, one that is known to be gone, closed, or this transport
                carries no messages.
        """
        raise TransportError(f"{self.name} carries no messages: {len(content)} bytes to {peer} are not sent")

    @abstractmethod
    def poll(self) -> list[TransportEvent]:
        """Drive progress, outgoing and incoming, and return what has ended since the last call. Never blocks."""

    @abstractmethod
    def abort(self, handle: WriteHandle) -> None:
        """Give a write up as far as possible; its end is still reported by `poll`. Unknown handles are ignored."""

    @abstractmethod
    def disconnect(self, peer: PeerId) -> None:
        """Forget a peer; outstanding writes to it fail, and its name is not taken again. Idempotent."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; outstanding writes are dropped without an event. Idempotent."""

    @property
    @abstractmethod
    def num_outgoing(self) -> int:
        """Writes that have not ended."""

    # ---- the receiving side

    def expect_incoming(self, key: str, peer: PeerId | None, ranges: Sequence[tuple[int, int]]) -> None:
        """Writes into `ranges` (offset, bytes) may arrive until `end_incoming(key)`.

        One-sided transports only count it, to be polled; a two-sided one accepts nothing else. `peer` may be `None`
        where it is not known who will write; a two-sided transport then cannot accept anything for `key`.
        """
        self._expected[key] = Expectation(peer, tuple(ranges))

    def end_incoming(self, key: str) -> None:
        """No write for `key` will arrive. On a two-sided transport this is a fence: later ones are not stored.

        Idempotent.
        """
        self._expected.pop(key, None)

    @property
    def wants_polling(self) -> bool:
        """Whether `poll` is needed now: a write is outstanding, or one may arrive."""
        return self.num_outgoing > 0 or bool(self._expected)


def check_descriptors(descriptors: Sequence[Descriptor], local_bytes: int, remote_bytes: int) -> str | None:
    """What is wrong with `descriptors` for arenas of these sizes; `None` when nothing is."""
    if not descriptors:
        return "a write needs at least one descriptor"
    for d in descriptors:
        if d.num_bytes <= 0 or d.local_offset < 0 or d.remote_offset < 0:
            return f"{d} is not a range"
        if d.local_offset + d.num_bytes > local_bytes:
            return f"{d} ends beyond the local arena of {local_bytes} bytes"
        if d.remote_offset + d.num_bytes > remote_bytes:
            return f"{d} ends beyond the peer's arena of {remote_bytes} bytes"
    return None
