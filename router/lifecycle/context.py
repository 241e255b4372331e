"""What all requests of one router share."""

from __future__ import annotations

from dataclasses import dataclass

from router.lifecycle.migration_slots import MigrationSlots
from router.lifecycle.open_exchanges import OpenExchanges
from router.lifecycle.request_errors import RequestErrors
from router.policy.admission import Admission
from router.policy.retry_budget import RetryBudget
from router.workers.registry import WorkerRegistry
from tandem.core.clock import Clock
from tandem.core.config import Config
from tandem.core.metrics import RouterMetrics
from tandem.core.tokenizer import Tokenizer


@dataclass(frozen=True)
class RouterContext:
    """Made once by the router's server."""

    config: Config
    clock: Clock
    workers: WorkerRegistry
    admission: Admission
    metrics: RouterMetrics
    tokenizer: Tokenizer
    open_exchanges: OpenExchanges
    budget: RetryBudget
    migrations: MigrationSlots
    errors: RequestErrors
