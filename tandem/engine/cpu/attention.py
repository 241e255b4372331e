"""Attention on the CPU, by the paged kernels: in float32, or by products of bfloat16."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from tandem.engine.arena import KVArena
from tandem.engine.attention.reference import AttentionParams
from tandem.engine.batch import PagedBatch, SequenceRows
from tandem.engine.cpu.attention_kernel import ATTEND, Reads, attend_call, row_blocks
from tandem.engine.cpu.attention_short import ATTEND_BY_TWO, ATTEND_IN_TILES
from tandem.engine.cpu.lending import threads_now
from tandem.engine.cpu.threads import Kernel, run
from tandem.engine.layout import KVLayout

_SHORT = {"by two": ATTEND_BY_TWO, "in tiles": ATTEND_IN_TILES}
# In the plan of a batch: what all rows read, and what those with logits do.
_OF_ALL, _OF_LOGITS = "reads", "reads of logits"


class CPUAttention:
    """Reads the pages in place, for single tokens and chunks alike."""

    def __init__(self, num_threads: int, products: str = "") -> None:
        """`products`: queries and weights are rounded to bfloat16 and multiplied so (`loader.Types.products`); only for
        pages that `attention_short` takes. Empty: nothing is rounded."""
        self.num_threads, self._short = num_threads, _SHORT[products] if products else None
        self.name = f"cpu, {products}" if products else "cpu"

    def kernel(self, layout: KVLayout) -> Kernel:
        """Computes attention over such pages."""
        return self._short or ATTEND[layout.dtype]

    def attend(
        self, batch: PagedBatch, arena: KVArena, layer: int, query: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Return the attention of all rows, `[T, heads, head_dim]` float32; `query` has the same shape."""
        query = query.contiguous()
        output = torch.empty_like(query)
        threads = threads_now(self.num_threads)
        places = query.data_ptr(), output.data_ptr()
        run(self.num_threads, self.call(batch, arena, layer, params, query.shape[1], *places, threads))
        return output

    @staticmethod
    def plan(reads: Reads) -> dict[Any, Any]:
        """What `PagedBatch.plan` holds for a batch that reads this."""
        return {_OF_ALL: reads}

    def call(
        self,
        batch: PagedBatch,
        arena: KVArena,
        layer: int,
        params: AttentionParams,
        num_heads: int,
        query: int,
        output: int,
        num_threads: int,
        *,
        of_logits: bool = False,
    ) -> bytes:
        """`attend` by address, for `run` with `num_threads`; `of_logits`: of the rows that have logits alone."""
        kind = _OF_LOGITS if of_logits else _OF_ALL
        reads = batch.plan.get(kind)
        if reads is None:
            if kind not in batch.shared:
                spans = _spans_of_logits(batch.sequences) if of_logits else _spans(batch.sequences)
                batch.shared[kind] = row_blocks(spans, num_heads // arena.layout.num_kv_heads)
            reads = batch.plan[kind] = Reads(batch.block_tables.numpy(), batch.shared[kind])
        pages = arena.layer(layer).data_ptr()
        return attend_call(
            self.kernel(arena.layout), reads, arena.layout, pages, params, num_heads, query, output, num_threads
        )


def _spans(sequences: Iterable[SequenceRows]) -> Iterator[tuple[int, int, int, int]]:
    """As `row_blocks` takes them, of all rows."""
    return ((s.index, s.row, s.num_rows, s.start) for s in sequences)


def _spans_of_logits(sequences: Iterable[SequenceRows]) -> Iterator[tuple[int, int, int, int]]:
    """Of the rows that have logits, behind one another."""
    row = 0
    for one in sequences:
        if one.num_logits:
            yield one.index, row, one.num_logits, one.end - one.num_logits
        row += one.num_logits
