"""One attempt at a prompt of which a vector is wanted: a prefill worker alone, no pages for decode, no handoff."""

from __future__ import annotations

import logging
from dataclasses import replace

from router.lifecycle.attempt import AttemptOver
from router.lifecycle.in_flight import InFlightRequest
from router.policy.choose import choose
from router.policy.recovery import AttemptEnd, Fault, failure
from router.policy.route import Route
from router.request import events
from router.request.request import TokenGiven
from router.workers import wire
from tandem.core import fault_points
from tandem.core.errors import IncompatibleError, InternalError, NoWorkerError, TandemError, WorkerLostError
from tandem.core.identity import Role
from tandem.core.states import RequestState

_log = logging.getLogger(__name__)


class PoolingAttempt:
    """Everything from the chosen worker to the end of the attempt.

    A retry begins anew: the vector comes whole or not at all.
    """

    def __init__(self, in_flight: InFlightRequest, route: Route) -> None:
        """`route` is of the present workers."""
        assert route.prefill is not None
        self._in_flight, self._route = in_flight, route
        self._request_id = in_flight.request.request_id
        self._workers = in_flight.context.workers
        self._prefill = self._workers.session(route.prefill)
        self._number = in_flight.journal.attempt
        self._has_started = False
        self._is_pooled = False

    async def run(self) -> None:
        """Begin, and follow the events until the vector has come.

        Raises:
            AttemptOver: the worker failed, refused, left or was lost.
            TandemError: the client, the deadline or the router ended the request.
        """
        why = "the router gave up"
        try:
            self._begin()
            while not self._is_pooled:
                self._handle(await self._in_flight.next_event())
        except (AttemptOver, TandemError) as error:
            why = str(error)
            raise
        finally:
            if not self._is_pooled:
                self._prefill.cancel(self._request_id, self._number, why)
            self._prefill.let_go(self._request_id)

    def _begin(self) -> None:
        in_flight, request, prefill = self._in_flight, self._in_flight.request, self._prefill
        now_s = in_flight.context.clock.now()
        in_flight.trace.attempt_began(now_s, self._number, prefill.key, None, self._route.why.value)
        prefill.hold(self._request_id, in_flight.inbox, len(request.prompt_ids), computes=True)
        prefill.send(
            wire.start_prefill(request, in_flight.journal, None, age_s=in_flight.age_s, slack_s=in_flight.slack_s)
        )
        fault_points.reach("router.sent")
        _log.debug("attempt %d begins at prefill %s alone", self._number, prefill.key)

    def _handle(self, event: events.Event) -> None:
        if getattr(event, "attempt", self._number) != self._number:
            return
        match event:
            case events.PrefillStarted():
                self._has_started = True
                self._prefill.note_taken_up(self._request_id, steps=True)
                self._in_flight.note_prompt(Role.PREFILL, event.num_cached_tokens)
                self._in_flight.reach(RequestState.PREFILLING)
            case events.PromptPooled():
                self._is_pooled = True
                self._in_flight.take_vector(event.values)
            case TokenGiven() | events.PrefillEnded():
                error = InternalError(f"{self._prefill.key} gave no vector; is it of an older version?")
                raise self._over(Fault.FAILED, error)
            case events.AttemptFailed():
                leaving = [self._prefill.key] if self._prefill.is_leaving else []
                raise AttemptOver(failure(event.error, event.worker, self._prefill.key, None, leaving=leaving))
            case events.WorkerLost() if event.worker == self._prefill.key:
                raise self._over(Fault.LEFT if event.is_planned else Fault.DIED, event.error)
            case events.WorkerSilent() if event.worker == self._prefill.key:
                self._leave_early()
            case _:  # of an attempt, or of a wait, that is over
                pass

    def _leave_early(self) -> None:
        """Leave a silent worker that has not begun, where another is ready: no work is lost by that."""
        in_flight, key = self._in_flight, self._prefill.key
        if not self._has_started and in_flight.recovery.may_leave_early() and self._has_place_elsewhere():
            raise self._over(Fault.SILENT, WorkerLostError(f"worker {key} is silent, and has not begun"))
        in_flight.note_held_up()

    def _has_place_elsewhere(self) -> bool:
        facts = replace(self._in_flight.facts, is_first_attempt=False)
        try:
            choose(self._workers.snapshot(), facts, self._in_flight.recovery.wishes_without(self._prefill.key))
        except (NoWorkerError, IncompatibleError):
            return False
        return True

    def _over(self, fault: Fault, error: TandemError) -> AttemptOver:
        key = self._prefill.key
        return AttemptOver(AttemptEnd(fault, key, error, key, None))
