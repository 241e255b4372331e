"""Serves one request, from its place in the queue to its end.

    QUEUED      a pair of workers is chosen; `Reserve` goes to decode, `StartPrefill` to prefill, at once
    PREFILLING  prefill computes; when decode grants pages, prefill learns of the grant and writes into them
    HANDOFF     every choice has its first token, from prefill; the pages are on their way
    DECODING    decode has verified the pages and sends all further tokens
    FINISHED    every choice has ended

A prompt of the mixed pool is computed at decode: there is no handoff then, and PREFILLING goes over into DECODING.

An attempt that a worker's loss or a refusal ends begins anew, with the journal: what the client has seen stands, and
the new attempt goes on behind it. `router/policy/recovery.py` says how; `docs/life-of-a-request.md` tells the same hop
by hop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.lifecycle.attempt import Attempt, AttemptOver
from router.lifecycle.context import RouterContext
from router.lifecycle.in_flight import InFlightRequest
from router.request.events import Event
from router.request.mailbox import Mailbox
from router.request.request import Delta, Request, Usage
from tandem.core.errors import CancelledError, DeadlineError, TandemError
from tandem.core.identity import Role
from tandem.core.states import RequestState

# Error codes that `tandem_requests_total` tells apart from "failed".
_OUTCOMES = {
    "cancelled": "cancelled",
    "deadline": "deadline",
    "overloaded": "overloaded",
    "no_worker": "no_worker",
    "draining": "no_worker",
}


async def serve_request(
    request: Request,
    context: RouterContext,
    inbox: Mailbox[Event],
    emit: Callable[[Delta], None],
    on_prompt: Callable[[Role], None],
) -> Usage:
    """Serve `request`; `emit` gets each delta as soon as it is settled, `on_prompt` the role that computes the prompt.

    The request holds one place in `context.admission`, which is given back here. `inbox` may already hold what
    happened to the client.

    Raises:
        TandemError: what the request ended with; nothing of it is left at any worker then.
    """
    in_flight = InFlightRequest(request, context, inbox, emit, on_prompt)
    state, outcome = RequestState.FAILED, "failed"
    try:
        with in_flight.deadline():
            while True:
                route = await in_flight.find_route()
                try:
                    await Attempt(in_flight, route).run()
                    break
                except AttemptOver as over:
                    in_flight.begin_anew(over.end)
        state, outcome = RequestState.FINISHED, "finished"
        return in_flight.usage()
    except TandemError as error:
        outcome = _OUTCOMES.get(error.code, "failed")
        if isinstance(error, CancelledError | DeadlineError):
            state = RequestState.CANCELLED
        raise
    except asyncio.CancelledError:
        state, outcome = RequestState.CANCELLED, "cancelled"
        raise
    finally:
        in_flight.end(state, outcome)
