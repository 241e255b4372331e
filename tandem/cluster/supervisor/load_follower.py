"""Lets pools follow their load: brings figures to the laws (`autoscale`, `role_law`), and their decisions to the pools.

What a law asks for and the host has no memory for is refused here, told, and asked for again; all else goes on. A
change of a role comes before growth: it takes seconds, and needs no room.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from tandem.cluster.supervisor import events as ev
from tandem.cluster.supervisor.autoscale import Decision, Followed, PoolLaw, PoolSize, Range, Settings
from tandem.cluster.supervisor.demand import Demand
from tandem.cluster.supervisor.load_figures import LoadFigures, RouterReport, WorkerReport
from tandem.cluster.supervisor.load_listener import Heard, LoadListener
from tandem.cluster.supervisor.pools import PoolState
from tandem.cluster.supervisor.role_law import RoleChange, RoleLaw
from tandem.cluster.supervisor.router_monitor import FollowedRouter
from tandem.cluster.supervisor.slots import Phase
from tandem.cluster.supervisor.worker_monitor import FollowedWorker
from tandem.core.errors import TandemError
from tandem.core.identity import WORKER_ROLES, Role

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Law:
    """By what pools follow their load.

    Attributes:
        ttft_s, tpot_s: the cluster's targets.
        page_size: tokens in a page.
    """

    settings: Settings = field(default_factory=Settings)
    ttft_s: float = 5.0
    tpot_s: float = 0.2
    page_size: int = 32


class LoadFollower:
    """Of both pools.

    Args:
        processes: all that live, as they are when it is looked at.
        beat_s: a heartbeat: how often they are looked at.
        check_room: raises `TandemError` where so many more workers have no room; blocks.
        changed: called when people can see something new.
    """

    def __init__(
        self,
        cluster: PoolState,
        law: Law,
        processes: Collection[FollowedWorker | FollowedRouter],
        beat_s: float,
        *,
        feed: Callable[[ev.Event], None],
        check_room: Callable[[dict[Role, int]], None],
        changed: Callable[[], None],
    ) -> None:
        self.pools: dict[Role, Followed] = {}
        self._cluster, self._law = cluster, law
        self._processes, self._beat_s = processes, beat_s
        self._feed, self._check_room, self._changed = feed, check_room, changed
        demand = Demand(law.ttft_s, law.tpot_s, law.settings.shrink_delay_s)
        self._listener = LoadListener(demand, LoadFigures(law.page_size), beat_s)
        self._roles = RoleLaw()

    async def run(self, opened: asyncio.Event) -> None:
        """Once the cluster has `opened`, until it is cancelled."""
        await opened.wait()
        while True:
            await asyncio.sleep(self._beat_s)
            await self._look(asyncio.get_running_loop().time())

    async def _look(self, now_s: float) -> None:
        if self._cluster.closing:
            return
        if self._listener.hear(self._worker_reports(now_s), self._router_reports(), now_s) is Heard.NOTHING_NEW:
            return
        self._take_ranges(self._cluster.sizes.ranges)
        decisions = {role: self._decide(role, now_s) for role in self.pools}
        if self._change_role(decisions, now_s):
            return
        for role, decision in decisions.items():
            await self._follow(role, decision)

    def _router_reports(self) -> list[RouterReport]:
        """Of those that serve, or should: nobody waits for what one that has been killed counted."""
        found = []
        for each in self._processes:
            slot = self._cluster.routers.get(each.name)
            if not isinstance(each, FollowedRouter) or each.load is None or slot is None:
                continue
            if slot.incarnation == each.incarnation and slot.listens:
                found.append(RouterReport(slot.incarnation, each.load_at, each.load))
        return found

    def _worker_reports(self, now_s: float) -> list[WorkerReport]:
        """Of those that serve."""
        found = []
        for each in self._processes:
            slot = self._cluster.workers.get(each.name)
            if not isinstance(each, FollowedWorker) or each.load is None or slot is None:
                continue
            if slot.incarnation == each.incarnation and slot.ready_at is not None:
                found.append(WorkerReport(slot.role, slot.incarnation, now_s - slot.ready_at, each.load))
        return found

    def _take_ranges(self, ranges: dict[Role, Range]) -> None:
        self.pools = {role: pool for role, pool in self.pools.items() if role in ranges}
        for role, bounds in ranges.items():
            if role not in self.pools:
                self.pools[role] = Followed(PoolLaw(role, bounds, self._law.settings))
            self.pools[role].law.range = bounds

    def _decide(self, role: Role, now_s: float) -> Decision:
        size = self._size(role)
        return self.pools[role].law.decide(self._listener.of(role, len(size.ready)), size, now_s)

    def _change_role(self, decisions: Mapping[Role, Decision], now_s: float) -> bool:
        """Let a worker go from one pool to the other where the law of roles says so."""
        if len(decisions) < len(WORKER_ROLES):
            return False
        cluster = self._cluster
        is_changing = cluster.is_changing_role
        change = self._roles.decide(decisions, cluster.sizes.ranges, cluster.may_go, now_s, is_changing=is_changing)
        if change is None:
            return False
        _log.info("a worker goes from %s to %s: %s (%s)", change.giver, change.taker, change.why, _shown(change.inputs))
        self._note(change, decisions)
        self._feed(ev.RoleGiven(change.giver, change.taker, change.instead))
        return True

    def _note(self, change: RoleChange, decisions: Mapping[Role, Decision]) -> None:
        for role, by in ((change.giver, -1), (change.taker, 0 if change.instead else 1)):
            before = decisions[role].before
            why = f"a worker goes from {change.giver} to {change.taker}: {change.why}"
            noted = replace(decisions[role], wanted=before + by, why=why, inputs=change.inputs)
            self.pools[role].latest = noted
            self.pools[role].changes.append(noted)

    async def _follow(self, role: Role, decision: Decision) -> None:
        pool = self.pools.get(role)
        if decision.wanted > decision.before:
            decision = await self._within_room(decision)
        if pool is None or self.pools.get(role) is not pool or self._cluster.wanted[role] != decision.before:
            return  # somebody has ordered otherwise meanwhile
        before, pool.latest = pool.latest, decision
        is_refused_anew = bool(decision.refused) and not (before and before.refused)
        if decision.is_change or is_refused_anew:
            pool.changes.append(decision)
            verb = "grows" if decision.wanted > decision.before else "shrinks" if decision.is_change else "stays"
            told = f"{decision.why}{'; ' + decision.refused if decision.refused else ''} ({_shown(decision.inputs)})"
            _log.info("%s %s from %d to %d: %s", role, verb, decision.before, decision.wanted, told)
        if is_refused_anew:
            self._feed(ev.GrowthRefused(role, decision.refused))
        if decision.is_change:
            self._feed(ev.LoadFollowed(role, decision.wanted))
        elif is_refused_anew:
            self._changed()

    async def _within_room(self, decision: Decision) -> Decision:
        """As much of the growth as the host has room for; who comes from the other pool has its room."""
        refused = ""
        largest_free = min(decision.wanted, decision.before + self._cluster.num_given_up(decision.role))
        for wanted in range(decision.wanted, largest_free, -1):
            try:
                await asyncio.to_thread(self._check_room, {decision.role: wanted - largest_free})
            except TandemError as error:
                refused = error.message
            else:
                return replace(decision, wanted=wanted, refused=refused)
        return replace(decision, wanted=largest_free, refused=refused)

    def _size(self, role: Role) -> PoolSize:
        slots = [slot for slot in self._cluster.slots.of(role).values() if slot.counts]
        starting = [slot for slot in slots if slot.phase is Phase.STARTING]
        return PoolSize(
            wanted=self._cluster.wanted[role],
            ready=frozenset(slot.incarnation for slot in slots if slot.phase is Phase.READY),
            starting=frozenset(slot.incarnation for slot in starting),
            changing=frozenset(slot.incarnation for slot in starting if slot.is_heir),
            num_leaving=len(self._cluster.slots.of(role)) - len(slots),
            num_unplaced=sum(slot.is_unplaced for slot in slots),
        )


def _shown(inputs: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.6g}" for name, value in inputs.items())
