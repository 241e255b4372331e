"""A router in virtual time: the real choice of workers, journal, recovery and budget; a script for what is around.

It does what `router.lifecycle` does, without HTTP, streams and tasks, and moves nobody away from a worker that leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from decode_worker.events import Admitted, ComputesHere, GrantMade, WriterSuspected
from kvtransfer.protocol.messages import AttemptKey
from prefill_worker.events import HandedOff, PromptEnded, PromptStarted
from router.policy.recovery import FIRST, AttemptEnd, Fault, Recovery, RecoveryLimits, failure
from router.policy.retry_budget import RetryBudget
from router.policy.route import RequestFacts, Route, Wishes, choose_prefill
from router.policy.snapshot import Snapshot
from router.policy.worker_load import WorkerLoad
from router.request.journal import Journal
from router.request.request import Request, TokenGiven
from tandem.core.errors import IncompatibleError, InternalError, NoWorkerError, TandemError, WorkerLostError
from tandem.core.identity import Role
from tandem.core.pages import pages_for
from tandem.worker.request import AttemptFailed, AttemptSpec, ChoiceJournal, TokenSampled
from tests.support.decode_node import DecodeNode
from tests.support.node import FORMAT, Node
from tests.support.prefill_node import PrefillNode
from tests.support.scripted_model import PAGE
from tests.support.virtual_time import Kernel

_LATENCY_S = 0.0005  # to a worker and back
_NOTICE_S = 0.05  # until a broken stream is noticed
_VERDICT_S = 0.5  # as `router.lifecycle.attempt`

Place = Callable[[Snapshot, RequestFacts, Wishes], Route]
"""As `router.policy.route.choose`."""

RECOVERY = RecoveryLimits(max_attempts=20, local_prefill_tokens=8, max_rest_s=5.0)


@dataclass(slots=True)
class _Held:
    """As `router.workers.session.Held`."""

    num_queued_tokens: int
    num_pages: int
    steps: bool


class Router:
    """Args:
    place: gives each attempt its workers.
    mixed_pool_tokens, mixed_step_tokens: see `RequestFacts` and `WorkerLoad`; 0: no prompt is computed at decode.
    """

    def __init__(self, kernel: Kernel, place: Place, *, mixed_pool_tokens: int, mixed_step_tokens: int) -> None:
        self.kernel = kernel
        self.choose_route = place
        self.mixed_pool_tokens = mixed_pool_tokens
        self._mixed_step_tokens = mixed_step_tokens
        self.workers: list[Node] = []
        self.budget = RetryBudget(1.0, 1000, kernel.clock)
        self.requests: dict[str, InFlight] = {}
        self._held: dict[Node, dict[str, _Held]] = {}
        self._waiting: list[InFlight] = []  # for a worker

    # -- workers

    def add(self, worker: Node) -> None:
        """It is ready from now on."""
        self.workers.append(worker)
        self._held[worker] = {}
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            request.place()

    def ended(self, worker: Node) -> None:
        """Its process has ended; its stream breaks."""
        self.kernel.after(_NOTICE_S, lambda: self._lost(worker))

    def _lost(self, worker: Node) -> None:
        self.workers.remove(worker)
        for request_id in list(self._held.pop(worker)):
            self.requests[request_id].lost(worker)

    def snapshot(self) -> Snapshot:
        by_role = {role: [self._load(w) for w in self.workers if w.role is role] for role in Role}
        return Snapshot.of(by_role[Role.PREFILL], by_role[Role.DECODE], is_prefill_coming=True, is_decode_coming=True)

    def _load(self, worker: Node) -> WorkerLoad:
        """As `WorkerSession.load`."""
        held, status = self._held[worker].values(), worker.load.newest
        return WorkerLoad(
            key=worker.key,
            kv_format=FORMAT,
            page_size=PAGE,
            num_active=max(status.num_running + status.num_queued, len(held)),
            num_queued_tokens=max(status.num_queued_tokens, sum(h.num_queued_tokens for h in held)),
            num_available_pages=status.pages.free + status.pages.cached - sum(h.num_pages for h in held),
            num_stepping=max(status.num_running, sum(h.steps for h in held)),
            mixed_step_tokens=self._mixed_step_tokens if worker.role is Role.DECODE else 0,
        )

    def find(self, key: Any) -> Any:
        return next(worker for worker in self.workers if worker.key == key)

    def hold(self, worker: Node, request: Request, *, computes: bool) -> None:
        num_tokens = len(request.prompt_ids)
        num_pages = pages_for(num_tokens, PAGE) if worker.role is Role.DECODE else 0
        self._held[worker][request.request_id] = _Held(num_tokens if computes else 0, num_pages, computes)

    def note(self, worker: Node, request_id: str, *, steps: bool) -> None:
        """What is left to compute and to take is in the worker's own figures."""
        held = self._held.get(worker, {}).get(request_id)
        if held is not None:
            held.num_queued_tokens = held.num_pages = 0
            held.steps = steps

    def let_go(self, worker: Node, request_id: str) -> None:
        self._held.get(worker, {}).pop(request_id, None)

    def tell(self, worker: Node, command: Callable[[], object]) -> None:
        """Say something on the stream to a worker, in order; lost with its process."""
        worker.later(_LATENCY_S, command)

    def wait(self, request: InFlight) -> None:
        """Until a worker joins."""
        self._waiting.append(request)

    # -- requests

    def begin(self, request: Request) -> None:
        self.requests[request.request_id] = in_flight = InFlight(self, request)
        in_flight.place()

    def client_left(self, request_id: str) -> None:
        self.requests[request_id].cancel()

    def hear(self, worker: Node, event: Any) -> None:
        if isinstance(event, WriterSuspected):
            return
        key = event.grant.key if isinstance(event, GrantMade) else event.key
        self.kernel.after(_LATENCY_S, lambda: self.requests[key.request_id].hear(worker, key, event))


