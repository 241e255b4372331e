"""What a simulated cluster is. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtransfer.layout import KvFormat, LayoutId
from router.request.tenant import ANYBODY, Tenant
from tandem.cluster.supervisor.autoscale import Range, Settings
from tandem.core.identity import Role
from tandem.core.step_times import StepTimes
from tandem.core.worker_types import Power
from tandem.sim.cores import Slowdowns
from tandem.sim.faults import FaultShape
from tandem.sim.tiers import TierShape
from tandem.worker.batch import SchedulerLimits


@dataclass(frozen=True, slots=True)
class WorkerType:
    """What a worker costs, an hour, and what it draws. `name`: by which types differ."""

    name: str = ""
    price: float = 0.0
    power: Power = field(default_factory=lambda: Power(0.0, 0.0))


ANY_TYPE = WorkerType()


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Workers of one role, all alike but for `others`.

    num_workers: with which it begins.
    times: of their steps; `None`: those of the whole world.
    bounds: between which it follows its load; `None`: it does not.
    type: of these workers, and of those that are started later.
    others: of other types in the same pool.
    """

    num_workers: int
    num_pages: int
    limits: SchedulerLimits
    times: StepTimes | None = None
    bounds: Range | None = None
    type: WorkerType = ANY_TYPE
    others: tuple[PoolShape, ...] = ()

    @property
    def groups(self) -> tuple[PoolShape, ...]:
        return self, *self.others


@dataclass(frozen=True, slots=True)
class TenantShape:
    """Whose requests they are. `priority`: of all of them; lower goes first."""

    tenant: Tenant = ANYBODY
    priority: int = 0


@dataclass(frozen=True, slots=True)
class KindShape:
    """What requests of one class ask for.

    Attributes:
        priority: lower goes first.
        timeout_s: from its arrival; `None`: its client waits for ever.
        ttft_ms, tpot_ms: by when it wants tokens; 0: the cluster's.
    """

    priority: int = 0
    timeout_s: float | None = None
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class WorldShape:
    """Attributes:
    bytes_per_s, latency_s: of the way out of a prefill worker.
    message_s: from the router to a worker, or back.
    report_s: a worker that computes tells of itself so often.
    mixed_pool_tokens: the longest prompt that a decode worker may compute alone; endless: any, 0: none.
    start_s: that a worker needs to be ready.
    look_s: between two looks of the supervisor at the load: a heartbeat.
    flexible: workers that may serve in the other role than the one they were started in.
    change_s: in which one that holds nothing changes its role.
    ttft_s, tpot_s: by when tokens are wanted.
    settings: of the law by which pools follow their load.
    slowdowns: of steps and messages beside steps, where all workers share one host's cores; `None`: each has its own.
    faults: who dies when, and which ways become slow.
    prefix_cache: workers keep pages of prompts, and requests go where theirs are.
    tiers: that each worker has below its pool, where `prefix_cache`; `None`: none.
    names_sessions: requests say of which conversation they are a turn, so that the router knows its sessions.
    tenants: by the names that requests have.
    kinds: classes by the names that requests have; their priority counts, and not that of their tenant.
    ageing_s: what a level of priority is worth.
    max_waiting: requests that may wait, beyond which routers refuse some; `None`: whoever comes waits.
    changed: how a worker serves that has come from the other role, where its type is none of this pool's; by role and
        the name of its type.
    num_routers: that take the requests, each of them any.
    tells_changes: workers tell one router, too, at once when the number of their requests has changed, as they tell
        several.
    seed: of which router a request comes to.
    """

    prefill: PoolShape
    decode: PoolShape
    kv_format: KvFormat
    times: StepTimes
    bytes_per_s: float
    latency_s: float
    message_s: float
    report_s: float
    mixed_pool_tokens: float = 0
    start_s: float = 60.0
    look_s: float = 2.0
    flexible: int = 0
    change_s: float = 0.5
    ttft_s: float = 1.0
    tpot_s: float = 0.05
    settings: Settings = field(default_factory=Settings)
    slowdowns: Slowdowns | None = None
    faults: FaultShape = field(default_factory=FaultShape)
    prefix_cache: bool = False
    tiers: TierShape | None = None
    names_sessions: bool = False
    tenants: Mapping[str, TenantShape] = field(default_factory=dict)
    kinds: Mapping[str, KindShape] = field(default_factory=dict)
    ageing_s: float = 1.0
    max_waiting: int | None = None
    changed: Mapping[tuple[Role, str], PoolShape] = field(default_factory=dict)
    num_routers: int = 1
    tells_changes: bool = False
    seed: int = 0

    @property
    def layout(self) -> LayoutId:
        """Of all pages."""
        return self.kv_format.layout

    def kind(self, name: str) -> KindShape:
        """Of requests of this class; empty: of those of none."""
        return self.kinds[name] if name else KindShape()

    def pool(self, role: Role) -> PoolShape:
        return self.prefill if role is Role.PREFILL else self.decode

    def worker(self, role: Role, type_name: str) -> PoolShape:
        """As workers of this type serve in this role."""
        pool = self.pool(role)
        found = (group for group in pool.groups if group.type.name == type_name)
        return next(found, None) or self.changed.get((role, type_name), pool)

    @property
    def types(self) -> dict[str, WorkerType]:
        """By their names."""
        groups = (*self.prefill.groups, *self.decode.groups)
        return {group.type.name: group.type for group in groups}

    @property
    def is_colocated(self) -> bool:
        """There are no prefill workers, and none come: decode workers compute all prompts."""
        num = sum(group.num_workers for group in self.prefill.groups)
        return not num and Role.PREFILL not in self.ranges

    @property
    def ranges(self) -> dict[Role, Range]:
        """Of the pools that follow their load."""
        pools = {Role.PREFILL: self.prefill, Role.DECODE: self.decode}
        return {role: pool.bounds for role, pool in pools.items() if pool.bounds and pool.bounds.follows_load}
