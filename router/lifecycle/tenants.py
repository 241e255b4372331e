"""What each tenant has used: its limits a minute, and its counts in the metrics."""

from __future__ import annotations

from collections.abc import Callable

from router.lifecycle.tenant_limits import TenantLimits
from router.request.tenant import ANYBODY, OTHER, Tenant
from tandem.core.clock import Clock
from tandem.core.metrics import RouterMetrics

#: Of keys without a name, so many have a label of their own in metrics; all others are counted together.
MAX_NAMELESS = 64


class Tenants(TenantLimits):
    """Of one router. Not thread-safe."""

    def __init__(self, metrics: RouterMetrics, clock: Clock, num_routers: Callable[[], int]) -> None:
        super().__init__(clock, num_routers)
        self._metrics = metrics
        self._nameless: set[str] = set()  # at most MAX_NAMELESS

    def count_end(self, tenant: Tenant, outcome: str, num_prompt_tokens: int = 0, num_output_tokens: int = 0) -> None:
        """A request has ended, or was refused. `num_prompt_tokens`: 0 where its prompt was not begun."""
        label, metrics = self._label(tenant), self._metrics
        metrics.tenant_requests.labels(label, outcome).inc()
        metrics.tenant_tokens.labels(label, "prompt").inc(num_prompt_tokens)
        metrics.tenant_tokens.labels(label, "output").inc(num_output_tokens)

    def count_targets(self, tenant: Tenant, *, ttft_kept: bool, tpot_kept: bool) -> None:
        """A request that was let in has been served, or has failed."""
        words = ("kept" if kept else "missed" for kept in (ttft_kept, tpot_kept))
        self._metrics.slo_requests.labels(self._label(tenant), *words).inc()

    def _label(self, tenant: Tenant) -> str:
        if tenant.is_named or tenant == ANYBODY or tenant.name in self._nameless:
            return tenant.name
        if len(self._nameless) >= MAX_NAMELESS:
            return OTHER
        self._nameless.add(tenant.name)
        return tenant.name
