"""What a routing decision is made from, beside the workers, and what comes of it. Plain data.

`router.policy.choose` makes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from router.policy.prefix import HeldPrefix
from tandem.core.identity import WorkerKey
from tandem.core.step_times import NO_PROMPTS, PromptSteps


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What a routing decision knows of a request.

    Attributes:
        priority: urgent where below 0.
        prefix: who holds how much of the prompt's beginning, as far as is known.
        deadline_s: when its client gives up, on the router's clock; `None` where it does not.
        num_held_tokens: of prompts that wait in this router for their turn, behind this one.
        first_token_in_s: from now on it is wanted within this time.
        mixed_pool_tokens: the longest prompt of the mixed pool; endless: any, 0: none.
        pools: a prefill worker serves it alone.
    """

    num_prompt_tokens: int
    priority: int = 0
    prefix: HeldPrefix[WorkerKey] = field(default_factory=HeldPrefix)
    deadline_s: float | None = None
    num_held_tokens: int = 0
    mixed_pool_tokens: float = 0
    first_token_in_s: float = math.inf
    is_first_attempt: bool = True
    pools: bool = False


@dataclass(frozen=True, slots=True)
class Wishes:
    """Which workers recovery wants for the next attempt.

    Attributes:
        prefill: holds pages of the request; it is chosen where it is ready and has a partner.
        decode: as `prefill`.
        max_local_tokens: if above 0, `decode` alone is asked first and may compute so many tokens by itself. A prefill
            worker is chosen when decode says that it needs one. In a colocated cluster there is none, and no bound.
        avoid: chosen only where there is no other.
        exclude: never chosen, because they are gone or leaving.
    """

    prefill: WorkerKey | None = None
    decode: WorkerKey | None = None
    max_local_tokens: int = 0
    avoid: frozenset[WorkerKey] = frozenset()
    exclude: frozenset[WorkerKey] = frozenset()


class Why(StrEnum):
    LOAD = "load"  # the pair that has least to do
    KEPT = "kept"  # it holds pages of the request
    MIXED_POOL = "mixed_pool"  # a decode worker computes the prompt sooner
    COLOCATED = "colocated"  # there are no prefill workers, and this one is the soonest
    PREFIX = "prefix"  # the prompt begins with pages that are held there


@dataclass(frozen=True, slots=True)
class Candidate:
    """One worker that a decision weighed, for people. All figures are in prompt tokens.

    Attributes:
        num_held_tokens: of the prompt, in its cache as far as is known.
        num_stored_tokens: that it can read back behind these from a tier below its cache.
        num_tokens_in_front: to be computed before the prompt.
        cost: what decides; of a decode worker that of its batch, and of the pages that are to be sent there.
        cost_alone: of a decode worker that computes the prompt by itself, all in all; `None`: it may not.
        why_not_alone: then, in words.
        prompt_steps: of a decode worker, what prompts take in its steps.
    """

    worker: WorkerKey
    num_held_tokens: int
    num_tokens_in_front: int
    num_active: int
    cost: float
    cost_alone: float | None = None
    num_stored_tokens: int = 0
    why_not_alone: str = ""
    prompt_steps: PromptSteps = NO_PROMPTS


@dataclass(frozen=True, slots=True)
class Route:
    """`prefill` is `None` where decode is asked first; it may compute up to `max_local_tokens` by itself. `decode` is
    `None` where the prompt is pooled. `unpaced`: it computes in chunks of full size, since nobody else computes."""

    prefill: WorkerKey | None
    decode: WorkerKey | None
    max_local_tokens: int
    why: Why
    weighed: tuple[Candidate, ...] = field(default=(), compare=False)  # for people, of each role some
    unpaced: bool = False


ANY = Wishes()
"""None."""
