"""The whole story of one request, from its place in the queue to its end.

    QUEUED      a pair of workers is chosen; `Reserve` goes to decode, `StartPrefill` to prefill, at once
    PREFILLING  prefill computes; when decode grants pages, prefill learns of the grant and writes into them
    HANDOFF     every choice has its first token, from prefill; the pages are on their way
    DECODING    decode has verified the pages and sends all further tokens
    FINISHED    every choice has ended

An attempt that a worker's loss or a refusal ends begins anew on another pair, with the journal: what the client has
seen stands, and the new attempt goes on behind it. `docs/life-of-a-request.md` tells the same hop by hop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from router.admission import Admission
from router.attempt import Attempt, AttemptOver
from router.choice_text import ChoiceText
from router.cluster import Cluster, Pair
from router.events import ClientGone, DeadlinePassed, Event, RouterLeaves, WaitOver
from router.journal import Journal
from router.mailbox import Mailbox
from router.placement import place
from router.request import Delta, Request, TokenGiven, Usage
from router.under_way import UnderWay
from router.worker_key import WorkerKey
from tandem.core.clock import Clock
from tandem.core.config import Config
from tandem.core.errors import CancelledError, DrainingError, NoWorkerError, TandemError
from tandem.core.logging import get_logger
from tandem.core.metrics import RouterMetrics
from tandem.core.states import RequestLife, RequestState
from tandem.core.tokenizer import Tokenizer

log = get_logger(__name__)

_WAY = [RequestState.QUEUED, RequestState.PREFILLING, RequestState.HANDOFF, RequestState.DECODING]


@dataclass(frozen=True)
class House:
    """What all stories of one router share."""

    config: Config
    clock: Clock
    cluster: Cluster
    admission: Admission
    metrics: RouterMetrics
    tokenizer: Tokenizer
    under_way: UnderWay


async def tell(request: Request, house: House, inbox: Mailbox[Event], emit: Callable[[Delta], None]) -> Usage:
    """Serve `request`; `emit` gets each delta as soon as it is settled.

    The request holds one place in `house.admission`, which is given back here. `inbox` may already hold what
    happened to the client.

    Raises:
        TandemError: what the request ended with; nothing of it is left at any worker then.
    """
    story = Story(request, house, inbox, emit)
    end = RequestState.FAILED
    try:
        with story.deadline():
            while True:
                pair = await story.find_pair()
                try:
                    await Attempt(story, pair).run()
                    break
                except AttemptOver as over:
                    story.begin_anew(over)
        end = RequestState.FINISHED
        return story.usage()
    except (CancelledError, asyncio.CancelledError):
        end = RequestState.CANCELLED
        raise
    finally:
        story.end(end)


class Story:
    """The facts of one request over all its attempts."""

    def __init__(self, request: Request, house: House, inbox: Mailbox[Event], emit: Callable[[Delta], None]) -> None:
        self.request = request
        self.house = house
        self.inbox = inbox
        self.journal = Journal(request.num_choices)
        self.life = RequestLife(request.request_id, request.arrived_s)
        self.num_cached_tokens: int | None = None
        self._emit = emit
        self._texts = [ChoiceText(house.tokenizer, request, n) for n in range(request.num_choices)]
        # Events that were taken from the inbox and not looked at yet.
        self._pending: deque[Event] = deque()
        self._avoid: set[WorkerKey] = set()
        self._last_failure: TandemError | None = None
        # Invariant: true exactly while we hold a place in the admission queue.
        self._is_waiting = True
        self._last_token_s: list[float | None] = [None] * request.num_choices

    # -- inputs

    async def next_event(self) -> Event:
        """The next event that concerns an attempt. Raises `CancelledError` when client or deadline end it all."""
        if not self._pending:
            self._pending.extend(await self.inbox.take())
        event = self._pending.popleft()
        if isinstance(event, RouterLeaves):
            raise DrainingError(event.why, request_id=self.request.request_id)
        if isinstance(event, ClientGone):
            raise CancelledError(f"cancelled: {event.why}", request_id=self.request.request_id)
        if isinstance(event, DeadlinePassed):
            raise CancelledError(
                f"the deadline of {self.request.timeout_s:g} s passed", request_id=self.request.request_id
            )
        return event

    @contextmanager
    def deadline(self) -> Iterator[None]:
        """Inside, the client's time-out is watched."""
        if self.request.timeout_s is None:
            yield
            return
        left_s = self.request.timeout_s - (self.house.clock.now() - self.request.arrived_s)
        timer = asyncio.get_running_loop().call_later(max(0.0, left_s), self.inbox.put, DeadlinePassed())
        try:
            yield
        finally:
            timer.cancel()

    # -- placing

    async def find_pair(self) -> Pair:
        """The workers of the next attempt.

        A first attempt takes what there is. A later one waits up to the lease for a worker to come back.

        Raises:
            NoWorkerError: a pool is empty.
            IncompatibleError: no two workers pair.
        """
        if self._last_failure is None:
            return self._place()
        house, lease_s = self.house, self.house.config.transport.lease_s
        timer = asyncio.get_running_loop().call_later(lease_s, self.inbox.put, WaitOver())
        try:
            with house.cluster.watched_by(self.inbox):
                while True:
                    try:
                        return self._place()
                    except NoWorkerError as error:
                        if isinstance(await self.next_event(), WaitOver):
                            raise NoWorkerError(
                                f"{self._last_failure.message}; then for {lease_s:g} s: {error.message}",
                                request_id=self.request.request_id,
                            ) from self._last_failure
        finally:
            timer.cancel()

    def _place(self) -> Pair:
        cluster = self.house.cluster
        return cluster.pair(place(cluster.snapshot(), len(self.request.prompt_ids), self._avoid))

    def begin_anew(self, over: AttemptOver) -> None:
        """The attempt is over: begin the next one, or raise the error that ended it when there is none."""
        error, attempt = over.error, self.journal.attempt
        error.request_id = self.request.request_id
        is_last = attempt >= self.house.config.limits.max_attempts
        log.warning(
            "attempt over",
            attempt=attempt,
            code=error.code,
            error=error.message,
            worker=str(over.worker),
            state=self.life.state.value,
            num_tokens=self.journal.num_tokens,
            retry=error.retryable and not is_last,
        )
        if is_last or not error.retryable:
            raise error
        self._last_failure = error
        self._avoid.update(over.suspects)
        self.journal.next_attempt()
        if self.life.state is not RequestState.QUEUED:
            self.life.to(RequestState.QUEUED, self.house.clock.now())
        self.house.metrics.retries.labels(error.code).inc()

    # -- tokens

    def take_token(self, token: TokenGiven) -> None:
        """Enter a token in the journal; give the client what may be given now."""
        ready = self.journal.accept(token)
        if not ready:
            return
        self._measure(token.choice, len(ready))
        text = self._texts[token.choice]
        deltas = text.push(ready)
        if text.is_finished:
            self.journal.finish(token.choice, text.num_tokens)
        for delta in deltas:
            self._emit(delta)

    def _measure(self, choice: int, num_tokens: int) -> None:
        now_s, metrics = self.house.clock.now(), self.house.metrics
        last_s = self._last_token_s[choice]
        if last_s is not None:
            metrics.itl_s.observe(now_s - last_s)
        elif all(stamp is None for stamp in self._last_token_s):
            metrics.ttft_s.observe(now_s - self.request.arrived_s)
        for _ in range(num_tokens - 1):  # they came early and were held back: the client gets them at once
            metrics.itl_s.observe(0.0)
        self._last_token_s[choice] = now_s

    # -- states

    def reach(self, state: RequestState) -> None:
        """Move on to `state`, through what lies between; nothing where it is already behind us.

        Prefill's and decode's streams are not ordered against each other, so a state may become known late.
        """
        behind, wanted = _WAY.index(self.life.state), _WAY.index(state)
        now_s = self.house.clock.now()
        for step in _WAY[behind + 1 : wanted + 1]:
            self.life.to(step, now_s)
        self._leave_queue()

    def end(self, state: RequestState) -> None:
        """The request has ended in `state`: measure and log it."""
        if state is RequestState.FINISHED:
            self.reach(RequestState.DECODING if self.life.state is RequestState.HANDOFF else RequestState.PREFILLING)
        self._leave_queue()
        now_s = self.house.clock.now()
        self.life.to(state, now_s)
        metrics, dropped = self.house.metrics, self.journal.dropped
        phases = {phase: self.life.seconds_in(phase) for phase in _WAY}
        for phase, seconds in phases.items():
            metrics.phase_s.labels(phase.value).observe(seconds)
        metrics.request_s.observe(now_s - self.request.arrived_s)
        metrics.requests.labels(state.value).inc()
        for reason, count in dropped.items():
            if reason == "disagreed":
                metrics.disagreements.inc(count)
            else:
                metrics.dropped_tokens.labels(reason).inc(count)
        log.info(
            "request ended",
            outcome=state.value,
            attempts=self.journal.attempt,
            num_prompt_tokens=len(self.request.prompt_ids),
            num_output_tokens=self.journal.num_tokens,
            **{f"{phase.value}_s": round(seconds, 6) for phase, seconds in phases.items()},
            **({"dropped_tokens": dict(dropped)} if dropped else {}),
        )

    def _leave_queue(self) -> None:
        if self._is_waiting:
            self._is_waiting = False
            self.house.admission.leave()

    def usage(self) -> Usage:
        return Usage(len(self.request.prompt_ids), self.journal.num_tokens, self.num_cached_tokens)
