"""Serves one request, from its place in the queue to its end.

    QUEUED      it waits in the router until its turn has come (`router.lifecycle.turns`)
                a pair of workers is chosen; `Reserve` goes to decode, `StartPrefill` to prefill, at once
    PREFILLING  prefill computes; when decode grants pages, prefill learns of the grant and writes into them
    HANDOFF     every choice has its first token, from prefill; the pages are on their way
    DECODING    decode has verified the pages and sends all further tokens
    FINISHED    every choice has ended

A prompt of the mixed pool is computed at decode: there is no handoff then, and PREFILLING goes over into DECODING.
A prompt that is pooled ends with PREFILLING (`router.lifecycle.pooling_attempt`).

Where the loss of a worker or a refusal ends an attempt, the next one gets the journal: what the client has seen
stands, and the new attempt goes on behind it. `router/policy/recovery.py` says how; `docs/life-of-a-request.md` tells
the same hop by hop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.lifecycle.attempt import Attempt, AttemptOver
from router.lifecycle.context import RouterContext
from router.lifecycle.in_flight import InFlightRequest
from router.lifecycle.pooling_attempt import PoolingAttempt
from router.observe.trace import Trace
from router.request.events import Event
from router.request.mailbox import Mailbox
from router.request.request import Delta, Request, Usage
from tandem.core.errors import CancelledError, DeadlineError, InvalidRequestError, TandemError
from tandem.core.identity import Role
from tandem.core.states import RequestState

_OUTCOMES = {code: code for code in ("cancelled", "deadline", "overloaded", "no_worker")} | {
    "draining": "no_worker",
    "rate_limit_exceeded": "rate_limited",
    "deadline_unmeetable": "deadline",
}


def outcome_of(error: TandemError) -> str:
    """What `tandem_requests_total` calls the end of a request with `error`."""
    return "invalid" if isinstance(error, InvalidRequestError) else _OUTCOMES.get(error.code, "failed")


async def serve_request(
    request: Request,
    context: RouterContext,
    inbox: Mailbox[Event],
    emit: Callable[[Delta], None],
    on_prompt: Callable[[Role], None],
    trace: Trace,
) -> Usage:
    """Serve `request`. It holds one place in the queue of `context.admission`, which is given back here.

    Args:
        inbox: gets all that happens to the request; it may already hold the end of its client.
        emit: called with each delta as soon as it is settled.
        on_prompt: called with the role that computes the prompt.
        trace: what happens is noted there, for people.

    Raises:
        TandemError: the error that ended the request; no worker holds anything of it then.
    """
    make_attempt = PoolingAttempt if request.pools else Attempt
    in_flight = InFlightRequest(request, context, inbox, emit, on_prompt, trace)
    state, outcome = RequestState.FAILED, "failed"
    try:
        with in_flight.deadline():
            await in_flight.wait_turn()
            while True:
                route = await in_flight.find_route()
                try:
                    await make_attempt(in_flight, route).run()
                    break
                except AttemptOver as over:
                    await in_flight.begin_anew(over.end)
        state, outcome = RequestState.FINISHED, "finished"
        return in_flight.usage()
    except TandemError as error:
        outcome, trace.error = outcome_of(error), error.message
        if isinstance(error, CancelledError | DeadlineError):
            state = RequestState.CANCELLED
        raise
    except asyncio.CancelledError:
        state, outcome = RequestState.CANCELLED, "cancelled"
        raise
    finally:
        in_flight.end(state, outcome)
