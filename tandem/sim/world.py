"""The cluster of a simulation: machines, the ways between them, and a router that places requests as the real one does.

What ships decides: `router.policy.choose` over pools of reports that are as old as reports are, and the batch
scheduler of each worker over its page pool. Stand-ins are: reservations at decode, granted in their order; and
transfers, which begin with the first computed chunk and share the way out of their prefill worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

from kvtransfer.layout import KvFormat
from router.policy.choose import choose
from router.policy.pool import Pool
from router.policy.route import RequestFacts
from router.policy.snapshot import Snapshot
from router.workers.learnt import Learnt
from tandem.cluster.supervisor.autoscale import Decision, Range, Settings
from tandem.cluster.supervisor.role_law import RoleChange
from tandem.core.errors import ConfigError, InternalError
from tandem.core.identity import Role, WorkerKey
from tandem.core.pages import page_table, pages_for
from tandem.core.sampling import SamplingParams
from tandem.core.step_times import StepTimes
from tandem.core.token_ids import token_ids
from tandem.sim.cores import SharedCores
from tandem.sim.figures import Figures
from tandem.sim.fleet import Fleet
from tandem.sim.kernel import Kernel
from tandem.sim.load import Arrival
from tandem.sim.machine import TOKEN, Machine, Work
from tandem.sim.outcome import Outcome
from tandem.sim.scaling import Scaler, ShippedLaw
from tandem.sim.timeline import Timeline
from tandem.worker.batch import Batch, SchedulerLimits
from tandem.worker.sequence import Sequence as Choice

LOOK_S = 2.0
"""Between two looks of the supervisor at the load; a heartbeat."""


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Workers of one role, all alike.

    num_workers: with which it begins.
    times: of their steps; `None`: those of the whole world.
    bounds: between which it follows its load; `None`: it does not.
    """

    num_workers: int
    num_pages: int
    limits: SchedulerLimits
    times: StepTimes | None = None
    bounds: Range | None = None


@dataclass(frozen=True, slots=True)
class WorldShape:
    """Attributes:
    bytes_per_s, latency_s: of the way out of a prefill worker.
    message_s: from the router to a worker, or back.
    report_s: a worker that computes tells of itself so often.
    mixed_pool_tokens: the longest prompt that a decode worker may compute alone; endless: any, 0: none.
    start_s: that a worker needs to be ready.
    flexible: workers that may serve in the other role than the one they were started in.
    change_s: in which one that holds nothing changes its role.
    ttft_s, tpot_s: by when tokens are wanted.
    settings: of the law by which pools follow their load.
    speeds: of steps while so many workers compute, where all share one host's cores; none: each has its own.
    """

    prefill: PoolShape
    decode: PoolShape
    kv_format: KvFormat
    times: StepTimes
    bytes_per_s: float
    latency_s: float
    message_s: float
    report_s: float
    mixed_pool_tokens: float = 0
    start_s: float = 60.0
    flexible: int = 0
    change_s: float = 0.5
    ttft_s: float = 1.0
    tpot_s: float = 0.05
    settings: Settings = field(default_factory=Settings)
    speeds: tuple[float, ...] = ()

    @property
    def is_colocated(self) -> bool:
        """There are no prefill workers, and none come: decode workers compute all prompts."""
        return not self.prefill.num_workers and Role.PREFILL not in self.ranges

    @property
    def ranges(self) -> dict[Role, Range]:
        """Of the pools that follow their load."""
        pools = {Role.PREFILL: self.prefill, Role.DECODE: self.decode}
        return {role: pool.bounds for role, pool in pools.items() if pool.bounds and pool.bounds.follows_load}


@dataclass(slots=True, eq=False)
class _Job:
    """One request on its way."""

    outcome: Outcome
    decode: Machine
    prefill: Machine | None
    prompt: Choice | None = None  # at prefill, until its pages have been sent
    pages: list[int] | None = None  # at decode, once granted
    began_s: float | None = None  # its first chunk is computed
    granted_s: float | None = None  # prefill knows of the pages
    is_computed: bool = False
    is_paced: bool = True  # at decode, where that computes the prompt

    @property
    def request_id(self) -> str:
        return str(self.outcome.arrival.number)


