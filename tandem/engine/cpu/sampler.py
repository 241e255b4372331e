"""Sampling on the host: rows that are drawn go through a compiled kernel, on several threads.

See `tandem.engine.sampler` for the rules.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tandem.core.errors import TandemError
from tandem.core.sampling import SampledToken, SampleRow, SamplingParams, TokenMask, uniform
from tandem.engine.cpu.draw_kernel import NAN, NOT_FINITE, Draw, compile_draw_kernel, draw_rows
from tandem.engine.sampler import (
    Logits,
    Sampler,
    changes_logits,
    check_shape,
    masks_of,
    nan_logits,
    not_sampled,
    nothing_left,
)
from tandem.engine.token_bounds import TokenBounds


class CompiledSampler(Sampler):
    """Samples by the compiled kernel; compiled when it is made."""

    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        super().__init__(eos_token_ids)
        compile_draw_kernel()

    def sample_rows(self, logits: Logits, rows: Sequence[SampleRow]) -> list[SampledToken | TandemError]:
        return sample_rows(logits, rows, self._eos_token_ids)


def sample_rows(
    logits: torch.Tensor, rows: Sequence[SampleRow], eos_token_ids: Sequence[int] = ()
) -> list[SampledToken | TandemError]:
    """Choose one token for each row; where that fails, the row has its error, and no other row shows it.

    Args:
        logits: `[len(rows), vocab]` float32, on the host; not changed.
        rows: what is asked of each row. Its state is read, not appended to.
        eos_token_ids: the model's ends of text, kept out until `min_tokens` unless `ignore_eos`.

    A row that holds NaN fails: the model overflowed, and any token would be invented.
    """
    check_shape(logits, rows)
    if not rows:
        return []
    failed: dict[int, TandemError] = {}
    masks = masks_of(rows, failed)
    on_host = logits.contiguous().numpy()
    # The kernel that draws finds the greatest by itself, on several threads.
    looked_at = [i for i, row in enumerate(rows) if row.params.is_greedy or i in masks or changes_logits(row)]
    chosen = [0] * len(rows)
    for index, likeliest, bad in zip(looked_at, *_greatest(on_host, looked_at), strict=True):
        chosen[index] = likeliest
        if bad:
            failed[index] = nan_logits()
    taken = [i for i, row in enumerate(rows) if i not in failed and not _stays(row, chosen[i], masks.get(i))]
    draws: dict[int, Draw] = {}
    for index in taken:
        row, values = rows[index], on_host[index]
        try:
            changed = _obey(values, row, masks.get(index), eos_token_ids)
            if changed is not None:
                values, chosen[index] = changed, int(changed.argmax())
            if not row.params.is_greedy:
                number = uniform(row.params.seed, row.choice, row.position)
                greatest = 0.0 if changed is None else float(changed[chosen[index]])
                draws[index] = Draw(values, row.params, number, greatest)
        except TandemError as error:
            failed[index] = error
        except Exception as error:  # noqa: BLE001 - the row's own; it goes to whoever asked for it
            failed[index] = not_sampled(error)
    if draws:
        for (index, draw), token_id in zip(
            draws.items(), draw_rows(list(draws.values()), torch.get_num_threads()), strict=True
        ):
            if token_id == NAN:
                failed[index] = nan_logits()
            else:
                chosen[index] = token_id if token_id != NOT_FINITE else int(draw.logits.argmax())
    tokens = _with_logprobs(logits, rows, chosen)
    return [failed.get(index, token) for index, token in enumerate(tokens)]


def _greatest(values: np.ndarray, indices: list[int]) -> tuple[list[int], list[bool]]:
    """Where each of these rows is greatest, and whether it holds NaN."""
    if not indices:
        return [], []
    # numpy does without torch's way to an operator, which costs more than the work; NaN is greatest to both.
    ids = values.argmax(axis=-1) if len(indices) == len(values) else [values[i].argmax() for i in indices]
    return [int(i) for i in ids], np.isnan(values[indices, ids]).tolist()


def _stays(row: SampleRow, likeliest: int, mask: TokenMask | None) -> bool:
    """Whether the likeliest token is the one to take, without a look at the others."""
    if not row.params.is_greedy or changes_logits(row):
        return False
    return mask is None or (likeliest >> 3 < len(mask) and bool(mask[likeliest >> 3] >> (likeliest & 7) & 1))


def _bits(mask: TokenMask, vocab_size: int) -> np.ndarray:
    """uint8 `[vocab_size]`: 1 for each token that may come."""
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    return bits[:vocab_size] if len(bits) >= vocab_size else np.pad(bits, (0, vocab_size - len(bits)))


def _obey(
    logits: np.ndarray, row: SampleRow, mask: TokenMask | None, eos_token_ids: Sequence[int]
) -> np.ndarray | None:
    """The logits, float64, with all that is asked of a row but its distribution; `None` where they stay."""
    if mask is None and not changes_logits(row):
        return None
    values = logits.astype(np.float64)
    bounds = TokenBounds.of(row, len(values), eos_token_ids)
    _change_logits(values, row, bounds)
    if mask is not None:
        _keep_to(values, _bits(mask, len(values)))
    if row.position < row.params.min_tokens:
        _keep_going(values, row.params, bounds)
    _mask(values, row, bounds)
    return values


def _change_logits(values: np.ndarray, row: SampleRow, bounds: TokenBounds) -> None:
    params, state = row.params, row.state
    if params.repetition_penalty != 1.0 and state.seen:
        seen = np.array(state.seen, np.int64)
        old = values[seen]
        values[seen] = np.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
    counts = state.output_counts
    if counts and (params.frequency_penalty or params.presence_penalty):
        output = np.fromiter(counts.keys(), dtype=np.int64, count=len(counts))
        times = np.fromiter(counts.values(), dtype=np.float64, count=len(counts))
        values[output] -= params.frequency_penalty * times + params.presence_penalty
    np.add.at(values, bounds.biased, bounds.biases)


def _keep_to(values: np.ndarray, allowed: np.ndarray) -> None:
    """Leave only what is allowed: all of it alike where the model excludes it all."""
    values[allowed == 0] = -np.inf
    if values.max() == -np.inf:
        values[allowed != 0] = 0.0


def _keep_going(values: np.ndarray, params: SamplingParams, bounds: TokenBounds) -> None:
    """Keep out what would end the output too soon, unless a grammar leaves nothing else."""
    before = values[bounds.ends]
    values[bounds.ends] = -np.inf
    if params.grammar and values.max() == -np.inf:
        values[bounds.ends] = before


def _mask(values: np.ndarray, row: SampleRow, bounds: TokenBounds) -> None:
    """Take away what must not be chosen. Raises `InvalidRequestError` where nothing is left."""
    if (allowed := bounds.allowed) is not None:
        kept = values[allowed]
        values[:] = -np.inf
        values[allowed] = kept
    values[bounds.forbidden(row.state.output_ids)] = -np.inf
    if (row.params.allowed_token_ids or row.params.bad_words) and values.max() == -np.inf:
        raise nothing_left()


def _with_logprobs(logits: torch.Tensor, rows: Sequence[SampleRow], chosen: list[int]) -> list[SampledToken]:
    tokens = [SampledToken(token_id) for token_id in chosen]
    wanted = [index for index, row in enumerate(rows) if row.params.num_logprobs >= 0]
    if not wanted:
        return tokens
    logprobs = torch.log_softmax(logits[wanted].float(), dim=-1)
    own = logprobs.gather(1, torch.tensor([[chosen[index]] for index in wanted], device=logits.device))
    most = min(max(rows[index].params.num_logprobs for index in wanted), logits.shape[1])
    values, ids = (tensor.tolist() for tensor in logprobs.topk(most, dim=-1))
    for place, (index, logprob) in enumerate(zip(wanted, own[:, 0].tolist(), strict=True)):
        count = rows[index].params.num_logprobs
        top = tuple(zip(ids[place][:count], values[place][:count], strict=True))
        tokens[index] = SampledToken(chosen[index], logprob, top)
    return tokens
