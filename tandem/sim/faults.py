"""Workers of a simulation that die, ways that become slow, and what routers may do about it. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from router.policy.recovery import RecoveryLimits
from tandem.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Death:
    """Of the worker with this name, at this second of the simulation."""

    worker: str
    at_s: float


@dataclass(frozen=True, slots=True)
class SlowLink:
    """From this second on the way out of the prefill worker with this name has that share of its bandwidth."""

    worker: str
    at_s: float
    share: float


def parse_fault(text: str) -> Death | SlowLink:
    """`WORKER@SECONDS` dies; `WORKER@SECONDS=SHARE` sends slowly. Raises `ConfigError`."""
    before, is_slow, of_share = text.partition("=")
    worker, _, seconds = before.rpartition("@")
    try:
        at_s, share = float(seconds), float(of_share) if is_slow else 1.0
    except ValueError:
        at_s, share = -1.0, 0.0
    if not worker or not 0 <= at_s < math.inf or not 0 < share <= 1:
        raise ConfigError(
            f"faults has {text!r}, and must have a worker and seconds, as decode-0@30, or also the share of its "
            "bandwidth that its way out keeps, as prefill-0@30=0.1",
            key="faults",
        )
    return SlowLink(worker, at_s, share) if is_slow else Death(worker, at_s)


@dataclass(frozen=True, slots=True)
class FaultShape:
    """Attributes:
    deaths: none: nobody dies, and nothing is kept for that.
    retry_share, retry_burst: as of `router.policy.retry_budget.RetryBudget`.
    wait_for_worker_s: that a request waits where its pool has no worker.
    tells_links: routers hear of slow ways, as they do in a cluster; false: what it would cost if they did not.
    """

    deaths: tuple[Death, ...] = ()
    slow_links: tuple[SlowLink, ...] = ()
    limits: RecoveryLimits = field(default_factory=lambda: RecoveryLimits(3, 512, 10.0))
    retry_share: float = 0.1
    retry_burst: int = 256
    wait_for_worker_s: float = 10.0
    tells_links: bool = True

    def link_share(self, worker: str, now_s: float) -> float:
        """Of its bandwidth that its way out has."""
        slow = (link.share for link in self.slow_links if link.worker == worker and now_s >= link.at_s)
        return min(slow, default=1.0)
