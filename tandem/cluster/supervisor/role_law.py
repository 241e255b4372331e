"""Which pool gives a worker to the other, to change its role: the law. Pure: both pools' decisions in, a change out.

A worker that changes its role serves again within seconds; a new one has to find room and to load the model. So where
both pools follow their load,

    one lacks a worker, and the other has one to spare  ─>  it goes from the other to the one, before one is started,
                                                            or in place of one that will serve much later

A pool lacks what makes it grow (`autoscale`); it has to spare what it has needed at no time of the last seconds, at its
mark. Between the two lies that law's band, so a worker does not go back for a chance. Both stay within their ranges,
and one change ends, and its figures settle, before the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tandem.cluster.supervisor.autoscale import SPARE_S, Decision, Range
from tandem.core.identity import WORKER_ROLES, Role

PAUSE_S = 6.0
"""Between the end of one change and the next: figures of the pools as they are now are needed."""


@dataclass(frozen=True, slots=True)
class RoleChange:
    """One worker goes from one pool to the other.

    Attributes:
        instead: of one that starts and is far from serving; else the pool that takes it becomes larger.
        inputs: the figures of both pools that it was decided from.
    """

    giver: Role
    taker: Role
    instead: bool
    why: str
    inputs: Mapping[str, float] = field(default_factory=dict)


class RoleLaw:
    """Of both pools. Not thread-safe."""

    def __init__(self) -> None:
        self._rests_until_s = -math.inf

    def decide(
        self,
        pools: Mapping[Role, Decision],
        ranges: Mapping[Role, Range],
        may_go: Callable[[Role, Role], bool],
        now_s: float,
        *,
        is_changing: bool,
    ) -> RoleChange | None:
        """To be called every few seconds.

        Args:
            pools: what the law of each pool says of it now.
            may_go: from the first pool to the second: `pools.flexible` allows it.
            is_changing: a worker is on its way from one pool to the other.
        """
        if is_changing:
            self._rests_until_s = now_s + PAUSE_S
        if now_s < self._rests_until_s:
            return None
        for giver, taker in (WORKER_ROLES, WORKER_ROLES[::-1]):
            gives, takes = pools[giver], pools[taker]
            instead = takes.num_far > 0
            is_within = gives.before > ranges[giver].least and (instead or takes.before < ranges[taker].most)
            if is_within and gives.spares and takes.lacks and may_go(giver, taker):
                why = f"{takes.why}; {giver} had {gives.spares} to spare for {SPARE_S:.0f} s"
                inputs = {f"{role}_{name}": value for role in pools for name, value in pools[role].inputs.items()}
                return RoleChange(giver, taker, instead, why, inputs)
        return None
