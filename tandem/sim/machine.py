"""A worker in virtual time: the batch scheduler and the page pool that ship, and steps that only take time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtransfer.layout import KvFormat
from router.policy.known_load import KnownLoad, Report
from router.policy.worker_load import WorkerLoad
from tandem.core.identity import Role, WorkerKey
from tandem.core.pages import PagePool
from tandem.core.step_times import StepTimes
from tandem.sim.kernel import Kernel
from tandem.worker.batch import Batch, SchedulerLimits
from tandem.worker.scheduler import BatchScheduler
from tandem.worker.sequence import Sequence as Choice
from tandem.worker.step_log import terms_of

_SALT = b"simulated"
#: Any token: nobody reads what is generated.
TOKEN = 7


@dataclass(slots=True)
class Work:
    """What a machine did."""

    num_steps: int = 0
    busy_s: float = 0.0
    num_tokens: int = 0
    num_rows: int = 0  # of these tokens, those of sequences that generate
    num_preemptions: int = 0
    num_mixed_steps: int = 0  # of decode, in which it computed prompts
    mixed_s: float = 0.0


class Machine:
    """Args:
    on_preempted: called with each sequence that lost its pages, as a step begins.
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
        on_preempted: Callable[[Choice], object],
        on_step: Callable[[Machine, Batch], None],
    ) -> None:
        page_size = kv_format.layout.page_size
        self.key, self.role = key, role
        self.pool = PagePool(num_pages, page_size)
        self.scheduler = BatchScheduler(self.pool, limits, salt=_SALT, prefix_cache=False)
        self.work = Work()
        self.known = KnownLoad(Report(num_available_pages=num_pages, num_commands=0))  # to the router
        self.num_waiting = 0  # requests that wait here for pages, or whose pages are on their way
        self.num_commands_sent = self.num_commands = 0  # by the router; and how many have come
        self._on_preempted = on_preempted
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
        for choice in batch.preempted:
            self.work.num_preemptions += 1
            self._on_preempted(choice)
        if not batch.items:
            self._is_busy = False
            return
        terms = terms_of(batch)
        seconds = self._times.seconds(terms)
        self.work.num_steps += 1
        self.work.busy_s += seconds
        self.work.num_tokens += batch.num_tokens
        self.work.num_rows += terms.num_rows
        if batch.num_paced_tokens:
            self.work.num_mixed_steps += 1
            self.work.mixed_s += seconds
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

    @property
    def is_empty(self) -> bool:
        """Nothing is here, or on its way here."""
        return not self.choices and not self.num_waiting and self.num_commands == self.num_commands_sent

    def tell(self) -> None:
        """Report how things are now."""
        choices, counts = self.choices, self.pool.counts()
        report = Report(
            num_active=len(choices) + self.num_waiting,
            num_queued_tokens=sum(choice.num_to_compute for choice in choices if not choice.is_decode),
            num_available_pages=counts.free + counts.cached,
            num_stepping=len(self.scheduler.running),
            num_commands=self.num_commands,
        )
        self.known.hear(report)

    def load(self) -> WorkerLoad:
        is_decode, page_size = self.role is Role.DECODE, self.pool.page_size
        mixed, most = (self._mixed_step_tokens, self._limits.max_num_seqs) if is_decode else (0, 0)
        return self.known.load(self.key, self._kv_format, page_size, mixed, most)
