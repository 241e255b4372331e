"""The workers as a routing decision sees them: plain data of one moment. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvtransfer.layout import KvFormat
from tandem.core.identity import WorkerKey


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """One ready worker as the router sees it now: its last report and what was sent to it since."""

    key: WorkerKey
    kv_format: KvFormat
    page_size: int
    num_active: int  # requests that run or wait there
    num_queued_tokens: int  # prompt tokens not yet computed
    num_available_pages: int  # free or evictable, less what our unanswered reservations will take
    # Of a decode worker: requests that take part in its steps now, and the tokens of a step up to which it computes
    # prompts; 0: it should not.
    num_stepping: int = 0
    mixed_step_tokens: int = 0


Pair = tuple[WorkerKey, WorkerKey]
"""A prefill worker and a decode worker."""


@dataclass(frozen=True, slots=True)
class Link:
    """What is known of the way that pages take from a prefill to a decode worker.

    Attributes:
        bytes_per_s: learnt from handoffs.
        is_broken: pages cannot be written there now; the pair is chosen only where there is no other.
    """

    bytes_per_s: float = math.inf
    is_broken: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All workers that may get new requests, and the pools that more will join."""

    prefill: Sequence[WorkerLoad]
    decode: Sequence[WorkerLoad]
    # Whether the membership has a worker of the pool that is not ready: it starts, or is to be replaced.
    is_prefill_coming: bool = False
    is_decode_coming: bool = False
    # Only of pairs that are worth noting: slow or broken. Of the others nothing is known that would matter.
    links: Mapping[Pair, Link] = field(default_factory=dict)

    @property
    def may_get_better(self) -> bool:
        """Whether the membership says that a request which cannot be placed now can be placed later."""
        if self.prefill and self.decode:  # but no two of them pair
            return self.is_prefill_coming or self.is_decode_coming
        return bool((self.prefill or self.is_prefill_coming) and (self.decode or self.is_decode_coming))
