"""A whole decoder, from token ids to logits: one program of kernels, past `transformers`' way through its parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tandem.engine.batch import PagedBatch
from tandem.engine.fused_kernel import gather_rows
from tandem.engine.fused_layer import FusedDecoderLayer, compute_layers, plan_layers
from tandem.engine.fused_modules import FusedRMSNorm
from tandem.engine.packed_kernel import arranged_features
from tandem.engine.packed_linear import PackedLinear
from tandem.engine.vector_ir import FLOAT_BYTES

_LEAST_POSITIONS = 1024


class FusedDecoder:
    """`head(norm(layers(embedding(ids))))`; float32.

    Args:
        embedding: `[vocab, hidden_size]`, rows without gaps.
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
        self._rotary = _RotaryTable(rotary)

    def logits(self, batch: PagedBatch) -> torch.Tensor:
        """`[R, vocab]` for the rows `batch.logit_rows`; `batch` is that of the running forward."""
        num_rows, num_logits = batch.num_tokens, len(batch.logit_rows)
        self._rotary.reserve(max(sequence.end for sequence in batch.sequences))
        sums = plan_layers(self._layers, num_rows)
        rotary = torch.empty(2, num_rows, self._rotary.dim, dtype=torch.float32)
        cos, sin = rotary.data_ptr(), rotary.data_ptr() + rotary.nbytes // 2
        last = torch.empty(num_logits, self._width, dtype=torch.float32)
        logits = torch.empty(num_logits, self._head.padded_features, dtype=torch.float32)
        arranged = torch.empty(num_logits, arranged_features(num_logits, self._width), dtype=torch.float32)
        positions, last_at = batch.positions.data_ptr(), last.data_ptr()
        compute_layers(
            self._layers,
            (cos, sin),
            before=(
                gather_rows.call(num_rows, self._embedding.data_ptr(), self._width, batch.token_ids.data_ptr(), sums),
                *(
                    gather_rows.call(num_rows, table, self._rotary.dim, positions, target)
                    for table, target in zip(self._rotary.addresses, (cos, sin), strict=True)
                ),
            ),
            behind=(
                gather_rows.call(num_logits, sums, self._width, batch.logit_rows.data_ptr(), last_at),
                self._norm.call(last_at, num_logits, last_at),
                *self._head.calls(
                    last_at, self._width * FLOAT_BYTES, num_logits, logits.data_ptr(), arranged.data_ptr()
                ),
            ),
        )
        return logits if self._head.out_features == logits.shape[1] else logits[:, : self._head.out_features]


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
