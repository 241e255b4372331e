"""What a transport tells of writes and messages: plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, NewType

PeerId = NewType("PeerId", str)
"""A peer's agent name: one for each incarnation."""


@dataclass(frozen=True, slots=True)
class WriteHandle:
    """One posted write. `number` is unique within its transport; `tag` is what the caller gave."""

    number: int
    peer: PeerId
    tag: bytes
    num_bytes: int


@dataclass(frozen=True, slots=True)
class WritePosted:
    """The transport has taken the write."""

    handle: WriteHandle


@dataclass(frozen=True, slots=True)
class WriteCompleted:
    """Every byte is in the peer's memory."""

    handle: WriteHandle


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """The write will not complete.

    Attributes:
        settled: no byte of it moves any more.
        is_link_broken: because the connection to the peer is broken.
    """

    handle: WriteHandle
    error: str
    settled: bool
    is_link_broken: bool = False


@dataclass(frozen=True, slots=True)
class LinkBroken:
    """The connection to a peer is broken: writes to it fail until `hang_up` and `connect`. Told once, before the first
    write that fails by it."""

    peer: PeerId
    error: str


@dataclass(frozen=True, slots=True)
class WriteArrived:
    """At the target: the write that a peer tagged `tag` is complete. A hint; the commit is the truth."""

    peer: PeerId
    tag: bytes


@dataclass(frozen=True, slots=True)
class MessageArrived:
    """At the target of `send`: `content` as it was sent. Who sent it is what the transport says, and no proof."""

    peer: PeerId
    content: bytes


class Greeting(NamedTuple):
    """Shows that a connection carries.

    Attributes:
        link: number of the connection between the two; it rises each time that it is made anew.
        trial: 0: the first one, by which a connection comes up; else which later one, from 1.
    """

    link: int
    trial: int = 0


@dataclass(frozen=True, slots=True)
class GreetingArrived:
    """At the target of `greet`."""

    peer: PeerId
    greeting: Greeting


TransportEvent = WriteCompleted | WriteFailed | LinkBroken | WriteArrived | MessageArrived | GreetingArrived
ThreadEvent = TransportEvent | WritePosted
"""What the transfer thread tells: it adds which writes are posted."""
