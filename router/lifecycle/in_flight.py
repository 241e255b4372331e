"""The facts of one request over all its attempts, and what it tells its client."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from router.lifecycle.context import RouterContext
from router.lifecycle.deadline import passed_deadline
from router.lifecycle.token_tally import Counted
from router.observe.trace import Trace
from router.policy.choose import choose
from router.policy.first_token import slack_of
from router.policy.prefix import HeldPrefix
from router.policy.recovery import FIRST, PLANNED, AttemptEnd, Fault, Recovery, RecoveryLimits
from router.policy.route import RequestFacts, Route
from router.request.choice_text import ChoiceText
from router.request.events import BrokenOff, Event, PromptScored, WaitOver, WorkerLost
from router.request.journal import Journal
from router.request.mailbox import Mailbox
from router.request.prompt_scores import PromptScores
from router.request.request import Delta, Request, TokenGiven, Usage
from router.workers import wire
from router.workers.session import WorkerSession
from tandem.core import fault_points
from tandem.core.errors import IncompatibleError, NoWorkerError, TandemError
from tandem.core.identity import Role, WorkerKey
from tandem.core.states import RequestLife, RequestState

_log = logging.getLogger(__name__)

_WAY = [RequestState.QUEUED, RequestState.PREFILLING, RequestState.HANDOFF, RequestState.DECODING]


class InFlightRequest:
    """Args: as of `router.lifecycle.serve.serve_request`."""

    def __init__(
        self,
        request: Request,
        context: RouterContext,
        inbox: Mailbox[Event],
        emit: Callable[[Delta], None],
        on_prompt: Callable[[Role], None],
        trace: Trace,
    ) -> None:
        self.request = request
        self.trace = trace
        self.context = context
        self.inbox = inbox
        self.journal = Journal(request.num_choices, _prompt_scores(request))
        self.life = RequestLife(request.request_id, request.arrived_s)
        trace.stamps = self.life.stamps
        limits = context.config.limits
        self.recovery = Recovery(
            RecoveryLimits(
                max_attempts=limits.max_attempts,
                local_prefill_tokens=context.config.scheduling.local_prefill_tokens,
                max_rest_s=limits.wait_for_worker_s,
            ),
            context.budget,
        )
        self.plan = FIRST
        #: Of its prompt, as of when it was placed first: its turn at workers stays as it is.
        self.slack_s = 0.0
        #: Every prefill worker that may keep pages of this request until it hears that the request has ended.
        self.pages_kept_at: dict[WorkerKey, WorkerSession] = {}
        self._num_cached_tokens: int | None = None
        self._emit = emit
        self._on_prompt = on_prompt
        self._texts = [ChoiceText(context.tokenizer, request, n) for n in range(request.num_choices)]
        # Events that were taken from the inbox and not handled yet.
        self._pending: deque[Event] = deque()
        self._last_failure: TandemError | None = None
        # When the first fault since the last token was noticed; `None` where there was none.
        self._fault_s: float | None = None
        # Invariant: true exactly while we hold a place in the admission queue.
        self._is_waiting = True
        self._first_token_s: list[float | None] = [None] * request.num_choices
        self._last_token_s: list[float | None] = [None] * request.num_choices
        self._second_token_s: list[float | None] = [None] * request.num_choices
        self._has_token = False  # whether the client has been given one
        context.budget.earn()
        context.load.came(request, context.turns.computed_share)
        self._turn = context.turns.join(request, inbox)
        self._counted = Counted(request, self._turn)

    @property
    def age_s(self) -> float:
        """Seconds since the request came, whatever came of earlier attempts: a retry keeps its place in queues."""
        return self.context.clock.now() - self.request.arrived_s

    # -- inputs

    async def next_event(self) -> Event:
        """The next event that concerns an attempt.

        Raises:
            CancelledError: the client is gone, or reads too slowly.
            DeadlineError: its time-out is over.
            DrainingError: the router leaves.
        """
        if not self._pending:
            self._pending.extend(await self.inbox.take())
        event = self._pending.popleft()
        if isinstance(event, BrokenOff):
            raise event.error
        self._note_loss(event)
        return event

    @contextmanager
    def deadline(self) -> Iterator[None]:
        """Inside, the client's time-out is watched."""
        if self.request.timeout_s is None:
            yield
            return
        left_s = max(0.0, self.request.timeout_s - self.age_s)
        error = passed_deadline(self.request)
        timer = asyncio.get_running_loop().call_later(left_s, self.inbox.put, BrokenOff(error))
        try:
            yield
        finally:
            timer.cancel()

    # -- placing

    async def wait_turn(self) -> None:
        """Wait until it is to be placed. Raises as `next_event`."""
        while not self._turn.has_come:
            await self.next_event()

    @property
    def facts(self) -> RequestFacts:
        request, scheduling = self.request, self.context.config.scheduling
        return RequestFacts(
            num_prompt_tokens=len(request.prompt_ids),
            prefix=self._known_prefix(),
            priority=request.priority,
            deadline_s=request.arrived_s + request.timeout_s if request.timeout_s is not None else None,
            mixed_pool_tokens=scheduling.mixed_pool_tokens,
            first_token_in_s=request.due_s - self.context.clock.now(),
            num_held_tokens=self.context.turns.num_waiting_tokens,
            is_first_attempt=self.journal.attempt == 1,
            pools=self.request.pools,
        )

    def _known_prefix(self) -> HeldPrefix[WorkerKey]:
        """Of no use where logits of the prompt are wanted, which a cached page does not have."""
        if self.journal.prompt_scores is not None or self.request.pools:
            return HeldPrefix()
        return self.context.workers.known_prefix(self.request.prompt_ids, self.request.cache_salt)

    async def find_route(self) -> Route:
        """The workers of the next attempt. Where there are none, it waits for up to `limits.wait_for_worker_s`:
        a new request only if one may come by what is known, a later attempt for any change.

        Raises:
            NoWorkerError: a pool is empty.
            IncompatibleError: no two workers pair, or one does not know what is asked for.
            TandemError: as `next_event`.
        """
        context, clock = self.context, self.context.clock
        wait_s = context.config.limits.wait_for_worker_s
        give_up_s = clock.now() + wait_s
        while True:
            try:
                context.workers.check_protocol(self.request.protocol)
                snapshot, facts = context.workers.snapshot(), self.facts
                route = choose(snapshot, facts, self.plan.wishes)
            except (NoWorkerError, IncompatibleError) as error:
                may_get_better = context.workers.snapshot().may_get_better(pools=self.request.pools)
                is_hopeless = self._last_failure is None and not may_get_better
                if is_hopeless or clock.now() >= give_up_s:
                    self._complete(error, wait_s)
                    raise
                self.note_held_up()
                wake_s = give_up_s
            else:
                wake_s = self.plan.rests_until_s(route)
                if clock.now() >= wake_s:
                    if self.journal.attempt == 1:
                        num_tokens = facts.num_prompt_tokens - facts.prefix.most_tokens
                        self.slack_s = slack_of(num_tokens, snapshot.prefill_tokens_per_s, self.request.timeout_s)
                    fault_points.reach("router.placed")
                    return route
            await self._change_of_workers(wake_s)
            if self._last_failure is not None:  # another worker that held the request may have been lost meanwhile
                await self._until_losses_are_clear(self._last_failure)

    async def _change_of_workers(self, until_s: float) -> None:
        """Wait until a worker comes or goes, for at most until then."""
        left_s = until_s - self.context.clock.now()
        timer = asyncio.get_running_loop().call_later(left_s, self.inbox.put, WaitOver())
        self.context.workers.watch(self.inbox)
        try:
            await self.next_event()
        finally:
            self.context.workers.unwatch(self.inbox)
            timer.cancel()

    async def _until_losses_are_clear(self, cause: TandemError) -> None:
        """Nobody gets the request while two workers may have died of it: wait for word of them.

        It comes when one is connected again, or when the supervisor has seen its end; in lease and grace it finds out.

        Raises:
            WorkersDiedError: two have died.
            WorkerLostError: no word came.
            TandemError: as `next_event`.
        """
        for event in self._pending:
            self._note_loss(event)
        context, transport = self.context, self.context.config.transport
        wait_s = transport.lease_s + transport.grace_s
        give_up_s = context.clock.now() + wait_s
        while self.recovery.must_wait(context.workers.fate, cause):
            if context.clock.now() >= give_up_s:
                raise self.recovery.nothing_was_heard(wait_s, cause)
            self.note_held_up()
            await self._change_of_workers(give_up_s)

    def _note_loss(self, event: Event) -> None:
        if isinstance(event, WorkerLost) and not event.is_planned:
            self.recovery.losses.note_lost(event.worker)

    def _complete(self, error: TandemError, waited_s: float) -> None:
        """Complete the error of a request that could not be placed: it names the failure before, if there was one."""
        error.request_id = self.request.request_id
        if self._last_failure is not None:
            error.message = f"{self._last_failure.message}; then for {waited_s:g} s: {error.message}"

    async def begin_anew(self, end: AttemptEnd) -> None:
        """The attempt is over: plan the next one, or raise the error that ends the request."""
        now_s = self.context.clock.now()
        _log.warning(
            "attempt %d ended in state %s after %d tokens: worker %s: %s (%s, %s)",
            self.journal.attempt,
            self.life.state.value,
            self.journal.num_tokens,
            end.worker,
            end.error.message,
            end.fault.value,
            end.error.code,
        )
        if self.life.state is not RequestState.QUEUED:
            self.life.to(RequestState.QUEUED, now_s)
        self.recovery.learn(end, now_s)
        if end.fault not in PLANNED:  # a move that was under way is over, and nobody would hear that its turn has come
            self.context.migrations.leave(self.inbox)
        try:
            if end.fault not in PLANNED and end.error.retryable:
                await self._until_losses_are_clear(end.error)
            self.plan = self.recovery.after(end)
        except TandemError as error:
            ours = copy.copy(error)  # the error of a lost worker is shared by all requests that it held
            ours.request_id = self.request.request_id
            raise ours from error
        self._last_failure = end.error
        self.trace.attempts[-1].ended = f"{end.fault.value}: {end.error.message}"
        self.journal.next_attempt()
        self._count(end.fault, end.error, now_s)

    def _count(self, fault: Fault, error: TandemError, now_s: float) -> None:
        metrics = self.context.metrics
        if fault in PLANNED and fault is not Fault.UNSERVED:
            metrics.moves.labels(fault.value).inc()
            return
        metrics.retries.labels(error.code).inc()
        if self._fault_s is None:
            self._fault_s = now_s

    # -- vectors

    def take_vector(self, values: tuple[float, ...]) -> None:
        """The client gets the vector of the prompt; nothing follows."""
        self._emit(Delta(0, "", [], "stop", vector=values))

    # -- tokens

    def take_token(self, token: TokenGiven) -> None:
        """Enter a token in the journal, and give the client what can be given out now."""
        ready = self.journal.accept(token)
        if not ready:
            return
        fault_points.reach("router.token" if self._has_token else "router.first_token")
        self._has_token = True
        self._measure(token.choice, len(ready))
        text = self._texts[token.choice]
        deltas = text.push(ready)
        if text.is_finished:
            self.journal.finish(token.choice, text.num_tokens)
            self.context.metrics.finished_choices.labels(deltas[-1].finish_reason).inc()
        if deltas and (scores := self.journal.prompt_scores) is not None and not scores.was_given:
            deltas[0].prompt_scores = scores.give()
        for delta in deltas:
            self._emit(delta)

    def note_held_up(self) -> None:
        """Nobody knows when its prompt will be begun: the worker that has it is silent or lost, or none is ready."""
        self._turn.held_up()

    def note_pages(self) -> None:
        """Decode has pages for it, or computes it."""
        self._turn.granted()

    def take_prompt_scores(self, scored: PromptScored) -> None:
        if self.journal.prompt_scores is not None:
            self.journal.prompt_scores.accept(scored.first, scored.tokens)

    def _measure(self, choice: int, num_tokens: int) -> None:
        now_s = self.context.clock.now()
        last_s, self._last_token_s[choice] = self._last_token_s[choice], now_s
        gap_s = None if last_s is None else now_s - last_s
        self.context.tally.gave(self._counted, now_s, num_tokens, gap_s)
        self.trace.token(now_s, num_tokens)
        if self._second_token_s[choice] is None:
            self._measure_begin(choice, num_tokens, gap_s, now_s)
        if self._fault_s is not None:
            self.context.metrics.recovery_s.observe(now_s - self._fault_s)
            self._fault_s = None

    def _measure_begin(self, choice: int, num_tokens: int, gap_s: float | None, now_s: float) -> None:
        """Its first two tokens; `gap_s` as of `TokenTally.gave`."""
        context, request = self.context, self.request
        if gap_s is None:
            if all(stamp is None for stamp in self._first_token_s):
                ttft_s = now_s - request.arrived_s
                context.metrics.ttft_s.observe(ttft_s)
                context.recorder.first_token(now_s, ttft_s)
                context.load.gave_first(request, ttft_s)
            self._first_token_s[choice] = now_s
        if gap_s is not None or num_tokens > 1:
            self._second_token_s[choice] = now_s
            context.metrics.second_token_s.observe(gap_s or 0.0)

    # -- states

    def reach(self, state: RequestState) -> None:
        """Move on to `state`, through the states between; nothing happens where it was reached already.

        Prefill's and decode's streams are not ordered against each other, so a state may become known late.
        """
        reached, wanted = _WAY.index(self.life.state), _WAY.index(state)
        now_s = self.context.clock.now()
        for step in _WAY[reached + 1 : wanted + 1]:
            self.life.to(step, now_s)
        self._leave_queue()

    def end(self, state: RequestState, outcome: str) -> None:
        """The request has ended in `state`: free what workers keep of it, measure and log it."""
        self.context.migrations.leave(self.inbox)
        self.context.tally.settle()  # its tokens are the turn's until that ends
        self._turn.end()
        for session in self.pages_kept_at.values():
            session.send(wire.release(self.request.request_id))
        if state is RequestState.FINISHED:
            self.reach(RequestState.DECODING if self.life.state is RequestState.HANDOFF else RequestState.PREFILLING)
        self._leave_queue()
        now_s = self.context.clock.now()
        self.life.to(state, now_s)
        self.trace.outcome = outcome
        metrics, dropped = self.context.metrics, self.journal.dropped
        phases = {phase: self.life.seconds_in(phase) for phase in _WAY}
        for phase, seconds in phases.items():
            metrics.phase_s.labels(phase.value).observe(seconds)
        metrics.request_s.observe(now_s - self.request.arrived_s)
        metrics.requests.labels(outcome).inc()
        num_prompt = len(self.request.prompt_ids) if self._num_cached_tokens is not None else 0
        self.context.tenants.count_end(self.request.tenant, outcome, num_prompt, self.journal.num_tokens)
        self._count_targets(outcome)
        if outcome == "finished":
            slowest_s = max((self._tpot_s(n) for n in range(self.request.num_choices)), default=0.0)
            self.context.load.ended(self.request, self.journal.num_tokens, slowest_s)
            for second_s, last_s in zip(self._second_token_s, self._last_token_s, strict=True):
                if second_s is not None and last_s is not None and last_s > second_s:
                    self._turn.had_place(last_s - second_s)
        for reason, count in dropped.items():
            if reason == "disagreed":
                metrics.disagreements.inc(count)
            else:
                metrics.dropped_tokens.labels(reason).inc(count)
        told = [f"{phase.value} {seconds:.6f} s" for phase, seconds in phases.items()]
        told += [f"{count} tokens dropped ({reason})" for reason, count in dropped.items()]
        _log.info(
            "request ended as %s in attempt %d with %d prompt and %d output tokens: %s",
            outcome,
            self.journal.attempt,
            len(self.request.prompt_ids),
            self.journal.num_tokens,
            ", ".join(told),
        )

    def _count_targets(self, outcome: str) -> None:
        """What its client, or the request itself, is to blame for says nothing of us; nor does what has no tokens."""
        request, targets = self.request, self.request.targets
        if targets is None or request.pools or outcome in ("cancelled", "invalid"):
            return
        is_over = outcome == "finished"
        begun = [(first_s, n) for n, first_s in enumerate(self._first_token_s) if first_s is not None]
        ttft_kept = bool(begun) and min(begun)[0] - request.arrived_s <= targets.ttft_s
        tpot_kept = is_over and all(self._tpot_s(n) <= targets.tpot_s for _, n in begun)
        self.context.tenants.count_targets(request.tenant, ttft_kept=is_over and ttft_kept, tpot_kept=tpot_kept)

    def _tpot_s(self, choice: int) -> float:
        """From the first token of a choice to its last, for each but the first."""
        first_s, last_s = self._first_token_s[choice], self._last_token_s[choice]
        num_more = len(self.journal.choices[choice].token_ids) - 1
        return (last_s - first_s) / num_more if first_s is not None and last_s is not None and num_more > 0 else 0.0

    def _leave_queue(self) -> None:
        if self._is_waiting:
            self._is_waiting = False
            self.context.admission.leave(self.request.tenant.owner)

    def note_prompt(self, computed_by: Role, num_cached_tokens: int) -> None:
        """A worker of this role computes the prompt; it had so many of its tokens in its cache.

        Only the first word counts: a retry also finds what an earlier attempt computed.
        """
        self._turn.begun(num_cached_tokens)
        self._on_prompt(computed_by)
        self.trace.computed_by = computed_by.value
        if self._num_cached_tokens is None:
            self.context.metrics.prompt_tokens.inc(len(self.request.prompt_ids))
            self._num_cached_tokens = self.trace.num_cached_tokens = num_cached_tokens

    def usage(self) -> Usage:
        return Usage(len(self.request.prompt_ids), self.journal.num_tokens, self._num_cached_tokens)


def _prompt_scores(request: Request) -> PromptScores | None:
    num_top = request.num_prompt_logprobs
    return PromptScores(len(request.prompt_ids), num_top) if num_top >= 0 else None
