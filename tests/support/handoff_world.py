"""A cluster of real cores in one thread and in virtual time: any number of prefill and decode workers and a router.

What is real decides: roles, drivers, both halves of the protocol, ledger, schedulers, page pools, and at the router
the choice of workers, journal, recovery and retry budget. What is scripted: the model, the time that steps and links
take, and what goes wrong. The same seed gives the same run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from router.policy.choose import choose
from router.request.request import Request
from tandem.core.identity import Role
from tandem.sim.kernel import Kernel
from tandem.worker.batch import SchedulerLimits
from tests.support.decode_node import DecodeNode
from tests.support.link import Link, LinkSpec
from tests.support.node import Node, NodeSpec
from tests.support.prefill_node import PrefillNode
from tests.support.step_runner import StepTime
from tests.support.virtual_router import InFlight, Place, Router

_START_S = 1.0  # of a worker's process
_KILL_S = 0.1  # from the wish to the end of a process
_TELL_EXIT_S = 0.02  # until its peers know
_NOTICE_S = 0.002  # until a worker knows that its stream broke; what was said before arrives earlier
_MOST_CALLS = 2_000_000

PREFILL = NodeSpec(48, SchedulerLimits(8, 64, 32, 200, 0.75, saturating_tokens=32), StepTime(0.002, 0.0001))
DECODE = NodeSpec(64, SchedulerLimits(12, 64, 32, 200, computes_prompts=True), StepTime(0.004, 0.00005))


@dataclass(frozen=True, slots=True)
class WorldSpec:
    """Without prefill workers the cluster is colocated.

    Attributes:
    mixed_pool_tokens: the longest prompt that a decode worker computes alone; 0: none.
    place: gives each attempt its workers.
    """

    num_prefill: int = 2
    num_decode: int = 2
    prefill: NodeSpec = PREFILL
    decode: NodeSpec = DECODE
    link: LinkSpec = field(default_factory=LinkSpec)
    mixed_pool_tokens: int = 0
    place: Place = choose
    seed: int = 0


class World:
    """A cluster whose workers are ready."""

    def __init__(self, spec: WorldSpec) -> None:
        self.spec = spec
        self.kernel = Kernel()
        self.link = Link(self.kernel, spec.link, spec.seed)
        self.router = Router(
            self.kernel,
            spec.place,
            mixed_pool_tokens=spec.mixed_pool_tokens,
            is_colocated=not spec.num_prefill,
        )
        self.nodes: dict[str, Node] = {}  # by incarnation, those that have ended too
        for role, number in ((Role.PREFILL, spec.num_prefill), (Role.DECODE, spec.num_decode)):
            for index in range(number):
                self._start(role, f"{role}-{index}", life=1)

    def _start(self, role: Role, worker_id: str, life: int) -> None:
        make: Any = PrefillNode if role is Role.PREFILL else DecodeNode
        spec = self.spec.prefill if role is Role.PREFILL else self.spec.decode
        node: Node = make(
            worker_id, f"{worker_id}#{life}", spec, kernel=self.kernel, cluster=self, link=self.link
        )
        for other in self.nodes.values():
            if not other.is_alive:
                node.ended.add(other.incarnation)
        self.nodes[node.incarnation] = node
        self.router.add(node)

    # -- what happens

    def ask(self, request: Request) -> None:
        """A client asks at `request.arrived_s`."""
        self.kernel.at(request.arrived_s, partial(self.router.begin, request))

    def leave(self, request_id: str, at_s: float) -> None:
        """A client goes away, if it still waits."""
        self.kernel.at(at_s, partial(self.router.client_left, request_id))

    def crash(self, worker_id: str, at_s: float) -> None:
        """The present process of a worker is killed."""
        self.kernel.at(at_s, lambda: self._crash(self._newest(worker_id)))

    def cut(self, worker_id: str, at_s: float, lasts_s: float) -> None:
        """Router and worker do not reach each other; both live, and notice."""
        self.kernel.at(at_s, lambda: self._cut(self._newest(worker_id), lasts_s))

    def _cut(self, node: Node, lasts_s: float) -> None:
        if not node.is_alive or node not in self.router.workers:
            return
        self.link.count[f"cut off {node.role}"] += 1
        self.router.lost(node)
        node.later(_NOTICE_S, node.session_ended)
        node.later(lasts_s, partial(self.router.add, node))

    def _newest(self, worker_id: str) -> Node:
        return [node for node in self.nodes.values() if node.key.worker_id == worker_id][-1]

    def _crash(self, node: Node) -> None:
        if not node.is_alive:
            return
        self.link.count[f"crashed {node.role}"] += 1
        node.crash()
        self.router.ended(node)
        self.kernel.after(_TELL_EXIT_S, partial(self._tell_exit, node))
        worker_id, _, life = node.incarnation.partition("#")
        self.kernel.after(_START_S, partial(self._start, node.role, worker_id, int(life) + 1))

    def _tell_exit(self, ended: Node) -> None:
        for node in list(self.nodes.values()):
            if node.is_alive and isinstance(node, DecodeNode) and ended.role is Role.PREFILL:
                node.prefill_ended(ended.incarnation)
            elif node.is_alive and isinstance(node, PrefillNode) and ended.role is Role.DECODE:
                node.decode_ended(ended.incarnation)

    def run(self, most_calls: int = _MOST_CALLS) -> World:
        """Until nothing is left to happen; then all has ended and nothing is held."""
        self.kernel.run(most_calls)
        left = [name for name, request in self.requests.items() if not request.is_over]
        assert not left, f"these requests wait for ever: {left}"
        for node in self.nodes.values():
            if node.is_alive:
                node.check_rest()
        return self

    # -- what the workers need of each other (`Cluster`)

    def hear(self, worker: Node, event: Any) -> None:
        self.router.hear(worker, event)

    def prefill(self, incarnation: str) -> Node:
        return self.nodes[incarnation]

    def decode(self, incarnation: str) -> Node:
        return self.nodes[incarnation]

    def kill(self, incarnation: str) -> None:
        self.link.count["killed by the protocol"] += self.nodes[incarnation].is_alive
        self.kernel.after(_KILL_S, lambda: self._crash(self.nodes[incarnation]))

    # -- looking

    @property
    def requests(self) -> dict[str, InFlight]:
        return self.router.requests

    @property
    def count(self) -> Counter[str]:
        """What went wrong, how often."""
        return self.link.count

    def of_role(self, role: Role) -> Sequence[Node]:
        return [node for node in self.nodes.values() if node.role is role]
