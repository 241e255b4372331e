"""The logs on all nodes of a joined Ray, each read by a small actor there that lives as long as it is asked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tandem.cluster.log_files import LogFiles
from tandem.cluster.ray.actor import own_log_directory
from tandem.core.pidfd import host_id

_START_S = 60.0
_WAIT_S = 30.0


class LogActor(LogFiles):
    """`directory`: empty where the node's Ray has the logs."""

    def __init__(self, directory: str, process: str, holds: str = "") -> None:
        self._place = Path(directory) if directory else own_log_directory()
        super().__init__(self._place, process, holds)

    def place(self) -> str:
        """The same for two nodes that have one directory."""
        return f"{host_id()}:{self._place}"


class NodeLogs:
    """As `LogFiles`, on every node that lives now; in a process that has joined Ray.

    Attributes:
        unread: addresses of nodes that did not answer.
    """

    def __init__(self, directory: str, process: str, holds: str = "") -> None:
        self.unread: list[str] = []
        nodes = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]}
        made = {node_id: _make(node_id, directory, process, holds) for node_id in nodes}
        self._actors: dict[str, Any] = {}  # by place
        for node_id, actor in made.items():
            try:
                self._actors.setdefault(ray.get(actor.place.remote(), timeout=_START_S), actor)
            except RayError:
                self.unread.append(nodes[node_id])

    def processes(self) -> list[str]:
        found: list[list[str]] = ray.get([actor.processes.remote() for actor in self._actors.values()])
        return sorted({process for processes in found for process in processes})

    def tail(self, num_lines: int) -> Iterator[dict[str, str]]:
        first = [actor.tail.remote(num_lines) for actor in self._actors.values()]
        for actor, answer in zip(self._actors.values(), first, strict=True):
            texts: dict[str, str] = ray.get(answer)
            while texts:
                yield texts
                texts = ray.get(actor.tail_on.remote())

    def follow(self) -> Iterator[dict[str, str]]:
        """What comes, for as long as a node lives."""
        asked = {actor.more.remote(_WAIT_S): actor for actor in self._actors.values()}
        while asked:
            (answered,), _ = ray.wait(list(asked), num_returns=1)
            actor = asked.pop(answered)
            with contextlib.suppress(RayError):  # its node has gone, and its logs with it
                yield ray.get(answered)
                asked[actor.more.remote(_WAIT_S)] = actor


def _make(node_id: str, directory: str, process: str, holds: str) -> Any:
    """Not detached: it ends with this process."""
    on_node = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(LogActor).options(num_cpus=0, scheduling_strategy=on_node).remote(directory, process, holds)
