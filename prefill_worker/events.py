"""What a prefill worker tells a router of an attempt; `TokenSampled` and `AttemptFailed` are as with both roles."""

from __future__ import annotations

from dataclasses import dataclass

from kvtransfer.protocol.messages import AttemptKey
from tandem.worker.cache_report import CacheNews
from tandem.worker.request import AttemptFailed, PromptPooled, PromptScored, TokenSampled
from tandem.worker.spans import Span


@dataclass(frozen=True, slots=True)
class HandoffStats:
    """Sizes in bytes and counts; times in seconds."""

    num_bytes: int
    num_extents: int
    num_descriptors: int
    handoff_s: float  # first post to acknowledgement
    exposed_s: float  # end of the prompt's computation to acknowledgement
    answer_s: float  # decode's verification to acknowledgement; 0: not known
    spans: tuple[Span, ...]  # writes and the commit, on the sender's clock


@dataclass(frozen=True, slots=True)
class PromptWork:
    """What a prompt has cost."""

    compute_s: float  # from the first chunk to the first tokens
    num_computed_tokens: int  # again after a preemption, too
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class PromptStarted:
    """The prompt has its pages and a place."""

    key: AttemptKey
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class PromptEnded:
    """The first tokens were the last ones, or the prompt was pooled: there is nothing to hand off."""

    key: AttemptKey
    work: PromptWork
    spans: tuple[Span, ...]  # in seconds before this


@dataclass(frozen=True, slots=True)
class HandedOff:
    """Decode has acknowledged the pages."""

    key: AttemptKey
    stats: HandoffStats
    work: PromptWork
    spans: tuple[Span, ...]  # in seconds before this


@dataclass(frozen=True, slots=True)
class LinkChanged:
    """How the way of pages to a decode worker is, from now on; for all routers."""

    prefill_worker_id: str
    prefill_incarnation: str
    decode_worker_id: str
    decode_incarnation: str
    is_broken: bool


Event = (
    PromptStarted
    | PromptScored
    | PromptPooled
    | TokenSampled
    | PromptEnded
    | HandedOff
    | AttemptFailed
    | LinkChanged
    | CacheNews
)
