"""Decode steps as CUDA graphs: one launch for each step instead of hundreds.

A graph repeats the same kernels on the same addresses, so a step's inputs lie in fixed buffers and its batch is padded
to the next of a few sizes. Padding rows write to a scratch page that no sequence owns, and nobody sees their logits.
Block tables stay on the device from step to step, and a graph begins with taking its sequences' rows in their order.
Chunks of prompts, and batches that mix them with decodes, run eagerly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tandem.engine.arena import KVArena
from tandem.engine.attention.reference import AttentionParams
from tandem.engine.batch import PagedBatch, SequenceInput, is_decode_step
from tandem.engine.block_tables import BlockTables
from tandem.engine.cuda.decode_step import DecodeBackend, DecodeStep
from tandem.engine.device import current
from tandem.engine.paged_model import PagedModel

_log = logging.getLogger(__name__)

#: A computation over fixed tensors; its result, too, lies always in the same one.
Compute = Callable[[], torch.Tensor]
#: Makes of a computation one that may be repeated: a captured graph, or the computation itself.
Capture = Callable[[Compute], Compute]


def buckets_up_to(max_num_seqs: int) -> tuple[int, ...]:
    """Return the batch sizes that are captured, ascending: powers of two, and the greatest."""
    return (*(1 << power for power in range((max_num_seqs - 1).bit_length())), max_num_seqs)


class DecodeGraphs:
    """Runs batches of single tokens; captures on construction, which takes some forwards for each size.

    Args:
        paged: its arena and its checks are used; its backend must be a `DecodeBackend`.
        max_num_seqs: the greatest batch.
        scratch_page: a page of the arena that no sequence is given, for what padding rows write.
        capture: `CudaCapture` on a GPU; `run_again` runs the same padded step without a graph.

    Raises `TypeError` for a backend that cannot be captured.
    """

    def __init__(self, paged: PagedModel, *, max_num_seqs: int, scratch_page: int, capture: Capture) -> None:
        if not isinstance(paged.backend, DecodeBackend):
            raise TypeError(f"{paged.backend.name} attention reads decode steps on the host")
        self._paged = paged
        self.buckets = buckets_up_to(max_num_seqs)
        self._steps: dict[int, _Step] = {}
        device = paged.arena.device
        with current(device):
            # Of its own: as many rows as a step has sequences, they never move.
            tables = BlockTables(
                paged.table_width, paged.num_pages, device=device, num_rows=max_num_seqs, is_copied=True
            )
            for size in reversed(self.buckets):  # the greatest first: the others find room in its memory
                self._steps[size] = _Step(paged, paged.backend, size, tables, scratch_page, capture)
        _log.info("decode steps of %s sequences are captured", ", ".join(map(str, self.buckets)))

    def takes(self, sequences: Sequence[SequenceInput]) -> bool:
        """Whether each sequence computes one token, with logits, and there are not too many."""
        return is_decode_step(sequences, self.buckets[-1])

    def forward(self, sequences: Sequence[SequenceInput]) -> torch.Tensor:
        """Return the logits of a batch that `takes` allows, float32 `[sequences, vocab]`, in memory of their own.

        Raises `ValueError` as `PagedModel.forward` does. Does not wait for the device.
        """
        self._paged.check(sequences)
        size = next(bucket for bucket in self.buckets if bucket >= len(sequences))
        with current(self._paged.arena.device):
            return self._steps[size].run(sequences)


class _Step:
    """The step of one bucket: its buffers, and what repeats it."""

    def __init__(
        self,
        paged: PagedModel,
        backend: DecodeBackend,
        num_rows: int,
        tables: BlockTables,
        scratch_page: int,
        capture: Capture,
    ) -> None:
        arena = paged.arena
        page_size = arena.layout.page_size
        width = paged.table_width
        self._inputs = _FixedInputs(num_rows, tables, page_size, scratch_page, arena.device)
        on_device = self._inputs.on_device
        kept = tables.tensor[0]
        step = DecodeStep(
            tables=torch.zeros((num_rows, width), dtype=torch.int32, device=arena.device),
            used=on_device.used,
            offsets=torch.arange(num_rows + 1, dtype=torch.int32, device=arena.device),
            max_keys=width * page_size,
        )
        batch = PagedBatch(
            token_ids=on_device.token_ids[None],
            positions=on_device.positions[None],
            write_pages=on_device.write_pages,
            write_slots=on_device.write_slots,
            logit_rows=torch.arange(num_rows, device=arena.device),
            block_tables=step.tables,
            sequences=(),  # what a step holds is known to its fixed tensors alone
        )
        fixed = PagedModel(
            paged.model, arena, _FixedStep(backend, step), paged.vocab_size, paged.max_context, decoder=paged.decoder
        )
        self._inputs.load(())

        def compute() -> torch.Tensor:
            torch.index_select(kept, 0, on_device.rows, out=step.tables)
            return fixed.compute(batch)

        # Kept, and with it all tensors above: a graph reads them by their addresses, and owns none of them.
        self._compute: Compute = compute
        self._repeat = capture(self._compute)

    def run(self, sequences: Sequence[SequenceInput]) -> torch.Tensor:
        self._inputs.load(sequences)
        # A copy in any case: the next step writes over the graph's own.
        return self._repeat()[: len(sequences)].to(torch.float32, copy=True)


class _FixedStep:
    """The attention of a step: each layer gets the same fixed tensors, whatever the batch says."""

    def __init__(self, backend: DecodeBackend, step: DecodeStep) -> None:
        self.name = backend.name
        self._backend = backend
        self._step = step

    def attend(
        self, batch: PagedBatch, arena: KVArena, layer: int, query: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Return `[B, heads, head_dim]`, like `query`."""
        del batch  # the same as the step has, with tables of its own
        return self._backend.attend_decode(self._step, arena, layer, query, params)


