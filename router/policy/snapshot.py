"""The workers as a routing decision sees them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from router.policy.pool import ALONE, Pool, Share
from router.policy.worker_load import WorkerLoad
from tandem.core.identity import Role, WorkerKey

# Of a token that is read from a tier, where nothing is learnt of that.
_READ_COST = 0.2

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
class TierReads:
    """Seconds in which a worker reads a token's pages back from a tier; 0: not known.

    Attributes:
        near_s: from the nearest one.
        far_s: from the farthest one; of a worker with one tier as `near_s`.
    """

    near_s: float = 0.0
    far_s: float = 0.0


_UNKNOWN = TierReads()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All workers that may get new requests, and the pools that more will join; to be used at once.

    Attributes:
        is_prefill_coming: the membership has a worker of the pool that is not ready: it starts, or is to be replaced;
            or no membership was told yet.
        is_decode_coming: as `is_prefill_coming`.
        links: only of pairs that are worth noting: slow or broken. Of the others nothing is known that would matter.
        prefill_tokens_per_s: that a prefill worker computes; 0 where none has yet.
        num_prefill_tokens_known: from so many tokens that was learnt of late; 0 where prefill has computed none for a
            while.
        tier_reads: by worker, as far as that is known.
        share: decides between equals.
        is_colocated: the cluster has no prefill workers: decode workers compute all prompts. `prefill_tokens_per_s` is
            of theirs then.
    """

    prefill: Pool
    decode: Pool
    is_prefill_coming: bool = False
    is_decode_coming: bool = False
    links: Mapping[Pair, Link] = field(default_factory=dict)
    prefill_tokens_per_s: float = 0.0
    num_prefill_tokens_known: float = 0.0
    tier_reads: Mapping[WorkerKey, TierReads] = field(default_factory=dict)
    share: Share = ALONE
    is_colocated: bool = False

    @classmethod
    def of(cls, prefill: Iterable[WorkerLoad], decode: Iterable[WorkerLoad], **others: Any) -> Snapshot:
        """Of workers that are not followed any further."""
        return cls(Pool(Role.PREFILL, prefill), Pool(Role.DECODE, decode), **others)

    def read_costs(self, worker: WorkerKey) -> tuple[float, float]:
        """Prompt tokens that a prefill worker computes while the worker reads one back from the nearest of its tiers,
        and from the farthest."""
        known = self.tier_reads.get(worker, _UNKNOWN)
        near, far = (each * self.prefill_tokens_per_s or _READ_COST for each in (known.near_s, known.far_s))
        return near, far

    def may_get_better(self, *, pools: bool = False) -> bool:
        """Whether a request that cannot be placed now can be later, by what is known of who comes; one that `pools`
        needs a prefill worker alone."""
        if pools:
            return bool(self.prefill) or self.is_prefill_coming
        if self.is_colocated:
            return bool(self.decode) or self.is_decode_coming
        if self.prefill and self.decode:  # but no two of them pair
            return self.is_prefill_coming or self.is_decode_coming
        return bool((self.prefill or self.is_prefill_coming) and (self.decode or self.is_decode_coming))
