"""How parts and commits reach decode: with the pages where the transport carries messages, else on a stream."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvtransfer.protocol.messages import AttemptKey, Commit, CommitPart
from kvtransfer.transports.base import Transport
from prefill_worker.peers import Peer
from tandem.core.errors import TransportError
from tandem.worker.wire import call_to_message, call_to_proto

_log = logging.getLogger(__name__)


class Commits:
    """All of one worker. On the transfer thread.

    A message takes a tenth of the time of a call through two event loops, and may get lost: what the protocol sends
    again goes on the stream. So does all where the transport has no messages, or decode has nowhere to answer.

    Args:
        worker_id: this worker's, for logs at decode.
        peer: a decode worker that is paired with, by its incarnation.
        run_in_loop: has the event loop call a function.
    """

    def __init__(
        self,
        worker_id: str,
        peer: Callable[[str], Peer | None],
        run_in_loop: Callable[[Callable[[], None]], object],
    ) -> None:
        self._worker_id = worker_id
        self._peer = peer
        self._run_in_loop = run_in_loop
        self._transport: Transport | None = None
        # The grant of each attempt whose commit went as a message. Until it is over the transport is polled: that
        # drives the message on, and an answer is about to come.
        self._under_way: dict[AttemptKey, str] = {}

    def bind(self, transport: Transport) -> None:
        """Give it the transport; once."""
        self._transport = transport

    def send(self, said: Commit | CommitPart, *, again: bool = False) -> None:
        """Send it, for the first time or `again`. What gets lost is the protocol's to notice."""
        peer = self._peer(said.receiver)
        if peer is None:
            _log.info("decode worker %s is gone: it does not hear of %s", said.receiver, said.grant_id)
            return
        if not again and peer.commits.is_open and self._send_message(peer, said):
            return
        call = call_to_proto(said, self._worker_id)
        self._run_in_loop(lambda: peer.commits.put(call))

    def closed(self, key: AttemptKey) -> None:
        """Nothing more comes of this attempt."""
        grant_id = self._under_way.pop(key, None)
        if grant_id is not None and self._transport is not None:
            self._transport.end_incoming(grant_id)

    def _send_message(self, peer: Peer, said: Commit | CommitPart) -> bool:
        transport = self._transport
        if transport is None or not transport.carries_messages:
            return False
        try:
            transport.send(peer.name, call_to_message(said, self._worker_id))
        except TransportError as error:
            _log.info("%s of %s goes on the stream: %s", type(said).__name__, said.grant_id, error)
            return False
        if isinstance(said, Commit):
            self._under_way[said.key] = said.grant_id
            transport.expect_incoming(said.grant_id, peer.name)
        return True
