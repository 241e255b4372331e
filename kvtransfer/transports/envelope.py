"""How an agent describes itself to a peer: a small header that every transport shares, then the library's own blob."""

from __future__ import annotations

import ipaddress
import json
import struct
from dataclasses import asdict, dataclass

from tandem.core.errors import TransportError

_MAGIC = b"TNDM1"
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Envelope:
    """Attributes:
    transport: name of the transport that made it.
    address: where the arena begins in the agent's own address space.
    num_bytes: size of the arena.
    device: where it lies, `cpu` or `cuda:N`.
    host, door: where the agent's doorbell is.
    """

    transport: str
    agent_name: str
    address: int
    num_bytes: int
    device: str
    host: str
    door: int

    def check(self) -> None:
        """Raises `ValueError` where a peer's header says what no arena can be."""
        if not all(isinstance(text, str) for text in (self.transport, self.agent_name, self.device, self.host)):
            raise ValueError("names must be texts")
        ipaddress.ip_address(self.host)
        if "%" in self.host:  # a scope has a meaning on its own host only
            raise ValueError(f"{self.host!r} is an address of one link")
        for number in (self.address, self.num_bytes, self.door):
            if not isinstance(number, int) or isinstance(number, bool) or number < 0:
                raise ValueError(f"{number!r} is neither an address nor a size, nor a port")
        if self.door > 0xFFFF:
            raise ValueError(f"{self.door} is no port")
        if self.address + self.num_bytes > 1 << 64:
            raise ValueError(f"{self.num_bytes} bytes from {self.address} on are beyond all memory")

    def pack(self, blob: bytes = b"") -> bytes:
        header = json.dumps(asdict(self)).encode()
        return _MAGIC + _LENGTH.pack(len(header)) + header + blob


def unpack(metadata: bytes, transport: str) -> tuple[Envelope, bytes]:
    """The header and the library's blob.

    Raises:
        TransportError: not a description, or that of another transport.
    """
    start = len(_MAGIC) + _LENGTH.size
    if metadata[: len(_MAGIC)] != _MAGIC or len(metadata) < start:
        raise TransportError(f"this is no description of a peer: {metadata[:16]!r}…")
    (length,) = _LENGTH.unpack_from(metadata, len(_MAGIC))
    try:
        envelope = Envelope(**json.loads(metadata[start : start + length]))
        envelope.check()
    except (ValueError, TypeError, RecursionError) as error:
        raise TransportError(f"the description of a peer is damaged: {error}") from error
    if envelope.transport != transport:
        raise TransportError(f"peer {envelope.agent_name} speaks {envelope.transport!r}, this worker {transport!r}")
    return envelope, metadata[start + length :]


class PeerBook:
    """The peers that a transport knows, and the names it must not take again."""

    def __init__(self, transport: str, agent_name: str) -> None:
        self._transport = transport
        self._agent_name = agent_name
        # Invariant: no name is in both.
        self._known: dict[str, tuple[bytes, Envelope]] = {}
        self._left: set[str] = set()

    def enter(self, metadata: bytes) -> tuple[Envelope, bytes, bool]:
        """The peer's header, the library's blob, and whether the peer is new.

        Raises:
            TransportError: the blob is unusable, or the name belonged to another incarnation.
        """
        envelope, blob = unpack(metadata, self._transport)
        name = envelope.agent_name
        known = self._known.get(name)
        if known is not None and known[0] == metadata:
            return envelope, blob, False
        if known is not None or name in self._left or name == self._agent_name:
            raise TransportError(f"agent name {name!r} is taken: a restarted worker needs a new one")
        self._known[name] = (metadata, envelope)
        return envelope, blob, True

    def withdraw(self, name: str) -> None:
        """Undo `enter` for a peer whose blob the library refused."""
        self._known.pop(name, None)

    def get(self, name: str) -> Envelope:
        """Raises `TransportError` for a peer that is not connected."""
        if name not in self._known:
            raise TransportError(f"{self._agent_name} is not connected to peer {name!r}")
        return self._known[name][1]

    def leave(self, name: str) -> bool:
        """Forget a peer and burn its name; whether it was known."""
        if self._known.pop(name, None) is None:
            return False
        self._left.add(name)
        return True

    def names(self) -> list[str]:
        return list(self._known)
