"""Many scripted workers and several routers that place requests there, in virtual time.

Routers choose by the shipped policy, from what they know by the shipped rules: the workers' reports, and what they sent
themselves. They know nothing of each other. Workers take prompts in the order of their coming, and generate in batches
with a place for each sequence; they report as `tandem.worker.sessions` does.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvtransfer.layout import KvFormat, LayoutId
from router.policy.choose import choose
from router.policy.known_load import KnownLoad, Report
from router.policy.pool import Pool, Share
from router.policy.route import RequestFacts
from router.policy.snapshot import Snapshot
from tandem.core.identity import Role, WorkerKey
from tandem.core.pages import pages_for

PAGE = 16
FORMAT = KvFormat(LayoutId("w", "float32", num_layers=1, num_kv_heads=1, head_dim=8, page_size=PAGE), "ucx")


@dataclass(frozen=True)
class PlacementSpec:
    """A load on a cluster.

    Attributes:
        load: arrivals over what the prefill workers can compute, and over what the decode workers have places for.
        interval_s: least time between two reports of a changed load (`metrics.worker_interval_s`).
        latency_s: of a message between a router and a worker.
        is_prompt: a changed number of requests is reported to all routers at once.
    """

    num_prefill: int = 8
    num_decode: int = 8
    num_routers: int = 1
    num_requests: int = 5000
    load: float = 0.8
    seed: int = 0
    prompt_tokens: float = 1000.0  # mean of an exponential distribution
    prefill_tokens_per_s: float = 5000.0
    chunk_tokens: int = 512
    num_places: int = 32
    hold_s: float = 5.12  # mean time that a sequence has its place
    num_pages: int = 8192
    interval_s: float = 0.25
    latency_s: float = 0.0005
    is_prompt: bool = True

    @property
    def requests_per_s(self) -> float:
        prefill = self.num_prefill * self.prefill_tokens_per_s / self.prompt_tokens
        return self.load * min(prefill, self.num_decode * self.num_places / self.hold_s)


class Kernel:
    """Runs calls in the order of their times."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._numbers = itertools.count()
        self._heap: list[tuple[float, int, Callable[[], object]]] = []

    def at(self, time_s: float, call: Callable[[], object]) -> None:
        heapq.heappush(self._heap, (time_s, next(self._numbers), call))

    def after(self, delay_s: float, call: Callable[[], object]) -> None:
        self.at(self.now_s + delay_s, call)

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._heap:
            self.now_s, _, call = heapq.heappop(self._heap)
            call()


@dataclass(eq=False)
class Placed:
    """One request; seconds."""

    name: str
    router: Router
    num_tokens: int
    hold_s: float
    came_s: float
    prefill: PrefillWorker | None = None
    decode: DecodeWorker | None = None
    began_s: float = 0.0  # its computation
    computed_s: float = 0.0
    admitted_s: float = 0.0
    is_granted: bool = False

    @property
    def queued_s(self) -> float:
        """In front of prefill and in front of decode."""
        return self.began_s - self.came_s + self.admitted_s - self.computed_s


class Worker:
    """What both roles share: reports."""

    role: Role

    def __init__(self, spec: PlacementSpec, kernel: Kernel, number: int) -> None:
        self.spec, self.kernel = spec, kernel
        self.key = WorkerKey(f"{self.role}-{number:04d}", "1")
        self.routers: list[Router] = []
        self._num_commands: dict[Router, int] = {}
        self._last_s = -1.0
        self._is_due = False
        self._num_told = 0

    def report(self) -> Report:
        raise NotImplementedError

    def taken_from(self, router: Router) -> None:
        """A command of this router is taken in."""
        self._num_commands[router] = self._num_commands.get(router, 0) + 1

    def changed(self) -> None:
        """As `SessionHub.beat`: at once where the number of requests has changed, else at most once an interval."""
        now_s, num = self.kernel.now_s, self.report().num_active
        if self.spec.is_prompt and num != self._num_told and len(self.routers) > 1:
            self._num_told = num
            self._tell_all()
        elif not self._is_due:
            self._is_due = True
            self.kernel.at(max(now_s, self._last_s + self.spec.interval_s), self._beat)

    def _beat(self) -> None:
        self._is_due = False
        self._last_s = self.kernel.now_s
        self._tell_all()

    def _tell_all(self) -> None:
        for router in self.routers:
            self.tell(router)

    def tell(self, router: Router, event: Callable[[], None] | None = None) -> None:
        """A message: maybe an event, and always the load."""
        said = self.report()
        num = self._num_commands.get(router, 0)
        report = Report(said.num_active, said.num_queued_tokens, said.num_available_pages, said.num_stepping, num)

        def arrive() -> None:
            router.hear(self, report)
            if event is not None:
                event()

        self.kernel.after(self.spec.latency_s, arrive)


