"""What a worker of either role stands on in virtual time, without a process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvtransfer.layout import KvFormat
from tandem.core.clock import Clock
from tandem.core.identity import Role, WorkerKey
from tandem.core.pages import PagePool
from tandem.sim.kernel import Kernel
from tandem.worker.batch import SchedulerLimits
from tandem.worker.counters import WorkerCounters
from tandem.worker.load import LoadReport
from tandem.worker.request import RequestLimits
from tandem.worker.scheduler import BatchScheduler
from tests.support.ends import Cluster, End
from tests.support.inline import LateExecutor, inline_guides
from tests.support.link import Link
from tests.support.scripted_model import EOS, LAYOUT, PAGE, VOCAB, Memory, sample, score
from tests.support.step_runner import StepRunner, StepTimes

SESSION = 1  # of the one router
FORMAT = KvFormat(LAYOUT, "scripted")
LEASE_S, GRACE_S = 2.0, 1.0
QUEUE_BOUND = 200


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One worker's size and speed."""

    num_pages: int
    limits: SchedulerLimits
    step_time: StepTimes
    prefix_cache: bool = True
    priority_ageing_s: float = 1.0
    compile_s: float = 0.003  # of each grammar
    ahead: bool = False  # steps are computed apart from their host, which plans the next one meanwhile


class Node(End):
    """A pool, a scheduler, an arena and a runner, and the core of a role around them."""

    role: Role
    memory: Memory

    def __init__(
        self, worker_id: str, incarnation: str, spec: NodeSpec, *, kernel: Kernel, cluster: Cluster, link: Link
    ) -> None:
        super().__init__(incarnation, kernel, cluster, link)
        self.key = WorkerKey(worker_id, incarnation)
        self._priority_ageing_s = spec.priority_ageing_s
        self.pool = PagePool(spec.num_pages, PAGE)
        self.scheduler = BatchScheduler(self.pool, spec.limits, salt=b"m", prefix_cache=spec.prefix_cache)
        self.memory = Memory(self.pool, spec.limits.window, spec.limits.num_windowed)
        self.runner = StepRunner(kernel, self.scheduler, self.memory, spec.step_time, ahead=spec.ahead)
        self.load = LoadReport(self.scheduler, lambda: None, lambda: None)
        self.counters = WorkerCounters()
        compiler = LateExecutor(kernel, spec.compile_s)
        self.guides = inline_guides(self.runner.submit, self.counters, compiler)
        self.is_draining = False

    def core_parts(self) -> dict[str, Any]:
        """What both roles are made of."""
        clock: Clock = self.kernel.clock
        return {
            "worker_id": self.key.worker_id,
            "scheduler": self.scheduler,
            "emit": self._emit,
            "limits": RequestLimits(VOCAB, 96, frozenset({EOS}), 4, self._priority_ageing_s),
            "sample": sample,
            "guides": self.guides,
            "score": score,
            "counters": self.counters,
            "load": self.load,
            "clock": clock,
            "is_draining": lambda: self.is_draining,
        }

    def _emit(self, events: dict[int, list[Any]]) -> None:
        for event in events[SESSION]:
            self.cluster.hear(self, event)

    def crash(self) -> None:
        """The process ends, and its memory with it."""
        self.is_alive = False
        self.runner.is_stopped = True

    def replace_self(self, num_quarantined: int) -> None:
        """The driver finds that only a new process gets its pages back."""
        self.cluster.kill(self.incarnation)

    def session_ended(self) -> None:
        """The router cannot be reached any more."""
        raise NotImplementedError

    def check_rest(self) -> None:
        """Nothing is held any more."""
        self.pool.check()
        counts = self.pool.counts()
        assert counts.used == counts.reserved == counts.quarantined == 0, (self.key, counts)
        scheduler = self.scheduler
        assert not [*scheduler.running, *scheduler.waiting, *scheduler.parked], self.key
        newest = self.load.newest
        assert newest.num_running == newest.num_queued == newest.num_queued_tokens == 0, (self.key, newest)
