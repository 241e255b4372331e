"""What sizes the pools of a simulation: by default the laws that ship, fed with what their supervisor would hear."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from tandem.cluster.supervisor.autoscale import Decision, PoolLaw, PoolSize, Range, Settings
from tandem.cluster.supervisor.demand import Demand, Sample
from tandem.cluster.supervisor.role_law import RoleChange, RoleLaw
from tandem.core.identity import WORKER_ROLES, Role


class Scaler(Protocol):
    """Says how many workers pools shall have, or which gives one to the other; asked every few seconds."""

    def decide(
        self, sample: Sample, sizes: Mapping[Role, PoolSize], now_s: float, /
    ) -> list[Decision] | RoleChange: ...


class Changing(Protocol):
    """Workers that may change their role."""

    @property
    def is_changing_role(self) -> bool: ...

    def may_go(self, giver: Role, taker: Role, /) -> bool: ...


class ShippedLaw:
    """As `tandem.cluster.supervisor.load_follower` asks it.

    Args:
        ranges: of the pools that follow their load.
    """

    def __init__(
        self, ranges: Mapping[Role, Range], settings: Settings, ttft_s: float, tpot_s: float, workers: Changing
    ) -> None:
        self._ranges, self._workers, self._roles = ranges, workers, RoleLaw()
        self._demand = Demand(ttft_s, tpot_s, settings.shrink_delay_s)
        self._laws = {role: PoolLaw(role, bounds, settings) for role, bounds in ranges.items() if bounds.follows_load}

    def decide(self, sample: Sample, sizes: Mapping[Role, PoolSize], now_s: float) -> list[Decision] | RoleChange:
        self._demand.hear(sample, now_s)
        found = {
            role: law.decide(self._demand.of(role, len(sizes[role].ready)), sizes[role], now_s)
            for role, law in self._laws.items()
        }
        if len(found) == len(WORKER_ROLES):
            workers = self._workers
            change = self._roles.decide(
                found, self._ranges, workers.may_go, now_s, is_changing=workers.is_changing_role
            )
            if change is not None:
                return change
        return list(found.values())