class PrefillWorker(Worker):
    role = Role.PREFILL

    def __init__(self, spec: PlacementSpec, kernel: Kernel, number: int) -> None:
        super().__init__(spec, kernel, number)
        self._queue: deque[Placed] = deque()
        self._left = 0  # tokens of the first one
        self._behind = 0  # tokens of the others

    def report(self) -> Report:
        return Report(len(self._queue), self._left + self._behind, 0, min(1, len(self._queue)))

    def take(self, request: Placed) -> None:
        self.taken_from(request.router)
        self._queue.append(request)
        self._behind += request.num_tokens
        if len(self._queue) == 1:
            self._begin()
        self.changed()

    def _begin(self) -> None:
        request = self._queue[0]
        self._left = request.num_tokens
        self._behind -= request.num_tokens
        request.began_s = self.kernel.now_s
        self.tell(request.router, lambda: request.router.note(self, request, steps=True))
        self._step()

    def _step(self) -> None:
        num = min(self._left, self.spec.chunk_tokens)
        self.kernel.after(num / self.spec.prefill_tokens_per_s, lambda: self._stepped(num))

    def _stepped(self, num: int) -> None:
        self._left -= num
        if self._left:
            self._step()
        else:
            request = self._queue.popleft()
            request.computed_s = self.kernel.now_s
            assert request.decode is not None
            decode = request.decode
            self.kernel.after(self.spec.latency_s, lambda: decode.arrive(request))
            self.tell(request.router, lambda: request.router.let_go(self, request))
            if self._queue:
                self._begin()
        self.changed()


class DecodeWorker(Worker):
    role = Role.DECODE

    def __init__(self, spec: PlacementSpec, kernel: Kernel, number: int) -> None:
        super().__init__(spec, kernel, number)
        self._free = spec.num_pages
        self._reserving: deque[Placed] = deque()  # no pages yet
        self._num_expected = 0  # have pages, and their handoff is not over
        self._waiting: deque[Placed] = deque()  # for a place
        self._num_running = 0

    def report(self) -> Report:
        num = len(self._reserving) + self._num_expected + len(self._waiting) + self._num_running
        return Report(num, 0, self._free, self._num_running)

    def take(self, request: Placed) -> None:
        self.taken_from(request.router)
        self._reserving.append(request)
        self._grant()
        self.changed()

    def _grant(self) -> None:
        while self._reserving and self._pages_of(self._reserving[0]) <= self._free:
            request = self._reserving.popleft()
            self._free -= self._pages_of(request)
            self._num_expected += 1
            request.is_granted = True
            self._tell_granted(request)
            if request.computed_s:
                self.arrive(request)

    def _tell_granted(self, request: Placed) -> None:
        self.tell(request.router, lambda: request.router.note(self, request, steps=False))

    def _pages_of(self, request: Placed) -> int:
        return pages_for(request.num_tokens, PAGE)

    def arrive(self, request: Placed) -> None:
        """Its prompt is computed; its pages come once it has a grant."""
        if request.is_granted:
            self._num_expected -= 1
            self._waiting.append(request)
            self._admit()
            self.changed()

    def _admit(self) -> None:
        while self._waiting and self._num_running < self.spec.num_places:
            request = self._waiting.popleft()
            self._num_running += 1
            request.admitted_s = self.kernel.now_s
            self._tell_admitted(request)
            self._end_later(request)

    def _tell_admitted(self, request: Placed) -> None:
        self.tell(request.router, lambda: request.router.note(self, request, steps=True))

    def _end_later(self, request: Placed) -> None:
        self.kernel.after(request.hold_s, lambda: self._end(request))

    def _end(self, request: Placed) -> None:
        self._num_running -= 1
        self._free += self._pages_of(request)
        self.tell(request.router, lambda: request.router.let_go(self, request))
        self._admit()
        self._grant()
        self.changed()


