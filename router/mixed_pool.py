"""The mixed pool: which new prompts a decode worker computes by itself, so that none rests while others queue. Pure.

While a decode worker generates, reading the weights takes most of each step, and some tokens of a prompt beside cost
little more. So a decode worker computes whole prompts in chunks that fill its steps up to `step_tokens`
(`tandem/worker/scheduler.py`), slower than a prefill worker. A prompt goes that way where it is ready sooner.
Reference: the mixed pool of Patel et al., "Splitwise", ISCA 2024; here the workers keep their roles.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.placement import Snapshot, WorkerLoad
from router.worker_key import WorkerKey
from tandem.core.pages import pages_for

# What a prompt token costs in a step that is not full, against one in a prefill worker's chunk: 1.4 to 2 on a CPU. With
# less, prompts would be kept from a prefill worker that is about to have time for them.
_SMALL_STEP_COST = 1.5


@dataclass(frozen=True, slots=True)
class MixedPool:
    """How far decode workers take part in prefill.

    Attributes:
        step_tokens: decodes and prompt tokens of a decode worker's step; 0: prompts are always handed off.
    """

    step_tokens: int

    def computes_alone(self, snapshot: Snapshot, num_prompt_tokens: int) -> WorkerKey | None:
        """The decode worker that has a prompt computed before any prefill worker has; `None`: it is handed off.

        Without a ready prefill worker nothing is decided here: the other half of every request would be missing.
        """
        if not self.step_tokens or not snapshot.prefill:
            return None
        at_prefill = min(worker.num_queued_tokens for worker in snapshot.prefill) + num_prompt_tokens
        costs = {worker.key: self._cost(worker, num_prompt_tokens) for worker in snapshot.decode}
        best = min(costs, key=lambda key: (costs[key], key), default=None)
        return best if best is not None and costs[best] < at_prefill else None

    def _cost(self, worker: WorkerLoad, num_prompt_tokens: int) -> float:
        """Time until the prompt is computed there, in tokens of a prefill worker."""
        room = self.step_tokens - worker.num_active
        lacks_pages = pages_for(num_prompt_tokens, worker.page_size) > worker.num_available_pages
        if room < 1 or lacks_pages:
            return float("inf")
        slowness = _SMALL_STEP_COST * self.step_tokens / room
        return slowness * (worker.num_queued_tokens + num_prompt_tokens)
