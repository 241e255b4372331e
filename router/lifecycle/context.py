"""What all requests of one router share."""

from __future__ import annotations

from dataclasses import dataclass, field

from router.lifecycle.migration_slots import MigrationSlots
from router.lifecycle.open_exchanges import OpenExchanges
from router.lifecycle.request_errors import RequestErrors
from router.lifecycle.request_load import RequestLoad
from router.lifecycle.tenants import Tenants
from router.lifecycle.token_tally import TokenTally
from router.lifecycle.turns import Turns
from router.observe.recorder import Recorder
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
    budget: RetryBudget
    migrations: MigrationSlots
    tenants: Tenants
    turns: Turns
    load: RequestLoad
    recorder: Recorder
    tally: TokenTally
    open_exchanges: OpenExchanges = field(default_factory=OpenExchanges)
    errors: RequestErrors = field(default_factory=RequestErrors)

    async def drain(self) -> None:
        """Take no new requests; return when those under way have ended."""
        self.admission.is_draining = True
        await self.open_exchanges.wait_none()
