"""Looks after the nodes for the supervisor: which there are, whether one answers, which machine it is."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence

from tandem.cluster.supervisor import events as ev
from tandem.cluster.supervisor.handles import Launcher
from tandem.cluster.supervisor.nodes import Aim, Node
from tandem.cluster.supervisor.placing import looks_for_nodes, to_knock
from tandem.cluster.supervisor.pools import PoolState
from tandem.core.errors import TandemError, WorkerLostError

_log = logging.getLogger(__name__)

LIST_TIMEOUT_S = 3.0
"""How long the list of nodes may take; without Ray's control store there is none, and the last one counts."""

MEET_EVERY_S = 10.0
"""How often it is looked whether a machine is back on which something was lost."""


class NodeSurvey:
    """What is found becomes events; what follows from them is decided elsewhere. All calls in one event loop."""

    def __init__(
        self, cluster: PoolState, launcher: Launcher, feed: Callable[[ev.Event], None], heartbeat_s: float
    ) -> None:
        self._cluster, self._launcher, self._feed, self._heartbeat_s = cluster, launcher, feed, heartbeat_s
        self._listing: asyncio.Future[Sequence[Node]] | None = None
        self._meeting: set[str] = set()  # nodes that are being asked which machine they are

    async def find_place(self, name: str, is_wanted: Callable[[], bool]) -> Aim | None:
        """Where to start the life that begins in this slot: a node that answers now, where one has room.

        Each that does not answer is known for it afterwards. `None`: it is not wanted any more.
        """
        await self._list()
        while is_wanted():
            aim = self._cluster.aim(name)
            node = self._cluster.book.nodes.get(aim.node_id)
            if node is None or (await self._knock(node) and is_wanted()):
                return aim
        return None

    async def run(self) -> None:
        """Ask nodes that are missed for a sign of life, look for others, and for machines that are back."""
        book, loop = self._cluster.book, asyncio.get_running_loop()
        met_at = -math.inf
        async with asyncio.TaskGroup() as meetings:  # a machine may take long to answer: knocks go on meanwhile
            while True:
                await asyncio.sleep(self._heartbeat_s)
                meets = bool(book.unproven) and loop.time() - met_at >= MEET_EVERY_S
                if meets or looks_for_nodes(self._cluster.slots, book):
                    await self._list()
                await asyncio.gather(*(self._knock(node) for node in to_knock(self._cluster.slots, book)))
                if meets:
                    met_at = loop.time()
                    for node in book.to_meet:
                        if node.node_id not in self._meeting:
                            meetings.create_task(self._meet(node))

    async def _list(self) -> None:
        if self._listing is None or self._listing.done():  # else one hangs: Ray answers nobody
            self._listing = asyncio.ensure_future(asyncio.to_thread(self._launcher.nodes))
        try:
            async with asyncio.timeout(LIST_TIMEOUT_S):
                nodes = await asyncio.shield(self._listing)
        except (TimeoutError, TandemError) as error:
            _log.warning("Ray does not list its nodes: %r", error)
        else:
            self._feed(ev.NodesListed(tuple(nodes)))

    async def _knock(self, node: Node) -> bool:
        was_suspect = node.node_id in self._cluster.book.suspects
        answered = await self._launcher.knock(node)
        if answered == was_suspect:
            said = "answers again" if answered else "does not answer: nothing is started there"
            _log.warning("node %s at %s %s", node.node_id[:8], node.address, said)
        self._feed(ev.NodeKnocked(node.node_id, answered))
        return answered

    async def _meet(self, node: Node) -> None:
        self._meeting.add(node.node_id)
        try:
            boot = await self._launcher.meet(node)
        except WorkerLostError as error:
            _log.warning("node %s does not say which machine it is: %s", node.node_id[:8], error)
        else:
            self._feed(ev.NodeMet(node.node_id, boot))
        finally:
            self._meeting.discard(node.node_id)
