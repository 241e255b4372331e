"""The nodes as the supervisor knows them: where a worker is started, who does not answer, whose end is unproven.

Pure: what was heard comes in, decisions go out. Ray itself takes a node that has died or is cut off for alive until its
own checks have failed, for a minute or more, and would place successors there meanwhile. So the node is chosen here.

    one of its processes misses a heartbeat,
    or it was told to begin one and has not yet    ─>  it is knocked at
    a knock is not answered                        ─>  it is suspect: nothing is started there, and it is knocked at
    a knock is answered                            ─>  it counts again
    Ray lists it no longer                         ─>  it is gone

A knock asks for a connection to the node's own Ray: no process of ours is needed there, and none that is stopped or
busy makes its node suspect.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tandem.core.identity import Role
from tandem.core.machine import HostBoot

MAX_UNPROVEN = 1024
"""Ends that wait for a proof; the oldest are forgotten: whoever waited for those has most likely ended itself."""


@dataclass(frozen=True)
class Node:
    """A node that Ray takes for alive."""

    node_id: str  # Ray's
    address: str  # host's
    port: int  # at which its Ray listens
    places: Mapping[Role, int]  # how many processes of each role it has room for


@dataclass(frozen=True)
class Aim:
    """Where a process is to be started.

    Attributes:
        node_id: empty where no known node has room: Ray finds one as soon as there is one, or has it added.
        avoid: nodes that are not to be taken then.
    """

    node_id: str = ""
    avoid: frozenset[str] = frozenset()


@dataclass
class NodeBook:
    """What is known of the nodes."""

    nodes: dict[str, Node] = field(default_factory=dict)  # as last listed, by id
    suspects: set[str] = field(default_factory=set)  # of those: did not answer the last knock
    missed: set[str] = field(default_factory=set)  # of those: a process there missed a heartbeat since the last knock
    met: set[str] = field(default_factory=set)  # of those: the boot under which it runs is known
    unproven: dict[str, HostBoot] = field(default_factory=dict)  # incarnations whose end nobody saw, oldest first
    # Of each machine, by its name and address, the boot that was met last; and those before, which are over for good.
    current: dict[tuple[str, str], HostBoot] = field(default_factory=dict)
    over: set[HostBoot] = field(default_factory=set)

    # --- what is heard ---------------------------------------------------------------------------------------------

    def take_list(self, nodes: Sequence[Node]) -> None:
        """Ray lists these as alive, and no others."""
        self.nodes = {node.node_id: node for node in nodes}
        self.suspects &= self.nodes.keys()
        self.missed &= self.nodes.keys()
        self.met &= self.nodes.keys()

    def is_suspect(self, node_id: str) -> bool:
        return node_id in self.suspects

    def miss(self, node_id: str) -> None:
        """A process there did not answer a heartbeat."""
        self.missed.add(node_id)

    def take_knock(self, node_id: str, answered: bool) -> bool:
        """Whether that is new."""
        self.missed.discard(node_id)
        is_new = (node_id in self.suspects) == answered
        if answered:
            self.suspects.discard(node_id)
        else:
            self.suspects.add(node_id)
        return is_new

    def leave_unproven(self, incarnation: str, boot: HostBoot) -> list[str]:
        """It ran there, is taken for lost, and its end was not seen; itself where its boot is known to be over."""
        if boot in self.over:
            return [incarnation]
        if not boot.machine:
            return []  # nothing will ever prove it
        self.unproven[incarnation] = boot
        if len(self.unproven) > MAX_UNPROVEN:
            del self.unproven[next(iter(self.unproven))]
        return []

    def meet(self, node_id: str, boot: HostBoot) -> list[str]:
        """A process on this node has just answered, under this boot; the incarnations whose end that proves.

        A machine runs one boot at a time. So any other is over, and what is heard of it from now on is old news.
        """
        self.met.add(node_id)
        if boot in self.over:
            return []
        before = self.current.get((boot.machine, boot.address))
        self.current[boot.machine, boot.address] = boot
        if before is not None and before.is_over(boot):
            self.over.add(before)
        proven = [incarnation for incarnation, lost in self.unproven.items() if lost.is_over(boot)]
        self.over.update(self.unproven.pop(incarnation) for incarnation in proven)
        return proven

    # --- what follows ----------------------------------------------------------------------------------------------

    def to_knock(self, awaited: Collection[str] = ()) -> list[Node]:
        """Whom to ask now whether they are there.

        Args:
            awaited: nodes that shall begin a process and have not yet.
        """
        doubted = self.missed | self.suspects | set(awaited)
        return [self.nodes[node_id] for node_id in sorted(doubted) if node_id in self.nodes]

    @property
    def to_meet(self) -> list[Node]:
        """Nodes whose boot may prove an end, and is not known: one at an address where something was lost."""
        addresses = {boot.address for boot in self.unproven.values()}
        unmet = self.nodes.keys() - self.met - self.suspects
        return [self.nodes[node_id] for node_id in sorted(unmet) if self.nodes[node_id].address in addresses]

    def aim(self, role: Role, taken: Mapping[str, int], tried: Collection[str] = ()) -> Aim:
        """Where the next process of `role` goes: to the node with most room for it, rather not where it was tried.

        Args:
            taken: by node id, how many places of the role are taken.
            tried: nodes on which it did not come up.
        """
        free = {node_id: node.places.get(role, 0) - taken.get(node_id, 0) for node_id, node in self.nodes.items()}
        open_ = [node_id for node_id, places in free.items() if places > 0 and node_id not in self.suspects]
        best = min(open_, key=lambda node_id: (node_id in tried, -free[node_id], node_id), default="")
        return Aim(best, frozenset(self.suspects))

    def is_better(self, now: Aim, then: Aim) -> bool:
        """Whether a process that was aimed `then`, and does not run yet, should be started anew where `now` says."""
        if then.node_id:
            return then.node_id in self.suspects or then.node_id not in self.nodes
        return bool(self.suspects - then.avoid) or now.node_id in then.avoid
