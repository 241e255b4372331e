"""Who goes first in all queues and batches of a worker, and who gives way: urgency and age in one number. Pure.

A level of priority is worth so many seconds of waiting. So a request's turn is a point in time that never changes, and
nobody has to look at a clock to let it age. What comes later than a request's turn goes behind it (by what the most
urgent priority is worth, where that is below 0). So only finitely many go before it, however urgent all is that comes.
"""

from __future__ import annotations


def turn_of(priority: int, arrived_s: float, ageing_s: float) -> float:
    """The lowest goes first. `priority`: lower is more urgent; `arrived_s`: on the worker's clock; `ageing_s`: what a
    level of priority is worth."""
    return arrived_s + priority * ageing_s
