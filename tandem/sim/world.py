"""The cluster of a simulation: machines, the ways between them, and a router that places requests as the real one does.

What ships decides: `router.policy.choose` over pools of reports that are as old as reports are, and the batch
scheduler of each worker over its page pool, and at decode the ledger of reservations. A stand-in are transfers, which
begin with the first computed chunk and share the way out of their prefill worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

from decode_worker.ledger import AttemptState
from kvtransfer.protocol.messages import AttemptKey
from prefill_worker.retained_prompts import RetainedPrompts
from router.lifecycle.tenant_limits import TenantLimits
from router.policy.admission import Admission
from router.policy.choose import choose, choose_prefill
from router.policy.first_token import check_in_time, slack_of
from router.policy.losses import Fate
from router.policy.recovery import PLANNED, AttemptEnd, Fault, Recovery
from router.policy.retry_budget import RetryBudget
from router.request.events import TurnCame
from router.request.journal import Journal
from router.request.request import Request
from router.request.targets import Targets
from tandem.cluster.supervisor.autoscale import Decision
from tandem.cluster.supervisor.role_law import RoleChange
from tandem.core.errors import (
    ConfigError,
    DeadlineError,
    InternalError,
    NoWorkerError,
    OverloadedError,
    TandemError,
    WorkerLostError,
)
from tandem.core.identity import WORKER_ROLES, Role, WorkerKey
from tandem.core.page_keys import PageKeys
from tandem.core.pages import pages_for
from tandem.core.sampling import SampledToken, SamplingParams
from tandem.core.token_ids import token_ids
from tandem.sim.cores import SharedCores
from tandem.sim.faults import Death
from tandem.sim.figures import Figures
from tandem.sim.fleet import Fleet
from tandem.sim.gaps import Gaps
from tandem.sim.job import InFlight, Job
from tandem.sim.kernel import Kernel
from tandem.sim.known import Known
from tandem.sim.load import Arrival
from tandem.sim.machine import SALT, TOKEN, Machine, SchedulerMaker, token_of
from tandem.sim.outcome import Outcome
from tandem.sim.scaling import Scaler, ShippedLaw
from tandem.sim.shape import KindShape, TenantShape, WorldShape
from tandem.sim.timeline import Timeline
from tandem.worker.batch import Batch
from tandem.worker.scheduler import BatchScheduler
from tandem.worker.sequence import Sequence as Choice
from tandem.worker.turn import turn_of

LOOK_S = 2.0
"""Between two looks of the supervisor at the load; a heartbeat."""


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
    gaps: between tokens; `None`: nobody wants to know.
    decisions: that changed the size of a pool.
    role_changes: workers that went from one pool to the other, and when.
    num_unsent: turns of conversations of which one before them failed.
    at_once: steps in which nothing happens are taken several at a time; nothing but the time that this takes depends on
        it, and up to a report's time by when pages that fill in these steps are copied to tiers.
    make_scheduler: makes what plans the steps of a worker, where what ships is compared with another one; `None`: what
        ships.
    """

    shape: WorldShape
    on_end: Callable[[Outcome], object] = lambda _: None
    scaler: Scaler | None = None
    timeline: Timeline | None = None
    gaps: Gaps | None = None
    at_once: bool = True
    make_scheduler: SchedulerMaker | None = None
    kernel: Kernel = field(default_factory=lambda: Kernel(0.0))
    fleet: Fleet = field(init=False)
    figures: Figures = field(init=False)
    decisions: list[Decision] = field(default_factory=list, init=False)
    role_changes: list[tuple[float, RoleChange]] = field(default_factory=list, init=False)
    num_unsent: int = field(default=0, init=False)
    machines: dict[WorkerKey, Machine] = field(default_factory=dict, init=False)
    _jobs: dict[str, Job] = field(default_factory=dict, init=False)
    _link_free_s: dict[WorkerKey, float] = field(default_factory=dict, init=False)
    _known: Known = field(init=False)  # to the router
    _budget: RetryBudget = field(init=False)
    _limits: TenantLimits = field(init=False)
    _admission: Admission | None = field(default=None, init=False)  # `None`: whoever comes waits
    _retained: dict[WorkerKey, RetainedPrompts] = field(default_factory=dict, init=False)  # where somebody may die
    _placeless: list[InFlight] = field(default_factory=list, init=False)  # for which there is no worker
    _cores: SharedCores | None = field(default=None, init=False)
    _followed: list[Outcome] = field(default_factory=list, init=False)  # of requests that came behind others

    def __post_init__(self) -> None:
        shape = self.shape
        self._cores = SharedCores(self.kernel, shape.speeds) if shape.speeds else None
        self._known = Known(shape, self.kernel)
        self.fleet = Fleet(self.kernel, self._make, self._ready, self._known.leave, shape.flexible, shape.change_s)
        self.figures = Figures()
        self._limits = TenantLimits(self.kernel.clock)
        if shape.max_waiting is not None:
            self._admission = Admission(shape.max_waiting, self.kernel.clock, lambda: self._known.num_places)
        faults = shape.faults
        self._budget = RetryBudget(faults.retry_share, faults.retry_burst, self.kernel.clock)
        if self.scaler is None and shape.ranges:
            self.scaler = ShippedLaw(shape.ranges, shape.settings, shape.ttft_s, shape.tpot_s, self.fleet)
        for role in WORKER_ROLES:
            for group in shape.pool(role).groups:
                for _ in range(group.num_workers):
                    self.fleet.start(role, 0.0, group.type.name)
        for death in faults.deaths:
            self.kernel.at(death.at_s, partial(self._die, death))

    def _make(self, key: WorkerKey, role: Role, type_name: str) -> Machine:
        pool = self.shape.worker(role, type_name)
        looks_at_s = self._known.report_due_s if self.at_once else None
        machine = self.machines[key] = Machine(
            self.kernel, key, role, num_pages=pool.num_pages, limits=pool.limits,
            times=pool.times or self.shape.times, kv_format=self.shape.kv_format, prefix_cache=self.shape.prefix_cache,
            on_preempted=self._preempted, on_admitted=self._admitted, on_step=self._stepped,
            on_quiet=self._stepped_quietly, looks_at_s=looks_at_s if role is Role.DECODE else None,
            cores=self._cores, timeline=self.timeline, make_scheduler=self.make_scheduler, tiers=self.shape.tiers,
            on_tier_news=self._has_tier_news,
        )  # fmt: skip
        if self.shape.faults.deaths and role is Role.PREFILL:
            groups = machine.scheduler.groups
            self._retained[key] = RetainedPrompts(machine.pool, SALT, shares=self.shape.prefix_cache, groups=groups)
        self._link_free_s[key] = 0.0
        return machine

    def _has_tier_news(self, machine: Machine) -> None:
        """A worker tells of it with its next report, also where it has nothing to compute."""
        self.kernel.after(self.shape.report_s, partial(self._known.hear_pages, machine))

    def _ready(self, machine: Machine) -> None:
        self._known.add(machine)
        placeless, self._placeless = self._placeless, []
        for request in placeless:
            self._place(request)

    # -- sizes

    def _look(self) -> None:
        """As the supervisor does; until all requests have ended."""
        self.fleet.look()
        if self.figures.num_open == 0:
            return
        assert self.scaler is not None
        roles = Role.PREFILL, Role.DECODE
        prefill, decode = (self.fleet.machines(role) for role in roles)
        sample = self.figures.sample(prefill, decode, self._known.turns)
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
                self.fleet.start(decision.role, self.shape.start_s, self.shape.pool(decision.role).type.name)
            for _ in range(decision.wanted, decision.before):
                self.fleet.give_up(decision.role)
            if decision.is_change:
                self.decisions.append(decision)

    def run(self, arrivals: Sequence[Arrival]) -> list[Outcome]:
        """Until all requests have ended, and those that follow them: these are the last ones of what is returned, in
        the order in which they came. Raises `ConfigError` for one that fits into no worker."""
        # Workers of a role and a type are alike.
        lives = (life for life in self.fleet.lives if life.machine is not None)
        schedulers = {(life.role, life.type): life.machine.scheduler for life in lives if life.machine is not None}
        for arrival in (each for first in arrivals for each in first.turns()):
            _check_fits(arrival, schedulers.values())
        self._followed = []
        outcomes = [self.ask(arrival) for arrival in arrivals]
        if self.scaler is not None:
            self.kernel.after(LOOK_S, self._look)
        self.kernel.run_all()
        if self.figures.num_open:
            raise InternalError(f"the simulation came to its end before {self.figures.num_open} of its requests did")
        return outcomes + self._followed

    def ask(self, arrival: Arrival) -> Outcome:
        """One more request, which comes when it says; as by a client who has heard that another one has ended."""
        kind = self._kind(arrival)
        cluster = Targets(self.shape.ttft_s, self.shape.tpot_s)
        outcome = Outcome(arrival, cluster.asked(kind.ttft_ms, kind.tpot_ms))
        self.figures.num_open += 1
        self.kernel.at(arrival.arrived_s, partial(self._arrive, outcome))
        return outcome

    # -- the router

    def _arrive(self, outcome: Outcome) -> None:
        """It waits in the router until its turn has come."""
        arrival, who, page_keys = outcome.arrival, self._who(outcome), self._known.page_keys(outcome.arrival)
        asked = self._request(outcome)
        try:
            self._limits.check(who.tenant, arrival.num_input)
            if asked.timeout_s is not None:
                self._check_in_time(asked, asked.timeout_s, self._known.held(page_keys, arrival).most_tokens)
            if self._admission is not None:
                self._admission.enter(owner=who.tenant.owner, weight=who.tenant.weight)
        except OverloadedError as error:
            self._failed(outcome, error)
            return
        self._limits.enter(who.tenant, arrival.num_input)
        self.figures.came(arrival, self._known.turns.computed_share)
        inbox = _Inbox(self.kernel, self._place)
        request = inbox.request = InFlight(outcome, asked, self._limits, self._known.turns.join(asked, inbox))
        request.is_waiting = self._admission is not None
        request.page_keys = page_keys
        if asked.timeout_s is not None:
            self.kernel.at(arrival.arrived_s + asked.timeout_s, partial(self._timed_out, request, asked.timeout_s))
        self._budget.earn()
        if self.shape.faults.deaths:
            request.journal = Journal(1)

    def _request(self, outcome: Outcome) -> Request:
        arrival, who, kind = outcome.arrival, self._who(outcome), self._kind(outcome.arrival)
        return Request(
            str(arrival.number), (TOKEN,) * arrival.num_input, SamplingParams(), arrival.arrived_s,
            priority=kind.priority if arrival.kind else who.priority, timeout_s=kind.timeout_s, tenant=who.tenant,
            session=self._session(arrival), targets=outcome.targets,
        )  # fmt: skip

    def _check_in_time(self, asked: Request, timeout_s: float, num_held_tokens: int) -> None:
        place_in_s = self._admission.place_in_s() if self._admission is not None else 0.0
        in_s = self._known.turns.first_token_in_s(asked, num_held_tokens, place_in_s)
        check_in_time(in_s, timeout_s, 0.0, asked.request_id)

    def _timed_out(self, request: InFlight, timeout_s: float) -> None:
        """Its client waits no longer: wherever it is, it ends."""
        if request.is_over:
            return
        if request in self._placeless:
            self._placeless.remove(request)
        if (job := self._jobs.get(request.asked.request_id)) is not None:
            self.machines[job.decode].settle()  # what it has generated by now, its client has
            self._close(job)
            self._cancel(job)
        self._fail(request, DeadlineError(f"the deadline of {timeout_s:g} s passed"))

    def _kind(self, arrival: Arrival) -> KindShape:
        return self.shape.kinds[arrival.kind] if arrival.kind else KindShape()

    def _session(self, arrival: Arrival) -> str:
        return str(arrival.conversation) if self.shape.names_sessions and arrival.conversation is not None else ""

    def _who(self, outcome: Outcome) -> TenantShape:
        name = outcome.arrival.tenant
        return self.shape.tenants[name] if name else TenantShape()

    def _leaves_queue(self, request: InFlight) -> None:
        """Its prompt is being computed, or it has ended before that."""
        if self._admission is not None and request.is_waiting:
            request.is_waiting = False
            self._admission.leave(self._who(request.outcome).tenant.owner)

    def _place(self, request: InFlight) -> None:
        if request.is_over:
            return
        outcome, snapshot, facts = request.outcome, self._known.snapshot(), self._known.facts(request)
        try:
            route = choose(snapshot, facts, request.plan.wishes)
        except NoWorkerError as error:
            self._wait_for_worker(request, error)
            return
        assert route.decode is not None
        arrival, request.give_up_s = outcome.arrival, None
        if request.attempt == 1:
            num_left = arrival.num_input - facts.prefix.most_tokens
            request.slack_s = slack_of(num_left, snapshot.prefill_tokens_per_s, request.asked.timeout_s)
        turn = turn_of(request.asked.priority, arrival.arrived_s, self.shape.ageing_s)
        job = Job(
            key=AttemptKey(str(arrival.number), request.attempt),
            turn=turn + request.slack_s,
            own_turn=turn,
            arrival=arrival.number,
            num_tokens=arrival.num_input,
            num_running=1,
            page_keys=request.page_keys[: arrival.num_input // self.shape.kv_format.layout.page_size],
            max_local_tokens=route.max_local_tokens,
            unpaced=route.unpaced,
            request=request,
            decode=route.decode,
            prefill=route.prefill,
            num_known=outcome.num_tokens,
        )
        outcome.decode, outcome.prefill = route.decode.worker_id, route.prefill.worker_id if route.prefill else ""
        self._jobs[job.key.request_id] = job
        self._known.foresee(job, [key for key in (route.prefill, route.decode) if key is not None])
        decode = self.machines[job.decode]
        num_pages = self.shape.kv_format.layout.num_sent_pages(job.num_tokens)
        computes = job.max_local_tokens >= job.num_tokens
        self._known.send(job, decode, job.num_tokens if computes else 0, num_pages, self._reserve)
        if job.prefill is not None:
            self._known.send(job, self.machines[job.prefill], job.num_tokens, 0, self._start)

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
        if not self._fetches(prefill, job, prompt):
            prefill.scheduler.add(prompt)
            prefill.wake()

    def _fetches(self, prefill: Machine, job: Job, prompt: Choice) -> bool:
        """Whether pages of it that lie below the pool are read first."""
        scheduler = prefill.scheduler
        if prefill.tiers is None:
            return False
        keys = scheduler.wanted_keys(prompt)
        num_hidden = scheduler.num_hidden(len(keys) * prefill.pool.page_size)
        if not prefill.tiers.fetch(keys[num_hidden:], lambda _: self._fetched(prefill, job, prompt)):
            return False
        prefill.fetching.append(prompt)
        return True

    def _fetched(self, prefill: Machine, job: Job, prompt: Choice) -> None:
        prefill.fetching.remove(prompt)
        if job.prompt is prompt:  # else nobody waits for it any more
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
            params=SamplingParams(max_tokens=job.outcome.arrival.num_output),
            tpot_s=job.outcome.targets.tpot_beside_prompts_s, owner=job,
            keys=PageKeys(job.request.page_keys),
        )  # fmt: skip

    def _send_pages(self, job: Job) -> None:
        """Once the prompt is computed and decode has pages for it; the chunks before the last one are on their way."""
        assert job.prefill is not None
        assert job.began_s is not None
        assert job.granted_s is not None
        shape, key, now_s = self.shape, job.prefill, self.kernel.now_s
        bytes_per_s = shape.bytes_per_s * shape.faults.link_share(key.worker_id, now_s)
        num_sent, num_last = self._bytes_to_send(job)
        start_s = max(self._link_free_s[key], job.began_s, job.granted_s)
        end_s = max(start_s + num_sent / bytes_per_s, now_s + num_last / bytes_per_s)
        self._link_free_s[key] = end_s
        self.kernel.at(end_s + shape.latency_s, partial(self._sent, job))

    def _bytes_to_send(self, job: Job) -> tuple[int, int]:
        """Of all that decode lacks of a prompt, and of what the last chunk has of that."""
        layout, chunk_size = self.shape.kv_format.layout, self.shape.prefill.limits.chunk_size
        groups, num_tokens = layout.groups, job.num_tokens
        num_there = job.num_there if groups.num_windowed else len(job.cached)
        num_in_chunk = (num_tokens - num_there * layout.page_size) % chunk_size or chunk_size
        if not groups.num_windowed:
            num_sent = num_tokens - job.num_leading * layout.page_size
            return num_sent * layout.token_bytes, min(num_sent, num_in_chunk) * layout.token_bytes
        end, num_hidden = groups.num_handed_off(num_tokens), groups.num_hidden(num_tokens)
        first = groups.index_of(max(0, num_tokens - num_in_chunk) // layout.page_size, num_hidden)
        num_sent = end - job.num_leading
        return num_sent * layout.page_bytes, min(num_sent, end - first) * layout.page_bytes

    def _first_sent(self, job: Job) -> int:
        """The first token of a prompt that an output sees in some layer, by whole pages: those before it are not
        sent."""
        groups = self.shape.kv_format.layout.groups
        return 0 if groups.num_windowed else groups.num_hidden(job.num_tokens) * groups.page_size

    def _sent(self, job: Job) -> None:
        prefill, decode = self._prefill_of(job), self.machines[job.decode]
        if job.is_over or prefill.is_dead or decode.is_dead:
            return
        assert job.prompt is not None
        prefill.free(job.prompt)
        job.prompt = None
        prefill.wake()
        self._known.let_go(prefill, job)
        self._known.tell(prefill)
        self._known.learn_link(prefill.key, decode.key)
        if job.outcome.handed_off_s is None:
            job.outcome.handed_off_s = self.kernel.now_s
        decode.ledger.admit(job)
        choice = self._choice(job)
        choice.token_ids += token_ids([token_of(choice)]) * max(1, job.num_known)
        choice.num_computed = job.num_tokens
        self._enter(job, choice, AttemptState.RUNNING)
        self._known.taken_up(decode, job, steps=True)
        self._give_pages(decode)

    # -- decode

    def _enter(self, job: Job, choice: Choice, state: AttemptState) -> None:
        """Into the next step's batch, with the pages that it has here."""
        decode = self.machines[job.decode]
        job.sequence, job.is_admitted = choice, True
        choice.num_published = job.num_there
        self._lay_out(choice, job.num_hidden, [*job.cached, *job.pages])
        decode.ledger.set_state(job, state)
        decode.scheduler.enter(choice)
        decode.wake()

    def _lay_out(self, choice: Choice, num_hidden: int, pages: Sequence[int]) -> None:
        """Of its prompt it holds these, in one list."""
        groups = self.shape.kv_format.layout.groups
        choice.num_hidden = num_hidden
        choice.pages, choice.windowed = groups.tables(pages, num_hidden, pages_for(choice.num_prompt, groups.page_size))

    def _reserve(self, job: Job) -> None:
        if job.is_over:
            return
        decode = self.machines[job.decode]
        if self.make_scheduler is not None and job.prefill is None:
            self._add_to_other(decode, job)
            return
        if not self._fetches_at_decode(decode, job):
            decode.ledger.push(job)
            self._give_pages(decode)

    def _fetches_at_decode(self, decode: Machine, job: Job) -> bool:
        """As `_fetches`, only where the prompt can be computed here then."""
        if decode.tiers is None or not job.max_local_tokens:
            return False
        page_size = decode.pool.page_size
        num_wanted = (job.num_tokens - 1) // page_size
        num_hidden = decode.scheduler.num_hidden(num_wanted * page_size)
        at_least = pages_for(max(0, job.num_tokens - job.max_local_tokens), page_size) - num_hidden
        keys = job.page_keys[num_hidden:num_wanted]
        begins = decode.tiers.fetch(keys, lambda _: self._fetched_at_decode(decode, job), at_least=at_least)
        decode.num_fetching += begins
        return begins

    def _fetched_at_decode(self, decode: Machine, job: Job) -> None:
        decode.num_fetching -= 1
        if not job.is_over:
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
            if job.is_over:  # its pages are given up when decode hears of that
                continue
            self._known.taken_up(decode, job, steps=False)
            job.request.turn.granted()
            if job.prefill is None and not self._finds_prefill(job):
                continue
            self.kernel.after(self.shape.message_s, partial(self._granted, job))

    def _finds_prefill(self, job: Job) -> bool:
        """Of one that decode was to compute by itself, and that is too much for that."""
        snapshot, facts, wishes = self._known.snapshot(), self._known.facts(job.request), job.request.plan.wishes
        try:
            key = choose_prefill(snapshot, facts, job.decode, self.shape.kv_format, wishes)
        except NoWorkerError as error:
            self._over(job, AttemptEnd(Fault.UNSERVED, job.decode, error, None, job.decode))
            return False
        job.prefill, job.outcome.prefill = key, key.worker_id
        self._known.send(job, self.machines[key], job.num_tokens, 0, self._start)
        return True

    def _compute_here(self, job: Job) -> None:
        prompt = self._choice(job)
        # A retry is not paced: it has waited long enough.
        prompt.paced, prompt.yields = job.key.attempt == 1 and not job.unpaced, job.key.attempt == 1
        prompt.turn, prompt.samples = job.turn, not job.num_known
        prompt.num_computed = prompt.num_cached = job.num_there * self.shape.kv_format.layout.page_size
        self._enter(job, prompt, AttemptState.COMPUTING)
        decode = self.machines[job.decode]
        job.request.turn.granted()
        self._begun(decode, job, prompt.num_cached)

    def _generates(self, job: Job, prompt: Choice) -> None:
        """It is computed at decode, and goes on as any."""
        decode = self.machines[job.decode]
        decode.ledger.set_state(job, AttemptState.RUNNING)
        num_hidden, pages = prompt.num_hidden, decode.scheduler.remove(prompt)
        prompt.turn, prompt.paced, prompt.yields, prompt.samples = job.own_turn, False, False, True
        self._lay_out(prompt, num_hidden, pages)
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
        self._known.taken_up(machine, job, steps=True)
        self._leaves_queue(job.request)
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
            if job.outcome.prefill_s is None:
                job.outcome.prefill_s = machine.step_began_s
            if machine.role is Role.PREFILL:
                if job.began_s is None and item.start + item.num_tokens > self._first_sent(job):
                    job.began_s = now_s
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
            self._known.hear_pages(machine)
        if happened and machine.has_reservations:  # as in a worker, the next step takes its pages first
            self.kernel.after(0.0, partial(self._give_pages, machine))
        self._known.may_tell(machine)

    def _give(self, job: Job, index: int) -> None:
        """The `index`th token of its output, to its client, who may have it."""
        if not job.is_over and job.request.takes(job.key.attempt, index, 1, job.arrival):
            if self.gaps is not None and job.outcome.num_tokens:
                self.gaps.note(self.kernel.now_s, self.kernel.now_s - job.outcome.last_token_s)
            job.outcome.token(self.kernel.now_s)
            job.request.num_uncharged += 1
            self.figures.gave(job.outcome)
            if self._admission is not None and job.outcome.num_tokens == 1:
                self._admission.first_token(job.outcome.ttft_s)

    def _stepped_quietly(self, machine: Machine, running: Sequence[Choice], ends_s: Sequence[float]) -> None:
        longest_s, num_taken = max((b - a for a, b in pairwise(ends_s)), default=0.0), 0
        for choice in running:
            job: Job = choice.owner
            first, num = choice.num_output - len(ends_s), len(ends_s)
            if not job.is_over and job.request.takes(job.key.attempt, first, num, job.arrival):
                if self.gaps is not None:
                    self.gaps.note(ends_s[0], ends_s[0] - job.outcome.last_token_s)
                num_taken += 1
                job.outcome.several(ends_s, longest_s)
                self.figures.gave_more(num)
                job.request.num_uncharged += num
        if self.gaps is not None and num_taken:
            for a, b in pairwise(ends_s):
                self.gaps.note(b, b - a, num_taken)
        if ends_s[-1] == self.kernel.now_s:
            self._known.may_tell(machine)

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
            decode.ledger.end(job, job.pages, (), quarantined=False)
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
        if (then := job.outcome.arrival.then) is not None:
            came_s = then.arrived_s(job.outcome.arrival.arrived_s, self.kernel.now_s)
            self._followed.append(self.ask(replace(then.arrival, arrived_s=came_s)))

    def _close(self, job: Job) -> None:
        """The attempt is over for the router."""
        job.is_over = True
        del self._jobs[job.key.request_id]
        self._known.let_go(self.machines[job.decode], job)
        if job.prefill is not None:
            self._known.let_go(self._prefill_of(job), job)
        self._known.forget(job)

    def _forget(self, request: InFlight) -> None:
        """It has ended: behind all else prefill workers hear that they need not keep anything for it."""
        request.is_over = True
        request.charge()
        request.turn.end()
        self._leaves_queue(request)
        if self._admission is not None:
            self._admission.end(self.kernel.now_s - request.outcome.arrival.arrived_s)
        for key in request.kept_at:
            drop = partial(self._retained[key].drop, str(request.outcome.arrival.number))
            self.kernel.after(self.shape.message_s, partial(self.machines[key].between_steps, drop))

    # -- deaths

    def _die(self, death: Death) -> None:
        machine = self.fleet.die(death.worker, self.shape.start_s)
        if machine is None:
            there = [
                f"{machine.role.value}-0" for machine in self.machines.values() if machine.key.worker_id.endswith("-0")
            ]
            raise ConfigError(
                f"no worker {death.worker} is there at {death.at_s:g} s to die; those of a pool are numbered from "
                f"{' and '.join(there)} on",
                key="faults",
            )
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
        self._forget(request)
        self._failed(request.outcome, error)

    def _failed(self, outcome: Outcome, error: TandemError) -> None:
        outcome.error = error.code
        self.figures.failed()
        self.on_end(outcome)
        self.num_unsent += sum(1 for _ in outcome.arrival.turns()) - 1


def _check_fits(arrival: Arrival, schedulers: Iterable[BatchScheduler]) -> None:
    num_tokens = arrival.num_input + arrival.num_output
    for scheduler in schedulers:
        needed, pool = scheduler.most_pages(num_tokens), scheduler.pool
        if needed > pool.num_pages:
            # Of a text with windows it may be less than all that has to fit; a page may have some of the layers.
            unit, of_page = ("pages", 1) if scheduler.limits.num_windowed else ("tokens", pool.page_size)
            kept = f", of which {needed * of_page} {unit} are kept at a time" if scheduler.limits.window else ""
            raise ConfigError(
                f"request {arrival.number} has {arrival.num_input} + {arrival.num_output} tokens{kept}, and a worker "
                f"has room for {pool.num_pages * of_page}; raise tokens of both pools, or take a load of "
                "shorter ones",
                key="prefill.tokens",
            )
