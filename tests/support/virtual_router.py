"""A router in virtual time: the real choice of workers, journal, recovery and budget; a script for what is around.

It does what `router.lifecycle` does, without HTTP, streams and tasks, and moves nobody away from a worker that leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from decode_worker.events import GrantMade, WriterSuspected
from kvtransfer.protocol.messages import AttemptKey
from router.policy.first_token import slack_of
from router.policy.losses import Fate
from router.policy.recovery import FIRST, PLANNED, AttemptEnd, Recovery, RecoveryLimits
from router.policy.retry_budget import RetryBudget
from router.policy.route import RequestFacts, Route, Wishes
from router.policy.snapshot import Snapshot
from router.policy.worker_load import WorkerLoad
from router.request.journal import Journal
from router.request.prompt_scores import PromptScores
from router.request.request import Request, TokenGiven
from tandem.core.errors import NoWorkerError, TandemError
from tandem.core.identity import Role, WorkerKey
from tandem.core.pages import pages_for
from tandem.sim.kernel import Kernel
from tandem.worker.prompt_scoring import PromptScoring
from tandem.worker.request import AttemptSpec, ChoiceJournal, PromptScored, TokenSampled
from tests.support.node import FORMAT, Node
from tests.support.prefill_node import PrefillNode
from tests.support.scripted_model import PAGE
from tests.support.virtual_attempt import Attempt

_LATENCY_S = 0.0005  # to a worker and back
_TOKENS_PER_S = 5000.0  # of prompts, as it has learnt
_NOTICE_S = 0.05  # until a broken stream is noticed
_PROOF_S = 0.3  # until the supervisor has told that a process ended
_MOST_DOUBT_S = 3.0  # as `router.lifecycle.in_flight`: lease and grace

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
    mixed_pool_tokens: see `RequestFacts`; 0: no prompt is computed at decode.
    is_colocated: see `Snapshot`.
    """

    def __init__(
        self,
        kernel: Kernel,
        place: Place,
        *,
        mixed_pool_tokens: int,
        is_colocated: bool = False,
    ) -> None:
        self.kernel = kernel
        self.is_colocated = is_colocated
        self.choose_route = place
        self.mixed_pool_tokens = mixed_pool_tokens
        self.workers: list[Node] = []
        self.budget = RetryBudget(1.0, 1000, kernel.clock)
        self.requests: dict[str, InFlight] = {}
        self._held: dict[Node, dict[str, _Held]] = {}
        self._proven: set[WorkerKey] = set()  # that their processes have ended
        self._waiting: list[Callable[[], object]] = []  # for a change of the workers

    # -- workers

    def add(self, worker: Node) -> None:
        """It is ready from now on, or its stream is open again."""
        self.workers.append(worker)
        self._held[worker] = {}
        self._changed()

    def _changed(self) -> None:
        waiting, self._waiting = self._waiting, []
        for look_again in waiting:
            look_again()

    def ended(self, worker: Node) -> None:
        """Its process has ended; its stream breaks."""
        self.kernel.after(_NOTICE_S, lambda: self.lost(worker))
        self.kernel.after(_PROOF_S, lambda: self._is_proven(worker.key))

    def _is_proven(self, key: WorkerKey) -> None:
        self._proven.add(key)
        self._changed()

    def fate(self, key: WorkerKey) -> Fate:
        """As `router.workers.registry`."""
        if any(worker.key == key for worker in self.workers):
            return Fate.HEARD
        return Fate.ENDED if key in self._proven else Fate.UNKNOWN

    def lost(self, worker: Node) -> None:
        """Its stream has broken."""
        if worker not in self.workers:
            return
        self.workers.remove(worker)
        for request_id in list(self._held.pop(worker)):
            self.requests[request_id].lost(worker)

    def snapshot(self) -> Snapshot:
        by_role = {role: [self._load(w) for w in self.workers if w.role is role] for role in Role}
        return Snapshot.of(
            by_role[Role.PREFILL],
            by_role[Role.DECODE],
            is_prefill_coming=not self.is_colocated,
            is_decode_coming=True,
            is_colocated=self.is_colocated,
        )

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
            prompt_steps=worker.scheduler.prompt_steps(),
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
        """Say something on the stream to a worker, in order; lost with the stream."""
        if worker in self.workers:
            worker.later(_LATENCY_S, command)

    def wait(self, look_again: Callable[[], object], until_s: float | None = None) -> None:
        """For a change of the workers, for at most until then."""
        self._waiting.append(look_again)
        if until_s is not None:
            self.kernel.at(until_s, self._changed)

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
        self.kernel.after(_LATENCY_S, lambda: self._arrived(worker, key, event))

    def _arrived(self, worker: Node, key: AttemptKey, event: Any) -> None:
        if worker in self.workers:
            self.requests[key.request_id].hear(worker, key, event)


