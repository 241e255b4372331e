"""On which nodes routers run: on those with the resource `router`, spread evenly, as each node has one port. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tandem.core.identity import Role


def nodes_for_routers(nodes: Iterable[Mapping[str, Any]], home: str) -> list[str]:
    """The ids of those that live and have the resource `router`, `home` first; where none has it, `home` alone.

    Args:
        nodes: as `ray.nodes()` tells them.
        home: the node of `tandem serve`.
    """
    able = {node["NodeID"] for node in nodes if node["Alive"] and node["Resources"].get(Role.ROUTER.value, 0) > 0}
    return sorted(able, key=lambda node: (node != home, node)) or [home]


def choose_node(nodes: Sequence[str], others: Sequence[str], before: str | None) -> str:
    """The one with the fewest routers; of equals the one that this router was on before, then the first.

    Args:
        others: where the routers are that stay beside it.
    """
    num_there = Counter(others)
    return min(nodes, key=lambda node: (num_there[node], node != before, nodes.index(node)))
