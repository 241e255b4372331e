"""Decode steps as programs that are made once: for a fused decoder on the CPU what CUDA graphs are on a GPU.

Between two steps of the same sequences only their newest tokens, positions and pages differ. These lie in arrays that
do not move. So the calls of all kernels, which take addresses, are made once for each number of sequences. Nothing is
padded, and the results are those of the eager way. Chunks of prompts, and batches that mix them with decodes, run
eagerly.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tandem.engine.attention.interface import ForwardContext, current_forward
from tandem.engine.batch import PagedBatch, SequenceInput, is_decode_step, with_pages
from tandem.engine.block_tables import BlockTables
from tandem.engine.cpu.attention import CPUAttention
from tandem.engine.cpu.attention_kernel import Reads
from tandem.engine.cpu.decoder import FusedDecoder, PreparedForward
from tandem.engine.cpu.layer_kernels import ROWS_FOR_THREADS
from tandem.engine.cpu.lending import threads_now
from tandem.engine.paged_model import PagedModel


class DecodePrograms:
    """Runs batches of single tokens, of fewer sequences than would be run layer by layer.

    A program has some 15 KiB for twelve layers, and there is one for each number of sequences and of threads.

    Args:
        paged: its arena and its checks are used.
        decoder: computes its logits.
        attention: its attention.
    """

    def __init__(self, paged: PagedModel, decoder: FusedDecoder, attention: CPUAttention) -> None:
        self._paged = paged
        self._decoder = decoder
        self._attention = attention
        self._inputs = _FixedInputs(ROWS_FOR_THREADS - 1, paged.tables, paged.arena.layout.page_size)
        # By numbers of sequences and of threads.
        self._prepared: dict[tuple[int, int], PreparedForward] = {}

    def takes(self, sequences: Sequence[SequenceInput]) -> bool:
        """Whether each sequence computes one token, with logits, and there are not too many."""
        return is_decode_step(sequences, self._inputs.max_rows)

    def forward(self, sequences: Sequence[SequenceInput]) -> torch.Tensor:
        """Return the logits of a batch that `takes` allows, float32 `[sequences, vocab]`.

        The next step writes over them. Raises `ValueError` as `PagedModel.forward` does.
        """
        self._paged.check(sequences)
        if self._inputs.load(sequences):
            self._prepared.clear()
        self._decoder.reserve(max(sequence.end for sequence in sequences))
        # Borrowed threads may have come or gone since the last step: the attention is cut for those of now.
        shape = len(sequences), threads_now(self._attention.num_threads)
        prepared = self._prepared.get(shape)
        if prepared is None or not self._decoder.is_current(prepared):
            prepared = self._prepared[shape] = self._prepare(*shape)
        return self._decoder.repeat(prepared)

    def _prepare(self, num_rows: int, num_threads: int) -> PreparedForward:
        batch, paged = self._inputs.batch(num_rows), self._paged
        context = ForwardContext(batch, paged.arena, self._attention, places=paged.places)
        token = current_forward.set(context)
        try:
            return self._decoder.prepare(batch, num_threads)
        finally:
            current_forward.reset(token)


class _FixedInputs:
    """The inputs of a step of up to `max_rows` sequences, at addresses that stay.

    Args:
        tables: of all steps of these sequences, whichever way they are computed.
    """

    def __init__(self, max_rows: int, tables: BlockTables, page_size: int) -> None:
        self.max_rows = max_rows
        self._tables = tables
        self._read: torch.Tensor | None = None  # what of the tables is at addresses that programs have
        self._page_size = page_size
        self._windowed_pages = np.zeros((tables.num_groups - 1, max_rows), dtype=np.int64)
        # Tokens, positions, and the pages and slots that are written to.
        self._columns = np.zeros((4, max_rows), dtype=np.int64)
        rows = np.arange(max_rows)
        self._logit_rows = torch.from_numpy(rows)
        # A block for each row; see `attention_kernel.row_blocks`.
        self._blocks = np.stack([rows, rows, np.ones_like(rows), np.zeros_like(rows)], axis=1)

    def load(self, sequences: Sequence[SequenceInput]) -> bool:
        """Make these, which are checked, the inputs of the next step. Raises as `BlockTables.rows` does.

        Returns:
            Whether the tables have moved: then programs read what is not theirs any more.
        """
        rows = self._tables.rows(sequences)
        tokens, positions, pages, slots = [], [], [], []
        for sequence in sequences:
            last, slot = divmod(sequence.start, self._page_size)
            tokens.append(sequence.token_ids[0])
            positions.append(sequence.start)
            pages.append(sequence.pages[last])
            slots.append(slot)
        num_rows = len(sequences)
        if len(self._windowed_pages):
            newest = np.array(positions) // self._page_size
            self._windowed_pages[:, :num_rows] = self._tables.host[1:, rows, newest]
        self._columns[:, :num_rows] = tokens, positions, pages, slots
        self._blocks[:num_rows, 0], self._blocks[:num_rows, 3] = rows, positions
        has_moved, self._read = self._read is not self._tables.tensor, self._tables.tensor
        return has_moved

    def batch(self, num_rows: int) -> PagedBatch:
        """The first rows, over this memory."""
        tokens, positions, pages, slots = torch.from_numpy(self._columns[:, :num_rows])
        tables = self._tables.tensor
        batch = PagedBatch(
            token_ids=tokens[None],
            positions=positions[None],
            write_pages=pages,
            write_slots=slots,
            logit_rows=self._logit_rows[:num_rows],
            block_tables=tables[0],
            sequences=(),  # what a step holds is known to its arrays alone
        )
        written = torch.from_numpy(self._windowed_pages[:, :num_rows])
        batch.windowed = with_pages(batch, zip(written, tables[1:], strict=True))
        for group in (batch, *batch.windowed):
            group.plan = CPUAttention.plan(Reads(group.block_tables.numpy(), self._blocks[:num_rows]))
        return batch
