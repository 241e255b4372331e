"""The other side of a transport under test: in this process, or in one of its own."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvtransfer.extents import ArenaShape, Descriptor, PageArea
from kvtransfer.transports.base import Transport
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
from kvtransfer.transports.registry import create_transport
from tests.support.stopping import stop_still
from tests.support.waiting import wait_until

ARENA_BYTES = 24 << 20
EMPTY = 0xEE  # what an arena holds where nothing was written
ALL = PageArea([0], ArenaShape(num_layers=1, num_pages=1, extent_bytes=ARENA_BYTES))


@dataclass
class Agent:
    """A transport with an arena of `ARENA_BYTES`, driven by hand."""

    transport: Transport
    arena: Any = field(default_factory=lambda: np.full(ARENA_BYTES, EMPTY, np.uint8))
    events: list[TransportEvent] = field(default_factory=list)
    is_closed: bool = False

    @classmethod
    def make(cls, name: str, agent_name: str, options: dict[str, Any]) -> Agent:
        agent = cls(create_transport(name, agent_name, **options))
        agent.transport.register(agent.arena.ctypes.data, agent.arena.nbytes, owner=agent.arena)
        return agent

    def metadata(self) -> bytes:
        return self.transport.metadata()

    def connect(self, metadata: bytes) -> PeerId:
        return self.transport.connect(metadata)

    def connect_to_killed(self, metadata: bytes, pid: int) -> PeerId:
        """Connect to an agent whose process has been killed since the last poll here."""
        self.poll()
        process = os.pidfd_open(pid)
        try:
            os.kill(pid, signal.SIGKILL)
            assert select.select([process], [], [], 10)[0], "it does not die"
        finally:
            os.close(process)
        return self.connect(metadata)

    def expect(self, key: str, peer: str, area: PageArea | None = ALL) -> None:
        self.transport.expect_incoming(key, PeerId(peer), area)

    def end(self, key: str) -> None:
        self.transport.end_incoming(key)

    def read(self, offset: int = 0, num_bytes: int = ARENA_BYTES) -> bytes:
        return bytes(self.arena[offset : offset + num_bytes])

    def arrived(self) -> list[bytes]:
        self.poll()
        return [e.tag for e in self.events if isinstance(e, WriteArrived)]

    def hears(self, timeout_s: float) -> bool:
        """Whether somebody rings, or has rung since the last time."""
        return self.transport.doorbell.wait(timeout_s)

    def came(self) -> list[tuple[str, bytes]]:
        """Tags and messages, in the order in which they came, and from whom."""
        self.poll()
        return [
            (e.peer, e.tag if isinstance(e, WriteArrived) else e.content)
            for e in self.events
            if isinstance(e, WriteArrived | MessageArrived)
        ]

    def poll(self) -> None:
        if not self.is_closed:
            self.events += self.transport.poll()

    def poll_for(self, seconds: float) -> None:
        deadline_s = time.monotonic() + seconds
        while time.monotonic() < deadline_s:
            self.poll()
            time.sleep(0.0005)

    def end_of(self, peer: PeerId, descriptors: Sequence[Descriptor], timeout_s: float) -> TransportEvent:
        """Write, and how that ended."""
        handle = self.write(peer, descriptors)

        def ends() -> list[TransportEvent]:
            self.poll()
            return self.ends(handle)

        return wait_until(ends, f"the end of {handle}", timeout_s, every_s=0.001)[0]

    def break_connections(self) -> int:
        """Shut all TCP connections of this process, as a network that fails does; how many there were."""
        num = 0
        for name in os.listdir("/proc/self/fd"):
            try:
                connection = socket.socket(fileno=os.dup(int(name)))
            except OSError:  # no socket, or gone since it was listed
                continue
            with connection:
                is_tcp = connection.family == socket.AF_INET and connection.type == socket.SOCK_STREAM
                if is_tcp and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    try:
                        connection.shutdown(socket.SHUT_RDWR)
                    except OSError:  # it is not connected
                        continue
                    num += 1
        return num

    def fill(self, value: int) -> None:
        self.arena[:] = value

    def close(self) -> None:
        self.is_closed = True
        self.transport.close()

    # ---- writing

    def write(self, peer: PeerId, descriptors: Sequence[Descriptor], tag: bytes = b"") -> WriteHandle:
        return self.transport.post_write(peer, descriptors, tag)

    def ends(self, handle: WriteHandle) -> list[TransportEvent]:
        return [e for e in self.events if isinstance(e, WriteCompleted | WriteFailed) and e.handle == handle]

    # ---- connections

    def hang_up(self, peer: PeerId) -> None:
        self.transport.hang_up(peer)

    def greet(self, peer: PeerId, greeting: Greeting) -> None:
        self.transport.greet(peer, greeting)

    def open_writes(self, peer: PeerId) -> None:
        self.transport.open_writes(peer)

    def greetings(self) -> list[Greeting]:
        self.poll()
        return [e.greeting for e in self.events if isinstance(e, GreetingArrived)]

    def broken(self) -> list[str]:
        self.poll()
        return [e.peer for e in self.events if isinstance(e, LinkBroken)]


def host_agents(conn: Connection, environment: Mapping[str, str]) -> None:
    """Main of the peer's process: hosts agents, obeys calls, polls. UCX reads its settings with the first agent."""
    os.environ.update(environment)
    agents: dict[str, Agent] = {}
    while True:
        if conn.poll(0.0005):
            try:
                call = conn.recv()
            except EOFError:
                for agent in agents.values():
                    agent.close()
                return
            method, agent_name, args = call
            try:
                if method == "make":
                    agents[agent_name] = Agent.make(*args)
                    answer = None
                else:
                    answer = getattr(agents[agent_name], method)(*args)
                if method == "close":
                    del agents[agent_name]
                conn.send((answer, None))
            except Exception as error:  # noqa: BLE001 - the test sees it
                conn.send((None, error))
        for agent in agents.values():
            agent.poll()


