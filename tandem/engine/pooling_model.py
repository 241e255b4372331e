"""Models that give hidden states, or scores of them, where others give logits."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn
from transformers import PreTrainedModel


class PoolingModel(PreTrainedModel):  # type: ignore[misc]
    """`head(base(ids))` of the rows that are asked for: called as a model that generates, which has logits there."""

    base_model_prefix = "base"
    _supports_attention_backend = True

    def __init__(self, base: PreTrainedModel, head: nn.Module) -> None:
        """`head` gives `[…, N]` of the hidden states behind the last norm, `[…, hidden_size]`."""
        super().__init__(base.config)
        self.base, self.head = base, head

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, use_cache: bool, logits_to_keep: torch.Tensor
    ) -> SimpleNamespace:
        """`logits`: `[1, len(logits_to_keep), N]`."""
        output = self.base(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)
        return SimpleNamespace(logits=self.head(output.last_hidden_state[:, logits_to_keep]))

    def get_input_embeddings(self) -> nn.Module:
        embeddings: nn.Module = self.base.get_input_embeddings()
        return embeddings