@dataclass(frozen=True, slots=True)
class _Fields:
    """The inputs of B rows, as views of one stretch of memory."""

    token_ids: torch.Tensor  # [B] int64
    positions: torch.Tensor  # [B] int64
    write_pages: torch.Tensor  # [B] int64
    write_slots: torch.Tensor  # [B] int64
    rows: torch.Tensor  # [B] int64: of the block tables
    used: torch.Tensor  # [B] int32

    @staticmethod
    def num_bytes(num_rows: int) -> int:
        return 5 * num_rows * 8 + num_rows * 4

    @classmethod
    def over(cls, memory: torch.Tensor, num_rows: int) -> _Fields:
        """`memory` is uint8, `num_bytes(num_rows)` long."""
        longs = memory[: 5 * num_rows * 8].view(torch.int64).view(5, num_rows)
        return cls(longs[0], longs[1], longs[2], longs[3], longs[4], memory[5 * num_rows * 8 :].view(torch.int32))


class _FixedInputs:
    """The inputs of a step: written on the host, sent to the device by one copy that nobody waits for."""

    def __init__(
        self, num_rows: int, tables: BlockTables, page_size: int, scratch_page: int, device: torch.device
    ) -> None:
        self._tables = tables
        self._page_size = page_size
        self._scratch_page = scratch_page
        is_cuda = device.type == "cuda"
        num_bytes = _Fields.num_bytes(num_rows)
        self._host_bytes = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        self._device_bytes = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.host = _Fields.over(self._host_bytes, num_rows)
        self.on_device = _Fields.over(self._device_bytes, num_rows)
        self._sent = torch.cuda.Event() if is_cuda else None

    def load(self, sequences: Sequence[SequenceInput]) -> None:
        """Make these the inputs of the next step. Raises as `BlockTables.rows` does.

        Rows beyond them are padding: token 0 at the beginning of the scratch page, over one slot of any page.
        """
        if self._sent is not None:
            self._sent.synchronize()  # of the last copy: long done, unless steps are queued without a look at tokens
        self._write(sequences)
        self._device_bytes.copy_(self._host_bytes, non_blocking=True)
        if self._sent is not None:
            self._sent.record()

    def _write(self, sequences: Sequence[SequenceInput]) -> None:
        num = len(sequences)
        rows = np.array(self._tables.rows(sequences), dtype=np.int64)
        positions = np.fromiter((sequence.start for sequence in sequences), dtype=np.int64, count=num)
        last_pages = positions // self._page_size
        self._fill(self.host.token_ids, np.asarray([sequence.token_ids[0] for sequence in sequences]), 0)
        self._fill(self.host.positions, positions, 0)
        self._fill(self.host.used, positions + 1, 1)
        self._fill(self.host.rows, rows, 0)
        self._fill(self.host.write_pages, self._tables.host[0, rows, last_pages], self._scratch_page)
        self._fill(self.host.write_slots, positions % self._page_size, 0)

    @staticmethod
    def _fill(field: torch.Tensor, values: np.ndarray, padding: int) -> None:
        row = field.numpy()
        row[: len(values)] = values
        row[len(values) :] = padding


def run_again(compute: Compute) -> Compute:
    """The padded step on its fixed buffers, each time anew: what a graph must give, for any device."""
    return compute


class CudaCapture:
    """Captures computations into CUDA graphs that share one pool of memory: only one runs at a time."""

    #: Before a capture: libraries make their handles, and kernels are compiled.
    _NUM_WARM_UPS = 2

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Compute) -> Compute:
        """Capture on the current device."""
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(self._NUM_WARM_UPS):
                compute()
        torch.cuda.current_stream().wait_stream(stream)
        # Other threads may use the device meanwhile; the graph does not capture what they do.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = compute()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay
