"""The connections by which pages go to decode workers: made ahead, and made anew when they break. In the event loop.

A connection may break while both workers live: a firewall, a switch, a reset. Then nobody is to end for it:

    this worker                                   decode
    closes its end, and posts nothing more
    Pair, with the next number  ────────────────> closes its end; frees no page of this writer before the bytes of the
                                                  old connection have had their time to land
    settles what was outstanding, confirms idle
    connects, greets  ══════════════════════════> hears the greeting: the new connection is up

What only seems broken is tried first: a write was overdue, or the peer could not be reached in another way, as when it
was stopped. If another greeting comes through by it, and all that hung has ended, it is kept. UCX never frees a
connection that carries, however often both ends close it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvtransfer.protocol.messages import FailureReason
from kvtransfer.transports.base import Transport
from kvtransfer.transports.events import Greeting
from prefill_worker.links import LinkFigures
from prefill_worker.peers import DecodePeers, Peer
from tandem.core.errors import HandoffError, TandemError, WorkerLostError
from tandem.rpc.v1 import common_pb2 as pb

_log = logging.getLogger(__name__)

# How long a greeting may take, in seconds. A wire-up takes some round trips, and the peer may be in a long step.
_GREETING_S = 2.0
# How long a trial of a connection may take, in leases and in seconds: half of it for a greeting, half for the end of
# what hung. Meanwhile decode waits for what was outstanding, and in the end has this worker killed. If it was stopped,
# it waits from when it goes on, and the trial may take its longest.
_TRIAL_LEASES, _LONGEST_TRIAL_S = 0.05, 0.5
# How long an attempt waits for a connection that is broken, in leases.
_PATIENCE_LEASES = 0.25
# Pauses between two tries to make a connection anew, in seconds.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0


class Calls(Protocol):
    """What a worker lends to its connections."""

    def ask_transport(self, command: Callable[[Transport], Any]) -> Awaitable[Any]:
        """Run on the transfer thread. An error is the caller's, and does not end the worker."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> None: ...

    def link_changed(self, peer: Peer, *, is_broken: bool) -> None:
        """Routers are to know."""

    def link_closed(self, receiver: str) -> None:
        """What was outstanding to this decode worker is settled."""

    async def drained(self, receiver: str) -> None:
        """Until no write is outstanding to this decode worker of attempts that have failed by now."""


@dataclass(slots=True)
class _Connection:
    peer: Peer
    number: int = 0  # of the connection that counts; it rises each time that one is made anew
    is_whole: asyncio.Event = field(default_factory=asyncio.Event)  # not known to be broken
    num_trials: int = 0  # of that one
    is_suspected: bool = False  # since its last trial knew for what to wait
    has_broken: bool = False  # it is known to be; while it is made anew: the new one is, too
    is_greeted: asyncio.Event = field(default_factory=asyncio.Event)  # the first greeting came through, or did not


