"""A router of a simulation: lets requests in, has them wait for their turn, places them as the real one does, and goes
on with those whose worker has died."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from kvtransfer.protocol.messages import AttemptKey
from router.lifecycle.tenant_limits import TenantLimits
from router.lifecycle.turns import Turns
from router.policy.admission import Admission
from router.policy.choose import choose, choose_prefill
from router.policy.first_token import check_in_time, slack_of
from router.policy.losses import Fate
from router.policy.other_turns import EVERY_S
from router.policy.pool import Share
from router.policy.recovery import PLANNED, AttemptEnd, Fault, Recovery
from router.policy.retry_budget import RetryBudget
from router.request.events import TurnCame
from router.request.journal import Journal
from router.request.request import Request
from tandem.core.errors import DeadlineError, NoWorkerError, OverloadedError, TandemError, WorkerLostError
from tandem.core.identity import WorkerKey
from tandem.core.page_keys import PageKeys
from tandem.core.sampling import SamplingParams
from tandem.sim.cores import Hops
from tandem.sim.job import InFlight, Job
from tandem.sim.kernel import Kernel
from tandem.sim.known import Known
from tandem.sim.load import Arrival
from tandem.sim.machine import TOKEN, Machine
from tandem.sim.outcome import Outcome
from tandem.sim.shape import TenantShape, WorldShape
from tandem.worker.turn import turn_of


class Cluster(Protocol):
    """Workers and clients, as a router reaches them."""

    @property
    def machines(self) -> Mapping[WorkerKey, Machine]:
        """All that ever were."""

    def page_keys(self, arrival: Arrival) -> PageKeys:
        """Of the full pages of its prompt and its answer; none without prefix caches."""

    def came(self, arrival: Arrival, computed_share: float) -> object:
        """A request was let in. `computed_share`: of prompts lately, what was in no cache."""

    def reserve(self, job: Job) -> object:
        """At its decode worker."""

    def start(self, job: Job) -> object:
        """At its prefill worker."""

    def cancel(self, job: Job) -> object:
        """At both."""

    def drop(self, request: InFlight) -> object:
        """It has ended: prefill workers need not keep anything for it."""

    def failed(self, outcome: Outcome, error: TandemError) -> object: ...


@dataclass(slots=True)
class _Inbox:
    """Of a request that waits."""

    kernel: Kernel
    place: Callable[[InFlight], object]
    request: InFlight = field(init=False)  # set by whoever joins, before the next event

    def put(self, _: TurnCame) -> None:
        self.kernel.after(0.0, lambda: self.place(self.request))


class Router:
    """One of `shape.num_routers`.

    Attributes:
        number: from 0.
        num_requests: that came.
        num_placed: attempts at requests that were sent to workers.
        most_waiting: requests for their turn at a time.
    """

    def __init__(self, number: int, shape: WorldShape, kernel: Kernel, hops: Hops, cluster: Cluster) -> None:
        self.number = number
        self.num_requests = self.num_placed = self.most_waiting = 0
        self._shape, self._kernel, self._cluster = shape, kernel, cluster
        self.known = Known(shape, kernel, hops, Share(number, shape.num_routers))
        self._limits = TenantLimits(kernel.clock, self._num_routers)
        self._admission: Admission | None = None  # `None`: whoever comes waits
        if shape.max_waiting is not None:
            self._admission = Admission(
                shape.max_waiting, kernel.clock, lambda: self.known.num_places, self._num_routers
            )
        faults = shape.faults
        self._budget = RetryBudget(faults.retry_share, faults.retry_burst, kernel.clock, self._num_routers)
        self._jobs: dict[str, Job] = {}
        self._placeless: list[InFlight] = []  # for which there is no worker

    def _num_routers(self) -> int:
        return self._shape.num_routers

    @property
    def turns(self) -> Turns:
        """Requests that wait."""
        return self.known.turns

    # -- requests that come

    def arrive(self, outcome: Outcome) -> None:
        """It waits here until its turn has come."""
        self.num_requests += 1
        arrival, who, page_keys = outcome.arrival, self._who(outcome), self._cluster.page_keys(outcome.arrival)
        asked = self._request(outcome)
        try:
            self._limits.check(who.tenant, arrival.num_input)
            if asked.timeout_s is not None:
                self._check_in_time(asked, asked.timeout_s, self.known.held(page_keys, arrival).most_tokens)
            if self._admission is not None:
                self._admission.enter(owner=who.tenant.owner, weight=who.tenant.weight)
        except OverloadedError as error:
            self._cluster.failed(outcome, error)
            return
        self._limits.enter(who.tenant, arrival.num_input)
        self._cluster.came(arrival, self.turns.computed_share)
        inbox = _Inbox(self._kernel, self._place)
        request = inbox.request = InFlight(outcome, asked, self._limits, self.turns.join(asked, inbox))
        self.most_waiting = max(self.most_waiting, self.turns.num_waiting)
        request.is_waiting = self._admission is not None
        request.page_keys = page_keys
        if asked.timeout_s is not None:
            self._kernel.at(arrival.arrived_s + asked.timeout_s, partial(self._timed_out, request, asked.timeout_s))
        self._budget.earn()
        if self._shape.faults.deaths:
            request.journal = Journal(1)

    def _request(self, outcome: Outcome) -> Request:
        arrival, who, kind = outcome.arrival, self._who(outcome), self._shape.kind(outcome.arrival.kind)
        return Request(
            str(arrival.number), (TOKEN,) * arrival.num_input, SamplingParams(), arrival.arrived_s,
            priority=kind.priority if arrival.kind else who.priority, timeout_s=kind.timeout_s, tenant=who.tenant,
            session=self._session(arrival), targets=outcome.targets,
        )  # fmt: skip

    def _check_in_time(self, asked: Request, timeout_s: float, num_held_tokens: int) -> None:
        place_in_s = self._admission.place_in_s() if self._admission is not None else 0.0
        in_s = self.turns.first_token_in_s(asked, num_held_tokens, place_in_s)
        check_in_time(in_s, timeout_s, 0.0, asked.request_id)

    def _session(self, arrival: Arrival) -> str:
        return str(arrival.conversation) if self._shape.names_sessions and arrival.conversation is not None else ""

    def _who(self, outcome: Outcome) -> TenantShape:
        name = outcome.arrival.tenant
        return self._shape.tenants[name] if name else TenantShape()

    def _timed_out(self, request: InFlight, timeout_s: float) -> None:
        """Its client waits no longer: wherever it is, it ends."""
        if request.is_over:
            return
        if request in self._placeless:
            self._placeless.remove(request)
        if (job := self._jobs.get(request.asked.request_id)) is not None:
            self._cluster.machines[job.decode].settle()  # what it has generated by now, its client has
            self._close(job)
            self._cluster.cancel(job)
        self._fail(request, DeadlineError(f"the deadline of {timeout_s:g} s passed"))

    # -- placement

    def ready(self) -> None:
        """A worker takes requests from now on, and all routers have heard of it."""
        placeless, self._placeless = self._placeless, []
        for request in placeless:
            self._place(request)

    def _place(self, request: InFlight) -> None:
        if request.is_over:
            return
        outcome, snapshot, facts = request.outcome, self.known.snapshot(), self.known.facts(request)
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
        turn, layout = turn_of(request.asked.priority, arrival.arrived_s, self._shape.ageing_s), self._shape.layout
        job = Job(
            key=AttemptKey(str(arrival.number), request.attempt),
            turn=turn + request.slack_s,
            own_turn=turn,
            arrival=arrival.number,
            num_tokens=arrival.num_input,
            num_running=1,
            page_keys=request.page_keys[: arrival.num_input // layout.page_size],
            max_local_tokens=route.max_local_tokens,
            unpaced=route.unpaced,
            request=request,
            decode=route.decode,
            prefill=route.prefill,
            num_known=outcome.num_tokens,
        )
        outcome.decode, outcome.prefill = route.decode.worker_id, route.prefill.worker_id if route.prefill else ""
        self._jobs[job.key.request_id] = job
        self.num_placed += 1
        self.known.foresee(job, [key for key in (route.prefill, route.decode) if key is not None])
        decode, num_pages = self._cluster.machines[job.decode], layout.num_sent_pages(job.num_tokens)
        computes = job.max_local_tokens >= job.num_tokens
        self.known.send(job, decode, job.num_tokens if computes else 0, num_pages, self._cluster.reserve)
        if job.prefill is not None:
            self._start(job, job.prefill)

    def _start(self, job: Job, prefill: WorkerKey) -> None:
        self.known.send(job, self._cluster.machines[prefill], job.num_tokens, 0, self._cluster.start)

    def find_prefill(self, job: Job) -> bool:
        """Of one that decode was to compute by itself, and that is too much for that. Whether there is one."""
        snapshot, facts, wishes = self.known.snapshot(), self.known.facts(job.request), job.request.plan.wishes
        try:
            key = choose_prefill(snapshot, facts, job.decode, self._shape.kv_format, wishes)
        except NoWorkerError as error:
            self._over(job, AttemptEnd(Fault.UNSERVED, job.decode, error, None, job.decode))
            return False
        job.prefill, job.outcome.prefill = key, key.worker_id
        self._start(job, key)
        return True

    def _wait_for_worker(self, request: InFlight, error: NoWorkerError) -> None:
        now_s = self._kernel.now_s
        if request.give_up_s is None:
            request.give_up_s = now_s + self._shape.faults.wait_for_worker_s
            self._kernel.at(request.give_up_s, partial(self._waited, request))
        if now_s >= request.give_up_s:
            self._fail(request, error)
        else:
            self._placeless.append(request)

    def _waited(self, request: InFlight) -> None:
        if request in self._placeless:
            self._placeless.remove(request)
            self._place(request)

    # -- what becomes of a request

    def begun(self, request: InFlight, num_cached: int) -> None:
        """Its prompt is computed from now on, but for so many tokens."""
        self._leaves_queue(request)
        request.turn.begun(num_cached)

    def first_token(self, ttft_s: float) -> None:
        """Of a request."""
        if self._admission is not None:
            self._admission.first_token(ttft_s)

    def end(self, job: Job) -> None:
        """It has all its tokens."""
        request, outcome = job.request, job.outcome
        self._close(job)
        if outcome.num_tokens > 2:
            request.turn.had_place(outcome.last_token_s - outcome.second_token_s)
        self._forget(request)

    def _leaves_queue(self, request: InFlight) -> None:
        """Its prompt is being computed, or it has ended before that."""
        if self._admission is not None and request.is_waiting:
            request.is_waiting = False
            self._admission.leave(self._who(request.outcome).tenant.owner)

    def _close(self, job: Job) -> None:
        """The attempt is over here."""
        job.is_over = True
        del self._jobs[job.key.request_id]
        self.known.let_go(self._cluster.machines[job.decode], job)
        if job.prefill is not None:
            self.known.let_go(self._cluster.machines[job.prefill], job)
        self.known.forget(job)

    def _forget(self, request: InFlight) -> None:
        """It has ended."""
        request.is_over = True
        request.charge()
        request.turn.end()
        self._leaves_queue(request)
        if self._admission is not None:
            self._admission.end(self._kernel.now_s - request.outcome.arrival.arrived_s)
        self._cluster.drop(request)

    def _fail(self, request: InFlight, error: TandemError) -> None:
        self._forget(request)
        self._cluster.failed(request.outcome, error)

    # -- deaths

    def died(self, machine: Machine) -> None:
        """A worker, as is heard now."""
        for job in list(self._jobs.values()):
            if machine.key == job.decode or (machine.key == job.prefill and not job.is_admitted):
                error = WorkerLostError(f"worker {machine.key} has died")
                self._over(job, AttemptEnd(Fault.DIED, machine.key, error, job.prefill, job.decode))

    def _over(self, job: Job, end: AttemptEnd) -> None:
        """An attempt has ended before its request."""
        request = job.request
        self._close(job)
        self._cluster.cancel(job)
        recovery = request.recovery = request.recovery or Recovery(self._shape.faults.limits, self._budget)
        journal = request.journal = request.journal or Journal(1)
        recovery.learn(end, self._kernel.now_s)
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
        return Fate.ENDED if self._cluster.machines[worker].is_dead else Fate.HEARD


class TurnWords:
    """Of one router: tells the others whose turn it is there, as `router.http.turn_exchange` does."""

    def __init__(self, kernel: Kernel, message_s: float, router: Router, others: Sequence[Router]) -> None:
        self._kernel, self._message_s, self._turns = kernel, message_s, router.turns
        self._name, self._others = str(router.number), others
        self._is_telling = self._has_news = False
        router.turns.on_news = self._note_news

    def _note_news(self) -> None:
        self._has_news = True
        if not self._is_telling:
            self._is_telling = True
            self._kernel.after(0.0, self._tell, endless=True)

    def _tell(self) -> None:
        if not self._has_news and not self._turns.num_waiting:
            self._is_telling = False
            return
        self._has_news, news = False, self._turns.tell()
        for other in self._others:
            self._kernel.after(self._message_s, partial(other.turns.hear, self._name, news), endless=True)
        self._kernel.after(2 * self._message_s, self._told, endless=True)

    def _told(self) -> None:
        """All have answered."""
        self._turns.look()
        self._kernel.after(EVERY_S * len(self._others), self._tell, endless=True)
