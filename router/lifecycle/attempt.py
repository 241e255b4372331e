"""One attempt at a request: its two workers, what they are told, and what their events mean."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from functools import partial

from router.lifecycle.in_flight import InFlightRequest
from router.policy.choose import choose, choose_prefill
from router.policy.recovery import AttemptEnd, Fault, failure
from router.policy.route import Route
from router.request import events
from router.request.request import TokenGiven
from router.workers import wire
from router.workers.known_pages import TOLD_S, Foreseen
from router.workers.session import WorkerSession
from tandem.core import fault_points
from tandem.core.errors import (
    DrainingError,
    IncompatibleError,
    InternalError,
    NoWorkerError,
    TandemError,
    WorkerLostError,
)
from tandem.core.identity import Role, WorkerKey
from tandem.core.states import RequestState

_log = logging.getLogger(__name__)

# How long decode may take to say whether prefill's commit came before prefill's end: some steps of a busy worker.
_VERDICT_S = 0.5


class AttemptOver(Exception):
    """The attempt ended before the request did; both workers have been told to drop it."""

    def __init__(self, end: AttemptEnd) -> None:
        super().__init__(end.error.message)
        self.end = end


class Attempt:
    """Everything from the chosen workers to the end of the attempt."""

    def __init__(self, in_flight: InFlightRequest, route: Route) -> None:
        """`route` is of the present workers."""
        assert route.decode is not None
        self._in_flight = in_flight
        self._request_id = in_flight.request.request_id
        self._journal = in_flight.journal
        self._route = route
        self._workers = workers = in_flight.context.workers
        # `None` while decode has not said that it needs one, and for good where it computes by itself.
        self._prefill = workers.session(route.prefill) if route.prefill is not None else None
        self._decode = workers.session(route.decode)
        self._number = self._journal.attempt
        # Pages that its workers are about to have.
        self._foreseen: Foreseen = {}
        self._is_granted = False
        # When prefill was told of the grant, by the loop's clock; `None` before.
        self._attached_s: float | None = None
        self._is_prefill_started = False
        self._is_admitted = False
        # The loss of prefill, while decode has not said whether it had the pages before; the timer ends that wait.
        self._lost: events.WorkerLost | None = None
        self._verdict_timer: asyncio.TimerHandle | None = None
        # Whether prefill has nothing left to give: the pages are decode's, or there was nothing to hand off.
        self._is_prefill_done = False
        self._is_decode_leaving = False
        # Whether what prefill computed may be wrong. Decode hears of it in time: the pages that it has verified are
        # what prefill sealed, so they would stay there for other requests.
        self._may_be_wrong = False
        # Whether each choice was ended by a worker, which then holds nothing of it any more.
        # An earlier attempt's end is in the journal that this attempt's workers get.
        self._ended_at_worker = [choice.is_finished for choice in self._journal.choices]
        self._told_to_end = set[int]()  # choices of which decode was told that nobody wants more

    async def run(self) -> None:
        """Begin, and follow the events until every choice has ended.

        Raises:
            AttemptOver: a worker failed, refused, left or was lost.
            TandemError: the client, the deadline or the router ended the request.
        """
        why = "the router gave up"
        try:
            self._begin()
            self._in_flight.inbox.at_once = self._take_at_once
            while not self._journal.is_finished:
                self._handle(await self._in_flight.next_event())
            why = "every choice has ended"
        except (AttemptOver, TandemError) as error:
            why = str(error)
            raise
        finally:
            self._in_flight.inbox.at_once = None
            self._close(why)

    def _begin(self) -> None:
        """Both workers start at once: prefill computes while decode makes room. Or decode alone is asked."""
        in_flight, request, max_local_tokens = self._in_flight, self._in_flight.request, self._route.max_local_tokens
        num_tokens = len(request.prompt_ids)
        now_s, why = in_flight.context.clock.now(), self._route.why.value
        weighed = self._route.weighed
        in_flight.trace.attempt_began(now_s, self._number, self._prefill_key, self._decode.key, why, weighed)
        chosen = [worker.key for worker in (self._prefill, self._decode) if worker is not None]
        self._foreseen = self._workers.foresee(chosen, request.prompt_ids, request.cache_salt)
        self._decode.hold(
            self._request_id,
            in_flight.inbox,
            num_tokens,
            computes=max_local_tokens >= num_tokens,
            num_sequences=request.num_choices,
        )
        self._decode.send(
            wire.reserve(
                request,
                self._journal,
                age_s=in_flight.age_s,
                slack_s=in_flight.slack_s,
                max_local_tokens=max_local_tokens,
                unpaced=self._route.unpaced,
            )
        )
        if self._prefill is not None:
            self._start_prefill(self._prefill)
        fault_points.reach("router.sent")
        _log.debug(
            "attempt %d begins at prefill %s and decode %s, chosen by %s",
            self._number,
            self._prefill_key,
            self._decode.key,
            self._route.why,
        )

    def _start_prefill(self, prefill: WorkerSession) -> None:
        in_flight, request = self._in_flight, self._in_flight.request
        prefill.hold(self._request_id, in_flight.inbox, len(request.prompt_ids), computes=True)
        prefill.send(
            wire.start_prefill(
                request, self._journal, self._decode.info, age_s=in_flight.age_s, slack_s=in_flight.slack_s
            )
        )
        in_flight.pages_kept_at[prefill.key] = prefill

    # -- events

    def _handle(self, event: events.Event) -> None:
        if getattr(event, "attempt", self._number) != self._number:
            if isinstance(event, TokenGiven):
                self._in_flight.take_token(event)  # the journal counts it as stale
            return
        match event:
            case TokenGiven():
                self._token(event)
            case events.Granted():
                self._granted(event)
            case events.PrefillStarted():
                self._is_prefill_started = True
                if self._prefill is not None:
                    self._prefill.note_taken_up(self._request_id, steps=True)
                self._in_flight.note_prompt(Role.PREFILL, event.num_cached_tokens)
                self._in_flight.reach(RequestState.PREFILLING)
            case events.LocalPrefillStarted():
                self._computes_locally(event)
            case events.PromptScored():
                self._in_flight.take_prompt_scores(event)
            case events.Admitted():
                self._is_admitted = True
                self._forget_loss()
                self._decode.note_taken_up(self._request_id, steps=True)
                self._generates()
            case events.HandoffDone() | events.PrefillEnded():
                self._prefill_done(event)
            case events.AttemptFailed():
                self._failed(event)
            case events.WorkerLost():
                self._worker_lost(event)
            case events.WorkerSilent():
                self._worker_silent(event)
            case events.DecodeLeaves():
                self._decode_leaves(event)
            case events.MayMove():
                self._move()
            case events.WorkersChanged():
                self._ask_to_move()
            case events.WaitOver() if self._lost is not None and self._needs_prefill():
                raise self._died(self._lost)
            case _:  # ChoicesEnded, and WaitOver of a wait that is over
                pass

    def _take_at_once(self, event: events.Event) -> bool:
        """Most tokens change nothing but the text: they go to the client without the request's task, which a token
        that may change more wakes up."""
        if type(event) is not TokenGiven or event.attempt != self._number or event.finish_reason is not None:
            return False
        in_flight = self._in_flight
        if in_flight.life.state is not RequestState.DECODING or event.index == 0:
            return False
        self._take(event)
        if self._journal.is_finished:  # by a stop string, or with tokens that had come early
            in_flight.inbox.put(events.ChoicesEnded())
        return True

    def _take(self, token: TokenGiven) -> None:
        """It goes to the client. Where it brings its choice to a stop string, decode need not go on with that one."""
        self._in_flight.take_token(token)
        choices, number = self._journal.choices, token.choice
        if len(choices) == 1 or number >= len(choices) or self._journal.is_finished:
            return
        if choices[number].is_finished and not self._ended_at_worker[number] and number not in self._told_to_end:
            self._told_to_end.add(number)
            self._decode.send(wire.end_choice(self._request_id, self._number, number))

    def _token(self, token: TokenGiven) -> None:
        in_flight = self._in_flight
        if token.finish_reason is not None and token.choice < len(self._ended_at_worker):
            self._ended_at_worker[token.choice] = True
        self._take(token)
        if in_flight.life.state in (RequestState.QUEUED, RequestState.PREFILLING) and not self._journal.is_finished:
            if not self._journal.has_first_tokens:
                in_flight.reach(RequestState.PREFILLING)
            elif self._prefill is None:  # decode goes on by itself: there is no handoff
                self._generates()
            else:
                in_flight.reach(RequestState.HANDOFF)
        if token.index == 0:
            self._ask_to_move()

    def _granted(self, granted: events.Granted) -> None:
        self._decode.note_taken_up(self._request_id, steps=False)
        self._in_flight.note_pages()
        self._is_granted = True
        if self._prefill is None:
            self._prefill = self._find_prefill()
            self._in_flight.trace.attempts[-1].prefill = self._prefill.key.worker_id
            self._start_prefill(self._prefill)
        fault_points.reach("router.granted")
        self._prefill.send(wire.attach_grant(self._request_id, granted))
        self._attached_s = asyncio.get_running_loop().time()

    def _find_prefill(self) -> WorkerSession:
        """A prefill worker for decode's grant. Without one, decode gets its pages back while the request waits."""
        try:
            wishes, decode = self._in_flight.plan.wishes, self._decode
            self._workers.check_protocol(self._in_flight.request.protocol)
            key = choose_prefill(self._workers.snapshot(), self._in_flight.facts, decode.key, decode.kv_format, wishes)
            return self._workers.session(key)
        except (NoWorkerError, IncompatibleError) as error:
            raise self._over(Fault.UNSERVED, self._decode.key, error) from error

    def _computes_locally(self, event: events.LocalPrefillStarted) -> None:
        self._decode.note_taken_up(self._request_id, steps=True)
        self._in_flight.note_pages()
        self._is_admitted = True
        self._in_flight.note_prompt(Role.DECODE, event.num_cached_tokens)
        self._in_flight.reach(RequestState.PREFILLING)

    def _generates(self) -> None:
        """Decode has all it needs, and goes on alone."""
        self._in_flight.reach(RequestState.DECODING)
        self._in_flight.context.migrations.leave(self._in_flight.inbox)  # if it came here by a move, that is done
        self._ask_to_move()

    def _prefill_done(self, event: events.HandoffDone | events.PrefillEnded) -> None:
        if isinstance(event, events.PrefillEnded) or not self._journal.has_first_tokens:
            # Its tokens come before this on the same stream, and they would have ended the request.
            prefill = self._prefill_key or self._decode.key
            error = InternalError(f"{prefill} ended without the first token of each choice")
            raise self._over(Fault.FAILED, prefill, error)
        self._let_prefill_go()

    def _let_prefill_go(self) -> None:
        self._is_prefill_done = True
        if self._prefill is not None:
            self._prefill.let_go(self._request_id)

    # -- failures

    @property
    def _prefill_key(self) -> WorkerKey | None:
        return self._prefill.key if self._prefill is not None else None

    def _over(self, fault: Fault, worker: WorkerKey, error: TandemError) -> AttemptOver:
        return AttemptOver(AttemptEnd(fault, worker, error, self._prefill_key, self._decode.key))

    def _needs_prefill(self) -> bool:
        """Commit is the truth: once decode has the pages and the client the first tokens, prefill may even die."""
        is_handed_over = self._is_admitted or self._is_prefill_done
        return not (is_handed_over and self._journal.has_first_tokens)

    def _failed(self, failed: events.AttemptFailed) -> None:
        if failed.worker == self._prefill_key and self._is_admitted and not self._needs_prefill():
            _log.warning("prefill %s failed after decode had admitted the request: %s", failed.worker, failed.error)
            self._let_prefill_go()
            return
        self._may_be_wrong = failed.worker == self._prefill_key and isinstance(failed.error, InternalError)
        if self._lost is not None:
            raise self._died(self._lost)
        leaving = [worker.key for worker in (self._prefill, self._decode) if worker is not None and worker.is_leaving]
        raise AttemptOver(failure(failed.error, failed.worker, self._prefill_key, self._decode.key, leaving=leaving))

    def _worker_lost(self, lost: events.WorkerLost) -> None:
        if lost.worker == self._decode.key:
            raise self._died(lost)
        if lost.worker == self._prefill_key and self._needs_prefill():
            if not (self._is_granted and self._journal.has_first_tokens):
                raise self._died(lost)
            # It may have committed: its end and decode's word come on two streams.
            self._lost = lost
            loop = asyncio.get_running_loop()
            self._verdict_timer = loop.call_later(_VERDICT_S, self._in_flight.inbox.put, events.WaitOver())

    def _worker_silent(self, silent: events.WorkerSilent) -> None:
        """Leave a silent worker that has not begun with this attempt, where others are ready: no work is lost by that.

        What it has begun waits for it until it is lost. The pages of a writer that attached would stay in quarantine
        without it, and a prompt that it computes would be computed again.
        """
        worker, may_leave = silent.worker, self._in_flight.recovery.may_leave_early()
        if may_leave and self._is_untouched_by(silent) and self._has_place_without(worker):
            raise self._over(Fault.SILENT, worker, WorkerLostError(f"worker {worker} is silent, and has not begun"))
        if worker == (self._prefill_key or self._decode.key):
            self._in_flight.note_held_up()

    def _is_untouched_by(self, silent: events.WorkerSilent) -> bool:
        if silent.worker == self._decode.key:
            return not self._is_granted and not self._is_admitted
        has_attached = self._attached_s is not None and self._attached_s <= silent.heard_s
        return silent.worker == self._prefill_key and not self._is_prefill_started and not has_attached

    def _forget_loss(self) -> None:
        """Prefill's loss no longer matters: what fails from now on is decode's own."""
        self._lost = None
        if self._verdict_timer is not None:
            self._verdict_timer.cancel()
            self._verdict_timer = None

    def _died(self, lost: events.WorkerLost) -> AttemptOver:
        return self._over(Fault.LEFT if lost.is_planned else Fault.DIED, lost.worker, lost.error)

    # -- moving away from a decode worker that leaves

    def _decode_leaves(self, event: events.DecodeLeaves) -> None:
        if event.worker != self._decode.key:
            return
        self._is_decode_leaving = True
        # Another worker may become ready only later.
        self._workers.watch(self._in_flight.inbox)
        self._ask_to_move()

    def _ask_to_move(self) -> None:
        """Ask to leave the leaving worker, once the request has arrived there: prefill then has all its pages."""
        has_arrived = self._is_admitted and self._journal.has_first_tokens
        if self._is_decode_leaving and has_arrived:
            self._in_flight.context.migrations.ask(self._in_flight.inbox)

    def _has_place_without(self, worker: WorkerKey) -> bool:
        wishes = self._in_flight.recovery.wishes_without(worker)
        later = replace(self._in_flight.facts, is_first_attempt=False)
        try:
            self._workers.check_protocol(self._in_flight.request.protocol)
            choose(self._workers.snapshot(), later, wishes)
        except (NoWorkerError, IncompatibleError):
            return False
        return True

    def _move(self) -> None:
        if self._is_decode_leaving and self._has_place_without(self._decode.key):
            raise self._over(Fault.MOVED, self._decode.key, DrainingError(f"{self._decode.key} is leaving"))
        self._in_flight.context.migrations.leave(self._in_flight.inbox)  # it stays, and asks again when workers change

    # -- the end

    def _close(self, why: str) -> None:
        """Leave nothing behind: each worker that may still hold something of this attempt is told to drop it."""
        self._workers.unwatch(self._in_flight.inbox)
        self._forget_loss()
        ended_by_itself = self._journal.is_finished and all(self._ended_at_worker)
        if self._prefill is not None:
            if not ended_by_itself and not self._is_prefill_done:
                self._prefill.cancel(self._request_id, self._number, why)
            self._prefill.let_go(self._request_id)
        if not ended_by_itself or not self._is_admitted:
            self._decode.cancel(self._request_id, self._number, why, discards=self._may_be_wrong)
        self._decode.let_go(self._request_id)
        if self._foreseen:
            forget = partial(self._workers.pages.forget, self._foreseen)
            # Workers have told of the pages of an attempt that went well, or will soon.
            delay_s = TOLD_S if self._journal.is_finished else 0.0
            asyncio.get_running_loop().call_later(delay_s, forget)
