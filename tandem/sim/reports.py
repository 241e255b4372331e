"""What workers of a simulation tell their routers of themselves, and when: as `tandem.worker.sessions` does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from router.policy.known_load import Report
from tandem.core.identity import WorkerKey
from tandem.core.pages import CacheChange
from tandem.sim.job import Job
from tandem.sim.kernel import Kernel
from tandem.sim.machine import Machine, Work
from tandem.sim.shape import WorldShape


@dataclass(frozen=True, slots=True)
class PageNews:
    """Pages that came to a worker's cache and went since it told of them last.

    Attributes:
        cached: `None`: nothing has changed.
        of_tiers: in any tier, and in the nearest of several; `None`: it has none.
    """

    worker: WorkerKey
    cached: CacheChange | None = None
    of_tiers: tuple[CacheChange, CacheChange] | None = None


@dataclass(frozen=True, slots=True)
class Status:
    """A worker at one moment.

    Attributes:
        said: of which router's commands, it does not say.
        num_commands: that had come by then, by the number of their router.
        work: what it had done by then.
        reads: of its tiers, the nearest first: name, pages that were read and the seconds that this took, since its
            start; `None`: it has none.
    """

    machine: Machine
    said: Report
    num_commands: Mapping[int, int]
    work: Work
    pages: PageNews
    reads: tuple[tuple[str, int, float], ...] | None

    def report(self, router: int) -> Report:
        """To this router."""
        return replace(self.said, num_commands=self.num_commands.get(router, 0))


class Listener(Protocol):
    """A router, as workers know it."""

    def add(self, machine: Machine) -> None:
        """It takes requests."""

    def hear(self, status: Status) -> None: ...

    def hear_pages(self, news: PageNews) -> None: ...

    def learn_link(self, prefill: WorkerKey, decode: WorkerKey) -> None: ...

    def taken_up(self, machine: Machine, job: Job, *, steps: bool) -> None: ...

    def let_go(self, machine: Machine, job: Job) -> None: ...


class Reports:
    """Of all workers, to all routers: while a worker computes, once in `report_s`.

    One router hears them without delay: what it does not know then it has sent itself, and counts it. Several hear
    them a message later, since what one of them has sent meanwhile the others do not know; and they are told, besides,
    as soon as the number of requests at a worker has changed. With `shape.tells_changes` one router is told so, too.
    """

    def __init__(self, shape: WorldShape, kernel: Kernel, routers: Sequence[Listener]) -> None:
        self._shape, self._kernel, self._routers = shape, kernel, routers
        self._tells_changes = shape.tells_changes or len(routers) > 1
        # Where all requests are of one tenant, and of no session, it makes no difference who has got how much.
        self._counts_tokens = bool(shape.tenants) or shape.names_sessions
        self._told_s: dict[WorkerKey, float] = {}  # the last time, but for changes of the number of requests
        self._num_told = Counter[WorkerKey]()  # requests

    def _say(self, call: Callable[[], object]) -> None:
        if self._tells_changes:
            self._kernel.after(self._shape.message_s, call)
        else:
            call()

    # -- to all routers

    def _say_to_all(self, say: Callable[[Listener], object]) -> None:
        def arrive() -> None:
            for router in self._routers:
                say(router)

        self._say(arrive)

    def hello(self, machine: Machine) -> None:
        """It takes requests, once all of them have heard of it: as one that has nothing to do, so decode may compute
        prompts."""
        for router in self._routers:
            router.add(machine)
        status, self._told_s[machine.key] = self._status(machine), self._kernel.now_s
        for router in self._routers:
            router.hear(status)

    def tell(self, machine: Machine) -> None:
        self._tell_all(machine)
        self._told_s[machine.key] = self._kernel.now_s

    def _tell_all(self, machine: Machine) -> None:
        status = self._status(machine)
        if self._counts_tokens:
            for choice in machine.scheduler.running:
                choice.owner.request.charge()
        self._say_to_all(lambda router: router.hear(status))

    def _status(self, machine: Machine) -> Status:
        said, reads = machine.report(), None
        self._num_told[machine.key] = said.num_active
        pages = self._page_news(machine)
        if machine.tiers is not None:
            counted = ((store.name, store.counters) for store in machine.tiers.stores)
            reads = tuple((name, counters.num_read, counters.read_s) for name, counters in counted)
        return Status(machine, said, dict(machine.num_commands), replace(machine.work), pages, reads)

    def may_tell(self, machine: Machine) -> None:
        """A step of it has ended."""
        now_s = self._kernel.now_s
        is_idle = not machine.scheduler.running and not machine.scheduler.waiting
        if is_idle or now_s >= self.report_due_s(machine):
            self.tell(machine)
        else:
            self.look(machine)

    def report_due_s(self, machine: Machine) -> float:
        return self._told_s[machine.key] + self._shape.report_s

    def look(self, machine: Machine) -> None:
        """Requests may have come to it or left it."""
        if self._tells_changes and not machine.is_dead and machine.num_requests != self._num_told[machine.key]:
            self._tell_all(machine)

    def tell_pages(self, machine: Machine) -> None:
        news = self._page_news(machine)
        self._say_to_all(lambda router: router.hear_pages(news))

    def _page_news(self, machine: Machine) -> PageNews:
        if not self._shape.prefix_cache:
            return PageNews(machine.key)
        cached, of_tiers = machine.pool.take_changes(), machine.take_tier_news()
        return PageNews(machine.key, cached, of_tiers if machine.tiers is not None else None)

    def tell_link(self, prefill: WorkerKey, decode: WorkerKey) -> None:
        """How fast its last handoff went."""
        self._say_to_all(lambda router: router.learn_link(prefill, decode))

    # -- to the one that has sent the job

    def taken_up(self, machine: Machine, job: Job, *, steps: bool) -> None:
        """The worker has pages for it, computes it or generates."""
        self._say(partial(self._take_up, machine, job, steps=steps))

    def _take_up(self, machine: Machine, job: Job, *, steps: bool) -> None:
        if not job.is_over:  # else a later attempt of its request may be held there
            self._routers[job.outcome.router].taken_up(machine, job, steps=steps)

    def let_go(self, machine: Machine, job: Job) -> None:
        """The worker has ended what it was to do."""
        self._say(partial(self._let_go, machine, job))

    def _let_go(self, machine: Machine, job: Job) -> None:
        if not job.is_over:
            self._routers[job.outcome.router].let_go(machine, job)
