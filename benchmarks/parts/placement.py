"""What it costs the router to place a request, and to hear of a worker's load, by the number of workers.

Real sessions, pools and decisions; the workers are scripted, and what they say does not come by a wire.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from typing import Any

from kvtransfer.wire import protocols_to_proto
from router.policy.choose import choose
from router.policy.route import RequestFacts
from router.request.events import Event
from router.request.mailbox import Mailbox
from router.workers.registry import WorkerRegistry
from router.workers.session import WorkerSession
from tandem.core.metrics import RouterMetrics
from tandem.core.protocols import Protocols
from tandem.rpc.v1 import common_pb2 as pb
from tandem.rpc.v1.control_pb2 import Member, Membership
from tandem.rpc.v1.decode_pb2 import DecodeCommand, DecodeEvent, DecodeEvents
from tandem.rpc.v1.prefill_pb2 import PrefillCommand, PrefillEvent, PrefillEvents

_PAGE_SIZE = 32
_PAGES = 2048
_NUM_STATUSES = 4  # different ones of each worker


@dataclass(frozen=True)
class PlacementSizes:
    """How much is asked.

    Attributes:
        num_workers: of both roles together; with one there is one of each.
        num_rounds: placements, requests and statuses that are timed with each number of workers.
    """

    num_workers: tuple[int, ...] = (1, 8, 64, 256, 1024)
    num_rounds: int = 5000
    num_prompt_tokens: int = 512


@dataclass
class PlacementCost:
    """Seconds of each one, by the number of workers.

    Attributes:
        placement_s: the choice of both workers, and what is then noted of them.
        request_s: of a whole request: also what is noted while it runs and when it has ended.
        status_s: a status that changes the worker's rank.
    """

    placement_s: dict[int, list[float]] = field(default_factory=dict)
    request_s: dict[int, list[float]] = field(default_factory=dict)
    status_s: dict[int, list[float]] = field(default_factory=dict)


def measure_placement(sizes: PlacementSizes) -> PlacementCost:
    """All of it in this thread."""
    cost = PlacementCost()
    for num in sizes.num_workers:
        registry = _registry(num)
        statuses = cycle(list(_statuses(registry)))
        for _ in range(_NUM_STATUSES * num):
            _hear(next(statuses))
        cost.status_s[num] = [_timed(partial(_hear, next(statuses))) for _ in range(sizes.num_rounds)]
        cost.placement_s[num], cost.request_s[num] = [], []
        for number in range(sizes.num_rounds):
            request = _Request(registry, str(number), sizes.num_prompt_tokens)
            placement_s = _timed(request.place)
            cost.placement_s[num].append(placement_s)
            cost.request_s[num].append(placement_s + _timed(request.run))
    return cost


def _timed(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


class _Request:
    """What the router does with its picture of the workers for one request that is handed off."""

    def __init__(self, registry: WorkerRegistry, name: str, num_tokens: int) -> None:
        self._registry = registry
        self._name = name
        self._facts = RequestFacts(num_tokens)
        self._mailbox: Mailbox[Event] = Mailbox()

    def place(self) -> None:
        route = choose(self._registry.snapshot(), self._facts)
        assert route.prefill is not None
        assert route.decode is not None
        self._prefill, self._decode = self._registry.session(route.prefill), self._registry.session(route.decode)
        self._decode.hold(self._name, self._mailbox, self._facts.num_prompt_tokens, computes=False)
        self._prefill.hold(self._name, self._mailbox, self._facts.num_prompt_tokens, computes=True)

    def run(self) -> None:
        self._decode.send(DecodeCommand())
        self._prefill.send(PrefillCommand())
        self._decode.note_taken_up(self._name, steps=False)
        self._prefill.note_taken_up(self._name, steps=True)
        self._prefill.let_go(self._name)
        self._decode.note_taken_up(self._name, steps=True)
        self._decode.let_go(self._name)


def _registry(num: int) -> WorkerRegistry:
    """Workers that have said hello, half of each role."""
    roles = ((pb.ROLE_PREFILL, "prefill"), (pb.ROLE_DECODE, "decode"))
    names = ((role, f"{name}-{number}") for number in range(num) for role, name in roles)
    members = [
        Member(worker_id=name, incarnation="1", role=role, address="scripted", state="ready")
        for role, name in islice(names, max(2, num))
    ]
    registry = WorkerRegistry(lease_s=1.0, metrics=RouterMetrics(), begin=lambda _: None)
    registry.apply(Membership(version=1, num_routers=2, members=members))
    layout = pb.Layout(weights_sha256="0" * 64, dtype="float32", num_layers=12, num_kv_heads=4, head_dim=64)
    layout.page_size = _PAGE_SIZE
    for session in registry.sessions():
        key, role = session.key, session.member.role
        info = pb.WorkerInfo(worker_id=key.worker_id, incarnation=key.incarnation, role=role, transport="ucx")
        info.layout.CopyFrom(layout)
        info.protocols.CopyFrom(protocols_to_proto(Protocols()))
        hello: Any = (
            PrefillEvents(events=[PrefillEvent(hello=info)])
            if session.is_prefill
            else DecodeEvents(events=[DecodeEvent(hello=info)])
        )
        session.receive(hello)
    return registry


def _statuses(registry: WorkerRegistry) -> Iterator[tuple[WorkerSession, Any]]:
    """Messages of all workers in turn, each unlike the worker's last one."""
    rng = random.Random(0)
    for number in range(1, _NUM_STATUSES + 1):
        for session in registry.sessions():
            status = pb.WorkerStatus(
                num_running=rng.randint(0, 32),
                num_queued=rng.randint(0, 2),
                num_queued_tokens=rng.choice([0, rng.randint(1, 8000)]),
                pages=pb.PageCounts(free=rng.randint(100, _PAGES), cached=number),
                prompt_tokens_computed=number * 1000,
                decode_tokens=number * 100,
            )
            make: Any = PrefillEvents if session.is_prefill else DecodeEvents
            yield session, make(status=status, num_commands=1 << 40)


def _hear(said: tuple[WorkerSession, Any]) -> None:
    session, message = said
    session.receive(message)
