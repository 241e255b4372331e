"""How a grant gets its writer: decode takes this worker as such, and its lease is kept. In the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial

from kvtransfer.protocol import sender_events as ev
from kvtransfer.protocol.messages import AttemptKey, FailureReason, Grant, RefusalReason
from prefill_worker.connections import Connections
from prefill_worker.peers import DecodePeers, Peer
from prefill_worker.role import PrefillRole
from prefill_worker.sender_driver import SenderDriver
from tandem.core import fault_points
from tandem.core.errors import HandoffError, TandemError
from tandem.rpc.v1 import common_pb2 as pb
from tandem.rpc.v1 import prefill_pb2 as prefill_pb
from tandem.worker.parts import WorkerParts
from tandem.worker.wire import grant_from_proto, refusal_from_proto

_log = logging.getLogger(__name__)


class Attaching:
    """All of one worker."""

    def __init__(
        self,
        parts: WorkerParts,
        peers: DecodePeers,
        connections: Connections,
        driver: SenderDriver,
        core: PrefillRole,
    ) -> None:
        self._parts = parts
        self._peers = peers
        self._connections = connections
        self._driver = driver
        self._core = core

    async def attach(self, command: prefill_pb.AttachGrant, target: pb.WorkerInfo) -> None:
        """Become the grant's writer, and stay it for as long as the handoff lasts.

        Args:
            target: the decode worker that the attempt's pages are for.
        """
        key = AttemptKey(command.request_id, command.attempt)
        try:
            peer = await self._peers.get(target)
            await self._connections.wait_whole(peer)
            grant = grant_from_proto(command.grant, peer.layout)
            if grant.key != key or grant.receiver != target.incarnation:
                raise HandoffError(
                    f"grant {grant.grant_id} is for {grant.key} at {grant.receiver}, not for {key}",
                    reason=FailureReason.GRANT_MISMATCH.value,
                )
            asked_s = time.monotonic()
            reply = await self._peers.attach(peer, grant, renew=False)
        except TandemError as error:
            # Decode could not be reached, or must not be paired with.
            self._parts.runner.submit(partial(self._core.fail, key, error))
            return
        if not reply.ok:
            reason, detail = refusal_from_proto(reply.error)
            if reason is not RefusalReason.ALREADY_ENDED:  # else the command was a repetition
                self._parts.on_transfer(lambda _: self._driver.happened(key, ev.RefusalReceived(reason, detail)))
            return
        self._parts.on_transfer(lambda _: self._attached(key, grant, asked_s + reply.lease_s))
        self._core.grant_attached(key)
        self._parts.runner.submit(lambda: self._core.attach(key))
        await self._renew(peer, key, grant, reply.lease_s)

    def _attached(self, key: AttemptKey, grant: Grant, lease_ends_s: float) -> None:
        """On the transfer thread."""
        fault_points.reach("prefill.attached")
        self._driver.attached(key, grant, lease_ends_s)

    async def _renew(self, peer: Peer, key: AttemptKey, grant: Grant, lease_s: float) -> None:
        """Keep the lease while the handoff needs it; a lease that is not renewed is lost by time."""
        while True:
            await asyncio.sleep(lease_s / 3)
            if not self._driver.needs_lease(key):
                return
            asked_s = time.monotonic()
            try:
                reply = await self._peers.attach(peer, grant, renew=True)
            except TandemError as error:
                _log.warning("lease of %s not renewed: %s", grant.grant_id, error)
                continue
            if not reply.ok:
                return  # committed already, or ended: the commit's answer says which
            ends_s = asked_s + reply.lease_s
            self._parts.on_transfer(lambda _, e=ends_s: self._driver.happened(key, ev.LeaseExtended(grant.grant_id, e)))  # type: ignore[misc]
