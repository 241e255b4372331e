"""Pairs with decode workers before a request needs them. In the event loop."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from prefill_worker.connections import Connections
from prefill_worker.peers import DecodePeers
from tandem.core.errors import TandemError
from tandem.rpc.v1 import common_pb2 as pb

_log = logging.getLogger(__name__)

# Pairings ahead of need that one worker has under way at a time.
_MEETINGS = 4


class Meetings:
    """All of one worker.

    Args:
        spawn: runs a coroutine in the background.
    """

    def __init__(
        self, peers: DecodePeers, connections: Connections, spawn: Callable[[Coroutine[Any, Any, None]], None]
    ) -> None:
        self._peers = peers
        self._connections = connections
        self._spawn = spawn
        self._turn = asyncio.Semaphore(_MEETINGS)
        # By incarnation: all and only those that are being paired with, or are to be. Each router names all of them.
        self._under_way: set[str] = set()

    def meet(self, decode: Sequence[pb.WorkerInfo]) -> None:
        """Pair with these: a few at a time, and not every worker with the same first."""
        for info in random.sample(decode, len(decode)):
            if info.incarnation not in self._peers.peers and info.incarnation not in self._under_way:
                self._under_way.add(info.incarnation)
                self._spawn(self._meet_one(info))

    async def _meet_one(self, info: pb.WorkerInfo) -> None:
        try:
            async with self._turn:
                await self._peers.get(info)
                await self._connections.wait_greeted(info.incarnation)
        except TandemError as error:  # the first request for it tries again
            _log.warning("not paired ahead with %s: %s", info.worker_id, error)
        finally:
            self._under_way.discard(info.incarnation)
