"""The mixed pool: which new prompts a decode worker computes by itself, so that none rests while others queue. Pure.

While a decode worker generates, reading the weights takes most of each step, and some tokens of a prompt beside cost
little more. So a decode worker computes whole prompts in chunks that fill its steps up to `mixed_step_tokens`
(`tandem/worker/scheduler.py`), slower than a prefill worker. A prompt goes that way where it is ready sooner.
Reference: the mixed pool of Patel et al., "Splitwise", ISCA 2024; here the workers keep their roles.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.policy.placement import Snapshot, WorkerLoad
from tandem.core.identity import WorkerKey
from tandem.core.pages import pages_for

# What a prompt token costs in a step that is not full, against one in a prefill worker's chunk. With less, prompts
# would be kept from a prefill worker that is about to have time for them.
_SMALL_STEP_COST = 1.2


@dataclass(frozen=True, slots=True)
class MixedPool:
    """How far decode workers take part in prefill.

    Attributes:
        max_prompt_tokens: longer prompts are always handed off: who generates beside one is slower meanwhile. 0: all.
    """

    max_prompt_tokens: int

    def computes_alone(self, snapshot: Snapshot, num_prompt_tokens: int) -> WorkerKey | None:
        """The decode worker that has a prompt computed before any prefill worker has; `None`: it is handed off.

        Only workers count that a handed-off prompt could go to: of a format that both pools have.
        """
        if num_prompt_tokens > self.max_prompt_tokens:
            return None
        formats = {worker.kv_format for worker in snapshot.prefill} & {worker.kv_format for worker in snapshot.decode}
        queues = [worker.num_queued_tokens for worker in snapshot.prefill if worker.kv_format in formats]
        costs = {
            worker.key: _cost(worker, num_prompt_tokens) for worker in snapshot.decode if worker.kv_format in formats
        }
        if not costs:
            return None
        best = min(costs, key=lambda key: (costs[key], key))
        return best if costs[best] < min(queues) + num_prompt_tokens else None


def _cost(worker: WorkerLoad, num_prompt_tokens: int) -> float:
    """Time until the prompt is computed there, in tokens of a prefill worker."""
    room = worker.mixed_step_tokens - worker.num_stepping
    if room < 1 or pages_for(num_prompt_tokens, worker.page_size) > worker.num_available_pages:
        return float("inf")
    slowness = _SMALL_STEP_COST * worker.mixed_step_tokens / room
    return slowness * (worker.num_queued_tokens + num_prompt_tokens)
