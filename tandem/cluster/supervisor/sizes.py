"""How many processes each pool shall have, between which bounds, and how often its load has changed that. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tandem.cluster.supervisor import events as ev
from tandem.cluster.supervisor.autoscale import Range
from tandem.core.identity import WORKER_ROLES, Role


@dataclass
class Sizes:
    """Attributes:
    wanted: processes of each pool.
    ranges: of the pools that follow their load, and of no others.
    """

    wanted: dict[Role, int] = field(default_factory=lambda: dict.fromkeys(Role, 0))
    ranges: dict[Role, Range] = field(default_factory=dict)
    _counts: dict[Role, ev.PoolSize] = field(
        default_factory=lambda: {role: ev.PoolSize(role, 0, 0, 0) for role in WORKER_ROLES}
    )

    def open(self, intent: ev.Intent) -> None:
        """As an earlier supervisor left it."""
        self.wanted, self.ranges = dict(intent.wanted), dict(intent.ranges)

    def take(self, event: ev.WantedChanged | ev.LoadFollowed | ev.RoleGiven | ev.GrowthRefused) -> None:
        """Nothing happens where a pool that no longer follows its load was to follow it."""
        match event:
            case ev.WantedChanged():
                self._change(event)
            case ev.LoadFollowed() if event.role in self.ranges:
                before, counts = self.wanted[event.role], self._counts[event.role]
                self.wanted[event.role] = event.workers
                self._counts[event.role] = replace(
                    counts,
                    num_grown=counts.num_grown + (event.workers > before),
                    num_shrunk=counts.num_shrunk + (event.workers < before),
                )
            case ev.RoleGiven() if {event.giver, event.taker} <= self.ranges.keys():
                self.wanted[event.giver] -= 1
                self.wanted[event.taker] += not event.instead
                counts = self._counts[event.taker]
                self._counts[event.taker] = replace(counts, num_taken=counts.num_taken + 1)
            case ev.GrowthRefused() if event.role in self.ranges:
                counts = self._counts[event.role]
                self._counts[event.role] = replace(counts, num_refused=counts.num_refused + 1)

    def _change(self, event: ev.WantedChanged) -> None:
        if event.most is None or event.most <= event.workers:
            self.ranges.pop(event.role, None)
            self.wanted[event.role] = event.workers
            return
        self.ranges[event.role] = Range(event.workers, event.most)
        self.wanted[event.role] = min(max(self.wanted[event.role], event.workers), event.most)

    @property
    def told(self) -> tuple[ev.PoolSize, ...]:
        """Of the pools of workers, for routers' metrics."""
        return tuple(self._told(role) for role in WORKER_ROLES)

    def _told(self, role: Role) -> ev.PoolSize:
        wanted = self.wanted.get(role, 0)
        bounds = self.ranges.get(role, Range(wanted, wanted))
        return replace(self._counts[role], wanted=wanted, least=bounds.least, most=bounds.most)
