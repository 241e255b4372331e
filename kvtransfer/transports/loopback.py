"""A complete transport inside one process, and faults on demand.

Writes are real copies between registered memories. An agent belongs to a `LoopbackNetwork`; agents of one network reach
each other. Copies happen in the writer's `poll`, so that a delayed write is really late.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Unpack

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


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with one write. Polls are those of the writer.

    Attributes:
        delay_polls: the bytes move this many polls later.
        lose_completion: the bytes move, and the writer never hears of it.
        duplicate_after_polls: the bytes move once more this many polls after the completion.
        corrupt: one bit of the first byte of each descriptor arrives flipped.
        truncate: only the first half of each descriptor arrives, and the write counts as complete.
        fail_after_bytes: the write fails, unsettled, after about this many bytes have moved.
    """

    delay_polls: int = 0
    lose_completion: bool = False
    duplicate_after_polls: int | None = None
    corrupt: bool = False
    truncate: bool = False
    fail_after_bytes: int | None = None


NO_FAULT = Fault()


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Faults by the number of the write in its agent, from 0; `default` for all others.

    Attributes:
        lose_messages: no message arrives, and nobody hears of it.
    """

    faults: Mapping[int, Fault] = field(default_factory=dict)
    default: Fault = NO_FAULT
    lose_messages: bool = False

    def of(self, number: int) -> Fault:
        return self.faults.get(number, self.default)


class LoopbackNetwork:
    """The agents that reach each other. Thread-safe: each agent is driven by its own transfer thread."""

    def __init__(self) -> None:
        # Also held during a copy, so that memory is not unregistered under a write.
        self.lock = threading.Lock()
        self._agents: dict[str, LoopbackTransport] = {}
        self._stopped: set[str] = set()
        # Connections that are cut; each end is there until its agent has hung up.
        self._cut: set[tuple[str, str]] = set()

    def join(self, agent: LoopbackTransport) -> None:
        with self.lock:
            if agent.agent_name in self._agents:
                raise TransportError(f"agent name {agent.agent_name!r} is taken on this network")
            self._agents[agent.agent_name] = agent

    def leave(self, agent: LoopbackTransport) -> None:
        with self.lock:
            if self._agents.get(agent.agent_name) is agent:
                del self._agents[agent.agent_name]

    def kill(self, agent_name: str) -> None:
        """As if the agent's process had been killed: writes to it fail, its own never land."""
        with self.lock:
            self._agents.pop(agent_name, None)

    def stop(self, agent_name: str) -> None:
        """As if by SIGSTOP: writes to it land, and stay in progress."""
        with self.lock:
            self._stopped.add(agent_name)

    def resume(self, agent_name: str) -> None:
        with self.lock:
            self._stopped.discard(agent_name)

    def cut(self, one: str, other: str) -> None:
        """As if the network had broken the connection between two that live. It is whole once both have hung up."""
        with self.lock:
            self._cut |= {(one, other), (other, one)}

    def hung_up(self, agent_name: str, peer: str) -> None:
        with self.lock:
            self._cut.discard((agent_name, peer))

    def is_cut(self, one: str, other: str) -> bool:
        """Call with `lock` held."""
        return bool(self._cut & {(one, other), (other, one)})

    def find(self, agent_name: str) -> LoopbackTransport | None:
        """The live agent of this name. Call with `lock` held."""
        return self._agents.get(agent_name)

    def is_stopped(self, agent_name: str) -> bool:
        """Call with `lock` held."""
        return agent_name in self._stopped


_DEFAULT_NETWORK = LoopbackNetwork()


@dataclass(slots=True)
class _Pending:
    """A write on its way. `polls_left` counts down to the copy."""

    handle: WriteHandle
    descriptors: tuple[Descriptor, ...]
    fault: Fault
    polls_left: int
    landed: bool = False
    reported: bool = False  # its end was told; bytes may move all the same


