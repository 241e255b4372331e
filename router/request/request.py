"""One request as the router knows it, free of HTTP and of the wire."""

from __future__ import annotations

import math
from dataclasses import dataclass

from router.request.targets import Targets
from router.request.tenant import ANYBODY, Tenant
from tandem.core.prompt_scores import TokenScore
from tandem.core.protocols import OLDEST
from tandem.core.sampling import SamplingParams

#: Of requests of batches: greater than any that a client may ask for, so that ageing does not bring one before those
#: that somebody waits for.
BACKGROUND_PRIORITY = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and what is wanted of it."""

    request_id: str  # unique for ever: workers remember what they were told under it
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    arrived_s: float  # on the router's clock
    num_choices: int = 1
    stop: tuple[str, ...] = ()
    priority: int = 0  # lower is more urgent
    timeout_s: float | None = None  # from arrival
    shown_ids: frozenset[int] = frozenset()  # special tokens that are part of the text
    num_prompt_logprobs: int = -1  # -1: none; 0: of the prompt's own tokens; k: also of the k likeliest at each place
    gives_output: bool = True  # `False`: the prompt alone is wanted; one token is sampled, and nobody gets it
    cache_salt: str = ""  # cached prefixes are shared under equal ones only
    asks_for_salt: bool = False  # the client does, and not the tenant alone: no worker may ignore it
    tenant: Tenant = ANYBODY
    shows_stop: bool = False  # what stopped a choice is in its text
    echoed_text: str = ""  # of the prompt, before each choice's own
    pools: bool = False  # a vector of the prompt is wanted, and no token
    session: str = ""  # of the tenant, to which it belongs; empty: none
    targets: Targets | None = None  # by when its tokens are wanted; `None`: nobody says

    @property
    def due_s(self) -> float:
        """By when its first token is wanted, on the router's clock."""
        ttft_s = self.targets.ttft_s if self.targets is not None else math.inf
        return self.arrived_s + min(ttft_s, self.timeout_s if self.timeout_s is not None else math.inf)

    @property
    def is_background(self) -> bool:
        """Whether it is one of a batch, for which nobody waits."""
        return self.priority == BACKGROUND_PRIORITY

    @property
    def protocol(self) -> int:
        """The lowest number of the protocol at which a worker obeys all of it."""
        sampling = self.sampling
        asks_for_more = sampling.grammar or sampling.allowed_token_ids or sampling.bad_words or self.asks_for_salt
        return 3 if asks_for_more or self.num_prompt_logprobs >= 0 else OLDEST


@dataclass(slots=True)  # not frozen: to make one, which happens for each token, would take four times as long
class TokenGiven:
    """One sampled token, as a worker gave it. (attempt, choice, index) names it within its request."""

    attempt: int
    choice: int
    index: int  # position in the choice's output, from 0
    token_id: int
    finish_reason: str | None = None  # "stop" or "length" on a choice's last token
    logprob: float = 0.0  # natural log; meaningful when asked for
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class Delta:
    """What one choice goes on with: settled text and the tokens that made it."""

    choice: int
    text: str
    tokens: list[TokenGiven]
    finish_reason: str | None
    stopped_by: str | None = None  # the stop string that ended the choice
    #: Of the prompt's tokens, where they are wanted; with the first delta of a request.
    prompt_scores: tuple[TokenScore | None, ...] = ()
    vector: tuple[float, ...] = ()  # of a prompt that is pooled


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request that ended."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int | None  # of the prompt, at prefill; `None` where no worker said
