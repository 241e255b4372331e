"""The cluster of a simulation: machines, the ways between them, and a router that places requests as the real one does.

What ships decides: `router.policy.choose` over pools of reports that are as old as reports are, and the batch
scheduler of each worker over its page pool, and at decode the ledger of reservations. A stand-in are transfers, which
begin with the first computed chunk and share the way out of their prefill worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

from decode_worker.ledger import AttemptState
from kvtransfer.layout import KvFormat
from kvtransfer.protocol.messages import AttemptKey
from prefill_worker.links import REMEMBERED_S
from prefill_worker.retained_prompts import RetainedPrompts
from router.lifecycle.turns import Turns
from router.policy.choose import choose, choose_prefill
from router.policy.first_token import slack_of
from router.policy.gate import Room
from router.policy.losses import Fate
from router.policy.pool import Order, Pool
from router.policy.prefix import HeldPrefix
from router.policy.recovery import PLANNED, AttemptEnd, Fault, Recovery
from router.policy.retry_budget import RetryBudget
from router.policy.route import RequestFacts
from router.policy.snapshot import Link, Pair, Snapshot
from router.request.events import TurnCame
from router.request.journal import Journal
from router.request.request import Request
from router.request.targets import Targets
from router.workers.known_pages import TOLD_S
from router.workers.learnt import Learnt
from tandem.cluster.supervisor.autoscale import Decision, Range, Settings
from tandem.cluster.supervisor.role_law import RoleChange
from tandem.core.errors import ConfigError, InternalError, NoWorkerError, TandemError, WorkerLostError
from tandem.core.identity import Role, WorkerKey
from tandem.core.page_keys import PageKeys
from tandem.core.pages import page_table, pages_for
from tandem.core.sampling import SampledToken, SamplingParams
from tandem.core.step_times import StepTimes
from tandem.core.token_ids import token_ids
from tandem.sim.cores import SharedCores
from tandem.sim.faults import Death, FaultShape
from tandem.sim.figures import Figures
from tandem.sim.fleet import Fleet
from tandem.sim.job import InFlight, Job
from tandem.sim.kernel import Kernel
from tandem.sim.load import Arrival
from tandem.sim.machine import SALT, TOKEN, Machine, SchedulerMaker, Work, token_of
from tandem.sim.outcome import Outcome
from tandem.sim.prefixes import Prefixes
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
    faults: who dies when, and which ways become slow.
    prefix_cache: workers keep pages of prompts, and requests go where theirs are.
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
    faults: FaultShape = field(default_factory=FaultShape)
    prefix_cache: bool = False

    @property
    def is_colocated(self) -> bool:
        """There are no prefill workers, and none come: decode workers compute all prompts."""
        return not self.prefill.num_workers and Role.PREFILL not in self.ranges

    @property
    def ranges(self) -> dict[Role, Range]:
        """Of the pools that follow their load."""
        pools = {Role.PREFILL: self.prefill, Role.DECODE: self.decode}
        return {role: pool.bounds for role, pool in pools.items() if pool.bounds and pool.bounds.follows_load}


@dataclass(slots=True)
class _Inbox:
    """Of a request that waits in the router."""

    kernel: Kernel
    place: Callable[[InFlight], object]
    request: InFlight = field(init=False)  # set by whoever joins, before the next event

    def put(self, _: TurnCame) -> None:
        self.kernel.after(0.0, lambda: self.place(self.request))


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
    make_scheduler: makes what plans the steps of a worker, where what ships is compared with another one; `None`: what
        ships.
    """

    shape: WorldShape
    on_end: Callable[[Outcome], object] = lambda _: None
    scaler: Scaler | None = None
    timeline: Timeline | None = None
    at_once: bool = True
    make_scheduler: SchedulerMaker | None = None
    kernel: Kernel = field(default_factory=lambda: Kernel(0.0))
    fleet: Fleet = field(init=False)
    figures: Figures = field(init=False)
    decisions: list[Decision] = field(default_factory=list, init=False)
    role_changes: list[tuple[float, RoleChange]] = field(default_factory=list, init=False)
    machines: dict[WorkerKey, Machine] = field(default_factory=dict, init=False)
    _pools: dict[Role, Pool] = field(default_factory=dict, init=False)
    _jobs: dict[str, Job] = field(default_factory=dict, init=False)
    _link_free_s: dict[WorkerKey, float] = field(default_factory=dict, init=False)
    _told_s: dict[WorkerKey, float] = field(default_factory=dict, init=False)
    _told: dict[WorkerKey, Work] = field(default_factory=dict, init=False)  # what it had done by then
    _takes_requests: set[WorkerKey] = field(default_factory=set, init=False)
    _prompt_speed: Learnt = field(default_factory=Learnt, init=False)  # tokens a second of computation
    _turns: Turns = field(init=False)
    _prefixes: Prefixes | None = field(default=None, init=False)
    _budget: RetryBudget = field(init=False)
    _retained: dict[WorkerKey, RetainedPrompts] = field(default_factory=dict, init=False)  # where somebody may die
    _links: dict[Pair, Link] = field(default_factory=dict, init=False)  # those that are slow, as the router knows
    _link_used_s: dict[Pair, float] = field(default_factory=dict, init=False)  # of these, the last time
    _placeless: list[InFlight] = field(default_factory=list, init=False)  # for which there is no worker
    _cores: SharedCores | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        shape = self.shape
        self._cores = SharedCores(self.kernel, shape.speeds) if shape.speeds else None
        self.fleet = Fleet(self.kernel, self._make, self._ready, self._leave, shape.flexible, shape.change_s)
        self.figures = Figures(shape.ttft_s, shape.tpot_s)
        self._turns = Turns(self._room, 1.0, self.kernel.clock)  # all have one priority, so what it is worth is nothing
        if shape.prefix_cache:
            self._prefixes = Prefixes(shape.kv_format.layout.page_size)
        faults = shape.faults
        self._budget = RetryBudget(faults.retry_share, faults.retry_burst, self.kernel.clock)
        if self.scaler is None and shape.ranges:
            self.scaler = ShippedLaw(shape.ranges, shape.settings, shape.ttft_s, shape.tpot_s, self.fleet)
        for role, pool in ((Role.PREFILL, shape.prefill), (Role.DECODE, shape.decode)):
            self._pools[role] = Pool(role)
            for _ in range(pool.num_workers):
                self.fleet.start(role, 0.0)
        for death in faults.deaths:
            self.kernel.at(death.at_s, partial(self._die, death))

    def _make(self, key: WorkerKey, role: Role) -> Machine:
        pool = self.shape.prefill if role is Role.PREFILL else self.shape.decode
        looks_at_s = self._report_due_s if self.at_once else None
        machine = self.machines[key] = Machine(
            self.kernel, key, role, num_pages=pool.num_pages, limits=pool.limits,
            times=pool.times or self.shape.times, kv_format=self.shape.kv_format, prefix_cache=self.shape.prefix_cache,
            on_preempted=self._preempted, on_admitted=self._admitted, on_step=self._stepped,
            on_quiet=self._stepped_quietly, looks_at_s=looks_at_s if role is Role.DECODE else None,
            cores=self._cores, timeline=self.timeline, make_scheduler=self.make_scheduler,
        )  # fmt: skip
        if self.shape.faults.deaths and role is Role.PREFILL:
            self._retained[key] = RetainedPrompts(machine.pool, SALT, shares=self.shape.prefix_cache)
        self._link_free_s[key] = 0.0
        self._told_s[key], self._told[key] = -self.shape.report_s, Work()
        return machine

    def _ready(self, machine: Machine) -> None:
        self._takes_requests.add(machine.key)
        self._tell(machine)  # as one that has nothing to do: decode may compute prompts
        placeless, self._placeless = self._placeless, []
        for request in placeless:
            self._place(request)

    def _leave(self, machine: Machine) -> None:
        self._takes_requests.discard(machine.key)
        self._pools[machine.role].discard(machine.key)
        if self._prefixes is not None:
            self._prefixes.lose(machine.key)
        self._turns.look()

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
        roles = Role.PREFILL, Role.DECODE
        prefill, decode = (self.fleet.machines(role) for role in roles)
        sample = self.figures.sample(prefill, decode, self._turns)
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
        if self.figures.num_open:
            raise InternalError(f"the simulation came to its end before {self.figures.num_open} of its requests did")
        return outcomes

    def ask(self, arrival: Arrival) -> Outcome:
        """One more request, which comes when it says; as by a client who has heard that another one has ended."""
        outcome = Outcome(arrival)
        self.figures.num_open += 1
        self.kernel.at(arrival.arrived_s, partial(self._arrive, outcome))
        return outcome

    # -- the router

    def _arrive(self, outcome: Outcome) -> None:
        """It waits in the router until its turn has come."""
        arrival = outcome.arrival
        self.figures.came(arrival, self._turns.computed_share)
        targets = Targets(self.shape.ttft_s, self.shape.tpot_s)
        prompt = (TOKEN,) * arrival.num_input
        request = Request(str(arrival.number), prompt, SamplingParams(), arrival.arrived_s, targets=targets)
        inbox = _Inbox(self.kernel, self._place)
        inbox.request = InFlight(outcome, self._turns.join(request, inbox))
        if self._prefixes is not None:
            inbox.request.page_keys = self._prefixes.keys(arrival)
        self._budget.earn()
        if self.shape.faults.deaths:
            inbox.request.journal = Journal(1)

    def _room(self) -> Room:
        """What the workers can take."""
        prefill, decode = self._pools[Role.PREFILL], self._pools[Role.DECODE]
        roomiest = next(decode.walk(Order.ROOM, decode.formats), None)
        is_mixed = self.shape.mixed_pool_tokens > 0 or self.shape.is_colocated
        return Room(
            num_computing=len(prefill) + (len(decode) if is_mixed else 0),
            tokens_per_s=self._prompt_speed.at(self.kernel.now_s),
            num_decode=len(decode),
            num_places=decode.num_places,
            most_pages=roomiest.num_available_pages if roomiest is not None else 0,
            page_size=roomiest.page_size if roomiest is not None else 0,
        )

    def _snapshot(self) -> Snapshot:
        return Snapshot(
            self._pools[Role.PREFILL],
            self._pools[Role.DECODE],
            links=self._links,
            prefill_tokens_per_s=self._prompt_speed.at(self.kernel.now_s),
            is_colocated=self.shape.is_colocated,
        )

    def _facts(self, request: InFlight) -> RequestFacts:
        arrival = request.outcome.arrival
        return RequestFacts(
            num_prompt_tokens=arrival.num_input,
            prefix=self._held(request),
            mixed_pool_tokens=self.shape.mixed_pool_tokens,
            first_token_in_s=arrival.arrived_s + self.shape.ttft_s - self.kernel.now_s,
            num_held_tokens=self._turns.num_waiting_tokens,
            is_first_attempt=request.attempt == 1,
        )

    def _held(self, request: InFlight) -> HeldPrefix[WorkerKey]:
        if self._prefixes is None:
            return HeldPrefix()
        return self._prefixes.held(request.page_keys, request.outcome.arrival.num_input)

    def _place(self, request: InFlight) -> None:
        outcome, snapshot, facts = request.outcome, self._snapshot(), self._facts(request)
        try:
            route = choose(snapshot, facts, request.plan.wishes)
        except NoWorkerError as error:
            self._wait_for_worker(request, error)
            return
        assert route.decode is not None
        arrival, request.give_up_s = outcome.arrival, None
        if request.attempt == 1:
            num_left = arrival.num_input - facts.prefix.most_tokens
            request.slack_s = slack_of(num_left, snapshot.prefill_tokens_per_s)
        job = Job(
            key=AttemptKey(str(arrival.number), request.attempt),
            turn=arrival.arrived_s + request.slack_s,
            own_turn=arrival.arrived_s,
            arrival=arrival.number,
            num_tokens=arrival.num_input,
            num_running=1,
            page_keys=request.page_keys,
            max_local_tokens=route.max_local_tokens,
            unpaced=route.unpaced,
            request=request,
            decode=route.decode,
            prefill=route.prefill,
            num_known=outcome.num_tokens,
        )
        outcome.decode, outcome.prefill = route.decode.worker_id, route.prefill.worker_id if route.prefill else ""
        self._jobs[job.key.request_id] = job
        if self._prefixes is not None:
            chosen = [key for key in (route.prefill, route.decode) if key is not None]
            job.foreseen = self._prefixes.foresee(chosen, job.page_keys, job.num_tokens)
        decode = self.machines[job.decode]
        num_pages = pages_for(job.num_tokens, decode.pool.page_size)
        computes = job.max_local_tokens >= job.num_tokens
        self._send(job, decode, job.num_tokens if computes else 0, num_pages, self._reserve)
        if job.prefill is not None:
            self._send(job, self.machines[job.prefill], job.num_tokens, 0, self._start)

    def _wait_for_worker(self, request: InFlight, error: NoWorkerError) -> None:
        now_s = self.kernel.now_s
        if request.give_up_s is None:
            request.give_up_s = now_s + self.shape.faults.wait_for_worker_s
            self.kernel.at(request.give_up_s, partial(self._waited, request))
        if now_s >= request.give_up_s:
            self._fail(request, error)
        else:
            self._placeless.append(request)

    def _waited(self, request: InFlight) -> None:
        if request in self._placeless:
            self._placeless.remove(request)
            self._place(request)

    def _send(self, job: Job, to: Machine, num_tokens: int, num_pages: int, call: Callable[[Job], object]) -> None:
        to.num_commands_sent += 1
        number = to.num_commands_sent
        to.known.hold(job.key.request_id, number, num_tokens, num_pages, computes=num_tokens > 0)
        self._show(to)

        def arrive() -> None:
            to.num_commands = number
            if not to.is_dead:
                call(job)

        self.kernel.after(self.shape.message_s, arrive)

    def _taken_up(self, machine: Machine, job: Job, *, steps: bool) -> None:
        """The router hears that the worker has pages for it, computes it or generates."""
        if machine.known.note_taken_up(job.key.request_id, steps=steps):
            self._show(machine)

    def _let_go(self, machine: Machine, job: Job) -> None:
        if machine.known.let_go(job.key.request_id):
            self._show(machine)

    def _tell(self, machine: Machine) -> None:
        now_s, work, before = self.kernel.now_s, machine.work, self._told[machine.key]
        machine.tell()
        self._hear_pages(machine)
        if machine.role is Role.PREFILL and (busy_s := work.busy_s - before.busy_s) > 0:
            self._prompt_speed.note((work.num_tokens - before.num_tokens) / busy_s, 1, now_s)
        elif self.shape.is_colocated and (chunk_s := work.chunk_s - before.chunk_s) > 0:
            self._prompt_speed.note((work.num_chunk_tokens - before.num_chunk_tokens) / chunk_s, 1, now_s)
        self._told[machine.key], self._told_s[machine.key] = replace(work), now_s
        self._show(machine)
        self._turns.look()

    def _hear_pages(self, machine: Machine) -> None:
        """Which came to its cache, and which went."""
        if self._prefixes is None or (change := machine.pool.take_changes()) is None:
            return
        if machine.key in self._takes_requests:
            self._prefixes.hear(machine.key, change)

    # -- prefill

    def _start(self, job: Job) -> None:
        if job.is_over:
            return
        prefill = self._prefill_of(job)
        job.prompt = prompt = self._choice(job)
        prompt.turn, prompt.promoted = job.turn, job.granted_s is not None
        retained = self._retained.get(prefill.key)
        if retained is not None:
            job.request.kept_at.add(prefill.key)
            recalled = retained.recall(prompt)
            prompt.samples = not job.num_known and not (recalled is not None and recalled.first_tokens)
            if recalled is not None and not prompt.samples and retained.give_pages(prompt, recalled):
                self._begun(prefill, job, prompt.num_cached)
                job.began_s = self.kernel.now_s
                self._computed(job)
                return
        prefill.scheduler.add(prompt)
        prefill.wake()

    def _prefill_of(self, job: Job) -> Machine:
        assert job.prefill is not None
        return self.machines[job.prefill]

    def _choice(self, job: Job) -> Choice:
        """Of the prompt alone."""
        return Choice(
            request_id=job.key.request_id, attempt=job.key.attempt, choice=0, turn=job.own_turn, arrival=job.arrival,
            token_ids=token_ids([TOKEN]) * job.num_tokens, num_prompt=job.num_tokens,
            params=SamplingParams(max_tokens=job.outcome.arrival.num_output), tpot_s=self.shape.tpot_s, owner=job,
            keys=PageKeys(job.page_keys),
        )  # fmt: skip

    def _send_pages(self, job: Job) -> None:
        """Once the prompt is computed and decode has pages for it; the chunks before the last one are on their way."""
        assert job.prefill is not None
        assert job.began_s is not None
        assert job.granted_s is not None
        shape, key, now_s, num_input = self.shape, job.prefill, self.kernel.now_s, job.num_tokens
        num_input -= len(job.cached) * shape.kv_format.layout.page_size
        bytes_per_s = shape.bytes_per_s * shape.faults.link_share(key.worker_id, now_s)
        of_token_s = shape.kv_format.layout.token_bytes / bytes_per_s
        num_last = num_input % shape.prefill.limits.chunk_size or min(num_input, shape.prefill.limits.chunk_size)
        start_s = max(self._link_free_s[key], job.began_s, job.granted_s)
        end_s = max(start_s + num_input * of_token_s, now_s + num_last * of_token_s)
        self._link_free_s[key] = end_s
        self.kernel.at(end_s + shape.latency_s, partial(self._sent, job))

    def _sent(self, job: Job) -> None:
        prefill, decode = self._prefill_of(job), self.machines[job.decode]
        if job.is_over or prefill.is_dead or decode.is_dead:
            return
        assert job.prompt is not None
        prefill.free(job.prompt)
        job.prompt = None
        prefill.wake()
        self._let_go(prefill, job)
        self._tell(prefill)
        self._learn_link(prefill.key, decode.key)
        if job.outcome.handed_off_s is None:
            job.outcome.handed_off_s = self.kernel.now_s
        decode.ledger.admit(job)
        choice = self._choice(job)
        choice.token_ids += token_ids([token_of(choice)]) * max(1, job.num_known)
        choice.num_computed = job.num_tokens
        self._enter(job, choice, AttemptState.RUNNING)
        self._taken_up(decode, job, steps=True)
        self._give_pages(decode)

    def _learn_link(self, prefill: WorkerKey, decode: WorkerKey) -> None:
        """What the router hears of a way that is slow, for as long as it is remembered; of others it need not know."""
        faults, pair, now_s = self.shape.faults, (prefill, decode), self.kernel.now_s
        share = faults.link_share(prefill.worker_id, now_s)
        if share == 1 or not faults.tells_links:
            return
        self._links[pair], self._link_used_s[pair] = Link(self.shape.bytes_per_s * share), now_s

        def forget() -> None:
            if self._link_used_s[pair] == now_s:
                self._links.pop(pair, None)

        self.kernel.after(REMEMBERED_S, forget)

    # -- decode

    def _enter(self, job: Job, choice: Choice, state: AttemptState) -> None:
        """Into the next step's batch, with the pages that it has here."""
        decode = self.machines[job.decode]
        job.sequence, job.is_admitted = choice, True
        choice.pages, choice.num_published = page_table([*job.cached, *job.pages]), len(job.cached)
        decode.ledger.set_state(job, state)
        decode.scheduler.enter(choice)
        decode.wake()

    def _reserve(self, job: Job) -> None:
        if job.is_over:
            return
        decode = self.machines[job.decode]
        if self.make_scheduler is not None and job.prefill is None:
            self._add_to_other(decode, job)
            return
        decode.ledger.push(job)
        self._give_pages(decode)

    def _add_to_other(self, decode: Machine, job: Job) -> None:
        """To a scheduler that does not ship, which admits whom it will: the ledger would do that before it."""
        job.sequence = prompt = self._choice(job)
        decode.scheduler.add(prompt)
        decode.wake()
        job.request.turn.granted()
        self._begun(decode, job, 0)

    def _give_pages(self, decode: Machine) -> None:
        """To those that wait and may have them now."""
        if not decode.has_reservations:
            return
        for job in list(iter(decode.ledger.take, None)):
            if job.state is AttemptState.ENTERING:
                self._compute_here(job)
                continue
            self._taken_up(decode, job, steps=False)
            job.request.turn.granted()
            if job.prefill is None and not self._finds_prefill(job):
                continue
            self.kernel.after(self.shape.message_s, partial(self._granted, job))

    def _finds_prefill(self, job: Job) -> bool:
        """Of one that decode was to compute by itself, and that is too much for that."""
        plan, kv_format = job.request.plan, self.shape.kv_format
        try:
            key = choose_prefill(self._snapshot(), self._facts(job.request), job.decode, kv_format, plan.wishes)
        except NoWorkerError as error:
            self._over(job, AttemptEnd(Fault.UNSERVED, job.decode, error, None, job.decode))
            return False
        job.prefill, job.outcome.prefill = key, key.worker_id
        self._send(job, self.machines[key], job.num_tokens, 0, self._start)
        return True

    def _compute_here(self, job: Job) -> None:
        prompt = self._choice(job)
        # A retry is not paced: it has waited long enough.
        prompt.paced, prompt.yields = job.key.attempt == 1 and not job.unpaced, job.key.attempt == 1
        prompt.turn, prompt.samples = job.turn, not job.num_known
        prompt.num_computed = prompt.num_cached = len(job.cached) * self.shape.kv_format.layout.page_size
        self._enter(job, prompt, AttemptState.COMPUTING)
        decode = self.machines[job.decode]
        job.request.turn.granted()
        self._begun(decode, job, prompt.num_cached)

    def _generates(self, job: Job, prompt: Choice) -> None:
        """It is computed at decode, and goes on as any."""
        decode = self.machines[job.decode]
        decode.ledger.set_state(job, AttemptState.RUNNING)
        pages = decode.scheduler.remove(prompt)
        prompt.turn, prompt.paced, prompt.yields, prompt.samples = job.own_turn, False, False, True
        prompt.pages = page_table(pages)
        prompt.token_ids += token_ids([token_of(prompt)]) * job.num_known
        decode.scheduler.enter(prompt)

    def _granted(self, job: Job) -> None:
        """Prefill hears of it. Its prompt goes before all that have no pages at decode, and keeps its own."""
        prefill = self._prefill_of(job)
        if job.is_over or prefill.is_dead:
            return
        job.granted_s = self.kernel.now_s
        if job.prompt is None:
            return
        prefill.scheduler.promote(job.prompt)
        if job.is_computed:
            self._send_pages(job)
        prefill.wake()

    # -- steps

    def _admitted(self, machine: Machine, choice: Choice) -> None:
        if machine.role is Role.PREFILL:
            self._begun(machine, choice.owner, choice.num_cached)

    def _begun(self, machine: Machine, job: Job, num_cached: int) -> None:
        """The router hears that the prompt is computed from now on, but for so many tokens."""
        self._taken_up(machine, job, steps=True)
        job.request.turn.begun(num_cached)
        if job.outcome.num_cached is None:
            job.outcome.num_cached = num_cached

    def _preempted(self, choice: Choice) -> None:
        """It is computed again; at prefill it has nothing to send until then."""
        job: Job = choice.owner
        if choice is job.prompt:
            job.is_computed, job.began_s = False, None

    def _stepped(self, machine: Machine, batch: Batch) -> None:
        now_s, happened = self.kernel.now_s, bool(batch.admitted or batch.preempted or batch.stalled)
        for item in batch.items:
            sequence, job = item.sequence, item.sequence.owner
            happened |= item.num_tokens > 1 or item.start < sequence.num_prompt
            if job.began_s is None:
                job.began_s = now_s
                if job.outcome.prefill_s is None:
                    job.outcome.prefill_s = machine.step_began_s
            if machine.role is Role.PREFILL:
                if item.start + item.num_tokens == sequence.num_prompt:
                    self._computed(job)
                continue
            if item.samples:
                self._give(job, sequence.num_output - 1)
            if sequence.num_output == sequence.params.max_tokens:
                machine.free(sequence)
                machine.ledger.remove(job)
                job.sequence, happened = None, True
                if not job.is_over:
                    self._end(job)
            elif job.state is AttemptState.COMPUTING and sequence.num_computed >= sequence.num_prompt:
                self._generates(job, sequence)
        if happened:
            self._hear_pages(machine)
        if happened and machine.has_reservations:  # as in a worker, the next step takes its pages first
            self.kernel.after(0.0, partial(self._give_pages, machine))
        self._may_tell(machine)

    def _give(self, job: Job, index: int) -> None:
        """The `index`th token of its output, to its client, who may have it."""
        if job.request.takes(job.key.attempt, index, 1, job.arrival):
            job.outcome.token(self.kernel.now_s)
            self.figures.gave(job.outcome)

    def _stepped_quietly(self, machine: Machine, running: Sequence[Choice], ends_s: Sequence[float]) -> None:
        longest_s = max((b - a for a, b in pairwise(ends_s)), default=0.0)
        for choice in running:
            job: Job = choice.owner
            if job.request.takes(job.key.attempt, choice.num_output - len(ends_s), len(ends_s), job.arrival):
                job.outcome.several(ends_s, longest_s)
                self.figures.gave_more(len(ends_s))
        if ends_s[-1] == self.kernel.now_s:
            self._may_tell(machine)

    def _report_due_s(self, machine: Machine) -> float:
        return self._told_s[machine.key] + self.shape.report_s

    def _may_tell(self, machine: Machine) -> None:
        now_s = self.kernel.now_s
        is_idle = not machine.scheduler.running and not machine.scheduler.waiting
        if is_idle or now_s >= self._report_due_s(machine):
            self._tell(machine)

    def _computed(self, job: Job) -> None:
        """The prompt, by prefill, which gives the first token, unless that was given before."""
        prefill, prompt = self._prefill_of(job), job.prompt
        assert prompt is not None
        del prompt.token_ids[prompt.num_prompt :]
        prompt.samples, job.is_computed = False, True
        if not job.outcome.num_tokens:
            self._give(job, 0)
        if job.outcome.is_over:
            prefill.free(prompt)
            self._give_up_pages(job)
            self._end(job)
            return
        prefill.scheduler.park(prompt)
        if (retained := self._retained.get(prefill.key)) is not None:
            retained.retain(0, prompt, {0: SampledToken(token_of(prompt))})
        if job.granted_s is not None:
            self._send_pages(job)

    def _give_up_pages(self, job: Job) -> None:
        """Of one that needs no decode, or does no more; its message may still be on its way there."""
        decode = self.machines[job.decode]
        if job.state is AttemptState.GRANTED:
            decode.ledger.end(job, job.pages, (), quarantined=False, keeps=False)
        else:
            decode.ledger.remove(job)
        self._give_pages(decode)

    def _end(self, job: Job) -> None:
        request = job.request
        self._close(job)
        if job.outcome.num_tokens > 2:
            request.turn.had_place(job.outcome.last_token_s - job.outcome.second_token_s)
        self._forget(request)
        self.figures.ended(job.outcome)
        self.on_end(job.outcome)

    def _close(self, job: Job) -> None:
        """The attempt is over for the router."""
        job.is_over = True
        del self._jobs[job.key.request_id]
        self._let_go(self.machines[job.decode], job)
        if job.prefill is not None:
            self._let_go(self._prefill_of(job), job)
        if self._prefixes is not None:
            # Workers have told of the pages of an attempt that went well, or will soon.
            delay_s = TOLD_S if job.outcome.is_over else 0.0
            self.kernel.after(delay_s, partial(self._prefixes.forget, job.foreseen))

    def _forget(self, request: InFlight) -> None:
        """It has ended: behind all else prefill workers hear that they need not keep anything for it."""
        request.turn.end()
        for key in request.kept_at:
            drop = partial(self._retained[key].drop, str(request.outcome.arrival.number))
            self.kernel.after(self.shape.message_s, partial(self.machines[key].between_steps, drop))

    # -- deaths

    def _die(self, death: Death) -> None:
        machine = self.fleet.die(death.worker, self.shape.start_s)
        if machine is None:
            raise ConfigError(f"no worker {death.worker} is there at {death.at_s:g} s to die", key="faults")
        machine.die()
        self.kernel.after(self.shape.message_s, partial(self._died, machine))

    def _died(self, machine: Machine) -> None:
        """The router hears of it."""
        for job in list(self._jobs.values()):
            if machine.key == job.decode or (machine.key == job.prefill and not job.is_admitted):
                error = WorkerLostError(f"worker {machine.key} has died")
                self._over(job, AttemptEnd(Fault.DIED, machine.key, error, job.prefill, job.decode))

    def _over(self, job: Job, end: AttemptEnd) -> None:
        """An attempt has ended before its request: what follows is the router's decision."""
        request = job.request
        self._close(job)
        self._cancel(job)
        recovery = request.recovery = request.recovery or Recovery(self.shape.faults.limits, self._budget)
        journal = request.journal = request.journal or Journal(1)
        recovery.learn(end, self.kernel.now_s)
        try:
            if end.fault not in PLANNED:
                recovery.must_wait(self._fate, end.error)
            request.plan = recovery.after(end)
        except TandemError as error:
            self._fail(request, error)
            return
        journal.next_attempt()
        request.outcome.num_recoveries += end.fault not in PLANNED
        self._place(request)

    def _fate(self, worker: WorkerKey) -> Fate:
        return Fate.ENDED if self.machines[worker].is_dead else Fate.HEARD

    def _cancel(self, job: Job) -> None:
        """Workers that live hear that nobody waits for this attempt any more."""
        ways = [(job.decode, self._cancel_at_decode)]
        if job.prefill is not None:
            ways.append((job.prefill, self._cancel_at_prefill))
        for key, cancel in ways:
            machine = self.machines[key]
            if not machine.is_dead:
                self.kernel.after(self.shape.message_s, partial(machine.between_steps, partial(cancel, job)))

    def _cancel_at_prefill(self, job: Job) -> None:
        if job.prompt is not None:
            prefill = self._prefill_of(job)
            prefill.free(job.prompt)
            job.prompt = None
            prefill.wake()

    def _cancel_at_decode(self, job: Job) -> None:
        if job.sequence is not None:
            self.machines[job.decode].free(job.sequence)
            job.sequence = None
        self._give_up_pages(job)

    def _fail(self, request: InFlight, error: TandemError) -> None:
        request.outcome.error = error.code
        self._forget(request)
        self.figures.failed()
        self.on_end(request.outcome)
