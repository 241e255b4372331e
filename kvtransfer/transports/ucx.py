"""One-sided writes over UCX, by way of NIXL.

NIXL's progress thread stays off: it burns a core when idle. Instead the owner of this transport polls while a write is
outstanding or expected. Measured on one host over shared memory:

- A first write to a peer that does not poll stays in progress although its bytes have landed.
- Over shared memory the posting call itself copies (with the GIL released), about 10 GB/s for large descriptors.
- A killed peer shows as an error on its outstanding writes within about 15 ms, and on each later post. A stopped one
  shows as in progress for ever, and writes land in it all the same.
- Neither releasing a handle nor deregistering memory is a fence. So a handle is kept until its write has ended, or its
  peer is disconnected.
- Nor is an error: over TCP, when the connection to a living peer broke, a whole MiB landed after NIXL had reported the
  write as failed. So an error is reported as not settled. NIXL does not connect to that peer again by itself: later
  writes to it are failed here, before anything is posted, until both sides have removed and added each other.
- `remove_remote_agent` closes no connection that carries and that the peer has connected too: the sockets stay, at both
  ends, also when both have removed each other. Where one broke, both free it.
- A notification of its own takes 0.15 ms between two processes that poll every 50 µs, 1 MB of it some 3 ms.
- On one host too, TCP carries the set-up of a connection, the notifications and the news of a peer's death; the bytes
  go by process_vm_writev.
- A peer that connects to us and is killed before we connect to it: UCX 1.23 takes over its dead socket, is reset,
  connects anew, is refused, and frees an endpoint that still has messages waiting: `stubs.c:107 Assertion '0' failed`
  in the next poll. With `UCX_TCP_CONN_NB=y` the refusal comes later, as an error.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, ClassVar, Unpack

import numpy as np

from kvtransfer.extents import Descriptor
from kvtransfer.transports.base import Place, Transport
from kvtransfer.transports.envelope import Envelope
from kvtransfer.transports.events import (
    Greeting,
    GreetingArrived,
    LinkBroken,
    MessageArrived,
    PeerId,
    TransportEvent,
    WriteArrived,
    WriteCompleted,
    WriteFailed,
    WriteHandle,
)
from tandem.core.errors import TransportError

_log = logging.getLogger(__name__)

# What UCX and NIXL read from the environment when an agent starts. A user's own setting always wins.
# UCX_TLS is left alone: UCX chooses among shared memory, CUDA IPC, RDMA and TCP by what the pair of hosts has.
DEFAULT_ENVIRONMENT: dict[str, str] = {
    "UCX_LOG_LEVEL": "error",  # a dead peer is reported by us, once, not by a page of diagnostics
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    "UCX_HANDLE_ERRORS": "none",  # a crash belongs to Python's faulthandler
    "UCX_ERROR_SIGNALS": "",
    # A blocking connect that is refused ends the process, where the refusing peer had connected to us before it died.
    "UCX_TCP_CONN_NB": "y",
    "NIXL_LOG_LEVEL": "WARN",
}

#: The package of NIXL that Tandem requires.
DEFAULT_BUILD = "nixl_cu12"

# What a notification of NIXL is, by its first byte.
_TAG, _MESSAGE, _GREETING = b"t", b"m", b"g"
_GREETED = struct.Struct("<II")  # the connection and the trial


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """The one border where NIXL's errors become ours."""
    try:
        yield
    except TransportError:
        raise
    except Exception as error:  # NIXL's error classes have no other common base
        raise TransportError(f"{what}: {type(error).__name__}: {error}") from error


def _nixl() -> ModuleType:
    """NIXL's API: of the build for this torch's CUDA where that is installed, else of the one that comes with Tandem.

    The builds differ in what they load for memory of a GPU. On a CPU either does.
    """
    import torch

    major = (torch.version.cuda or "").partition(".")[0]
    name = f"nixl_cu{major}"
    is_there = bool(major) and importlib.util.find_spec(name) is not None
    return importlib.import_module(f"{name if is_there else DEFAULT_BUILD}._api")


