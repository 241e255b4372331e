"""The order of all queues and batches of a worker: urgency and age in one number. Pure.

A level of priority is worth a number of seconds of waiting. So a request's turn is a point in time that never changes,
and it ages without a clock. Requests that come after this time go behind it. (Where the most urgent priority is below
0, they may come later by what that is worth.) So only finitely many requests go before it, however urgent new ones are.
"""

from __future__ import annotations


def turn_of(priority: int, arrived_s: float, ageing_s: float) -> float:
    """The lowest goes first. `priority`: lower is more urgent; `arrived_s`: on the worker's clock; `ageing_s`: what a
    level of priority is worth."""
    return arrived_s + priority * ageing_s
