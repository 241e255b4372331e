"""Who a request is for: whoever has the key that it carries. Pure."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, replace

from tandem.core.config import LimitsConfig


@dataclass(frozen=True, slots=True)
class Tenant:
    """What the file of keys says of a tenant.

    A key of a plain file, or of the variable, is a tenant of its own; without keys there is one, `ANYBODY`.

    Attributes:
        name: as people see it; of a key without a name, made from a digest of its digest.
        owner: tells tenants apart, and stays while the name, or the key without a name, does.
        circle: the same for all who share cached prefixes: the tenant's, or that of its group; empty: all share them.
        is_named: whether the file gives it a name.
        most_urgent_priority: `None`: as in `limits`.
        weight: what it is to get beside others, in tokens: a tenant of weight 2 gets twice as many as one of 1.
        ttft_ms, tpot_ms: as in `slo`; 0: as there.
        requests_per_minute, tokens_per_minute: at all routers together; 0: any number.
    """

    name: str
    owner: str
    circle: str
    is_named: bool = False
    most_urgent_priority: int | None = None
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    weight: float = 1.0
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0

    def limits(self, limits: LimitsConfig) -> LimitsConfig:
        """The bounds of its requests, where the cluster's are `limits`."""
        if self.most_urgent_priority is None:
            return limits
        return replace(limits, most_urgent_priority=self.most_urgent_priority)

    def cache_salt(self, secret: bytes, asked: str) -> str:
        """Under which workers cache its prompts; whoever has another circle, or asked for another salt, gets another.

        Args:
            secret: that all routers of the cluster have in common, so that workers learn nothing of tenants.
            asked: the request's own `cache_salt`; empty: none.
        """
        if not self.circle:
            return asked
        # The length in front: no circle and salt run together as another circle and salt do.
        circle = self.circle.encode()
        said = len(circle).to_bytes(4, "big") + circle + asked.encode()
        return hmac.new(secret, said, hashlib.sha256).hexdigest()


#: What tenants that are not told apart are called together.
OTHER = "other"
#: The one tenant of a router without keys.
ANYBODY = Tenant(name="anybody", owner="anybody", circle="")