class Router:
    """Places what comes to it."""

    def __init__(self, spec: PlacementSpec, kernel: Kernel, number: int) -> None:
        self.spec, self.kernel = spec, kernel
        self._share = Share(number, spec.num_routers)
        self._pools = {role: Pool(role) for role in (Role.PREFILL, Role.DECODE)}
        self._known: dict[WorkerKey, KnownLoad] = {}
        self._workers: dict[WorkerKey, Worker] = {}
        self._num_sent: dict[WorkerKey, int] = {}

    def meet(self, worker: Worker) -> None:
        self._workers[worker.key], self._known[worker.key] = worker, KnownLoad(worker.report())
        self._num_sent[worker.key] = 0
        worker.routers.append(self)
        self._rank(worker)

    def _rank(self, worker: Worker) -> None:
        self._pools[worker.role].put(self._known[worker.key].load(worker.key, FORMAT, PAGE, 0))

    def hear(self, worker: Worker, report: Report) -> None:
        self._known[worker.key].hear(report)
        self._rank(worker)

    def place(self, request: Placed) -> None:
        prefill, decode = self._pools[Role.PREFILL], self._pools[Role.DECODE]
        speed = self.spec.prefill_tokens_per_s
        snapshot = Snapshot(prefill, decode, share=self._share, prefill_tokens_per_s=speed)
        route = choose(snapshot, RequestFacts(request.num_tokens))
        assert route.prefill is not None
        assert route.decode is not None
        for key in (route.decode, route.prefill):
            self._send(self._workers[key], request)

    def _send(self, worker: Worker, request: Placed) -> None:
        self._num_sent[worker.key] += 1
        is_prefill = isinstance(worker, PrefillWorker)
        num_pages = 0 if is_prefill else pages_for(request.num_tokens, PAGE)
        self._known[worker.key].hold(
            request.name, self._num_sent[worker.key], request.num_tokens, num_pages, computes=is_prefill
        )
        self._rank(worker)
        if isinstance(worker, PrefillWorker):
            request.prefill = worker
        elif isinstance(worker, DecodeWorker):
            request.decode = worker
        assert isinstance(worker, PrefillWorker | DecodeWorker)
        self.kernel.after(self.spec.latency_s, lambda: worker.take(request))

    def note(self, worker: Worker, request: Placed, *, steps: bool) -> None:
        self._known[worker.key].note_taken_up(request.name, steps=steps)
        self._rank(worker)

    def let_go(self, worker: Worker, request: Placed) -> None:
        self._known[worker.key].let_go(request.name)
        self._rank(worker)


@dataclass
class PlacementWorld:
    """All of it. The same seed brings the same requests at the same times, whatever the routers."""

    spec: PlacementSpec
    kernel: Kernel = field(default_factory=Kernel)
    requests: list[Placed] = field(default_factory=list)
    routers: list[Router] = field(default_factory=list)

    def run(self) -> list[Placed]:
        """All requests, when each has ended."""
        spec = self.spec
        workers: list[Worker] = [PrefillWorker(spec, self.kernel, n) for n in range(spec.num_prefill)]
        workers += [DecodeWorker(spec, self.kernel, n) for n in range(spec.num_decode)]
        self.routers = [Router(spec, self.kernel, n) for n in range(spec.num_routers)]
        for router in self.routers:
            for worker in workers:
                router.meet(worker)
        arrivals = self._arrivals()
        self._next(arrivals)
        self.kernel.run()
        return self.requests

    def _next(self, arrivals: Iterator[Placed]) -> None:
        """One arrival after the other, so that few calls wait at a time."""
        request = next(arrivals, None)
        if request is None:
            return
        self.requests.append(request)

        def come() -> None:
            request.router.place(request)
            self._next(arrivals)

        self.kernel.at(request.came_s, come)

    def _arrivals(self) -> Iterator[Placed]:
        spec, at_s = self.spec, self.kernel.now_s
        what, whom = random.Random(spec.seed), random.Random(spec.seed + 1)
        for number in range(spec.num_requests):
            at_s += what.expovariate(spec.requests_per_s)
            num_tokens = 1 + int(what.expovariate(1 / spec.prompt_tokens))
            hold_s = what.expovariate(1 / spec.hold_s)
            yield Placed(f"r{number}", whom.choice(self.routers), num_tokens, hold_s, at_s)


def queued_s(requests: list[Placed]) -> list[float]:
    """Of each request, the shortest first; without the first tenth, in which the cluster fills."""
    return sorted(request.queued_s for request in requests[len(requests) // 10 :])


def p99(ordered: list[float]) -> float:
    return ordered[int(0.99 * len(ordered))]
