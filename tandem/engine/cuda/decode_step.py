"""One token of each of some sequences, in tensors that stay where they are: what a captured decode step reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from tandem.engine.arena import KVArena
from tandem.engine.attention.interface import AttentionBackend
from tandem.engine.attention.reference import AttentionParams


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """Row b is the token at `used[b] - 1` of a sequence with the block table `tables[b]`; all on one device.

    Shapes and `max_keys` are fixed, values change from step to step. Table entries beyond a sequence's tokens are ids
    of some pages of the arena, and nobody reads those pages.
    """

    tables: torch.Tensor  # [B, P] int32
    used: torch.Tensor  # [B] int32: tokens whose KV is in the pages when the row attends, its own included; at least 1
    offsets: torch.Tensor  # [B + 1] int32, 0 to B: where the row of each sequence begins
    max_keys: int  # P * page_size: no `used` is greater


@runtime_checkable
class DecodeBackend(AttentionBackend, Protocol):
    """An attention kernel that can be captured: it reads nothing of a decode step on the host."""

    def attend_decode(
        self, step: DecodeStep, arena: KVArena, layer: int, query: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Return `[B, heads, head_dim]`, like `query`."""
        ...
