"""How much of a queue each tenant has, and whether that is less than its share. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Queue:
    weight: float
    num_waiting: int = 0


class TenantQueues:
    """Counts of those that wait, by tenant; costs the same for any number of tenants."""

    def __init__(self) -> None:
        # Invariant: has all and only tenants of which somebody waits; `_weight` is the sum of their weights.
        self._queues: dict[str, _Queue] = {}
        self._weight = 0.0

    def enter(self, owner: str, weight: float, num_requests: int) -> None:
        queue = self._queues.get(owner)
        if queue is None:
            queue = self._queues[owner] = _Queue(weight)
            self._weight += weight
        queue.num_waiting += num_requests

    def leave(self, owner: str) -> None:
        """One of its requests no longer waits."""
        queue = self._queues[owner]
        queue.num_waiting -= 1
        if not queue.num_waiting:
            del self._queues[owner]
            self._weight = self._weight - queue.weight if self._queues else 0.0

    def is_below_share(self, owner: str, weight: float, num_requests: int, room: float) -> bool:
        """Whether others wait, and with `num_requests` more the tenant has no more than its share of `room` places; one
        is everybody's."""
        queue = self._queues.get(owner)
        own, own_weight = (queue.num_waiting, queue.weight) if queue is not None else (0, weight)
        others = self._weight - (own_weight if queue is not None else 0.0)
        if len(self._queues) <= (queue is not None):
            return False
        return own + num_requests <= max(1.0, room * own_weight / (own_weight + others))