@dataclass(slots=True)
class World:
    """Args:
    on_end: called with each outcome.
    scaler: what sizes the pools; `None`: the law that ships, where a pool follows its load.
    timeline: of what its workers do; `None`: nobody wants to know.
    decisions: that changed the size of a pool.
    role_changes: workers that went from one pool to the other, and when.
    at_once: steps in which nothing happens are taken several at a time; nothing but the time that this takes depends on
        it.
    """

    shape: WorldShape
    on_end: Callable[[Outcome], object] = lambda _: None
    scaler: Scaler | None = None
    timeline: Timeline | None = None
    at_once: bool = True
    kernel: Kernel = field(default_factory=lambda: Kernel(0.0))
    fleet: Fleet = field(init=False)
    figures: Figures = field(init=False)
    decisions: list[Decision] = field(default_factory=list, init=False)
    role_changes: list[tuple[float, RoleChange]] = field(default_factory=list, init=False)
    machines: dict[WorkerKey, Machine] = field(default_factory=dict, init=False)
    _pools: dict[Role, Pool] = field(default_factory=dict, init=False)
    _jobs: dict[str, _Job] = field(default_factory=dict, init=False)
    _waiting: dict[WorkerKey, deque[_Job]] = field(default_factory=dict, init=False)  # for pages of this decode worker
    _link_free_s: dict[WorkerKey, float] = field(default_factory=dict, init=False)
    _told_s: dict[WorkerKey, float] = field(default_factory=dict, init=False)
    _told: dict[WorkerKey, Work] = field(default_factory=dict, init=False)  # what it had done by then
    _takes_requests: set[WorkerKey] = field(default_factory=set, init=False)
    _prefill_speed: Learnt = field(default_factory=Learnt, init=False)  # tokens a second of computation
    _cores: SharedCores | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        shape = self.shape
        self._cores = SharedCores(self.kernel, shape.speeds) if shape.speeds else None
        self.fleet = Fleet(self.kernel, self._make, self._ready, self._leave, shape.flexible, shape.change_s)
        self.figures = Figures(shape.ttft_s, shape.tpot_s)
        if self.scaler is None and shape.ranges:
            self.scaler = ShippedLaw(shape.ranges, shape.settings, shape.ttft_s, shape.tpot_s, self.fleet)
        for role, pool in ((Role.PREFILL, shape.prefill), (Role.DECODE, shape.decode)):
            self._pools[role] = Pool(role)
            for _ in range(pool.num_workers):
                self.fleet.start(role, 0.0)

    def _make(self, key: WorkerKey, role: Role) -> Machine:
        pool = self.shape.prefill if role is Role.PREFILL else self.shape.decode
        looks_at_s = self._report_due_s if self.at_once else None
        machine = self.machines[key] = Machine(
            self.kernel, key, role, num_pages=pool.num_pages, limits=pool.limits,
            times=pool.times or self.shape.times, kv_format=self.shape.kv_format,
            on_preempted=self._preempted, on_step=self._stepped,
            on_quiet=self._stepped_quietly, looks_at_s=looks_at_s if role is Role.DECODE else None,
            cores=self._cores, timeline=self.timeline,
        )  # fmt: skip
        self._waiting[key], self._link_free_s[key] = deque(), 0.0
        self._told_s[key], self._told[key] = -self.shape.report_s, Work()
        return machine

    def _ready(self, machine: Machine) -> None:
        self._takes_requests.add(machine.key)
        self._tell(machine)  # as one that has nothing to do: decode may compute prompts

    def _leave(self, machine: Machine) -> None:
        self._takes_requests.discard(machine.key)
        self._pools[machine.role].discard(machine.key)

    def _show(self, machine: Machine) -> None:
        """Its load as it is now, to the router."""
        if machine.key in self._takes_requests:
            self._pools[machine.role].put(machine.load())

    # -- sizes

    def _look(self) -> None:
        """As the supervisor does; until all requests have ended."""
        self.fleet.look()
        if self.figures.num_open == 0:
            return
        assert self.scaler is not None
        roles, waiting = (Role.PREFILL, Role.DECODE), self._waiting
        prefill, decode = (list(self.fleet.machines(role)) for role in roles)
        num_kv = sum(job.outcome.arrival.num_input for machine in decode for job in waiting[machine.key])
        sample = self.figures.sample(prefill, decode, num_kv)
        decided = self.scaler.decide(sample, {role: self.fleet.size(role) for role in roles}, self.kernel.now_s)
        if isinstance(decided, RoleChange):
            self.fleet.give(decided.giver, decided.taker, instead=decided.instead)
            self.role_changes.append((self.kernel.now_s, decided))
        else:
            self._resize(decided)
        self.kernel.after(LOOK_S, self._look)

    def _resize(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            for _ in range(decision.before, decision.wanted):
                self.fleet.start(decision.role, self.shape.start_s)
            for _ in range(decision.wanted, decision.before):
                self.fleet.give_up(decision.role)
            if decision.is_change:
                self.decisions.append(decision)

    def run(self, arrivals: Sequence[Arrival]) -> list[Outcome]:
        """Until all requests have ended. Raises `ConfigError` for one that fits into no worker."""
        page_size = self.shape.kv_format.layout.page_size
        pools = [self.shape.decode] if self.shape.is_colocated else [self.shape.prefill, self.shape.decode]
        most = page_size * min(pool.num_pages for pool in pools)
        for arrival in arrivals:
            if arrival.num_input + arrival.num_output > most:
                raise ConfigError(
                    f"request {arrival.number} has {arrival.num_input} + {arrival.num_output} tokens, and a worker has "
                    f"room for {most}; raise tokens of both pools, or take a load of shorter ones",
                    key="prefill.tokens",
                )
        outcomes = [self.ask(arrival) for arrival in arrivals]
        if self.scaler is not None:
            self.kernel.after(LOOK_S, self._look)
        self.kernel.run_all()
        if self._jobs:
            raise InternalError(f"the simulation came to its end before {len(self._jobs)} of its requests did")
        return outcomes

    def ask(self, arrival: Arrival) -> Outcome:
        """One more request, which comes when it says; as by a client who has heard that another one has ended."""
        outcome = Outcome(arrival)
        self.figures.num_open += 1
        self.kernel.at(arrival.arrived_s, partial(self._arrive, outcome))
        return outcome

    # -- the router

    def _arrive(self, outcome: Outcome) -> None:
        arrival, prefill_pool = outcome.arrival, self._pools[Role.PREFILL]
        self.figures.came(arrival)
        facts = RequestFacts(
            num_prompt_tokens=arrival.num_input,
            mixed_pool_tokens=self.shape.mixed_pool_tokens,
            first_token_in_s=self.shape.ttft_s,
        )
        snapshot = Snapshot(
            prefill_pool,
            self._pools[Role.DECODE],
            prefill_tokens_per_s=self._prefill_speed.at(self.kernel.now_s),
            is_colocated=self.shape.is_colocated,
        )
        route = choose(snapshot, facts)
        assert route.decode is not None
        prefill = self.machines[route.prefill] if route.prefill is not None else None
        job = _Job(outcome, self.machines[route.decode], prefill, is_paced=not route.unpaced)
        outcome.decode, outcome.prefill = route.decode.worker_id, prefill.key.worker_id if prefill is not None else ""
        self._jobs[job.request_id] = job
        num_pages = pages_for(arrival.num_input, job.decode.pool.page_size)
        self._send(job, job.decode, 0 if prefill is not None else arrival.num_input, num_pages, self._reserve)
        if prefill is not None:
            self._send(job, prefill, arrival.num_input, 0, self._start)

    def _send(self, job: _Job, to: Machine, num_tokens: int, num_pages: int, call: Callable[[_Job], object]) -> None:
        to.num_commands_sent += 1
        number = to.num_commands_sent
        to.known.hold(job.request_id, number, num_tokens, num_pages, computes=num_tokens > 0)
        self._show(to)

        def arrive() -> None:
            to.num_commands = number
            call(job)

        self.kernel.after(self.shape.message_s, arrive)

    def _taken_up(self, machine: Machine, job: _Job, *, steps: bool) -> None:
        """The router hears that the worker has pages for it, computes it or generates."""
        if machine.known.note_taken_up(job.request_id, steps=steps):
            self._show(machine)

    def _let_go(self, machine: Machine, job: _Job) -> None:
        if machine.known.let_go(job.request_id):
            self._show(machine)

    def _tell(self, machine: Machine) -> None:
        now_s, work, before = self.kernel.now_s, machine.work, self._told[machine.key]
        machine.tell()
        if machine.role is Role.PREFILL and (busy_s := work.busy_s - before.busy_s) > 0:
            self._prefill_speed.note((work.num_tokens - before.num_tokens) / busy_s, 1, now_s)
        self._told[machine.key], self._told_s[machine.key] = replace(work), now_s
        self._show(machine)

    # -- prefill

    def _start(self, job: _Job) -> None:
        assert job.prefill is not None
        job.prompt = self._choice(job, job.prefill)
        job.prompt.promoted = job.granted_s is not None
        job.prefill.scheduler.add(job.prompt)
        job.prefill.wake()

    def _choice(self, job: _Job, machine: Machine) -> Choice:
        arrival = job.outcome.arrival
        return Choice(
            request_id=job.request_id, attempt=1, choice=0, turn=0.0, arrival=arrival.number,
            token_ids=token_ids([TOKEN]) * arrival.num_input, num_prompt=arrival.num_input,
            params=SamplingParams(max_tokens=arrival.num_output), paced=machine.role is Role.DECODE and job.is_paced,
            yields=not job.is_paced, tpot_s=self.shape.tpot_s,
        )  # fmt: skip

    def _send_pages(self, job: _Job) -> None:
        """Once the prompt is computed and decode has pages for it; the chunks before the last one are on their way."""
        assert job.prefill is not None
        assert job.began_s is not None
        assert job.granted_s is not None
        shape, key, now_s, num_input = self.shape, job.prefill.key, self.kernel.now_s, job.outcome.arrival.num_input
        of_token_s = shape.kv_format.layout.token_bytes / shape.bytes_per_s
        num_last = num_input % shape.prefill.limits.chunk_size or min(num_input, shape.prefill.limits.chunk_size)
        start_s = max(self._link_free_s[key], job.began_s, job.granted_s)
        end_s = max(start_s + num_input * of_token_s, now_s + num_last * of_token_s)
        self._link_free_s[key] = end_s
        self.kernel.at(end_s + shape.latency_s, partial(self._sent, job))

    def _sent(self, job: _Job) -> None:
        assert job.prefill is not None
        assert job.prompt is not None
        assert job.pages is not None
        job.prefill.free(job.prompt)
        job.prefill.wake()
        self._let_go(job.prefill, job)
        self._tell(job.prefill)
        job.outcome.handed_off_s = self.kernel.now_s
        arrival, decode = job.outcome.arrival, job.decode
        decode.pool.admit(job.pages)
        choice = self._choice(job, decode)
        choice.token_ids.append(TOKEN)
        choice.num_computed, choice.pages, choice.paced = arrival.num_input, page_table(job.pages), False
        decode.num_waiting -= 1
        decode.scheduler.enter(choice)
        decode.wake()
        self._taken_up(decode, job, steps=True)

    # -- decode

    def _reserve(self, job: _Job) -> None:
        if job.outcome.is_over:
            return
        if job.prefill is None:
            job.decode.scheduler.add(self._choice(job, job.decode))
            job.decode.wake()
            self._taken_up(job.decode, job, steps=True)
            return
        job.decode.num_waiting += 1
        self._waiting[job.decode.key].append(job)
        self._grant(job.decode)

    def _grant(self, decode: Machine) -> None:
        """Pages for those that wait, in their order."""
        waiting = self._waiting[decode.key]
        num_places = self.shape.decode.limits.max_num_seqs - len(decode.scheduler.running)
        num_places -= decode.num_waiting - len(waiting)  # granted, and still on their way
        while waiting and num_places > 0:
            job = waiting[0]
            needed = pages_for(job.outcome.arrival.num_input, decode.pool.page_size)
            pages = decode.pool.reserve(needed)
            if pages is None:
                return
            waiting.popleft()
            num_places -= 1
            job.pages = pages
            self._taken_up(decode, job, steps=False)
            self.kernel.after(self.shape.message_s, partial(self._granted, job))

    def _granted(self, job: _Job) -> None:
        """Prefill hears of it. Its prompt goes before all that have no pages at decode, and keeps its own."""
        if job.outcome.is_over:
            return
        assert job.prefill is not None
        job.granted_s = self.kernel.now_s
        if job.prompt is None:
            return
        job.prefill.scheduler.promote(job.prompt)
        if job.is_computed:
            self._send_pages(job)
        job.prefill.wake()

    # -- steps

    def _preempted(self, choice: Choice) -> None:
        """It is computed again; at prefill it has nothing to send until then."""
        job = self._jobs[choice.request_id]
        if choice is job.prompt:
            job.is_computed, job.began_s = False, None

    def _stepped(self, machine: Machine, batch: Batch) -> None:
        now_s = self.kernel.now_s
        for item in batch.items:
            job = self._jobs[item.sequence.request_id]
            if job.began_s is None:
                job.began_s = now_s
                if job.outcome.prefill_s is None:
                    job.outcome.prefill_s = machine.step_began_s
                self._taken_up(machine, job, steps=True)
            if not item.samples:
                continue
            if machine is job.prefill:
                if not job.outcome.num_tokens:  # else it was computed before, and lost its pages
                    job.outcome.token(now_s)
                    self.figures.gave(job.outcome)
                self._computed(job)
                continue
            job.outcome.token(now_s)
            self.figures.gave(job.outcome)
            if job.outcome.is_over:
                machine.free(item.sequence)
                self._end(job)
        if machine.role is Role.DECODE:
            self._grant(machine)
        self._may_tell(machine)

    def _stepped_quietly(self, machine: Machine, running: Sequence[Choice], ends_s: Sequence[float]) -> None:
        longest_s = max((b - a for a, b in pairwise(ends_s)), default=0.0)
        for choice in running:
            self._jobs[choice.request_id].outcome.several(ends_s, longest_s)
        self.figures.gave_more(len(running) * len(ends_s))
        if ends_s[-1] == self.kernel.now_s:
            self._may_tell(machine)

    def _report_due_s(self, machine: Machine) -> float:
        return self._told_s[machine.key] + self.shape.report_s

    def _may_tell(self, machine: Machine) -> None:
        now_s = self.kernel.now_s
        is_idle = not machine.scheduler.running and not machine.scheduler.waiting
        if is_idle or now_s >= self._report_due_s(machine):
            self._tell(machine)

    def _computed(self, job: _Job) -> None:
        """The prompt, by prefill, which gives the first token."""
        assert job.prefill is not None
        assert job.prompt is not None
        job.is_computed = True
        if job.outcome.is_over:
            job.prefill.free(job.prompt)
            self._give_up_pages(job)
            self._end(job)
            return
        job.prefill.scheduler.park(job.prompt)
        if job.granted_s is not None:
            self._send_pages(job)

    def _give_up_pages(self, job: _Job) -> None:
        """Of a request that needs no decode; its message may still be on its way there."""
        decode, waiting = job.decode, self._waiting[job.decode.key]
        if job.pages is not None:
            decode.pool.release(job.pages)
            decode.num_waiting -= 1
        elif job in waiting:
            waiting.remove(job)
            decode.num_waiting -= 1
        self._grant(decode)

    def _end(self, job: _Job) -> None:
        del self._jobs[job.request_id]
        self._let_go(job.decode, job)
        if job.prefill is not None:
            self._let_go(job.prefill, job)
        self.figures.ended(job.outcome)
        self.on_end(job.outcome)
