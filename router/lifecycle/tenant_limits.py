"""What each tenant may still have of its limits a minute."""

from __future__ import annotations

from collections.abc import Callable

from router.policy.rate_limit import BucketState, Limits, RateLimit
from router.request.tenant import Tenant
from tandem.core.clock import Clock
from tandem.core.errors import RateLimitError


class TenantLimits:
    """At one router. Not thread-safe."""

    def __init__(self, clock: Clock, num_routers: Callable[[], int] = lambda: 1) -> None:
        self._clock, self._num_routers = clock, num_routers
        # By owner. Invariant: has only tenants with limits, which have names in the file.
        self._rates: dict[str, RateLimit] = {}

    def check(self, tenant: Tenant, num_prompt_tokens: int = 0) -> None:
        """Raises `RateLimitError` where a request with this prompt is more than the tenant may have now."""
        rate = self._rate(tenant)
        if rate is None or (wait_s := rate.wait_s(num_prompt_tokens)) <= 0:
            return
        states = rate.states
        told = " and ".join(f"{state.per_minute} {name}" for name, state in states.items())
        raise RateLimitError(
            f"{tenant.name} may have {told} a minute at this router, and has used them; try again in {wait_s:.1f} s",
            retry_after_s=wait_s,
            headers=_headers(states),
        )

    def enter(self, tenant: Tenant, num_prompt_tokens: int) -> None:
        """A request that `check` let pass comes in."""
        if (rate := self._rate(tenant)) is not None:
            rate.take(num_requests=1, num_tokens=num_prompt_tokens)

    def give(self, tenant: Tenant, num_tokens: int) -> None:
        """So many tokens go out."""
        if (rate := self._rates.get(tenant.owner)) is not None and tenant.tokens_per_minute:
            rate.take(num_tokens=num_tokens)

    def headers(self, tenant: Tenant) -> dict[str, str]:
        """What OpenAI's clients read of limits; empty where there is none."""
        rate = self._rate(tenant)
        return _headers(rate.states) if rate is not None else {}

    def _rate(self, tenant: Tenant) -> RateLimit | None:
        """Of now."""
        if not tenant.requests_per_minute and not tenant.tokens_per_minute:
            return None
        limits = Limits(tenant.requests_per_minute, tenant.tokens_per_minute).share(self._num_routers())
        now_s = self._clock.now()
        rate = self._rates.get(tenant.owner)
        if rate is None:
            rate = self._rates[tenant.owner] = RateLimit(limits, now_s)
        rate.look(limits, now_s)
        return rate


def _headers(states: dict[str, BucketState]) -> dict[str, str]:
    """As OpenAI has them."""
    headers = {}
    for name, state in states.items():
        headers[f"x-ratelimit-limit-{name}"] = str(state.per_minute)
        headers[f"x-ratelimit-remaining-{name}"] = str(state.num_left)
        headers[f"x-ratelimit-reset-{name}"] = _told(state.full_in_s)
    return headers


def _told(seconds: float) -> str:
    """`6m0s`, `1s`, `120ms`."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