class InFlight:
    """One request over all its attempts, as `router.lifecycle.in_flight` and `attempt` have it."""

    def __init__(self, router: Router, request: Request) -> None:
        self._router = router
        self.request = request
        num_top = request.num_prompt_logprobs
        scores = PromptScores(len(request.prompt_ids), num_top) if num_top >= 0 else None
        self.journal = Journal(request.num_choices, scores)
        self.recovery = Recovery(RECOVERY, router.budget)
        self.plan = FIRST
        self.error: TandemError | None = None
        self.is_cancelled = False
        self.is_over = False
        self.num_doubts = 0  # looks at workers of unknown fate, without an end
        self._pages_kept_at: set[PrefillNode] = set()
        self._attempt: Attempt | None = None
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
            router.wait(self.place)
            return
        if (rests_until_s := self.plan.rests_until_s(route)) > now_s:
            router.kernel.at(rests_until_s, self.place)
            return
        self._attempt = Attempt(self, router, route)
        self._attempt.begin()

    def spec(self) -> AttemptSpec:
        request, scores = self.request, self.journal.prompt_scores
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
            scoring=scores and PromptScoring(scores.num_top, len(scores.tokens)),
            cache_salt=request.cache_salt,
            slack_s=slack_of(len(request.prompt_ids), _TOKENS_PER_S),
        )

    def keeps_pages(self, prefill: PrefillNode) -> None:
        self._pages_kept_at.add(prefill)

    def hear(self, worker: Node, key: AttemptKey, event: Any) -> None:
        if self._attempt is None:
            return
        if isinstance(event, TokenSampled):
            ended = event.ended.value if event.ended is not None else None
            token = TokenGiven(key.attempt, event.choice, event.index, event.token.token_id, ended)
            if self.journal.accept(token) and self.journal.prompt_scores is not None:
                self.journal.prompt_scores.give()  # they are there before the first token is
        if isinstance(event, PromptScored) and key.attempt == self.journal.attempt:
            assert self.journal.prompt_scores is not None
            self.journal.prompt_scores.accept(event.first, event.tokens)
        if key.attempt == self.journal.attempt:
            self._follow(partial(self._attempt.handle, worker, event))

    def lost(self, worker: Node) -> None:
        if self._attempt is None:
            return
        self.recovery.losses.note_lost(worker.key)
        self._follow(partial(self._attempt.worker_lost, worker))

    def verdict(self, attempt: Attempt) -> None:
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
        now_s = self._router.kernel.now_s
        self.recovery.learn(end, now_s)
        self._begin_anew(end, now_s + _MOST_DOUBT_S)

    def _begin_anew(self, end: AttemptEnd, give_up_s: float) -> None:
        """Plan the next attempt, as soon as it is clear of all that were lost but one whether they died."""
        if self.is_over:
            return
        router = self._router
        try:
            if end.fault not in PLANNED and self.recovery.must_wait(router.fate, end.error):
                if router.kernel.now_s >= give_up_s:
                    raise self.recovery.nothing_was_heard(_MOST_DOUBT_S, end.error)
                self.num_doubts += 1
                router.wait(partial(self._begin_anew, end, give_up_s), give_up_s)
                return
            self.plan = self.recovery.after(end)
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
