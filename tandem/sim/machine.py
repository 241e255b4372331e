"""A worker in virtual time: the batch scheduler and the page pool that ship, and steps that only take time."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from decode_worker.ledger import Ledger
from kvtransfer.layout import KvFormat
from router.policy.known_load import KnownLoad, Report
from router.policy.worker_load import WorkerLoad
from tandem.core.identity import Role, WorkerKey
from tandem.core.pages import CacheChange, PagePool
from tandem.core.step_times import StepTimes
from tandem.sim.cores import Kind, SharedCores
from tandem.sim.job import Job
from tandem.sim.kernel import Call, Kernel
from tandem.sim.quiet import advance, quiet_steps, quiet_times
from tandem.sim.tiers import TierShape, simulated_tiers
from tandem.sim.timeline import Timeline
from tandem.worker.batch import Batch, SchedulerLimits
from tandem.worker.page_tiers import TieredPages
from tandem.worker.scheduler import BatchScheduler
from tandem.worker.sequence import Sequence as Choice
from tandem.worker.step_log import terms_of

SALT = b"simulated"

SchedulerMaker = Callable[[PagePool, SchedulerLimits], BatchScheduler]
"""What plans the steps of a worker over its pages."""

# Quiet steps that are planned at once.
_MOST_AT_ONCE = 4096
#: Any token of a prompt: nobody reads it.
TOKEN = 7


def token_of(choice: Choice) -> int:
    """Each that it generates: as in no other request, since their answers differ."""
    return choice.arrival


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
    num_chunk_tokens: int = 0  # of prompts, but for paced ones, and what steps with such took
    chunk_s: float = 0.0


class Machine:
    """Args:
    on_preempted: called with each sequence that lost its pages, as a step begins.
    on_admitted: called with each that has got its pages then.
    on_step: called with each step when it has ended.
    on_quiet: called with the sequences of several steps in which nothing happened but a token for each, and with the
        times of their ends, which have come; afterwards `on_step` is not called for them.
    looks_at_s: when what `on_step` or `on_quiet` do is wanted again; `None`: after each step, one by one.
    cores: that it shares with others; it then takes its steps one by one. `None`: it has its own.
    timeline: where it notes when it computed what, if anybody wants to know.
    make_scheduler: makes what plans its steps; `None`: what ships.
    on_tier_news: called when its tiers have something that was not taken before.
    tiers: below its pool, where it has a prefix cache; `None`: there are none.
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
        prefix_cache: bool = False,
        on_preempted: Callable[[Choice], object],
        on_admitted: Callable[[Machine, Choice], object],
        on_step: Callable[[Machine, Batch], None],
        on_quiet: Callable[[Machine, Sequence[Choice], Sequence[float]], None],
        looks_at_s: Callable[[Machine], float] | None,
        cores: SharedCores | None = None,
        timeline: Timeline | None = None,
        make_scheduler: SchedulerMaker | None = None,
        tiers: TierShape | None = None,
        on_tier_news: Callable[[Machine], object] = lambda _: None,
    ) -> None:
        page_size = kv_format.layout.page_size
        self.key, self.role = key, role
        self._pool = PagePool(num_pages, page_size)
        maker = make_scheduler or partial(BatchScheduler, salt=SALT, prefix_cache=prefix_cache)
        self._scheduler = maker(self._pool, limits)
        if prefix_cache:
            self._pool.note_changes()
        self._ledger = Ledger[Job](self._scheduler, bound=limits.queue_bound)
        self.work = Work()
        self.num_commands = Counter[int]()  # that have come, by the number of their router
        self.num_on_their_way = 0  # commands of any router
        self._on_preempted, self._on_admitted = on_preempted, on_admitted
        self._kernel, self._times, self._limits, self._on_step = kernel, times, limits, on_step
        self._kv_format = kv_format
        self._on_quiet, self._looks_at_s = on_quiet, looks_at_s if cores is None else None
        self._cores, self._timeline = cores, timeline
        self._is_busy = False
        self._began_s = 0.0
        self.step_began_s = 0.0  # the last one that was planned by itself
        self._ends_s: list[float] = []  # of the quiet steps that are under way
        self._run = 0  # of these: a number that names them
        self._between: list[Call] = []  # to be called when the step that is under way has ended
        self.is_dead = False
        self._tiers: TieredPages | None = None
        self.fetching: list[Choice] = []  # of prefill, prompts whose pages are read from a tier
        self.num_fetching = 0  # of decode, attempts at such
        # By key, whether it is there now: in some tier, and in the nearest of several.
        self._on_tier_news = on_tier_news
        self._tier_news: tuple[dict[bytes, bool], dict[bytes, bool]] = {}, {}
        if tiers is not None and prefix_cache:
            page_bytes = kv_format.layout.page_bytes
            self._scheduler.tiers = self._tiers = simulated_tiers(
                tiers, kernel, self._scheduler, page_bytes, self.between_steps, self._hear_tiers
            )

    def _hear_tiers(self, change: CacheChange, near: CacheChange) -> None:
        if not any(self._tier_news):
            self._on_tier_news(self)
        for news, each in zip(self._tier_news, (change, near), strict=True):
            news.update(dict.fromkeys(each.came, True))
            news.update(dict.fromkeys(each.went, False))

    def take_tier_news(self) -> tuple[CacheChange, CacheChange]:
        """What its tiers have since the last call, and what the nearest of several has."""
        (of_any, of_nearest), self._tier_news = self._tier_news, ({}, {})
        return _change(of_any), _change(of_nearest)

    @property
    def tiers(self) -> TieredPages | None:
        return self._tiers

    @property
    def pool(self) -> PagePool:
        """As it is now."""
        self.settle()
        return self._pool

    @property
    def scheduler(self) -> BatchScheduler:
        """As it is now; sequences that come join the step after the one under way."""
        self.settle()
        return self._scheduler

    @property
    def ledger(self) -> Ledger[Job]:
        """As it is now: of decode, who is wanted here, and who gets pages when."""
        self.settle()
        return self._ledger

    @property
    def has_reservations(self) -> bool:
        """Whether some wait for pages."""
        return bool(self._ledger.waiting)

    @property
    def num_waiting(self) -> int:
        """Requests that wait here for pages, or whose pages are on their way."""
        return len(self._ledger.waiting) + self._ledger.num_to_come + self.num_fetching

    def wake(self) -> None:
        """There may be something to compute."""
        if not self._is_busy:
            self._is_busy = True
            self._kernel.after(0.0, self._turn)

    def between_steps(self, call: Call) -> None:
        """Now, or when the step that is under way has ended."""
        self.settle()
        if self._is_busy:
            self._between.append(call)
        else:
            call()

    def die(self) -> None:
        """Nothing follows, not even the end of its step."""
        self.settle()
        self.is_dead, self._is_busy = True, True

    def _turn(self) -> None:
        if self.is_dead:
            return
        between, self._between = self._between, []
        for call in between:
            call()
        if self._looks_at_s is not None and self._begin_quiet_steps(self._looks_at_s(self)):
            return
        batch = self._scheduler.schedule()
        for choice in batch.preempted:
            self.work.num_preemptions += 1
            self._on_preempted(choice)
        for choice in batch.admitted:
            self._on_admitted(self, choice)
        if not batch.items:
            self._is_busy = False
            return
        terms = terms_of(batch, self._times.windows)
        self._begin(batch, terms.num_rows, self._times.seconds(terms))

    def _begin(self, batch: Batch, num_rows: int, seconds: float, left_s: float | None = None) -> None:
        """`left_s`: of its time; `None`: all."""
        self.step_began_s = self._kernel.now_s
        self._note(1, batch.num_tokens, num_rows, seconds)
        if batch.num_paced_tokens:
            self.work.num_mixed_steps += 1
            self.work.mixed_s += seconds
        if batch.num_chunk_tokens:
            self.work.num_chunk_tokens += batch.num_chunk_tokens
            self.work.chunk_s += seconds
        if self._cores is not None:
            self._cores.run(Kind.of(num_rows), seconds, lambda: self._end_shared(batch, num_rows, seconds))
            return
        self._kernel.after(seconds if left_s is None else left_s, lambda: self._end(batch, num_rows, seconds))

    def _end_shared(self, batch: Batch, num_rows: int, alone_s: float) -> None:
        seconds = self._kernel.now_s - self.step_began_s
        self.work.busy_s += seconds - alone_s
        if batch.num_paced_tokens:
            self.work.mixed_s += seconds - alone_s
        if batch.num_chunk_tokens:
            self.work.chunk_s += seconds - alone_s
        self._end(batch, num_rows, seconds)

    def _note(self, num_steps: int, num_tokens: int, num_rows: int, seconds: float) -> None:
        self.work.num_steps += num_steps
        self.work.busy_s += seconds
        self.work.num_tokens += num_tokens
        self.work.num_rows += num_rows

    def _end(self, batch: Batch, num_rows: int, seconds: float) -> None:
        if self.is_dead:
            return
        num_of_prompts = batch.num_chunk_tokens + batch.num_paced_tokens
        if self._scheduler.learns_steps:
            self._scheduler.note_step(num_rows, num_of_prompts, seconds)
        if self._tiers is not None:
            of_prompts = (item.num_tokens for item in batch.items if item.num_tokens > 1)
            self._tiers.computed(batch.num_tokens if self.role is Role.PREFILL else sum(of_prompts), seconds)
        if self._timeline is not None:
            now_s = self._kernel.now_s
            self._timeline.note(self.key.worker_id, now_s - seconds, now_s, with_prompts=num_of_prompts > 0)
        self._scheduler.apply(batch, [[token_of(item.sequence)] for item in batch.items if item.samples])
        self._on_step(self, batch)
        self._turn()

    # -- steps in which nothing happens

    def _begin_quiet_steps(self, until_s: float) -> bool:
        """Those that follow now, up to the first that ends at `until_s` or later. Whether there are several."""
        num = quiet_steps(self._scheduler, _MOST_AT_ONCE)
        if num < 2:
            return False
        self._began_s = end_s = self._kernel.now_s
        self._ends_s = []
        for seconds in quiet_times(self._scheduler, self._times):
            self._ends_s.append(end_s := end_s + seconds)
            if len(self._ends_s) == num or end_s >= until_s:
                break
        self._run += 1
        run = self._run
        self._kernel.at(end_s, lambda: self._end_quiet_steps(run))
        return True

    def _end_quiet_steps(self, run: int) -> None:
        if run == self._run and self._ends_s:
            ends_s, self._ends_s = self._ends_s, []
            self._take_quiet_steps(ends_s)
            self._turn()

    def _take_quiet_steps(self, ends_s: Sequence[float]) -> None:
        """These have ended."""
        if not ends_s:
            return
        running, num = list(self._scheduler.running), len(ends_s)
        advance(self._scheduler, num, token_of)
        self._note(num, num * len(running), num * len(running), ends_s[-1] - self._began_s)
        if self._timeline is not None:
            self._timeline.note(self.key.worker_id, self._began_s, ends_s[-1], with_prompts=False)
        if self._scheduler.learns_steps:
            for began_s, end_s in pairwise((self._began_s, *ends_s)):
                self._scheduler.note_step(len(running), 0, end_s - began_s)
        self._on_quiet(self, running, ends_s)

    def settle(self) -> None:
        """Somebody looks, or changes something: those that have ended are taken, and the one under way ends as any."""
        if not self._ends_s or self.is_dead:
            return
        (ends_s, self._ends_s), now_s = (self._ends_s, []), self._kernel.now_s
        num = bisect_right(ends_s, now_s)
        self._take_quiet_steps(ends_s[:num])
        if num == len(ends_s):
            self._kernel.after(0.0, self._turn)
            return
        batch = self._scheduler.schedule()  # nothing has changed since it began
        begun_s = ends_s[num - 1] if num else self._began_s
        self._begin(batch, len(batch.items), ends_s[num] - begun_s, ends_s[num] - now_s)

    def free(self, choice: Choice) -> None:
        """It leaves, with its pages; full ones stay in the prefix cache."""
        self._pool.release(self._scheduler.retire(choice))

    # -- what a router sees

    @property
    def choices(self) -> Sequence[Choice]:
        """All that run or wait here."""
        return [*self.scheduler.running, *self.scheduler.waiting, *self.scheduler.parked, *self.fetching]

    @property
    def is_empty(self) -> bool:
        """Nothing is here, or on its way here."""
        return not self.num_requests and not self.num_on_their_way

    @property
    def num_requests(self) -> int:
        """All that run or wait here."""
        scheduler = self.scheduler
        num_choices = len(scheduler.running) + len(scheduler.waiting) + len(scheduler.parked) + len(self.fetching)
        return num_choices + self.num_waiting

    def report(self) -> Report:
        """How things are now; of which router's commands, it does not say."""
        choices, counts = self.choices, self.pool.counts()
        num_tokens = sum(choice.num_to_compute for choice in choices if not choice.is_decode)
        num_tokens += sum(job.num_tokens for job in self._ledger.waiting if job.max_local_tokens)
        return Report(
            num_active=len(choices) + self.num_waiting,
            num_queued_tokens=num_tokens,
            num_available_pages=counts.free + counts.cached,
            num_stepping=len(self.scheduler.running),
            prompt_steps=self.scheduler.prompt_steps(),
        )

    def load(self, known: KnownLoad) -> WorkerLoad:
        """As a router sees it that knows so much."""
        most = self._limits.max_num_seqs if self.role is Role.DECODE else 0
        return known.load(self.key, self._kv_format, self.pool.page_size, most)


def _change(news: dict[bytes, bool]) -> CacheChange:
    came = tuple(key for key, is_there in news.items() if is_there)
    return CacheChange(came, tuple(key for key, is_there in news.items() if not is_there))
