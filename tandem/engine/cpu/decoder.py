"""A whole decoder, from token ids to logits: one program of kernels, past `transformers`' way through its parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from tandem.engine.batch import PagedBatch
from tandem.engine.cpu.layer import FusedDecoderLayer, Program, Workspace, compute_layers, plan_layers
from tandem.engine.cpu.layer_kernels import GATHER, ROWS_FOR_THREADS, gather_rows
from tandem.engine.cpu.lending import threads_now
from tandem.engine.cpu.modules import FusedRMSNorm
from tandem.engine.cpu.packed_kernel import arranged_features
from tandem.engine.cpu.packed_linear import PackedLinear
from tandem.engine.cpu.threads import run
from tandem.engine.huge_pages import FLOAT_BYTES, map_memory

_LEAST_POSITIONS = 1024


class FusedDecoder:
    """`head(norm(layers(embedding(ids))))`; float32.

    Args:
        embedding: `[vocab, hidden_size]`, of a type that `GATHER` has, rows without gaps.
        rotary: `rotary(x, positions)` gives the cosines and sines of each position, for all layers; those of a position
            depend on nothing else.
        layers: of one workspace.
    """

    def __init__(
        self,
        embedding: torch.Tensor,
        rotary: nn.Module,
        layers: Sequence[FusedDecoderLayer],
        norm: FusedRMSNorm,
        head: PackedLinear,
    ) -> None:
        self._embedding, self._width = embedding, embedding.shape[1]
        self._layers, self._norm, self._head = layers, norm, head
        self._num_threads = layers[0].num_threads
        self._tail_space = Workspace()
        self._rotary = _RotaryTable(rotary)

    @cached_property
    def _logits(self) -> torch.Tensor:
        """`[R, padded]` for the most rows of a prepared forward; all prepared forwards share it.

        It is the same memory each time, resident as far as it is used. With a tensor that was made and freed in each
        step the thread also waited for others.
        """
        memory = map_memory((ROWS_FOR_THREADS - 1) * self._head.padded_features * FLOAT_BYTES)
        return memory.view(torch.float32).view(ROWS_FOR_THREADS - 1, -1)

    def logits(self, batch: PagedBatch) -> torch.Tensor:
        """`[R, vocab]` for the rows `batch.logit_rows`; `batch` is that of the running forward."""
        self.reserve(max(sequence.end for sequence in batch.sequences))
        program, between = Program(self._num_threads), self._make_room(batch)
        logits = torch.empty(len(batch.logit_rows), self._head.padded_features, dtype=torch.float32)
        self._add_all(program, batch, between, logits, threads_now(self._num_threads))
        program.run()
        return logits[:, : self._head.out_features]

    def reserve(self, num_positions: int) -> None:
        """Make room for contexts of so many tokens."""
        self._rotary.reserve(num_positions)

    def prepare(self, batch: PagedBatch, num_threads: int) -> PreparedForward:
        """Prepare the running forward for `repeat`, which takes what the memory of `batch` holds by then.

        Args:
            batch: of fewer than `ROWS_FOR_THREADS` tokens, all with logits, at positions for which there is room.
            num_threads: for how many threads the attention is cut.
        """
        program, between = Program(self._num_threads), self._make_room(batch)
        logits = self._logits[: len(batch.logit_rows)]
        self._add_all(program, batch, between, logits, num_threads)
        return PreparedForward(
            b"".join(program.calls), logits[:, : self._head.out_features], self._places(), (batch, between)
        )

    def is_current(self, prepared: PreparedForward) -> bool:
        """Whether all memory that it uses is still where it was."""
        return prepared.places == self._places()

    def repeat(self, prepared: PreparedForward) -> torch.Tensor:
        """The logits of a prepared forward that is current, in memory that the next one may write to."""
        run(self._num_threads, prepared.program)
        return prepared.logits

    def _places(self) -> tuple[int, ...]:
        return self._layers[0].workspace.address, *self._rotary.addresses

    def _make_room(self, batch: PagedBatch) -> _Between:
        num_rows, num_logits = batch.num_tokens, len(batch.logit_rows)
        return _Between(
            rotary=torch.empty(2, num_rows, self._rotary.dim, dtype=torch.float32),
            last=torch.empty(num_logits, self._width, dtype=torch.float32),
            arranged=torch.empty(num_logits, arranged_features(num_logits, self._width), dtype=torch.float32),
        )

    def _add_all(
        self, program: Program, batch: PagedBatch, between: _Between, logits: torch.Tensor, num_threads: int
    ) -> None:
        """Add the way to `logits` (`[R, padded]`) to `program`; see `compute_layers`."""
        num_rows, num_logits = batch.num_tokens, len(batch.logit_rows)
        sums = plan_layers(self._layers, num_rows)
        cos, sin = between.rotary.data_ptr(), between.rotary.data_ptr() + between.rotary.nbytes // 2
        positions, last = batch.positions.data_ptr(), between.last.data_ptr()
        program.add(
            [
                GATHER[self._embedding.dtype].call(
                    num_rows, self._embedding.data_ptr(), self._width, batch.token_ids.data_ptr(), sums
                ),
                *(
                    gather_rows.call(num_rows, table, self._rotary.dim, positions, target)
                    for table, target in zip(self._rotary.addresses, (cos, sin), strict=True)
                ),
            ]
        )
        # Rows with logits follow one another as they do in the batch: where all have some, these are the sums.
        tail = self._layers[-1].plan_tail(self._tail_space, batch.logit_rows) if num_logits < num_rows else None
        compute_layers(program, self._layers, (cos, sin), num_threads=num_threads, tail=tail)
        if not num_logits:
            return
        program.add(
            [
                self._norm.call(sums if tail is None else tail.sums, num_logits, last),
                *self._head.calls(
                    last, self._width * FLOAT_BYTES, num_logits, logits.data_ptr(), between.arranged.data_ptr()
                ),
            ]
        )


@dataclass(frozen=True, slots=True)
class _Between:
    """Memory for what lies between the kernels that are of no layer."""

    rotary: torch.Tensor  # [2, T, rotary_dim]: cosines and sines
    last: torch.Tensor  # [R, hidden_size]: what the head computes logits of
    arranged: torch.Tensor  # the same as the head's product takes it


@dataclass(frozen=True, slots=True)
class PreparedForward:
    """A forward whose batch changes in value, and not in shape or place."""

    program: bytes
    logits: torch.Tensor  # [R, vocab]
    places: tuple[int, ...]  # of the memory that may move: workspace and rotary tables
    kept: tuple[object, ...]  # whose memory the program uses, too


class _RotaryTable:
    """Cosines and sines of the positions `[0, n)`, where n grows with the contexts: small beside their KV."""

    def __init__(self, rotary: nn.Module) -> None:
        self._rotary = rotary
        self._num_positions = 0
        self.reserve(_LEAST_POSITIONS)

    def reserve(self, num_positions: int) -> None:
        """Make `addresses` those of `[num_positions or more, dim]` each."""
        if num_positions <= self._num_positions:
            return
        num_positions = max(num_positions, 2 * self._num_positions)
        positions = torch.arange(num_positions)[None]
        cos, sin = self._rotary(torch.empty(1, 1, 1, dtype=torch.float32), positions)
        self._tables = cos.contiguous(), sin.contiguous()
        self.dim: int = cos.shape[-1]
        self.addresses = tuple(table.data_ptr() for table in self._tables)
        self._num_positions = num_positions
