"""What sizes the pools of a simulation: by default the law that ships, fed with what its supervisor would hear."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from tandem.cluster.supervisor.autoscale import Decision, PoolLaw, PoolSize, Range, Settings
from tandem.cluster.supervisor.demand import Demand, Sample
from tandem.core.identity import Role


class Scaler(Protocol):
    """Says how many workers pools shall have; asked every few seconds."""

    def decide(self, sample: Sample, sizes: Mapping[Role, PoolSize], now_s: float, /) -> list[Decision]: ...


class ShippedLaw:
    """As `tandem.cluster.supervisor.load_follower` asks it.

    Args:
        ranges: of the pools that follow their load.
    """

    def __init__(self, ranges: Mapping[Role, Range], settings: Settings, ttft_s: float, tpot_s: float) -> None:
        self._demand = Demand(ttft_s, tpot_s, settings.shrink_delay_s)
        self._laws = {role: PoolLaw(role, bounds, settings) for role, bounds in ranges.items() if bounds.follows_load}

    def decide(self, sample: Sample, sizes: Mapping[Role, PoolSize], now_s: float) -> list[Decision]:
        self._demand.hear(sample, now_s)
        return [
            law.decide(self._demand.of(role, len(sizes[role].ready), now_s), sizes[role], now_s)
            for role, law in self._laws.items()
        ]
