"""What a routing decision knows of one worker. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvtransfer.layout import KvFormat
from tandem.core.identity import WorkerKey
from tandem.core.step_times import NO_PROMPTS, PromptSteps


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """One ready worker as the router sees it now: its last report and what was sent to it since."""

    key: WorkerKey
    kv_format: KvFormat
    page_size: int
    num_active: int  # requests that run or wait there
    num_queued_tokens: int  # prompt tokens not yet computed
    num_available_pages: int  # free or evictable, less what our unanswered reservations will take
    # Of a decode worker: requests that take part in its steps now, and what prompts would take beside them.
    num_stepping: int = 0
    prompt_steps: PromptSteps = NO_PROMPTS
    max_num_seqs: int = 0  # of a decode worker: sequences in its batch
    num_others: int = 0  # active sequences there that are not of this router, or have just ended