class LoopbackTransport(Transport):
    """An agent on a `LoopbackNetwork`; by default on the one that all agents of the process share."""

    name: ClassVar[str] = "loopback"
    carries_messages: ClassVar[bool] = True
    greets: ClassVar[bool] = True

    def __init__(
        self,
        agent_name: str,
        *,
        network: LoopbackNetwork | None = None,
        faults: FaultPlan | None = None,
        **place: Unpack[Place],
    ) -> None:
        super().__init__(agent_name, **place)
        self.faults = faults or FaultPlan()
        self._network = network or _DEFAULT_NETWORK
        self._pending: list[_Pending] = []
        self._ready: list[TransportEvent] = []
        # Filled by peers, under the network's lock.
        self._arrived: list[WriteArrived | MessageArrived | GreetingArrived] = []
        self._is_open = True
        self._network.join(self)

    def _register(self, me: Envelope) -> None:
        if me.device != "cpu":
            raise TransportError(f"loopback cannot register memory of device {me.device!r}")

    def post_write(self, peer: PeerId, descriptors: Sequence[Descriptor], tag: bytes = b"") -> WriteHandle:
        handle = self._new_write(peer, descriptors, tag)
        if self._takes_no_writes(peer):
            error = f"the connection to {peer} is broken"
            self._ready.append(WriteFailed(handle, error, settled=True, is_link_broken=True))
            return handle
        fault = self.faults.of(handle.number)
        self._pending.append(_Pending(handle, tuple(descriptors), fault, fault.delay_polls))
        return handle

    def send(self, peer: PeerId, content: bytes) -> None:
        self._tell(peer, MessageArrived(PeerId(self.agent_name), content))

    def greet(self, peer: PeerId, greeting: Greeting) -> None:
        self._tell(peer, GreetingArrived(PeerId(self.agent_name), greeting))

    def _tell(self, peer: PeerId, said: MessageArrived | GreetingArrived) -> None:
        self._open()
        self._peers.get(peer)
        with self._network.lock:
            there = self._network.find(peer)
            if there is None or self._network.find(self.agent_name) is not self:
                raise TransportError(f"{peer} is gone")
            if self._network.is_cut(self.agent_name, peer):
                self._note_cut(peer)
            if peer in self._broken:
                raise TransportError(f"the connection to {peer} is broken")
            if not self.faults.lose_messages:
                there._arrived.append(said)
                there.doorbell.ring()

    def poll(self) -> list[TransportEvent]:
        self._open()
        with self._network.lock:
            self._pending = [p for p in self._pending if not self._advance(p)]
            events: list[TransportEvent] = [*self._ready, *self._arrived]
            self._ready.clear()
            self._arrived.clear()
        return events

    def _advance(self, pending: _Pending) -> bool:
        """One poll of one write, with the network's lock held; whether it is over for good."""
        if pending.polls_left > 0:
            pending.polls_left -= 1
            return False
        peer = self._network.find(pending.handle.peer)
        if peer is None or self._network.find(self.agent_name) is not self:
            if not pending.reported:
                self._ready.append(WriteFailed(pending.handle, f"{pending.handle.peer} is gone", settled=True))
            return True
        if self._network.is_cut(self.agent_name, pending.handle.peer):
            self._note_cut(pending.handle.peer)
            if not pending.reported:
                self._ready.append(WriteFailed(pending.handle, "cut", settled=False, is_link_broken=True))
            return True
        fault = pending.fault
        if not pending.landed:
            self._copy(pending, peer)
            pending.landed = True
        if pending.reported:
            return True
        if fault.fail_after_bytes is not None:
            self._ready.append(WriteFailed(pending.handle, "injected failure", settled=False))
            return True
        if fault.lose_completion or self._network.is_stopped(pending.handle.peer):
            return False
        self._ready.append(WriteCompleted(pending.handle))
        if pending.handle.tag:
            peer._arrived.append(WriteArrived(PeerId(self.agent_name), pending.handle.tag))
            peer.doorbell.ring()
        if fault.duplicate_after_polls is None:
            return True
        pending.reported, pending.landed, pending.polls_left = True, False, fault.duplicate_after_polls
        return False

    def _note_cut(self, peer: PeerId) -> None:
        if peer not in self._broken:
            self._broken.add(peer)
            self._ready.append(LinkBroken(peer, "cut"))

    def _copy(self, pending: _Pending, peer: LoopbackTransport) -> None:
        here, there = self._registered().address, peer._registered().address
        left = pending.fault.fail_after_bytes
        for local, remote, num_bytes in pending.descriptors:
            num = num_bytes // 2 if pending.fault.truncate else num_bytes
            if left is not None:
                num = min(num, left)
                left -= num
            ctypes.memmove(there + remote, here + local, num)
            if pending.fault.corrupt and num:
                ctypes.c_uint8.from_address(there + remote).value ^= 1

    def disconnect(self, peer: PeerId) -> None:
        if self._forget(peer):
            self._drop(peer, settled=True)

    def _hang_up(self, peer: PeerId) -> None:
        self._network.hung_up(self.agent_name, peer)
        self._drop(peer, settled=False)

    def _drop(self, peer: PeerId, *, settled: bool) -> None:
        for pending in [p for p in self._pending if p.handle.peer == peer]:
            self._pending.remove(pending)
            if not pending.reported:
                error = f"disconnected from {peer}"
                self._ready.append(WriteFailed(pending.handle, error, settled, is_link_broken=True))

    def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._network.leave(self)
        self.doorbell.close()
        self._owner = None
        self._pending.clear()
        self._ready.clear()

    @property
    def num_outgoing(self) -> int:
        return len(self._pending) + len(self._ready)

    def _open(self) -> None:
        if not self._is_open:
            raise TransportError(f"{self.agent_name} is closed")
