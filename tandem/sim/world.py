"""The cluster of a simulation: machines, the ways between them, and routers that place requests as the real ones do.

What ships decides: `router.policy.choose` over pools of reports that are as old as reports are, and the batch
scheduler of each worker over its page pool, and at decode the ledger of reservations. A stand-in are transfers, which
begin with the first computed chunk and share the way out of their prefill worker.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

from decode_worker.ledger import AttemptState
from prefill_worker.retained_prompts import RetainedPrompts
from router.request.targets import Targets
from tandem.cluster.supervisor.autoscale import Decision
from tandem.cluster.supervisor.role_law import RoleChange
from tandem.core.errors import ConfigError, InternalError, TandemError
from tandem.core.identity import WORKER_ROLES, Role, WorkerKey
from tandem.core.page_keys import PageKeys
from tandem.core.pages import pages_for
from tandem.core.sampling import SampledToken, SamplingParams
from tandem.core.token_ids import token_ids
from tandem.sim.cores import Hops, Passing, SharedCores
from tandem.sim.faults import Death
from tandem.sim.figures import Figures
from tandem.sim.fleet import Fleet
from tandem.sim.gaps import Gaps
from tandem.sim.job import InFlight, Job
from tandem.sim.kernel import Call, Kernel
from tandem.sim.load import Arrival
from tandem.sim.machine import SALT, TOKEN, Machine, SchedulerMaker, token_of
from tandem.sim.outcome import Outcome
from tandem.sim.prefixes import PageNames
from tandem.sim.reports import Reports
from tandem.sim.router import Router, TurnWords
from tandem.sim.scaling import Scaler, ShippedLaw
from tandem.sim.shape import WorldShape
from tandem.sim.timeline import Timeline
from tandem.worker.batch import Batch
from tandem.worker.scheduler import BatchScheduler
from tandem.worker.sequence import Sequence as Choice


@dataclass(slots=True)
class World:
    """Args:
    on_end: called with each outcome.
    scaler: what sizes the pools; `None`: the law that ships, where a pool follows its load.
    timeline: of what its workers do; `None`: nobody wants to know.
    gaps: between tokens; `None`: nobody wants to know.
    decisions: that changed the size of a pool.
    role_changes: workers that went from one pool to the other, and when.
    routers: by their numbers.
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
    _link_free_s: dict[WorkerKey, float] = field(default_factory=dict, init=False)
    routers: tuple[Router, ...] = field(init=False)
    _reports: Reports = field(init=False)
    _whom: random.Random = field(init=False)  # of the routers a request comes to
    _page_names: PageNames | None = field(init=False)
    _retained: dict[WorkerKey, RetainedPrompts] = field(default_factory=dict, init=False)  # where somebody may die
    _cores: SharedCores | None = field(default=None, init=False)
    _passing: Passing | None = field(default=None, init=False)  # of tokens
    _hops: Hops = field(init=False)
    _followed: list[Outcome] = field(default_factory=list, init=False)  # of requests that came behind others

    def __post_init__(self) -> None:
        shape = self.shape
        if (slowdowns := shape.slowdowns) is not None:
            self._cores = SharedCores(self.kernel, slowdowns)
            if slowdowns.step_us or slowdowns.token_us:
                self._passing = Passing(self._cores, slowdowns.step_us * 1e-6, slowdowns.token_us * 1e-6)
        self._page_names = PageNames(shape.layout.page_size) if shape.prefix_cache else None
        self._hops = Hops(self.kernel, shape.message_s, self._cores)
        numbers = range(shape.num_routers)
        self.routers = tuple(Router(number, shape, self.kernel, self._hops, self) for number in numbers)
        self._whom = random.Random(f"{shape.seed}:routers")
        self._reports = Reports(shape, self.kernel, [router.known for router in self.routers])
        if len(self.routers) > 1:
            for router in self.routers:
                others = [other for other in self.routers if other is not router]
                TurnWords(self.kernel, shape.message_s, router, others)
        self.fleet = Fleet(self.kernel, self._make, self._ready, self._leaves, shape.flexible, shape.change_s)
        self.figures = Figures()
        if self.scaler is None and shape.ranges:
            self.scaler = ShippedLaw(shape.ranges, shape.settings, shape.ttft_s, shape.tpot_s, self.fleet)
        for role in WORKER_ROLES:
            for group in shape.pool(role).groups:
                for _ in range(group.num_workers):
                    self.fleet.start(role, 0.0, group.type.name)
        for death in shape.faults.deaths:
            self.kernel.at(death.at_s, partial(self._die, death))

    def _make(self, key: WorkerKey, role: Role, type_name: str) -> Machine:
        pool = self.shape.worker(role, type_name)
        looks_at_s = self._reports.report_due_s if self.at_once else None
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
        self.kernel.after(self.shape.report_s, partial(self._reports.tell_pages, machine))

    def _ready(self, machine: Machine) -> None:
        self._reports.hello(machine)
        for router in self.routers:
            router.ready()

    def _leaves(self, machine: Machine) -> None:
        for router in self.routers:
            router.known.leave(machine)

    # -- sizes

    def _look(self) -> None:
        """As the supervisor does; until all requests have ended."""
        self.fleet.look()
        if self.figures.num_open == 0:
            return
        assert self.scaler is not None
        roles = Role.PREFILL, Role.DECODE
        prefill, decode = (self.fleet.machines(role) for role in roles)
        sample = self.figures.sample(prefill, decode, [router.turns for router in self.routers])
        decided = self.scaler.decide(sample, {role: self.fleet.size(role) for role in roles}, self.kernel.now_s)
        if isinstance(decided, RoleChange):
            self.fleet.give(decided.giver, decided.taker, instead=decided.instead)
            self.role_changes.append((self.kernel.now_s, decided))
        else:
            self._resize(decided)
        self.kernel.after(self.shape.look_s, self._look, endless=True)

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
        the order in which they came. Raises `ConfigError` for one that fits into no worker, `InternalError` where
        some never end."""
        # Workers of a role and a type are alike.
        lives = (life for life in self.fleet.lives if life.machine is not None)
        schedulers = {(life.role, life.type): life.machine.scheduler for life in lives if life.machine is not None}
        for arrival in (each for first in arrivals for each in first.turns()):
            _check_fits(arrival, schedulers.values())
        self._followed = []
        outcomes = [self.ask(arrival) for arrival in arrivals]
        if self.scaler is not None:
            self.kernel.after(self.shape.look_s, self._look, endless=True)
        self.kernel.run_all()
        if self.figures.num_open:
            raise InternalError(f"the simulation came to its end before {self.figures.num_open} of its requests did")
        return outcomes + self._followed

    def ask(self, arrival: Arrival) -> Outcome:
        """One more request, which comes when it says; as by a client who has heard that another one has ended."""
        kind = self.shape.kind(arrival.kind)
        cluster = Targets(self.shape.ttft_s, self.shape.tpot_s)
        outcome = Outcome(arrival, cluster.asked(kind.ttft_ms, kind.tpot_ms))
        self.figures.num_open += 1
        self.kernel.at(arrival.arrived_s, partial(self._arrive, outcome))
        return outcome

    # -- what routers reach it by

    def _arrive(self, outcome: Outcome) -> None:
        """At one of the routers, by chance: all accept connections from one queue, or stand behind one balancer."""
        outcome.router = self._whom.randrange(len(self.routers))
        self.routers[outcome.router].arrive(outcome)

    def _router(self, job: Job) -> Router:
        return self.routers[job.outcome.router]

    def page_keys(self, arrival: Arrival) -> PageKeys:
        """Of the full pages of its prompt and its answer; none without prefix caches."""
        return self._page_names.keys(arrival) if self._page_names is not None else PageKeys()

    def came(self, arrival: Arrival, computed_share: float) -> None:
        """A request was let in. `computed_share`: of prompts lately, what was in no cache."""
        self.figures.came(arrival, computed_share)

    def failed(self, outcome: Outcome, error: TandemError) -> None:
        """It gets no more tokens."""
        outcome.error = error.code
        self.figures.failed()
        self.on_end(outcome)
        self.num_unsent += sum(1 for _ in outcome.arrival.turns()) - 1

    def drop(self, request: InFlight) -> None:
        """It has ended: behind all else prefill workers hear that they need not keep anything for it."""
        for key in request.kept_at:
            drop = partial(self._retained[key].drop, str(request.outcome.arrival.number))
            self._hops.send(partial(self.machines[key].between_steps, drop))

    def start(self, job: Job) -> None:
        """At its prefill worker."""
        self._start(job)
        self._reports.look(self._prefill_of(job))

    def reserve(self, job: Job) -> None:
        """At its decode worker."""
        self._reserve(job)
        self._reports.look(self.machines[job.decode])

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
        self._hops.take(end_s, shape.latency_s, partial(self._sent, job))

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
        self._reports.let_go(prefill, job)
        self._reports.tell(prefill)
        self._reports.tell_link(prefill.key, decode.key)
        if job.outcome.handed_off_s is None:
            job.outcome.handed_off_s = self.kernel.now_s
        decode.ledger.admit(job)
        choice = self._choice(job)
        choice.token_ids += token_ids([token_of(choice)]) * max(1, job.num_known)
        choice.num_computed = job.num_tokens
        self._enter(job, choice, AttemptState.RUNNING)
        self._reports.taken_up(decode, job, steps=True)
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
        """As `_fetches`, only where the prompt can be computed here then; in use its pages are anyhow."""
        if decode.tiers is None:
            return False
        page_size = decode.pool.page_size
        num_wanted = (job.num_tokens - 1) // page_size
        num_hidden = decode.scheduler.num_hidden(num_wanted * page_size)
        keys = job.page_keys[num_hidden:num_wanted]
        if not job.max_local_tokens:
            decode.tiers.used(keys)
            return False
        at_least = pages_for(max(0, job.num_tokens - job.max_local_tokens), page_size) - num_hidden
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
            self._reports.taken_up(decode, job, steps=False)
            job.request.turn.granted()
            if job.prefill is None and not self._router(job).find_prefill(job):
                continue
            self._hops.send(partial(self._granted, job))

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
        self._reports.taken_up(machine, job, steps=True)
        self._router(job).begun(job.request, num_cached)
        if job.outcome.num_cached is None:
            job.outcome.num_cached = num_cached

    def _preempted(self, choice: Choice) -> None:
        """It is computed again; at prefill it has nothing to send until then."""
        job: Job = choice.owner
        if choice is job.prompt:
            job.is_computed, job.began_s = False, None

    def _stepped(self, machine: Machine, batch: Batch) -> None:
        now_s, happened = self.kernel.now_s, bool(batch.admitted or batch.preempted or batch.stalled)
        to_pass: list[Call] = []
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
            is_last = sequence.num_output == sequence.params.max_tokens
            if is_last:
                machine.free(sequence)
                machine.ledger.remove(job)
                job.sequence, happened = None, True
            if item.samples and self._passing is None:
                self._give_of_decode(job, sequence.num_output - 1, is_last=is_last)
            elif item.samples:
                to_pass.append(partial(self._give_of_decode, job, sequence.num_output - 1, is_last=is_last))
            if not is_last and job.state is AttemptState.COMPUTING and sequence.num_computed >= sequence.num_prompt:
                self._generates(job, sequence)
        if happened:
            self._reports.tell_pages(machine)
        if happened and machine.has_reservations:  # as in a worker, the next step takes its pages first
            self.kernel.after(0.0, partial(self._give_pages, machine))
        self._reports.may_tell(machine)
        if to_pass and self._passing is not None:
            self._passing.take(machine.key, to_pass)

    def _give_of_decode(self, job: Job, index: int, *, is_last: bool) -> None:
        self._give(job, index)
        if is_last and not job.is_over:
            self._end(job)

    def _give(self, job: Job, index: int) -> None:
        """The `index`th token of its output, to its client, who may have it."""
        if not job.is_over and job.request.takes(job.key.attempt, index, 1, job.arrival):
            if self.gaps is not None and job.outcome.num_tokens:
                self.gaps.note(self.kernel.now_s, self.kernel.now_s - job.outcome.last_token_s)
            job.outcome.token(self.kernel.now_s)
            job.request.num_uncharged += 1
            self.figures.gave(job.outcome)
            if job.outcome.num_tokens == 1:
                self._router(job).first_token(job.outcome.ttft_s)

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
            self._reports.may_tell(machine)

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
        self._reports.look(decode)

    def _end(self, job: Job) -> None:
        self._router(job).end(job)
        self.figures.ended(job.outcome)
        self.on_end(job.outcome)
        if (then := job.outcome.arrival.then) is not None:
            came_s = then.arrived_s(job.outcome.arrival.arrived_s, self.kernel.now_s)
            self._followed.append(self.ask(replace(then.arrival, arrived_s=came_s)))

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
        self._hops.send(partial(self._died, machine))

    def _died(self, machine: Machine) -> None:
        """Routers hear of it."""
        for router in self.routers:
            router.died(machine)

    def cancel(self, job: Job) -> None:
        """Workers that live hear that nobody waits for this attempt any more."""
        ways = [(job.decode, self._cancel_at_decode)]
        if job.prefill is not None:
            ways.append((job.prefill, self._cancel_at_prefill))
        for key, cancel in ways:
            machine = self.machines[key]
            if not machine.is_dead:
                self._hops.send(partial(machine.between_steps, partial(cancel, job)))

    def _cancel_at_prefill(self, job: Job) -> None:
        if job.prompt is not None:
            prefill = self._prefill_of(job)
            prefill.free(job.prompt)
            job.prompt = None
            prefill.wake()
            self._reports.look(prefill)

    def _cancel_at_decode(self, job: Job) -> None:
        if job.sequence is not None:
            self.machines[job.decode].free(job.sequence)
            job.sequence = None
        self._give_up_pages(job)


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
