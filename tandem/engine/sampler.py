"""From logits to tokens: keyed, so that the same request gives the same tokens on every worker.

Each row is sampled by itself, in float64, from (seed, choice, position): neither the batch nor the worker shows. Rows
of a GPU that are not greedy are copied to the host for it.
Order: penalties over what was seen, bias, grammar, minimum length (which gives way where the grammar can only end),
allowed tokens, bad words; temperature; `min_p`, `top_k`, `top_p`; inverse CDF over the tokens that are left, by id.
Log-probabilities are of the model's own distribution, before all of that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tandem.core.errors import InternalError, InvalidRequestError, TandemError
from tandem.core.sampling import SampledToken, SampleRow, SamplingParams, TokenMask, uniform
from tandem.engine.cpu.draw_kernel import NAN, NOT_FINITE, Draw, compile_kernel, draw_rows
from tandem.engine.token_bounds import TokenBounds

#: float32 `[rows, vocab]`, on any device.
Logits = torch.Tensor


class Sampler:
    """Samples what a batch asks for; compiled when it is made.

    Args:
        eos_token_ids: the model's ends of text.
    """

    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        self._eos_token_ids = eos_token_ids
        compile_kernel()

    def __call__(self, logits: Logits, rows: Sequence[Sequence[SampleRow]]) -> list[list[SampledToken | TandemError]]:
        """For each row of `logits` one token for each of its `rows`: several choices may follow one prompt."""
        counts = [len(of_one) for of_one in rows]
        flat = [row for of_one in rows for row in of_one]
        if any(count != 1 for count in counts):
            repeats = torch.tensor(counts, dtype=torch.long, device=logits.device)
            logits = logits.repeat_interleave(repeats, dim=0)
        sampled = iter(sample_rows(logits, flat, self._eos_token_ids))
        return [[next(sampled) for _ in range(count)] for count in counts]


def sample_rows(
    logits: torch.Tensor, rows: Sequence[SampleRow], eos_token_ids: Sequence[int] = ()
) -> list[SampledToken | TandemError]:
    """Choose one token for each row; where that fails, the row has its error, and no other row shows it.

    Args:
        logits: `[len(rows), vocab]` float32, on any device; not changed.
        rows: what is asked of each row. Its state is read, not appended to.
        eos_token_ids: the model's ends of text, kept out until `min_tokens` unless `ignore_eos`.

    A row that holds NaN fails: the model overflowed, and any token would be invented.
    """
    if logits.dim() != 2 or logits.shape[0] != len(rows):
        raise ValueError(f"logits of shape {tuple(logits.shape)} for {len(rows)} rows")
    if not rows:
        return []
    failed: dict[int, TandemError] = {}
    masks = _masks(rows, failed)
    # The kernel that draws finds the greatest by itself, on several threads.
    looked_at = [i for i, row in enumerate(rows) if row.params.is_greedy or i in masks or _changes_logits(row)]
    chosen = [0] * len(rows)
    for index, likeliest, bad in zip(looked_at, *_greatest(logits, looked_at), strict=True):
        chosen[index] = likeliest
        if bad:
            failed[index] = _nan()
    taken = [i for i, row in enumerate(rows) if i not in failed and not _stays(row, chosen[i], masks.get(i))]
    draws: dict[int, Draw] = {}
    for index, values in zip(taken, _on_host(logits, taken), strict=True):
        row = rows[index]
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
            failed[index] = InternalError(f"no token could be sampled: {type(error).__name__}: {error}")
            failed[index].__cause__ = error
    if draws:
        for (index, draw), token_id in zip(
            draws.items(), draw_rows(list(draws.values()), torch.get_num_threads()), strict=True
        ):
            if token_id == NAN:
                failed[index] = _nan()
            else:
                chosen[index] = token_id if token_id != NOT_FINITE else int(draw.logits.argmax())
    tokens = _with_logprobs(logits, rows, chosen)
    return [failed.get(index, token) for index, token in enumerate(tokens)]


def _on_host(logits: torch.Tensor, indices: list[int]) -> list[np.ndarray]:
    """These rows of it; of a GPU one copy, and so one wait for it."""
    if not indices:
        return []
    if logits.device.type != "cpu":
        return list(logits[indices].cpu().numpy())
    values = logits.contiguous().numpy()
    return [values[index] for index in indices]


def _greatest(logits: torch.Tensor, indices: list[int]) -> tuple[list[int], list[bool]]:
    """Where each of these rows is greatest, and whether it holds NaN."""
    if not indices:
        return [], []
    if logits.device.type == "cpu":
        # numpy does without torch's way to an operator, which costs more than the work; NaN is greatest to both.
        values = logits.numpy()
        ids = values.argmax(axis=-1) if len(indices) == len(values) else [values[i].argmax() for i in indices]
        return [int(i) for i in ids], np.isnan(values[indices, ids]).tolist()
    best, best_ids = logits[indices].max(dim=-1)
    # One copy from the device, and so one wait for it.
    chosen, is_nan = torch.stack([best_ids, torch.isnan(best).long()]).tolist()
    return chosen, is_nan


def _nan() -> TandemError:
    return InternalError("the model gave NaN logits")


def _masks(rows: Sequence[SampleRow], failed: dict[int, TandemError]) -> dict[int, TokenMask]:
    """What the grammars of rows allow, by row; `failed` gets those whose grammar cannot tell."""
    masks = {}
    for index, row in enumerate(rows):
        if row.guide is not None and index not in failed:
            try:
                masks[index] = row.guide.allowed()
            except TandemError as error:
                failed[index] = error
    return masks


def _stays(row: SampleRow, likeliest: int, mask: TokenMask | None) -> bool:
    """Whether the likeliest token is the one to take, without a look at the others."""
    if not row.params.is_greedy or _changes_logits(row):
        return False
    return mask is None or (likeliest >> 3 < len(mask) and bool(mask[likeliest >> 3] >> (likeliest & 7) & 1))


def _bits(mask: TokenMask, vocab_size: int) -> np.ndarray:
    """uint8 `[vocab_size]`: 1 for each token that may come."""
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    return bits[:vocab_size] if len(bits) >= vocab_size else np.pad(bits, (0, vocab_size - len(bits)))


def _changes_logits(row: SampleRow) -> bool:
    params = row.params
    is_bound = bool(params.logit_bias or params.allowed_token_ids or params.bad_words)
    return params.has_penalties or is_bound or row.position < params.min_tokens


def _obey(
    logits: np.ndarray, row: SampleRow, mask: TokenMask | None, eos_token_ids: Sequence[int]
) -> np.ndarray | None:
    """The logits, float64, with all that is asked of a row but its distribution; `None` where they stay."""
    if mask is None and not _changes_logits(row):
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
        seen = np.fromiter(state.seen, dtype=np.int64, count=len(state.seen))
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
        raise InvalidRequestError("allowed_token_ids, bad_words, min_tokens and the grammar leave no token to choose")


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
