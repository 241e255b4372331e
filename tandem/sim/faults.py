"""Workers of a simulation that die, and what their routers may do about it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from router.policy.recovery import RecoveryLimits
from tandem.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Death:
    """Of the worker with this name, at this second of the simulation."""

    worker: str
    at_s: float

    @classmethod
    def parse(cls, text: str) -> Death:
        """`WORKER@SECONDS`. Raises `ConfigError`."""
        worker, _, seconds = text.rpartition("@")
        try:
            at_s = float(seconds)
        except ValueError:
            at_s = -1.0
        if not worker or not 0 <= at_s < float("inf"):
            raise ConfigError(f"faults has {text!r}, and must have a worker and seconds, as decode-0@30", key="faults")
        return cls(worker, at_s)


@dataclass(frozen=True, slots=True)
class FaultShape:
    """Attributes:
    deaths: none: nobody dies, and nothing is kept for that.
    retry_share, retry_burst: as of `router.policy.retry_budget.RetryBudget`.
    wait_for_worker_s: that a request waits where its pool has no worker.
    """

    deaths: tuple[Death, ...] = ()
    limits: RecoveryLimits = field(default_factory=lambda: RecoveryLimits(3, 512, 10.0))
    retry_share: float = 0.1
    retry_burst: int = 256
    wait_for_worker_s: float = 10.0
