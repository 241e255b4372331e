"""A worker in virtual time: the batch scheduler and the page pool that ship, and steps that only take time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtransfer.layout import KvFormat
from router.policy.worker_load import WorkerLoad
from tandem.core.identity import Role, WorkerKey
from tandem.core.pages import PagePool
from tandem.sim.kernel import Kernel
from tandem.sim.times import StepTimes, Terms
from tandem.worker.batch import Batch, SchedulerLimits
from tandem.worker.scheduler import BatchScheduler
from tandem.worker.sequence import Sequence as Choice

_SALT = b"simulated"
#: Any token: nobody reads what is generated.
TOKEN = 7


@dataclass(slots=True)
class Work:
    """What a machine did."""

    num_steps: int = 0
    busy_s: float = 0.0
    num_tokens: int = 0
    num_preemptions: int = 0


@dataclass(slots=True)
class Report:
    """What the router knows of a machine: as of some moment, and what was sent there since."""

    num_active: int = 0
    num_queued_tokens: int = 0
    num_available_pages: int = 0
    num_stepping: int = 0
    sent: dict[int, tuple[int, int]] = field(default_factory=dict)  # by request: tokens to compute, pages to take


class Machine:
    """Args:
    on_step: called with each step when it has ended.
    """

    def __init__(
        self,
        kernel: Kernel,
        key: WorkerKey,
        role: Role,
        *,
        num_pages: int,
        limits: SchedulerLimits,
        times: StepTimes,
        kv_format: KvFormat,
        mixed_step_tokens: int,
        on_step: Callable[[Machine, Batch], None],
    ) -> None:
        page_size = kv_format.layout.page_size
        self.key, self.role = key, role
        self.pool = PagePool(num_pages, page_size)
        self.scheduler = BatchScheduler(self.pool, limits, salt=_SALT, prefix_cache=False)
        self.work = Work()
        self.report = Report(num_available_pages=num_pages)
        self.num_waiting = 0  # requests that wait here for pages, or whose pages are on their way
        self.arrived: set[int] = set()  # requests whose messages came since the last report
        self._kernel, self._times, self._limits, self._on_step = kernel, times, limits, on_step
        self._kv_format, self._mixed_step_tokens = kv_format, mixed_step_tokens
        self._is_busy = False

    def wake(self) -> None:
        """There may be something to compute."""
        if not self._is_busy:
            self._is_busy = True
            self._kernel.after(0.0, self._turn)

    def _turn(self) -> None:
        batch = self.scheduler.schedule()
        self.work.num_preemptions += len(batch.preempted)
        if not batch.items:
            self._is_busy = False
            return
        seconds = self._times.seconds(Terms.of(batch))
        self.work.num_steps += 1
        self.work.busy_s += seconds
        self.work.num_tokens += batch.num_tokens
        self._kernel.after(seconds, lambda: self._end(batch))

    def _end(self, batch: Batch) -> None:
        self.scheduler.apply(batch, [[TOKEN] for item in batch.items if item.samples])
        self._on_step(self, batch)
        self._turn()

    def free(self, choice: Choice) -> None:
        """It leaves, with its pages."""
        self.pool.release(self.scheduler.remove(choice))

    # -- what a router sees

    @property
    def choices(self) -> Sequence[Choice]:
        """All that run or wait here."""
        return [*self.scheduler.running, *self.scheduler.waiting, *self.scheduler.parked]

    def tell(self) -> None:
        """Report how things are now; what was sent before is in it."""
        choices, counts = self.choices, self.pool.counts()
        to_compute = sum(c.num_to_compute for c in choices if not c.is_decode)
        on_their_way = {number: what for number, what in self.report.sent.items() if number not in self.arrived}
        self.arrived.clear()
        self.report = Report(
            num_active=len(choices) + self.num_waiting,
            num_queued_tokens=to_compute,
            num_available_pages=counts.free + counts.cached,
            num_stepping=len(self.scheduler.running),
            sent=on_their_way,
        )

    def load(self) -> WorkerLoad:
        """As `router.workers.session` makes it of a report and of what was sent since."""
        report = self.report
        sent = report.sent.values()
        return WorkerLoad(
            key=self.key,
            kv_format=self._kv_format,
            page_size=self.pool.page_size,
            num_active=report.num_active + len(sent),
            num_queued_tokens=report.num_queued_tokens + sum(tokens for tokens, _ in sent),
            num_available_pages=report.num_available_pages - sum(pages for _, pages in sent),
            num_stepping=report.num_stepping,
            mixed_step_tokens=self._mixed_step_tokens if self.role is Role.DECODE else 0,
            max_num_seqs=self._limits.max_num_seqs if self.role is Role.DECODE else 0,
        )
