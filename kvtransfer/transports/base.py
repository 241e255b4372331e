"""What every transport offers: one-sided writes into a peer's registered memory; some carry messages as well.

One transfer thread owns a transport and alone calls it (see `kvtransfer.transfer_thread`). Nothing here blocks.

A write ends at most once, by `WriteCompleted` or `WriteFailed` (`kvtransfer.transports.events`), which `poll` returns.
To a peer that has stopped it stays outstanding for ever, so time-outs belong to the caller. `WriteFailed.settled` says
whether the transport vouches that no byte moves any more. A write cannot be taken back: no library can promise that its
bytes do not land all the same.

A connection may break while both peers live (`LinkBroken`). Then each side closes its end (`hang_up`) and learns the
other one anew (`connect`).
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypedDict, Unpack

from kvtransfer.doorbell import Doorbell
from kvtransfer.extents import Descriptor, PageArea
from kvtransfer.interface import Interface
from kvtransfer.transports.envelope import Envelope, PeerBook
from kvtransfer.transports.events import Greeting, PeerId, TransportEvent, WriteHandle
from tandem.core.errors import TransportError

DEFAULT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Expectation:
    """Where in the local arena `peer` may write; `None`: nowhere."""

    peer: PeerId
    area: PageArea | None


class Place(TypedDict, total=False):
    """Where a transport works; what every implementation is told beside its name.

    Attributes:
        host: this host's address, as peers reach it; by default they are on this host.
        interface: the one that carries pages; `None`: the library chooses.
        timeout_s: bounds each step in which the library blocks, if there is one.
    """

    host: str
    interface: Interface | None
    timeout_s: float


class Transport(ABC):
    """One worker's end of the KV plane.

    The constructor of every implementation begins with `agent_name`, which must be new for each incarnation of a
    worker: peers refuse a restarted one under an old name.

    Attributes:
        doorbell: rung when it is worth polling at once.

    Raises:
        TransportError: the library is missing or cannot start, or `host` is not this host.
    """

    name: ClassVar[str]
    carries_messages: ClassVar[bool] = False  # whether there is `send`
    greets: ClassVar[bool] = False  # whether there is `greet`

    def __init__(self, agent_name: str, **place: Unpack[Place]) -> None:
        self.agent_name = agent_name
        self.interface = place.get("interface")
        self.timeout_s = place.get("timeout_s", DEFAULT_TIMEOUT_S)
        self.doorbell = Doorbell(place.get("host", "127.0.0.1"))
        self._peers = PeerBook(self.name, agent_name)
        # Peers to which the connection is broken: nothing is posted. Invariant: `_hung_up` is a part of it.
        self._broken: set[PeerId] = set()
        # Connected anew, and no greeting has come through yet: nobody may write there before `open_writes`.
        self._unproven: set[PeerId] = set()
        self._hung_up: set[PeerId] = set()
        self._me: Envelope | None = None
        self._owner: object = None  # of the registered memory
        self._numbers = itertools.count()
        # Grants whose writes may arrive, by key. While there is one, this side must be polled, or writers do not see
        # their completions.
        self._expected: dict[str, Expectation] = {}
        self._talks: set[str] = set()  # those of them that are of messages alone

    def register(self, address: int, num_bytes: int, *, owner: object, device: str = "cpu") -> None:
        """Register the arena: once, before `metadata`. All offsets are relative to `address`.

        Args:
            owner: kept referenced for as long as the memory is registered.
            device: `cpu` or `cuda:N`, where the memory lies.

        Raises:
            TransportError: registered before, or the memory cannot be used.
        """
        if self._me is not None:
            raise TransportError(f"{self.agent_name} has registered its arena already")
        self._open()
        door = self.doorbell
        me = Envelope(self.name, self.agent_name, address, num_bytes, device, door.host, door.port)
        self._owner = owner
        self._register(me)
        self._me = me

    def metadata(self) -> bytes:
        """Describe this agent and its memory to a peer. Send it over the authenticated control channel only.

        Raises:
            TransportError: nothing is registered.
        """
        return self._registered().pack(self._blob())

    def connect(self, metadata: bytes) -> PeerId:
        """Learn a peer, or learn it anew after `hang_up`. Idempotent. Both sides connect before the first write between
        them.

        Raises:
            TransportError: the blob is unusable, or its agent's name belonged to another incarnation.
        """
        self._open()
        peer, blob, is_new = self._peers.enter(metadata)
        name = PeerId(peer.agent_name)
        if is_new or name in self._hung_up:
            try:
                self._learn(peer, blob)
            except Exception:  # whatever it is: a peer that is half known could never connect again
                if is_new:
                    self._peers.withdraw(name)
                raise
            if name in self._hung_up:
                self._unproven.add(name)
            self._hung_up.discard(name)
            self._broken.discard(name)
        return name

    def open_writes(self, peer: PeerId) -> None:
        """The peer has heard from us on a connection that was made anew: from now on writes go there. Idempotent.

        Before that they fail as settled, so that nothing has gone by a connection that never came up.
        """
        self._unproven.discard(peer)

    def hang_up(self, peer: PeerId) -> None:
        """Close this end of the connection to a peer that lives: nothing more is sent on it.

        Outstanding writes to the peer fail, not settled: what is under way may land until the peer has closed its end
        too. Later ones fail as settled until `connect`. Idempotent.
        """
        if peer in self._hung_up or peer not in self._peers.names():
            return
        self._broken.add(peer)
        self._hung_up.add(peer)
        self._hang_up(peer)

    @abstractmethod
    def post_write(self, peer: PeerId, descriptors: Sequence[Descriptor], tag: bytes = b"") -> WriteHandle:
        """Start one write of all `descriptors`; `poll` tells how it ends, even if it fails at once.

        Raises:
            TransportError: misuse only: unknown peer, no descriptors, a range outside registered memory, closed.
        """

    def send(self, peer: PeerId, content: bytes) -> None:
        """Send a message behind the writes to this peer that have completed. It arrives whole and at most once, or
        never.

        Poll until it is known by other means that it has arrived: a long one, or the first to a peer, takes progress.

        Raises:
            TransportError: nothing was sent: an unknown peer, one that is known to be gone, closed, or this transport
                carries no messages.
        """
        raise TransportError(f"{self.name} carries no messages: {len(content)} bytes to {peer} are not sent")

    def greet(self, peer: PeerId, greeting: Greeting) -> None:
        """Have the connection to a peer made, so that the first write does not wait for that; or try whether it still
        carries. Poll, here and there, until the peer has heard `GreetingArrived`.

        Raises:
            TransportError: as `send`.
        """
        raise TransportError(f"{self.name} greets nobody, {peer} with {greeting} neither")

    @abstractmethod
    def poll(self) -> list[TransportEvent]:
        """Drive progress, outgoing and incoming, and return what has ended since the last call. Never blocks."""

    @abstractmethod
    def disconnect(self, peer: PeerId) -> None:
        """Forget a peer; outstanding writes to it fail, and its name is not taken again. Idempotent. An error of the
        library is logged, because the peer is gone either way."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; outstanding writes are dropped without an event. Idempotent."""

    @property
    @abstractmethod
    def num_outgoing(self) -> int:
        """Writes that have not ended."""

    # ---- the receiving side

    def expect_incoming(self, key: str, peer: PeerId, area: PageArea | None = None) -> None:
        """Writes of `peer` into `area` may arrive until `end_incoming(key)`; `None`: only messages.

        A one-sided transport only learns that it must be polled; a two-sided one accepts nothing else.
        """
        self._expected[key] = Expectation(peer, area)
        if area is None:
            self._talks.add(key)

    def end_incoming(self, key: str) -> None:
        """No write for `key` will arrive. On a two-sided transport this is a fence: later ones are not stored.

        Idempotent.
        """
        self._expected.pop(key, None)
        self._talks.discard(key)

    @property
    def wants_polling(self) -> bool:
        """Whether `poll` is needed now: a write is outstanding, or one may arrive."""
        return self.num_outgoing > 0 or bool(self._expected)

    @property
    def drives(self) -> bool:
        """Whether `poll` drives something of this side on: a write, or messages, whose ends nobody rings for."""
        return self.num_outgoing > 0 or bool(self._talks)

    # ---- what differs from library to library

    @abstractmethod
    def _open(self) -> Any:
        """Return what the library is reached by. Raises `TransportError` when this end is closed."""

    @abstractmethod
    def _register(self, me: Envelope) -> None:
        """Tell the library of the arena, which `_owner` owns."""

    def _blob(self) -> bytes:
        """What the library wants peers to know."""
        return b""

    def _learn(self, peer: Envelope, blob: bytes) -> None:  # noqa: B027 - not all libraries want to know
        """Tell the library of a new peer, which described itself by `blob`."""

    def _hang_up(self, peer: PeerId) -> None:  # noqa: B027 - not all libraries keep a connection
        """Close the connection to `peer` and fail what is outstanding."""

    # ---- what is the same for all

    def _forget(self, peer: PeerId) -> bool:
        """Whether `peer` was known; it is not any more, and its name is not taken again."""
        self._broken.discard(peer)
        self._hung_up.discard(peer)
        self._unproven.discard(peer)
        return self._peers.leave(peer)

    def _takes_no_writes(self, peer: PeerId) -> bool:
        return peer in self._broken or peer in self._unproven

    def _registered(self) -> Envelope:
        if self._me is None:
            raise TransportError(f"{self.agent_name} has registered no memory")
        return self._me

    def _new_write(self, peer: PeerId, descriptors: Sequence[Descriptor], tag: bytes) -> WriteHandle:
        """The handle of a write that can be posted. Raises `TransportError` as `post_write` does."""
        self._open()
        there = self._peers.get(peer)
        _check_descriptors(descriptors, self._registered().num_bytes, there.num_bytes)
        return WriteHandle(next(self._numbers), peer, tag, sum(d.num_bytes for d in descriptors))


def _check_descriptors(descriptors: Sequence[Descriptor], local_bytes: int, remote_bytes: int) -> None:
    """Raises `TransportError` where arenas of these sizes do not have such ranges."""
    if not descriptors:
        raise TransportError("a write needs at least one descriptor")
    for d in descriptors:
        if d.num_bytes <= 0 or d.local_offset < 0 or d.remote_offset < 0:
            raise TransportError(f"{d} is not a range")
        if d.local_offset + d.num_bytes > local_bytes:
            raise TransportError(f"{d} ends beyond the local arena of {local_bytes} bytes")
        if d.remote_offset + d.num_bytes > remote_bytes:
            raise TransportError(f"{d} ends beyond the peer's arena of {remote_bytes} bytes")
