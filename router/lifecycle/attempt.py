"""One attempt at a request: its two workers, what they are told, and what their events mean."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from router.lifecycle.in_flight import InFlightRequest
from router.policy.recovery import AttemptEnd, Fault, failure
from router.policy.route import Route, choose, choose_prefill
from router.request.events import (
    Admitted,
    AttemptFailed,
    DecodeLeaves,
    Event,
    Granted,
    HandoffDone,
    LocalPrefillStarted,
    MayMove,
    PrefillEnded,
    PrefillStarted,
    WaitOver,
    WorkerLost,
    WorkersChanged,
)
from router.request.request import TokenGiven
from router.workers import wire
from router.workers.session import WorkerSession
from tandem.core import fault_points
from tandem.core.errors import DrainingError, IncompatibleError, InternalError, NoWorkerError, TandemError
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
    """Everything between choosing the workers and the end of the attempt."""

    def __init__(self, in_flight: InFlightRequest, route: Route) -> None:
        """`route` is of the present workers."""
        self._in_flight = in_flight
        self._route = route
        self._workers = workers = in_flight.context.workers
        # `None` while decode has not said that it needs one, and for good where it computes by itself.
        self._prefill = workers.session(route.prefill) if route.prefill is not None else None
        self._decode = workers.session(route.decode)
        self._number = in_flight.journal.attempt
        self._is_granted = False
        self._is_admitted = False
        # Prefill's loss, while decode has not said whether it got the pages before; and when that takes too long.
        self._lost: WorkerLost | None = None
        self._verdict_timer: asyncio.TimerHandle | None = None
        # Whether prefill has nothing left to give: the pages are decode's, or there was nothing to hand off.
        self._is_prefill_done = False
        self._is_decode_leaving = False
        # Whether each choice was ended by a worker, which then holds nothing of it any more.
        # An earlier attempt's end is in the journal that this attempt's workers get.
        self._ended_at_worker = [choice.is_finished for choice in in_flight.journal.choices]

    async def run(self) -> None:
        """Begin, and follow the events until every choice has ended.

        Raises:
            AttemptOver: a worker failed, refused, left or was lost.
            TandemError: the client, the deadline or the router ended the request.
        """
        why = "the router gave up"
        try:
            self._begin()
            while not self._in_flight.journal.is_finished:
                self._handle(await self._in_flight.next_event())
            why = "every choice has ended"
        except (AttemptOver, TandemError) as error:
            why = str(error)
            raise
        finally:
            self._close(why)

    def _begin(self) -> None:
        """Both workers start at once: prefill computes while decode makes room. Or decode alone is asked."""
        in_flight, request = self._in_flight, self._in_flight.request
        max_local_tokens = self._route.max_local_tokens
        num_tokens = len(request.prompt_ids)
        self._decode.hold(request.request_id, in_flight.inbox, num_tokens, computes=max_local_tokens >= num_tokens)
        journal, age_s = in_flight.journal, in_flight.age_s
        self._decode.send(wire.reserve(request, journal, age_s=age_s, max_local_tokens=max_local_tokens))
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
        decode_info = self._decode.info
        if decode_info is None:  # never: a route takes greeted workers only
            raise InternalError(f"{self._decode.key} was chosen before its hello", request_id=request.request_id)
        prefill.hold(request.request_id, in_flight.inbox, len(request.prompt_ids), computes=True)
        prefill.send(wire.start_prefill(request, in_flight.journal, decode_info, age_s=in_flight.age_s))
        in_flight.pages_kept_at[prefill.key] = prefill

    # -- events

    def _handle(self, event: Event) -> None:
        if getattr(event, "attempt", self._number) != self._number:
            if isinstance(event, TokenGiven):
                self._in_flight.take_token(event)  # the journal counts it as stale
            return
        match event:
            case TokenGiven():
                self._token(event)
            case Granted():
                self._granted(event)
            case PrefillStarted():
                if self._prefill is not None:
                    self._prefill.note_begun(self._in_flight.request.request_id)
                self._in_flight.note_prompt(Role.PREFILL, event.num_cached_tokens)
                self._in_flight.reach(RequestState.PREFILLING)
            case LocalPrefillStarted():
                self._computes_locally(event)
            case Admitted():
                self._is_admitted = True
                self._forget_loss()
                self._decode.note_admitted(self._in_flight.request.request_id)
                self._generates()
            case HandoffDone() | PrefillEnded():
                self._prefill_done(event)
            case AttemptFailed():
                self._failed(event)
            case WorkerLost():
                self._worker_lost(event)
            case DecodeLeaves():
                self._decode_leaves(event)
            case MayMove():
                self._move()
            case WorkersChanged():
                self._ask_to_move()
            case WaitOver() if self._lost is not None and self._needs_prefill():
                raise self._died(self._lost)
            case _:  # WaitOver: of a wait that is over
                pass

    def _token(self, token: TokenGiven) -> None:
        in_flight = self._in_flight
        if token.finish_reason is not None and token.choice < len(self._ended_at_worker):
            self._ended_at_worker[token.choice] = True
        in_flight.take_token(token)
        if in_flight.life.state in (RequestState.QUEUED, RequestState.PREFILLING) and not in_flight.journal.is_finished:
            if not in_flight.journal.has_first_tokens:
                in_flight.reach(RequestState.PREFILLING)
            elif self._prefill is None:  # decode goes on by itself: there is no handoff
                self._generates()
            else:
                in_flight.reach(RequestState.HANDOFF)
        if token.index == 0:
            self._ask_to_move()

    def _granted(self, granted: Granted) -> None:
        request_id = self._in_flight.request.request_id
        self._decode.note_granted(request_id)
        self._is_granted = True
        if self._prefill is None:
            self._prefill = self._find_prefill()
            self._start_prefill(self._prefill)
        fault_points.reach("router.granted")
        self._prefill.send(wire.attach_grant(request_id, granted))

    def _find_prefill(self) -> WorkerSession:
        """Decode needs a prefill worker; where none is ready it gets its pages back while the request waits."""
        try:
            wishes, decode = self._in_flight.plan.wishes, self._decode
            return self._workers.session(
                choose_prefill(self._workers.snapshot(), decode.key, decode.kv_format, wishes)
            )
        except (NoWorkerError, IncompatibleError) as error:
            raise self._over(Fault.UNSERVED, self._decode.key, error) from error

    def _computes_locally(self, event: LocalPrefillStarted) -> None:
        self._decode.note_admitted(self._in_flight.request.request_id)
        self._is_admitted = True
        self._in_flight.note_prompt(Role.DECODE, event.num_cached_tokens)
        self._in_flight.reach(RequestState.PREFILLING)

    def _generates(self) -> None:
        """Decode has all it needs, and goes on alone."""
        self._in_flight.reach(RequestState.DECODING)
        self._in_flight.context.migrations.leave(self._in_flight.inbox)  # if it came here by a move, that is done
        self._ask_to_move()

    def _prefill_done(self, event: HandoffDone | PrefillEnded) -> None:
        if isinstance(event, PrefillEnded) or not self._in_flight.journal.has_first_tokens:
            # Its tokens come before this on the same stream, and they would have ended the request.
            prefill = self._prefill_key or self._decode.key
            error = InternalError(f"{prefill} ended without the first token of each choice")
            raise self._over(Fault.FAILED, prefill, error)
        self._let_prefill_go()

    def _let_prefill_go(self) -> None:
        self._is_prefill_done = True
        if self._prefill is not None:
            self._prefill.let_go(self._in_flight.request.request_id)

    # -- failures

    @property
    def _prefill_key(self) -> WorkerKey | None:
        return self._prefill.key if self._prefill is not None else None

    def _over(self, fault: Fault, worker: WorkerKey, error: TandemError) -> AttemptOver:
        return AttemptOver(AttemptEnd(fault, worker, error, self._prefill_key, self._decode.key))

    def _needs_prefill(self) -> bool:
        """Commit is the truth: once decode has the pages and the client the first tokens, prefill may even die."""
        is_handed_over = self._is_admitted or self._is_prefill_done
        return not (is_handed_over and self._in_flight.journal.has_first_tokens)

    def _failed(self, failed: AttemptFailed) -> None:
        if failed.worker == self._prefill_key and self._is_admitted and not self._needs_prefill():
            _log.warning("prefill %s failed after decode had admitted the request: %s", failed.worker, failed.error)
            self._let_prefill_go()
            return
        if self._lost is not None:
            raise self._died(self._lost)
        leaving = [worker.key for worker in (self._prefill, self._decode) if worker is not None and worker.is_leaving]
        raise AttemptOver(failure(failed.error, failed.worker, self._prefill_key, self._decode.key, leaving=leaving))

    def _worker_lost(self, lost: WorkerLost) -> None:
        if lost.worker == self._decode.key:
            raise self._died(lost)
        if lost.worker == self._prefill_key and self._needs_prefill():
            if not (self._is_granted and self._in_flight.journal.has_first_tokens):
                raise self._died(lost)
            # It may have committed: its end and decode's word come on two streams.
            self._lost = lost
            loop = asyncio.get_running_loop()
            self._verdict_timer = loop.call_later(_VERDICT_S, self._in_flight.inbox.put, WaitOver())

    def _forget_loss(self) -> None:
        """No verdict on prefill's loss is awaited: what fails from now on is decode's own."""
        self._lost = None
        if self._verdict_timer is not None:
            self._verdict_timer.cancel()
            self._verdict_timer = None

    def _died(self, lost: WorkerLost) -> AttemptOver:
        return self._over(Fault.LEFT if lost.is_planned else Fault.DIED, lost.worker, lost.error)

    # -- moving away from a decode worker that leaves

    def _decode_leaves(self, event: DecodeLeaves) -> None:
        if event.worker != self._decode.key:
            return
        self._is_decode_leaving = True
        # Another worker may become ready only later.
        self._workers.watch(self._in_flight.inbox)
        self._ask_to_move()

    def _ask_to_move(self) -> None:
        """What still is on its way to the leaving worker moves once it has arrived: its pages are then at prefill."""
        has_arrived = self._is_admitted and self._in_flight.journal.has_first_tokens
        if self._is_decode_leaving and has_arrived:
            self._in_flight.context.migrations.ask(self._in_flight.inbox)

    def _has_other_place(self) -> bool:
        wishes = self._in_flight.recovery.wishes_to_move(self._decode.key)
        later = replace(self._in_flight.facts, is_first_attempt=False)
        try:
            choose(self._workers.snapshot(), later, wishes)
        except (NoWorkerError, IncompatibleError):
            return False
        return True

    def _move(self) -> None:
        if self._is_decode_leaving and self._has_other_place():
            raise self._over(Fault.MOVED, self._decode.key, DrainingError(f"{self._decode.key} is leaving"))
        self._in_flight.context.migrations.leave(self._in_flight.inbox)  # it stays, and asks again when workers change

    # -- the end

    def _close(self, why: str) -> None:
        """Leave nothing behind: whatever a worker may still hold of this attempt, it is told to drop."""
        request_id = self._in_flight.request.request_id
        self._workers.unwatch(self._in_flight.inbox)
        self._forget_loss()
        ended_by_itself = self._in_flight.journal.is_finished and all(self._ended_at_worker)
        if self._prefill is not None:
            if not ended_by_itself and not self._is_prefill_done:
                self._prefill.cancel(request_id, self._number, why)
            self._prefill.let_go(request_id)
        if not ended_by_itself or not self._is_admitted:
            self._decode.cancel(request_id, self._number, why)
        self._decode.let_go(request_id)
