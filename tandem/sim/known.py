"""What one router of a simulation knows: workers as they were when they last told, what it has sent them since, which
ways between them are slow, and who waits in it for its turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

from prefill_worker.links import REMEMBERED_S
from router.lifecycle.turns import Turns
from router.policy.gate import Room, places_of_one
from router.policy.known_load import KnownLoad, Report
from router.policy.pool import Pool, Share
from router.policy.prefix import HeldPrefix
from router.policy.route import RequestFacts
from router.policy.snapshot import Link, Pair, Snapshot, TierReads
from router.workers.known_pages import TOLD_S
from router.workers.learnt import Learnt, LearntReads
from tandem.core.identity import WORKER_ROLES, Role, WorkerKey
from tandem.core.page_keys import PageKeys
from tandem.sim.cores import Hops
from tandem.sim.job import InFlight, Job
from tandem.sim.kernel import Kernel
from tandem.sim.load import Arrival
from tandem.sim.machine import Machine, Work
from tandem.sim.prefixes import Prefixes
from tandem.sim.reports import PageNews, Status
from tandem.sim.shape import WorldShape


class Known:
    """Attributes:
    turns: requests that wait.
    """

    def __init__(self, shape: WorldShape, kernel: Kernel, hops: Hops, share: Share) -> None:
        """`share`: which of how many routers this is."""
        self._shape, self._kernel, self._hops, self._share = shape, kernel, hops, share
        self.turns = Turns(self.room, shape.ageing_s, kernel.clock)
        self._pools = {role: Pool(role) for role in WORKER_ROLES}
        self._prefixes = Prefixes(shape.kv_format.layout.page_size) if shape.prefix_cache else None
        self._prompt_speed = Learnt()  # tokens a second of computation
        self._takes_requests: set[WorkerKey] = set()
        # Of each worker that ever took requests.
        self._loads: dict[WorkerKey, KnownLoad] = {}
        self._num_sent = Counter[WorkerKey]()  # commands
        self._told: dict[WorkerKey, Work] = {}  # what it had done when it told last
        self._learnt_reads: dict[WorkerKey, LearntReads] = {}  # from the tiers of each worker
        self._tier_reads: dict[WorkerKey, TierReads] = {}
        self._links: dict[Pair, Link] = {}  # those that are slow
        self._link_used_s: dict[Pair, float] = {}  # of these, the last time

    # -- workers

    def add(self, machine: Machine) -> None:
        """It takes requests; how it is, it is about to tell."""
        self._takes_requests.add(machine.key)
        report = Report(num_available_pages=machine.pool.num_pages, num_commands=0)
        self._loads[machine.key], self._told[machine.key] = KnownLoad(report), Work()

    def leave(self, machine: Machine) -> None:
        """It takes no more."""
        self._takes_requests.discard(machine.key)
        self._pools[machine.role].discard(machine.key)
        if self._prefixes is not None:
            self._prefixes.lose(machine.key)
        self.turns.look()

    # -- prompts that begin alike

    def foresee(self, job: Job, workers: Iterable[WorkerKey]) -> None:
        """These are about to have its pages."""
        if self._prefixes is not None:
            job.foreseen = self._prefixes.foresee(workers, job.page_keys, job.num_tokens)

    def forget(self, job: Job) -> None:
        """The attempt is over. Workers have told of the pages of one that went well, or will soon."""
        if self._prefixes is not None:
            delay_s = TOLD_S if job.outcome.is_over else 0.0
            self._kernel.after(delay_s, partial(self._prefixes.forget, job.foreseen))

    # -- links

    def learn_link(self, prefill: WorkerKey, decode: WorkerKey) -> None:
        """Of a way that is slow, for as long as it is remembered; of others it need not know."""
        faults, pair, now_s = self._shape.faults, (prefill, decode), self._kernel.now_s
        share = faults.link_share(prefill.worker_id, now_s)
        if share == 1 or not faults.tells_links:
            return
        self._links[pair], self._link_used_s[pair] = Link(self._shape.bytes_per_s * share), now_s

        def forget() -> None:
            if self._link_used_s[pair] == now_s:
                self._links.pop(pair, None)

        self._kernel.after(REMEMBERED_S, forget)

    # -- loads

    def load(self, worker: WorkerKey) -> KnownLoad:
        """Of one that takes requests, or did."""
        return self._loads[worker]

    def show(self, machine: Machine) -> None:
        """Its load as it is known now counts for what is placed next."""
        if machine.key in self._takes_requests:
            self._pools[machine.role].put(machine.load(self._loads[machine.key]))

    @property
    def num_places(self) -> float:
        """Of the sequences that the batches of all decode workers hold, those of this router."""
        decode = self._pools[Role.DECODE]
        return places_of_one(decode.num_places, self._share.of, decode.num_others)

    def room(self) -> Room:
        """What the workers can take."""
        decode = self._pools[Role.DECODE]
        return Room.of(
            self._pools[Role.PREFILL],
            decode,
            is_mixed=self._shape.mixed_pool_tokens > 0 or self._shape.is_colocated,
            tokens_per_s=self._prompt_speed.at(self._kernel.now_s),
            num_places=self.num_places,
            num_routers=self._share.of,
        )

    def snapshot(self) -> Snapshot:
        return Snapshot(
            self._pools[Role.PREFILL],
            self._pools[Role.DECODE],
            links=self._links,
            tier_reads=self._tier_reads,
            prefill_tokens_per_s=self._prompt_speed.at(self._kernel.now_s),
            num_prefill_tokens_known=self._prompt_speed.known_from(self._kernel.now_s),
            share=self._share,
            is_colocated=self._shape.is_colocated,
        )

    def facts(self, request: InFlight) -> RequestFacts:
        asked = request.asked
        return RequestFacts(
            num_prompt_tokens=request.outcome.arrival.num_input,
            prefix=self.held(request.page_keys, request.outcome.arrival),
            priority=asked.priority,
            deadline_s=asked.arrived_s + asked.timeout_s if asked.timeout_s is not None else None,
            mixed_pool_tokens=self._shape.mixed_pool_tokens,
            first_token_in_s=asked.due_s - self._kernel.now_s,
            num_held_tokens=self.turns.num_waiting_tokens,
            is_first_attempt=request.attempt == 1,
        )

    def held(self, page_keys: PageKeys, arrival: Arrival) -> HeldPrefix[WorkerKey]:
        """Who holds how much of its prompt."""
        return self._prefixes.held(page_keys, arrival.num_input) if self._prefixes is not None else HeldPrefix()

    def send(self, job: Job, to: Machine, num_tokens: int, num_pages: int, call: Callable[[Job], object]) -> None:
        """A command, by which `call` comes at the worker."""
        self._num_sent[to.key] += 1
        number = self._num_sent[to.key]
        self._loads[to.key].hold(job.key.request_id, number, num_tokens, num_pages, computes=num_tokens > 0)
        self.show(to)
        to.num_on_their_way += 1

        def arrive() -> None:
            to.num_commands[self._share.number] = number
            to.num_on_their_way -= 1
            if not to.is_dead:
                call(job)

        self._hops.send(arrive)

    def taken_up(self, machine: Machine, job: Job, *, steps: bool) -> None:
        """The worker has pages for it, computes it or generates."""
        if self._loads[machine.key].note_taken_up(job.key.request_id, steps=steps):
            self.show(machine)

    def let_go(self, machine: Machine, job: Job) -> None:
        if self._loads[machine.key].let_go(job.key.request_id):
            self.show(machine)

    # -- what workers tell

    def hear(self, status: Status) -> None:
        """How a worker was when it told this."""
        machine, work, now_s = status.machine, status.work, self._kernel.now_s
        before, self._told[machine.key] = self._told[machine.key], work
        self._loads[machine.key].hear(status.report(self._share.number))
        self.hear_pages(status.pages)
        if status.reads is not None:
            learnt = self._learnt_reads.setdefault(machine.key, LearntReads())
            page_size = self._shape.kv_format.layout.page_size
            self._tier_reads[machine.key] = learnt.note(status.reads, page_size, now_s)
        if machine.role is Role.PREFILL and (busy_s := work.busy_s - before.busy_s) > 0:
            self._prompt_speed.note(work.num_tokens - before.num_tokens, busy_s, now_s)
        elif self._shape.is_colocated and (chunk_s := work.chunk_s - before.chunk_s) > 0:
            self._prompt_speed.note(work.num_chunk_tokens - before.num_chunk_tokens, chunk_s, now_s)
        self.show(machine)
        self.turns.look()

    def hear_pages(self, news: PageNews) -> None:
        """Which came to a worker's cache, or the tiers below, and which went."""
        if self._prefixes is None or news.worker not in self._takes_requests:
            return
        if news.cached is not None:
            self._prefixes.hear(news.worker, news.cached)
        if news.of_tiers is not None:
            self._prefixes.hear_tiers(news.worker, *news.of_tiers)
