"""Embeddings that stay in the 16 bits of their checkpoint: a row becomes float32 when it is looked up."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from tandem.engine.fuse.recognise import replace_modules


class ShortEmbedding(nn.Module):
    """An `nn.Embedding` with a weight `[vocab, hidden_size]` of 16 bits, which it takes over; its rows are float32."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        # A parameter, and be it the only one that is left: `transformers` asks it for the model's device.
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(ids, self.weight).float()


def widen(model: PreTrainedModel) -> None:
    """Make float32 of all numbers of 16 bits that are left in a model on the CPU, but for plain embeddings."""
    replace_modules(model, _looked_up_short)
    for module in model.modules():
        if not isinstance(module, ShortEmbedding):
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                if is_short(tensor):
                    tensor.data = tensor.data.float()


def _looked_up_short(module: nn.Module) -> ShortEmbedding | None:
    # Subclasses do more than to look up: scaling, for one, which would be in 16 bits.
    if type(module) is nn.Embedding and module.max_norm is None and is_short(module.weight):
        return ShortEmbedding(module.weight)
    return None


def is_short(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.bfloat16, torch.float16)
