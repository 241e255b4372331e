"""Attention on the CPU in float32, by the paged kernel."""

from __future__ import annotations

import torch

from tandem.engine.arena import KVArena
from tandem.engine.attention_numba import attend_blocks, row_blocks
from tandem.engine.attention_reference import AttentionParams
from tandem.engine.batch import PagedBatch
from tandem.engine.threads import threads_now


class CPUAttention:
    """Reads the pages in place, for single tokens and chunks alike."""

    name = "cpu"

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads

    def attend(
        self, batch: PagedBatch, arena: KVArena, layer: int, query: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Return the attention of all rows, `[T, heads, head_dim]` float32; `query` has the same shape."""
        if "blocks" not in batch.plan:
            batch.plan["blocks"] = row_blocks((s.index, s.row, s.num_rows, s.start) for s in batch.sequences)
        output = attend_blocks(
            query.contiguous().numpy(),
            arena.numpy_layer(layer),
            batch.block_tables,
            batch.plan["blocks"],
            params.scaling,
            params.window,
            params.softcap,
            threads_now(self.num_threads),
        )
        return torch.from_numpy(output)