_IMPORTED = ["pytest", "tests.support.waiting", *(f"kvtransfer.transports.{n}" for n in ("registry", "ucx", "nccl"))]
"""Once for all such processes: most of what the start of one takes. None of it starts a thread, or loads UCX."""


class PeerProcess:
    """A process that hosts agents.

    Args:
        is_child: of the test's process, so that it stays known to the kernel until it is joined, and takes seconds to
            start; else of one that has all imports, and reaps it.
    """

    def __init__(self, *, is_child: bool = False) -> None:
        context: Any = multiprocessing.get_context("spawn" if is_child else "forkserver")
        if not is_child:
            context.set_forkserver_preload(_IMPORTED)
        self._conn, theirs = context.Pipe()
        self.process = context.Process(target=host_agents, args=(theirs, dict(os.environ)), daemon=True)
        self.process.start()
        theirs.close()

    def call(self, method: str, agent_name: str, *args: Any) -> Any:
        self._conn.send((method, agent_name, args))
        if not self._conn.poll(30):
            raise TimeoutError(f"the peer did not answer {method}")
        answer, error = self._conn.recv()
        if error is not None:
            raise error
        return answer

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        if number == signal.SIGSTOP:
            stop_still(self.process.pid)
        else:
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        """It is gone, and known to be, on return: the server of forks, which reaps it, tells that later."""
        self.process.kill()
        self.process.join()

    def end(self) -> None:
        self._conn.close()
        with contextlib.suppress(ProcessLookupError):  # it may end by itself meanwhile, as its connection has
            if self.process.is_alive():
                self.signal(signal.SIGCONT)
        self.process.join(5)
        if self.process.is_alive():
            self.kill()


@dataclass
class RemoteAgent:
    """An agent of a `PeerProcess`, with the face of `Agent`."""

    host: PeerProcess
    agent_name: str

    @classmethod
    def make(cls, host: PeerProcess, name: str, agent_name: str, options: dict[str, Any]) -> RemoteAgent:
        host.call("make", agent_name, name, agent_name, options)
        return cls(host, agent_name)

    def metadata(self) -> bytes:
        return self.host.call("metadata", self.agent_name)

    def connect(self, metadata: bytes) -> PeerId:
        return self.host.call("connect", self.agent_name, metadata)

    def expect(self, key: str, peer: str, area: PageArea | None = ALL) -> None:
        self.host.call("expect", self.agent_name, key, peer, area)

    def end(self, key: str) -> None:
        self.host.call("end", self.agent_name, key)

    def hang_up(self, peer: PeerId) -> None:
        self.host.call("hang_up", self.agent_name, peer)

    def read(self, offset: int = 0, num_bytes: int = ARENA_BYTES) -> bytes:
        return self.host.call("read", self.agent_name, offset, num_bytes)

    def came(self) -> list[tuple[str, bytes]]:
        return self.host.call("came", self.agent_name)

    def arrived(self) -> list[bytes]:
        return self.host.call("arrived", self.agent_name)

    def hears(self, timeout_s: float) -> bool:
        return self.host.call("hears", self.agent_name, timeout_s)

    def poll(self) -> None:
        """Its process polls."""

    def close(self) -> None:
        self.host.call("close", self.agent_name)


@dataclass
class Pair:
    """A writer here and a reader that expects writes into all of its arena."""

    name: str
    writer: Agent
    reader: Agent | RemoteAgent
    peer: PeerId

    def wait(self, look: Callable[[], object], what: str, timeout_s: float = 10.0) -> None:
        """Poll both sides until it is there."""

        def polled() -> object:
            self.writer.poll()
            self.reader.poll()
            return look()

        wait_until(polled, what, timeout_s, every_s=0.0002)

    def end_of(self, handle: WriteHandle, timeout_s: float = 10.0) -> TransportEvent:
        """How the write ended."""
        self.wait(lambda: self.writer.ends(handle), f"the end of {handle}", timeout_s)
        (end,) = self.writer.ends(handle)
        return end

    def connect_anew(self) -> None:
        """What workers do about a connection that broke, once the writer has hung up."""
        self.reader.hang_up(PeerId(self.writer.transport.agent_name))
        self.reader.connect(self.writer.metadata())
        self.writer.connect(self.reader.metadata())
        self.writer.open_writes(self.peer)