def _memory(device: str) -> tuple[str, int]:
    """NIXL's memory type and device number."""
    kind, _, number = device.partition(":")
    if kind == "cpu":
        return "DRAM", 0
    if kind == "cuda":
        return "VRAM", int(number or 0)
    raise TransportError(f"ucx cannot register memory of device {device!r}")


class UcxTransport(Transport):
    """NIXL's UCX backend. It rings at a peer after each write and message, and at each poll that finds a write that has
    not ended, because the peer must poll: over TCP it stores what has come only then. Each ring makes it look at once
    and a few times after, so while a slow write is under way the peer looks more often than this side does. A post does
    not ring, as writes over shared memory end by the first poll."""

    name: ClassVar[str] = "ucx"
    carries_messages: ClassVar[bool] = True
    greets: ClassVar[bool] = True

    def __init__(self, agent_name: str, **place: Unpack[Place]) -> None:
        super().__init__(agent_name, **place)
        networks = {"UCX_NET_DEVICES": ",".join(self.interface.devices())} if self.interface is not None else {}
        for key, value in (DEFAULT_ENVIRONMENT | networks).items():
            os.environ.setdefault(key, value)
        with _translated("cannot start NIXL"):
            nixl = _nixl()
            config = nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self._agent: Any = nixl.nixl_agent(agent_name, config)
            if "UCX" not in self._agent.backends:
                raise TransportError("this build of NIXL has no UCX backend")
        self._registration: Any = None
        self._agent_metadata = b""
        # Invariant: all and only writes whose end was not reported.
        self._handles: dict[WriteHandle, Any] = {}
        self._ready: list[TransportEvent] = []

    def _register(self, me: Envelope) -> None:
        kind, number = _memory(me.device)
        with _translated(f"cannot register {me.num_bytes} bytes of {me.device}"):
            self._registration = self._agent.register_memory([(me.address, me.num_bytes, number, "")], kind)
            self._agent_metadata = self._agent.get_agent_metadata()

    def _blob(self) -> bytes:
        return self._agent_metadata

    def _learn(self, peer: Envelope, blob: bytes) -> None:
        with _translated(f"cannot connect to {peer.agent_name}"):
            self._agent.add_remote_agent(blob)

    def post_write(self, peer: PeerId, descriptors: Sequence[Descriptor], tag: bytes = b"") -> WriteHandle:
        handle, agent = self._new_write(peer, descriptors, tag), self._agent
        if self._takes_no_writes(peer):
            error = f"the connection to {peer} is broken"
            self._ready.append(WriteFailed(handle, error, settled=True, is_link_broken=True))
            return handle
        try:
            with _translated(f"write to {peer}"):
                table = np.array(descriptors, dtype=np.uint64)
                local = self._descs(table[:, 0], table[:, 2], self._registered())
                remote = self._descs(table[:, 1], table[:, 2], self._peers.get(peer))
                raw = agent.initialize_xfer("WRITE", local, remote, str(peer), _TAG + tag if tag else b"")
        except TransportError as error:  # nothing was posted
            self._note_broken(peer, str(error))
            self._ready.append(WriteFailed(handle, str(error), settled=True, is_link_broken=True))
            return handle
        self._handles[handle] = raw
        self._advance(handle, lambda: agent.transfer(raw))
        return handle

    def send(self, peer: PeerId, content: bytes) -> None:
        self._notify(peer, _MESSAGE + content)

    def greet(self, peer: PeerId, greeting: Greeting) -> None:
        self._notify(peer, _GREETING + _GREETED.pack(*greeting))

    def _notify(self, peer: PeerId, content: bytes) -> None:
        agent = self._open()
        self._peers.get(peer)
        if peer in self._broken:
            raise TransportError(f"the connection to {peer} is broken")
        try:
            with _translated(f"message to {peer}"):
                agent.send_notif(str(peer), content)
        except TransportError as error:
            self._note_broken(peer, str(error))
            raise
        self._ring(peer)

    def poll(self) -> list[TransportEvent]:
        agent = self._open()
        with _translated("cannot poll"):
            arrived = agent.get_new_notifs()
        for handle, raw in list(self._handles.items()):
            self._advance(handle, lambda raw=raw: agent.check_xfer_state(raw))
        for peer in {handle.peer for handle in self._handles}:
            self._ring(peer)
        events, self._ready = self._ready, []
        for name, notifications in arrived.items():
            events += [_heard(PeerId(_text(name)), notification) for notification in notifications]
        return events

    def _advance(self, handle: WriteHandle, ask: Any) -> None:
        """Ask NIXL how the write stands; when it has ended, report that and release it."""
        try:
            with _translated(f"write to {handle.peer}"):
                state = ask()
                if state == "PROC":
                    return
                if state != "DONE":
                    raise TransportError(f"write to {handle.peer} ended as {state}")
            self._ready.append(WriteCompleted(handle))
        except TransportError as error:
            # Parts of the write may be on their way: an error of one descriptor says nothing about the others.
            self._note_broken(handle.peer, str(error))
            self._ready.append(WriteFailed(handle, str(error), settled=False, is_link_broken=True))
        self._release(handle)
        self._ring(handle.peer)  # its tag is on the way only now

    def _note_broken(self, peer: PeerId, error: str) -> None:
        if peer not in self._broken:
            self._broken.add(peer)
            self._ready.append(LinkBroken(peer, error))

    def _ring(self, peer: PeerId) -> None:
        there = self._peers.get(peer)
        self.doorbell.ring_at(there.host, there.door)

    def _release(self, handle: WriteHandle) -> None:
        raw = self._handles.pop(handle)
        try:
            with _translated(f"cannot release a write to {handle.peer}"):
                self._agent.release_xfer_handle(raw)
        except TransportError as error:
            # The write's end is reported elsewhere; NIXL frees the handle with the agent.
            _log.warning("%s", error)

    def disconnect(self, peer: PeerId) -> None:
        was_hung_up = peer in self._hung_up
        if self._forget(peer) and not was_hung_up:
            self._hang_up(peer)

    def _hang_up(self, peer: PeerId) -> None:
        for handle in [h for h in self._handles if h.peer == peer]:
            self._ready.append(WriteFailed(handle, f"disconnected from {peer}", settled=False, is_link_broken=True))
            self._release(handle)
        try:
            with _translated(f"cannot disconnect from {peer}"):
                self._open().remove_remote_agent(str(peer))
        except TransportError as error:  # NIXL forgets by itself whom it cannot reach any more
            _log.info("%s", error)

    def close(self) -> None:
        if self._agent is None:
            return
        agent = self._agent
        self.doorbell.close()
        for handle in list(self._handles):
            self._release(handle)
        try:
            with _translated("cannot close"):
                for peer in self._peers.names():
                    agent.remove_remote_agent(peer)
                if self._registration is not None:
                    agent.deregister_memory(self._registration)
        finally:
            self._agent = self._registration = self._owner = None
            self._ready.clear()

    @property
    def num_outgoing(self) -> int:
        return len(self._handles) + len(self._ready)

    def _descs(self, offsets: Any, sizes: Any, at: Envelope) -> Any:
        kind, number = _memory(at.device)
        rows = np.empty((len(offsets), 3), dtype=np.uint64)
        rows[:, 0] = offsets + np.uint64(at.address)
        rows[:, 1] = sizes
        rows[:, 2] = number
        return self._agent.get_xfer_descs(rows, kind)

    def _open(self) -> Any:
        if self._agent is None:
            raise TransportError(f"{self.agent_name} is closed")
        return self._agent


def _heard(peer: PeerId, notification: bytes) -> TransportEvent:
    kind, content = notification[:1], notification[1:]
    if kind == _GREETING and len(content) == _GREETED.size:
        return GreetingArrived(peer, Greeting(*_GREETED.unpack(content)))
    return (MessageArrived if kind == _MESSAGE else WriteArrived)(peer, content)


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
