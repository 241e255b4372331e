"""From logits to the log-probabilities of given tokens, of the model's own distribution."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem.core.errors import InternalError
from tandem.core.prompt_scores import TokenScore


def score_rows(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenScore] | InternalError:
    """How likely each of `token_ids` is by its row of `logits`, float32 `[len(token_ids), vocab]`, on any device.

    A row with NaN gives an error: the model overflowed.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    own = logprobs.gather(1, torch.tensor(token_ids, dtype=torch.long, device=logits.device)[:, None])
    if torch.isnan(own).any():
        return InternalError("the model gave NaN logits for a prompt")
    ranks = (logprobs > own).sum(dim=-1) + 1
    values, ids = (tensor.tolist() for tensor in logprobs.topk(min(num_top, logprobs.shape[1]), dim=-1))
    return [
        TokenScore(logprob, rank, tuple(zip(ids[row], values[row], strict=True)))
        for row, (logprob, rank) in enumerate(zip(own[:, 0].tolist(), ranks.tolist(), strict=True))
    ]