class InFlight:
    """One request over all its attempts, as `router.lifecycle.in_flight` and `attempt` have it."""

    def __init__(self, router: Router, request: Request) -> None:
        self._router = router
        self.request = request
        self.journal = Journal(request.num_choices)
        self.recovery = Recovery(RECOVERY, router.budget)
        self.plan = FIRST
        self.error: TandemError | None = None
        self.is_cancelled = False
        self.is_over = False
        self._pages_kept_at: set[PrefillNode] = set()
        self._attempt: _Attempt | None = None
        router.budget.earn()

    @property
    def tokens(self) -> list[list[int]]:
        """What the client has, by choice."""
        return [choice.token_ids for choice in self.journal.choices]

    @property
    def facts(self) -> RequestFacts:
        """As `router.lifecycle.in_flight`."""
        return RequestFacts(
            num_prompt_tokens=len(self.request.prompt_ids),
            priority=self.request.priority,
            mixed_pool_tokens=self._router.mixed_pool_tokens,
            is_first_attempt=self.journal.attempt == 1,
        )

    def place(self) -> None:
        """Begin the next attempt, as soon as there are workers for it."""
        if self.is_over:
            return
        router, now_s = self._router, self._router.kernel.now_s
        try:
            route = router.choose_route(router.snapshot(), self.facts, self.plan.wishes)
        except NoWorkerError:
            router.wait(self)
            return
        if (rests_until_s := self.plan.rests_until_s(route)) > now_s:
            router.kernel.at(rests_until_s, self.place)
            return
        self._attempt = _Attempt(self, router, route)
        self._attempt.begin()

    def spec(self) -> AttemptSpec:
        request = self.request
        journal = tuple(
            ChoiceJournal(number, tuple(choice.token_ids), choice.is_finished)
            for number, choice in enumerate(self.journal.choices)
            if choice.token_ids
        )
        return AttemptSpec(
            key=AttemptKey(request.request_id, self.journal.attempt),
            priority=request.priority,
            prompt_ids=request.prompt_ids,
            params=request.sampling,
            num_choices=request.num_choices,
            journal=journal,
            age_s=self._router.kernel.now_s - request.arrived_s,
        )

    def keeps_pages(self, prefill: PrefillNode) -> None:
        self._pages_kept_at.add(prefill)

    def hear(self, worker: Node, key: AttemptKey, event: Any) -> None:
        if isinstance(event, TokenSampled):
            ended = event.ended.value if event.ended is not None else None
            token = TokenGiven(key.attempt, event.choice, event.index, event.token.token_id, ended)
            self.journal.accept(token)
        if self._attempt is not None and key.attempt == self.journal.attempt:
            self._follow(partial(self._attempt.handle, worker, event))

    def lost(self, worker: Node) -> None:
        if self._attempt is None:
            return
        self.recovery.note_death(worker.key)
        self._follow(partial(self._attempt.worker_lost, worker))

    def verdict(self, attempt: _Attempt) -> None:
        """Decode has had time to say whether prefill committed before its end."""
        if attempt is self._attempt:
            self._follow(attempt.verdict)

    def _follow(self, step: Callable[[], AttemptEnd | None]) -> None:
        attempt = self._attempt
        assert attempt is not None
        end = step()
        if end is None and not self.journal.is_finished:
            return
        self._attempt = None
        attempt.close()
        if end is None:
            self._finish()
            return
        try:
            self.plan = self.recovery.after(end, self._router.kernel.now_s)
        except TandemError as error:
            self.error = error
            self._finish()
            return
        self.journal.next_attempt()
        self.place()

    def cancel(self) -> None:
        """The client is gone."""
        if self.is_over:
            return
        self.is_cancelled = True
        if self._attempt is not None:
            self._attempt.close()
            self._attempt = None
        self._finish()

    def _finish(self) -> None:
        self.is_over = True
        for prefill in self._pages_kept_at:
            self._router.tell(prefill, partial(prefill.release_request, self.request.request_id))


