"""A whole decoder on CUDA, from token ids to logits, past `transformers`' way through its parts.

Sums go from layer to layer as two tensors that are still to be added, so that each is made by the kernel that needs its
norm.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tandem.engine.batch import PagedBatch
from tandem.engine.cuda.layer_kernels import Rotary
from tandem.engine.cuda.modules import CudaDecoderLayer, CudaRMSNorm

#: Positions.
_TABLE_SLICE = 1 << 14


class CudaDecoder:
    """`head(norm(layers(embedding(ids))))`.

    Args:
        rotary: `rotary(x, positions)` gives the cosines and sines of each position, for all layers; those of a position
            depend on nothing else.
        max_context: positions are below it. A table of all of them is kept, in the model's type: it must not move while
            there are graphs, and is small beside the KV of such a context.
    """

    def __init__(
        self,
        embedding: nn.Embedding,
        rotary: nn.Module,
        layers: Sequence[CudaDecoderLayer],
        norm: CudaRMSNorm,
        head: nn.Linear,
        max_context: int,
    ) -> None:
        self._embedding, self._layers, self._norm, self._head = embedding, layers, norm, head
        weight = embedding.weight
        with torch.inference_mode():
            x, positions = weight.new_empty(1, 1, 1), torch.arange(max_context, device=weight.device)
            # In slices, as a rotary takes several times a slice's memory on the way.
            slices = [rotary(x, some[None]) for some in positions.split(_TABLE_SLICE)]
        self._cos, self._sin = (torch.cat(parts, dim=1) for parts in zip(*slices, strict=True))

    def logits(self, batch: PagedBatch) -> torch.Tensor:
        """`[R, vocab]` in the model's type for the rows `batch.logit_rows`; `batch` is that of the running forward."""
        rotary = Rotary(self._cos, self._sin, batch.positions)
        x: torch.Tensor = self._embedding(batch.token_ids)
        added: torch.Tensor | None = None
        # What comes behind the last K and V is for rows with logits alone.
        rows = batch.logit_rows if len(batch.logit_rows) < batch.num_tokens else None
        for number, layer in enumerate(self._layers, 1):
            x, added = layer.advance(x, added, rotary, rows if number == len(self._layers) else None)
        _, normed = self._norm.add(x, added)
        logits: torch.Tensor = self._head(normed)
        return logits[0]
