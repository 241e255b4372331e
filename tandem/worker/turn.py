"""The order of all queues and batches of a worker: urgency and age in one number. Pure.

A level of priority is worth a number of seconds of waiting. So a request's turn is a point in time that never changes,
and it ages without a clock. Requests that come after this time go behind it. (Where the most urgent priority is below
0, they may come later by what that is worth.) So only finitely many requests go before it, however urgent new ones are.

**Prompts have slack**, which grows with their length (`router.policy.first_token`): the turn of a long one is later,
so shorter ones that come meanwhile are computed between its chunks. With equal priorities a prompt is overtaken only by
those that come within its slack, and of these only by shorter ones. What it generates has its turn without slack.
"""

from __future__ import annotations


def turn_of(priority: int, arrived_s: float, ageing_s: float, slack_s: float = 0.0) -> float:
    """The lowest goes first. `priority`: lower is more urgent; `arrived_s`: on the worker's clock; `ageing_s`: what a
    level of priority is worth; `slack_s`: of a prompt."""
    return arrived_s + priority * ageing_s + slack_s
