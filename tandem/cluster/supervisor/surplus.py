"""Which processes go when a pool is made smaller. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from tandem.cluster.supervisor.slots import Phase, Slot
from tandem.core.identity import Role

_ORDER = {Phase.DRAINING: 0, Phase.STOPPING: 0, Phase.WAITING: 1, Phase.STARTING: 2, Phase.READY: 3}


def least_needed(pool: Collection[Slot], num: int) -> list[Slot]:
    """The first that goes first: who was started in the other role, and may go back; then who holds least; of
    equals the latest, so that low numbers stay.

    Of routers one goes that has another on its node, where there is such a one: each node has a port of its own.
    """
    left = sorted(pool, key=lambda slot: (_ORDER[slot.phase], slot.seat is slot.role, slot.num_requests, -slot.index))
    routers_on = Counter(slot.placement.node for slot in left if slot.role is Role.ROUTER and slot.placement)
    if not routers_on:
        return left[:num]
    going = []
    for _ in range(min(num, len(left))):
        first = min(left, key=lambda slot: (_ORDER[slot.phase], -_num_together(slot, routers_on)))
        left.remove(first)
        if first.placement:
            routers_on[first.placement.node] -= 1
        going.append(first)
    return going


def _num_together(slot: Slot, routers_on: Counter[str]) -> int:
    return routers_on[slot.placement.node] if slot.placement else 0