class _Attempt:
    """As `router.lifecycle.attempt.Attempt`; what ends it is returned."""

    def __init__(self, in_flight: InFlight, router: Router, route: Route) -> None:
        self._in_flight = in_flight
        self._router = router
        self._route = route
        self._id = in_flight.request.request_id
        self._key = AttemptKey(self._id, in_flight.journal.attempt)
        self._prefill: PrefillNode | None = router.find(route.prefill) if route.prefill is not None else None
        self._decode: DecodeNode = router.find(route.decode)
        self._is_granted = self._is_admitted = self._is_prefill_done = False
        self._lost: Node | None = None
        self._ended_at_worker = [choice.is_finished for choice in in_flight.journal.choices]

    def begin(self) -> None:
        request, local = self._in_flight.request, self._route.max_local_tokens
        spec = self._in_flight.spec()
        self._router.hold(self._decode, request, computes=local >= len(request.prompt_ids))
        self._router.tell(self._decode, partial(self._decode.reserve, spec, local))
        if self._prefill is not None:
            self._start_prefill(self._prefill)

    def _start_prefill(self, prefill: PrefillNode) -> None:
        self._router.hold(prefill, self._in_flight.request, computes=True)
        self._router.tell(prefill, partial(prefill.start, self._in_flight.spec(), self._decode.incarnation))
        self._in_flight.keeps_pages(prefill)

    def handle(self, worker: Node, event: Any) -> AttemptEnd | None:
        router = self._router
        match event:
            case TokenSampled():
                if event.ended is not None:
                    self._ended_at_worker[event.choice] = True
            case GrantMade(grant):
                return self._granted(grant)
            case PromptStarted() if self._prefill is not None:
                router.note(self._prefill, self._id, steps=True)
            case ComputesHere():
                router.note(self._decode, self._id, steps=True)
                self._is_admitted = True
            case Admitted():
                self._is_admitted, self._lost = True, None
                router.note(self._decode, self._id, steps=True)
            case HandedOff() | PromptEnded():
                if isinstance(event, PromptEnded) or not self._in_flight.journal.has_first_tokens:
                    if self._in_flight.journal.is_finished:
                        return None
                    error = InternalError(f"{worker.key} ended without the first token of each choice")
                    return self._over(Fault.FAILED, worker, error)
                self._let_prefill_go()
            case AttemptFailed():
                return self._failed(worker, event.error)
        return None

    def _granted(self, grant: Any) -> AttemptEnd | None:
        self._is_granted = True
        self._router.note(self._decode, self._id, steps=False)
        if self._prefill is None:
            wishes = self._in_flight.plan.wishes
            try:
                key = choose_prefill(self._router.snapshot(), self._in_flight.facts, self._decode.key, FORMAT, wishes)
            except (NoWorkerError, IncompatibleError) as error:
                return self._over(Fault.UNSERVED, self._decode, error)
            self._prefill = self._router.find(key)
            self._start_prefill(self._prefill)
        self._router.tell(self._prefill, partial(self._prefill.attach, grant))
        return None

    def _let_prefill_go(self) -> None:
        self._is_prefill_done = True
        if self._prefill is not None:
            self._router.let_go(self._prefill, self._id)

    def _needs_prefill(self) -> bool:
        is_handed_over = self._is_admitted or self._is_prefill_done
        return not (is_handed_over and self._in_flight.journal.has_first_tokens)

    def _failed(self, worker: Node, error: Any) -> AttemptEnd | None:
        if worker is self._prefill and self._is_admitted and not self._needs_prefill():
            self._let_prefill_go()
            return None
        if self._lost is not None:
            return self._died(self._lost)
        prefill = self._prefill.key if self._prefill is not None else None
        return failure(error, worker.key, prefill, self._decode.key)

    def worker_lost(self, worker: Node) -> AttemptEnd | None:
        if worker is self._decode:
            return self._died(worker)
        if worker is self._prefill and self._needs_prefill():
            if not (self._is_granted and self._in_flight.journal.has_first_tokens):
                return self._died(worker)
            self._lost = worker
            self._router.kernel.after(_VERDICT_S, lambda: self._in_flight.verdict(self))
        return None

    def verdict(self) -> AttemptEnd | None:
        return self._died(self._lost) if self._lost is not None and self._needs_prefill() else None

    def _died(self, worker: Node) -> AttemptEnd:
        return self._over(Fault.DIED, worker, WorkerLostError(f"{worker.key} is lost"))

    def _over(self, fault: Fault, worker: Node, error: TandemError) -> AttemptEnd:
        prefill = self._prefill.key if self._prefill is not None else None
        return AttemptEnd(fault, worker.key, error, prefill, self._decode.key)

    def close(self) -> None:
        """Leave nothing behind, as `Attempt._close`."""
        router = self._router
        ended_by_itself = self._in_flight.journal.is_finished and all(self._ended_at_worker)
        if self._prefill is not None:
            if not ended_by_itself and not self._is_prefill_done:
                router.tell(self._prefill, partial(self._prefill.cancel, self._key))
            router.let_go(self._prefill, self._id)
        if not ended_by_itself or not self._is_admitted:
            router.tell(self._decode, partial(self._decode.cancel, self._key))
        router.let_go(self._decode, self._id)