class Connections:
    """All of one worker, by the decode workers' incarnations.

    Args:
        lease_s: of decode workers' grants.
    """

    def __init__(self, peers: DecodePeers, calls: Calls, lease_s: float) -> None:
        self._peers = peers
        self._calls = calls
        self._patience_s = _PATIENCE_LEASES * lease_s
        self._trial_s = min(_TRIAL_LEASES * lease_s, _LONGEST_TRIAL_S)
        self._of_peers: dict[str, _Connection] = {}

    # -- the first connection

    def begin(self, peer: Peer) -> None:
        """The transport has just learnt `peer`: have the connection made."""
        connection = self._of_peers[peer.info.incarnation] = _Connection(peer)
        connection.is_whole.set()
        self._calls.spawn(self._greet_first(connection))

    async def _greet_first(self, connection: _Connection) -> None:
        try:
            if await self._greet(connection):
                _log.info("connected with %s", connection.peer.info.worker_id)
        finally:
            connection.is_greeted.set()

    async def wait_greeted(self, receiver: str) -> None:
        """Until the first connection to this peer is made, or could not be made in time."""
        if (connection := self._of_peers.get(receiver)) is not None:
            await connection.is_greeted.wait()

    async def _greet(self, connection: _Connection) -> bool:
        """Whether a greeting came through; a transport that has none is connected as soon as both know each other."""
        try:
            return await self._send_greeting(connection, 0, _GREETING_S) is not False
        except TandemError as error:
            _log.info("%s has not heard our greeting: %s", connection.peer.info.worker_id, error)
            return False

    async def _send_greeting(self, connection: _Connection, trial: int, timeout_s: float) -> bool | None:
        """Whether it came through; `None`: the transport has none. Raises as `DecodePeers.attach`, or `TransportError`
        if it cannot be sent."""
        peer, greeting = connection.peer, Greeting(connection.number, trial)
        key = f"greeting/{peer.info.incarnation}/{greeting.link}/{greeting.trial}"

        def greet(transport: Transport) -> bool:
            if transport.greets:
                transport.expect_incoming(key, peer.name)  # so that it is polled, which the wire-up needs
                transport.greet(peer.name, greeting)
            return transport.greets

        try:
            if not await self._calls.ask_transport(greet):
                return None
            return await self._peers.await_greeting(peer, greeting, timeout_s)
        finally:
            await self._end_incoming(key)

    async def _end_incoming(self, key: str) -> None:
        try:
            await self._calls.ask_transport(lambda transport: transport.end_incoming(key))
        except TandemError as error:
            _log.debug("the transfer thread has ended: %s", error)

    # -- one that broke

    def broke(self, receiver: str, why: str) -> None:
        """The connection to this decode worker broke: make it anew, unless that is under way."""
        connection = self._of_peers.get(receiver)
        if connection is None:
            return
        if not connection.is_whole.is_set():
            connection.has_broken = True
            return
        _log.warning("the connection to %s is broken and is made anew: %s", connection.peer.info.worker_id, why)
        self._begin_mending(connection, is_broken=True)

    def suspect(self, receiver: str, why: str) -> None:
        """A write was overdue, or this decode worker could not be reached in another way: what its connection is worth
        is not known. Keep it if it carries, else make it anew."""
        connection = self._of_peers.get(receiver)
        if connection is None:
            return
        connection.is_suspected = True
        if connection.is_whole.is_set():
            _log.warning("the connection to %s is tried: %s", connection.peer.info.worker_id, why)
            self._begin_mending(connection, is_broken=False)

    def _begin_mending(self, connection: _Connection, *, is_broken: bool) -> None:
        connection.is_whole.clear()
        connection.has_broken = is_broken
        self._calls.link_changed(connection.peer, is_broken=True)
        self._calls.spawn(self._mend(connection))

    async def _mend(self, connection: _Connection) -> None:
        pause_s, trial_s, is_kept = _FIRST_PAUSE_S, self._trial_s, not connection.has_broken
        while self._is_current(connection):
            is_up: bool | None = None
            if is_kept:
                is_up, trial_s = await self._try_it(connection, trial_s), _LONGEST_TRIAL_S
                is_kept = is_up is not False
            if not is_kept:
                is_up = await self._connect_anew(connection)
            if is_up and self._is_current(connection):
                _log.warning("the connection to %s is up again", connection.peer.info.worker_id)
                connection.is_whole.set()
                self._calls.link_changed(connection.peer, is_broken=False)
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _try_it(self, connection: _Connection, trial_s: float) -> bool | None:
        """Whether the connection carries, and all that hung has ended; `None`: that is not known yet, since the peer
        does not answer or something more hangs."""
        peer = connection.peer
        connection.num_trials += 1
        began_s = time.monotonic()
        try:
            if not await self._calls.ask_transport(lambda transport: transport.greets):
                return False  # nothing shows what it is worth
            await self._peers.reopen_commits(peer)
            await self._peers.await_greeting(peer, Greeting(connection.number), 0.0)  # an answer is all that is wanted
            if time.monotonic() - began_s > trial_s:
                trial_s = _LONGEST_TRIAL_S  # it goes on only now
            carries = await self._send_greeting(connection, connection.num_trials, trial_s / 2)
        except WorkerLostError as error:
            _log.info("%s is not reached: %s", peer.info.worker_id, error)
            return False if connection.has_broken else None
        except TandemError as error:
            _log.warning("the connection to %s is made anew: %s", peer.info.worker_id, error)
            return False
        connection.is_suspected = False
        if carries and await self._is_drained(peer, trial_s / 2) and not connection.has_broken:
            return None if connection.is_suspected else True
        _log.warning("the connection to %s does not carry, and is made anew", peer.info.worker_id)
        return False

    async def _is_drained(self, peer: Peer, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._calls.drained(peer.info.incarnation)
        except TimeoutError:
            return False
        return True

    async def _connect_anew(self, connection: _Connection) -> bool:
        peer, calls = connection.peer, self._calls
        connection.number, connection.num_trials = connection.number + 1, 0
        try:
            await calls.ask_transport(lambda transport: transport.hang_up(peer.name))
            await self._peers.pair_again(peer, connection.number)
            calls.link_closed(peer.info.incarnation)
            connection.has_broken = False  # what is told of the one before was told before it was closed
            await calls.ask_transport(lambda transport: transport.connect(peer.info.transport_metadata))
            if not await self._greet(connection):
                return False
            await calls.ask_transport(lambda transport: transport.open_writes(peer.name))
        except TandemError as error:
            _log.info("%s is not reached: %s", peer.info.worker_id, error)
            return False
        return not connection.has_broken

    def _is_current(self, connection: _Connection) -> bool:
        return self._of_peers.get(connection.peer.info.incarnation) is connection

    # -- for handoffs

    def is_whole(self, receiver: str) -> bool:
        """Whether there is a connection to this decode worker, and none knows it to be broken."""
        connection = self._of_peers.get(receiver)
        return connection is not None and connection.is_whole.is_set()

    def report(self, figures: Iterable[LinkFigures]) -> Iterator[pb.LinkStatus]:
        """For routers: the links with these figures, and all others that are broken. Of those that it does not name
        they know nothing."""
        rates = {figure.receiver: figure.bytes_per_s for figure in figures}
        broken = [receiver for receiver in self._of_peers if not self.is_whole(receiver)]
        for receiver in dict.fromkeys((*rates, *broken)):
            if (connection := self._of_peers.get(receiver)) is not None:
                yield pb.LinkStatus(
                    worker_id=connection.peer.info.worker_id,
                    incarnation=receiver,
                    bytes_per_s=rates.get(receiver, 0.0),
                    is_broken=not connection.is_whole.is_set(),
                )

    async def wait_whole(self, peer: Peer) -> None:
        """Until pages can be written to this peer.

        Raises:
            HandoffError: the connection is broken for longer.
            WorkerLostError: the peer has ended.
        """
        connection = self._of_peers.get(peer.info.incarnation)
        if connection is None:
            raise WorkerLostError(f"{peer.info.incarnation} is gone")
        try:
            async with asyncio.timeout(self._patience_s):
                await connection.is_whole.wait()
        except TimeoutError:
            raise HandoffError(
                f"the connection to {peer.info.worker_id} broke and is not up again after {self._patience_s:g} s",
                reason=FailureReason.LINK_BROKEN.value,
            ) from None

    def forget(self, receiver: str) -> None:
        """The decode worker has ended."""
        connection = self._of_peers.pop(receiver, None)
        if connection is not None:
            connection.is_whole.set()  # whoever waits finds that the peer is gone
