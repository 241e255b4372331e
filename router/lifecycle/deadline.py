"""Refuses a request that cannot be in time, before it costs anything."""

from __future__ import annotations

from router.lifecycle.context import RouterContext
from router.policy.first_token import check_in_time
from router.request.request import Request
from tandem.core.errors import DeadlineError


def check_deadline(request: Request, context: RouterContext) -> None:
    """Raises `UnmeetableDeadlineError` where its time-out is over before it could have its first token."""
    if request.timeout_s is None:
        return
    prefix = context.workers.known_prefix(request.prompt_ids, request.cache_salt)
    place_in_s = 0.0 if request.pools else context.admission.place_in_s(request.num_choices)
    in_s = context.turns.first_token_in_s(request, prefix.most_tokens, place_in_s)
    check_in_time(in_s, request.timeout_s, context.clock.now() - request.arrived_s, request.request_id)


def passed_deadline(request: Request) -> DeadlineError:
    """What a request ends with whose time-out passes."""
    return DeadlineError(f"the deadline of {request.timeout_s:g} s passed", request_id=request.request_id)
