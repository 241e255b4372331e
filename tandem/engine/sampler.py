"""From logits to tokens: keyed, so that the same request gives the same tokens on every worker.

Each row is sampled by itself, in float64, from (seed, choice, position): neither the batch nor the worker shows.
Order: penalties over what was seen, bias, grammar, minimum length (which gives way where the grammar can only end),
allowed tokens, bad words; temperature; `min_p`, `top_k`, `top_p`; inverse CDF over the tokens that are left, by id.
Log-probabilities are of the model's own distribution, before all of that.

There is one implementation for each kind of kernels: `cpu.sampler` compiles its own, `torch_sampler` serves any device
by operations of torch. An engine makes the one of its device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from tandem.core.errors import InternalError, InvalidRequestError, TandemError
from tandem.core.sampling import SampledToken, SampleRow, TokenMask

#: float32 `[rows, vocab]`, on any device.
Logits = torch.Tensor


class Sampler(ABC):
    """Samples what a batch asks for.

    Args:
        eos_token_ids: the model's ends of text.
    """

    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        self._eos_token_ids = eos_token_ids

    def __call__(self, logits: Logits, rows: Sequence[Sequence[SampleRow]]) -> list[list[SampledToken | TandemError]]:
        """For each row of `logits` one token for each of its `rows`: several choices may follow one prompt."""
        counts = [len(of_one) for of_one in rows]
        flat = [row for of_one in rows for row in of_one]
        if any(count != 1 for count in counts):
            repeats = torch.tensor(counts, dtype=torch.long, device=logits.device)
            logits = logits.repeat_interleave(repeats, dim=0, output_size=len(flat))
        sampled = iter(self.sample_rows(logits, flat))
        return [[next(sampled) for _ in range(count)] for count in counts]

    @abstractmethod
    def sample_rows(self, logits: Logits, rows: Sequence[SampleRow]) -> list[SampledToken | TandemError]:
        """Choose one token for each row; where that fails, the row has its error, and no other row shows it.

        Args:
            logits: `[len(rows), vocab]` float32; not changed.
            rows: what is asked of each row. Its state is read, not appended to.

        A row that holds NaN fails: the model overflowed, and any token would be invented.
        """


def check_shape(logits: Logits, rows: Sequence[SampleRow]) -> None:
    """Raises `ValueError` unless there is one row of logits for each of `rows`."""
    if logits.dim() != 2 or logits.shape[0] != len(rows):
        raise ValueError(f"logits of shape {tuple(logits.shape)} for {len(rows)} rows")


def masks_of(rows: Sequence[SampleRow], failed: dict[int, TandemError]) -> dict[int, TokenMask]:
    """What the grammars of rows allow, by row; `failed` gets those whose grammar cannot tell."""
    masks = {}
    for index, row in enumerate(rows):
        if row.guide is not None and index not in failed:
            try:
                masks[index] = row.guide.allowed()
            except TandemError as error:
                failed[index] = error
    return masks


def changes_logits(row: SampleRow) -> bool:
    """Whether something else than its grammar changes what is chosen from."""
    params = row.params
    is_bound = bool(params.logit_bias or params.allowed_token_ids or params.bad_words)
    return params.has_penalties or is_bound or row.position < params.min_tokens


def nan_logits() -> TandemError:
    return InternalError("the model gave NaN logits")


def nothing_left() -> TandemError:
    return InvalidRequestError("allowed_token_ids, bad_words, min_tokens and the grammar leave no token to choose")


def not_sampled(error: Exception) -> TandemError:
    """What a row gets that failed for a reason of its own."""
    made = InternalError(f"no token could be sampled: {type(error).__name__}: {error}")
    made.__cause__ = error
    return made
