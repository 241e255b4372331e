"""When a request that comes now would have its first token, as far as can be told, and when it is due. Pure."""

from __future__ import annotations

import math

from router.policy.gate import Room
from tandem.core.errors import UnmeetableDeadlineError

#: The slack of a prompt, in times of its computation alone.
_PATIENCE = 16.0


def first_token_in_s(tokens_in_front: float, num_tokens: int, place_in_s: float, room: Room) -> float:
    """Seconds. What is not known yet takes none, so that nobody is refused for a guess.

    Args:
        tokens_in_front: of prompts that go before.
        num_tokens: of the prompt; both without those that are found in caches.
        place_in_s: until there is a place for it in decode's batches.
    """
    if not room.tokens_per_s or not room.num_computing:
        return place_in_s
    return max(place_in_s, tokens_in_front / room.tokens_per_s / room.num_computing) + num_tokens / room.tokens_per_s


def check_in_time(in_s: float, timeout_s: float, age_s: float, request_id: str) -> None:
    """Raises `UnmeetableDeadlineError` where a request's time-out is over before it could have its first token.

    Args:
        in_s: from now on, as of `first_token_in_s`.
        timeout_s: from its arrival.
        age_s: since that.
    """
    if in_s > timeout_s - age_s > 0:  # what is over already ends as any that passes
        raise UnmeetableDeadlineError(
            f"the deadline of {timeout_s:g} s cannot be met: the first token is expected in {in_s:.1f} s; try again "
            "later, or with a longer timeout",
            retry_after_s=in_s,
            request_id=request_id,
        )


def slack_of(num_tokens: int, tokens_per_s: float, timeout_s: float | None = None) -> float:
    """Seconds that the first token of a prompt is due later than that of one which takes no time.

    Several times its own computation: who sends a long prompt expects to wait, and a short one that goes between its
    chunks delays it by little. So prompts are taken by the earliest due date (Liu and Layland, JACM 1973), and one is
    overtaken only by shorter ones that come within its slack.

    Args:
        num_tokens: of the prompt, without those that are found in caches.
        tokens_per_s: of prompts, that a worker computes; 0: not known yet, and prompts are taken as they come.
        timeout_s: after which nobody waits for it any more: it is computed before that.
    """
    own_s = num_tokens / tokens_per_s if tokens_per_s else 0.0
    most_s = max(0.0, timeout_s - 2 * own_s) if timeout_s is not None else math.inf
    return min(_PATIENCE * own_s, most_s)
