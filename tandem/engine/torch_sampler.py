"""Sampling by operations of torch, on the device that the logits are on: they are not copied to the host.

See `tandem.engine.sampler` for the rules. What rows ask for goes to the device in a few small copies, and one copy
brings back all tokens and log-probabilities of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tandem.core.errors import TandemError
from tandem.core.sampling import SampledToken, SampleRow, SamplingParams, TokenMask, uniform
from tandem.engine.device import to_device
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
from tandem.engine.torch_draw import Draws, draw

#: Draws the token of each row, as `torch_draw.draw` does.
Draw = Callable[[torch.Tensor, torch.Tensor, Draws], torch.Tensor]


class TorchSampler(Sampler):
    """Samples on any device.

    Args:
        draw: is given rows that `top_p`, `top_k` or `min_p` cut apart from others: which way a row is drawn, and so its
            bits, is its own.
    """

    def __init__(self, eos_token_ids: Sequence[int], draw: Draw = draw) -> None:
        super().__init__(eos_token_ids)
        self._draw = draw

    def sample_rows(self, logits: Logits, rows: Sequence[SampleRow]) -> list[SampledToken | TandemError]:
        check_shape(logits, rows)
        if not rows:
            return []
        failed: dict[int, TandemError] = {}
        asked = _Asked.of(rows, logits.shape[1], self._eos_token_ids, failed)
        greatest, chosen = logits.max(dim=-1)  # NaN is greatest
        is_nan, leaves_none = greatest.isnan(), torch.zeros_like(greatest, dtype=torch.bool)
        plain = [index for index in asked.numbers if index not in asked.changed]
        for alike in _drawn_alike(plain, rows):
            self._draw_into(chosen, alike, logits, greatest, rows, asked, alike)
        if asked.changed:
            changed = [*asked.changed]
            at = _ids(changed, logits.device)
            values = _rows_of(logits, changed).double()
            asked.edits.apply(values)
            best, likeliest = values.max(dim=-1)
            chosen[at], leaves_none[at] = likeliest, best == -torch.inf
            place_of = {index: place for place, index in enumerate(changed) if index in asked.numbers}
            for alike in _drawn_alike([*place_of], rows):
                self._draw_into(chosen, alike, values, best, rows, asked, [place_of[index] for index in alike])
        return _told(logits, rows, chosen, torch.stack([is_nan, leaves_none]), failed)

    def _draw_into(
        self,
        chosen: torch.Tensor,
        indices: list[int],
        logits: torch.Tensor,
        greatest: torch.Tensor,
        rows: Sequence[SampleRow],
        asked: _Asked,
        places: list[int],
    ) -> None:
        """Draw the rows `indices`, which stand at `places` in `logits` and `greatest`, and put their tokens into
        `chosen`; where there is no distribution, the likeliest stays."""
        logits, greatest = _rows_of(logits, places), _rows_of(greatest, places)
        draws = Draws.of([rows[index].params for index in indices], [asked.numbers[i] for i in indices], logits.device)
        drawn = self._draw(logits, greatest, draws)
        if len(indices) == len(chosen):
            chosen.copy_(torch.where(greatest.isfinite(), drawn, chosen))
        else:
            at = _ids(indices, logits.device)
            chosen[at] = torch.where(greatest.isfinite(), drawn, chosen[at])


@dataclass(slots=True)
class _Asked:
    """What rows want beyond their likeliest token.

    Attributes:
        numbers: of each row that is drawn its random number.
        changed: rows whose logits change, in order; `edits` says how, by the place among them.
    """

    numbers: dict[int, float] = field(default_factory=dict)
    changed: dict[int, None] = field(default_factory=dict)
    edits: _Edits = field(default_factory=lambda: _Edits())

    @classmethod
    def of(
        cls, rows: Sequence[SampleRow], vocab_size: int, eos_token_ids: Sequence[int], failed: dict[int, TandemError]
    ) -> _Asked:
        """Read it of all rows that are not `failed`, and which then may be more."""
        asked, masks = cls(), masks_of(rows, failed)
        for index, row in enumerate(rows):
            if index in failed:
                continue
            try:
                number = None if row.params.is_greedy else uniform(row.params.seed, row.choice, row.position)
                if index in masks or changes_logits(row):
                    bounds = TokenBounds.of(row, vocab_size, eos_token_ids)
                    asked.changed[index] = None  # first of all: a row that fails half way keeps its place
                    asked.edits.add(len(asked.changed) - 1, row, bounds, masks.get(index))
            except TandemError as error:
                failed[index] = error
            except Exception as error:  # noqa: BLE001 - the row's own; it goes to whoever asked for it
                failed[index] = not_sampled(error)
            else:
                if number is not None:
                    asked.numbers[index] = number
        return asked


class _Entries:
    """Entries of a matrix, `[row, token]`, with a number or two for each."""

    def __init__(self) -> None:
        self._rows: list[np.ndarray] = []
        self._tokens: list[np.ndarray] = []
        self._numbers: list[np.ndarray] = []

    def add(self, row: int, tokens: np.ndarray, *numbers: np.ndarray | float) -> None:
        if len(tokens):
            self._rows.append(np.full(len(tokens), row, np.int64))
            self._tokens.append(tokens)
            self._numbers.append(np.stack([np.broadcast_to(each, len(tokens)) for each in numbers] or [tokens[:0]]))

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Rows, tokens and numbers (`[numbers of each, entries]`); `None`: there are no entries."""
        if not self._rows:
            return None
        places = np.stack([np.concatenate(self._rows), np.concatenate(self._tokens)])
        rows, tokens = to_device(places, device)
        return rows, tokens, to_device(np.concatenate(self._numbers, axis=1), device)


class _Edits:
    """All that changes the logits of some rows, in the order in which it does."""

    def __init__(self) -> None:
        self._seen, self._output, self._biased = _Entries(), _Entries(), _Entries()
        self._ends, self._allowed, self._forbidden = _Entries(), _Entries(), _Entries()
        self._masks: dict[int, TokenMask] = {}
        self._give_way: list[int] = []  # rows whose ends of text come back where nothing else is left
        self._bound: list[int] = []  # rows with `allowed`

    def add(self, place: int, row: SampleRow, bounds: TokenBounds, mask: TokenMask | None) -> None:
        params, state = row.params, row.state
        if params.repetition_penalty != 1.0:
            self._seen.add(place, np.array(state.seen, np.int64), params.repetition_penalty)
        counts = state.output_counts
        if counts and (params.frequency_penalty or params.presence_penalty):
            output = np.fromiter(counts.keys(), dtype=np.int64, count=len(counts))
            times = np.fromiter(counts.values(), dtype=np.float64, count=len(counts))
            self._output.add(place, output, params.frequency_penalty * times + params.presence_penalty)
        self._biased.add(place, bounds.biased, bounds.biases)
        if mask is not None:
            self._masks[place] = mask
        if row.position < params.min_tokens:
            self._ends.add(place, bounds.ends)
            if params.grammar:
                self._give_way.append(place)
        if bounds.allowed is not None:
            self._bound.append(place)
            self._allowed.add(place, bounds.allowed)
        self._forbidden.add(place, bounds.forbidden(state.output_ids))

    def apply(self, values: torch.Tensor) -> None:
        """Change `values`, float64 `[rows, vocab]`."""
        device = values.device
        if (seen := self._seen.on(device)) is not None:
            rows, tokens, (penalty,) = seen
            old = values[rows, tokens]
            values[rows, tokens] = torch.where(old > 0, old / penalty, old * penalty)
        if (output := self._output.on(device)) is not None:
            rows, tokens, (penalty,) = output
            values[rows, tokens] -= penalty
        if (biased := self._biased.on(device)) is not None:
            rows, tokens, (bias,) = biased
            values.index_put_((rows, tokens), bias, accumulate=True)
        if self._masks:
            self._keep_to_masks(values)
        if (ends := self._ends.on(device)) is not None:
            rows, tokens, _ = ends
            before = values[rows, tokens]
            values[rows, tokens] = -torch.inf
            if self._give_way:
                gives_way = torch.zeros(len(values), dtype=torch.bool, device=device)
                gives_way[_ids(self._give_way, device)] = True
                gives_way &= values.amax(dim=-1) == -torch.inf
                values[rows, tokens] = torch.where(gives_way[rows], before, -torch.inf)
        if self._bound:
            allowed = self._allowed.on(device)
            kept = values[allowed[0], allowed[1]] if allowed is not None else None
            values[_ids(self._bound, device)] = -torch.inf
            if allowed is not None and kept is not None:
                values[allowed[0], allowed[1]] = kept
        if (forbidden := self._forbidden.on(device)) is not None:
            values[forbidden[0], forbidden[1]] = -torch.inf

    def _keep_to_masks(self, values: torch.Tensor) -> None:
        """Leave only what is allowed: all of it alike where the model excludes it all."""
        vocab_size, device = values.shape[1], values.device
        packed = np.zeros((len(self._masks), (vocab_size + 7) // 8), np.uint8)
        for place, mask in enumerate(self._masks.values()):
            of_row = np.frombuffer(mask, np.uint8)[: packed.shape[1]]
            packed[place, : len(of_row)] = of_row
        bits = to_device(packed, device).unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=device)
        allowed = (bits & 1).bool().flatten(1)[:, :vocab_size]
        rows = _ids([*self._masks], device)
        kept = torch.where(allowed, values[rows], -torch.inf)
        excludes_all = kept.amax(dim=-1, keepdim=True) == -torch.inf
        values[rows] = torch.where(excludes_all & allowed, 0.0, kept)


def _drawn_alike(indices: Sequence[int], rows: Sequence[SampleRow]) -> Iterator[list[int]]:
    """Rows with the whole distribution to choose from, and those whose distribution is cut."""
    cut = {index for index in indices if _cuts(rows[index].params)}
    for alike in ([index for index in indices if index not in cut], [index for index in indices if index in cut]):
        if alike:
            yield alike


def _cuts(params: SamplingParams) -> bool:
    return params.top_p < 1.0 or params.top_k > 0 or params.min_p > 0.0


def _told(
    logits: Logits,
    rows: Sequence[SampleRow],
    chosen: torch.Tensor,
    flags: torch.Tensor,
    failed: dict[int, TandemError],
) -> list[SampledToken | TandemError]:
    """What each row gets; `flags`: bool `[2, rows]`, whether a row holds NaN, and whether nothing is left to choose."""
    parts = [chosen, *flags]  # one copy, in which ids stay as they are: float64 holds them all
    wanted = [index for index, row in enumerate(rows) if row.params.num_logprobs >= 0]
    most = min(max((rows[index].params.num_logprobs for index in wanted), default=0), logits.shape[1])
    if wanted:
        logprobs = torch.log_softmax(_rows_of(logits, wanted).float(), dim=-1)
        own = logprobs.gather(1, _rows_of(chosen, wanted)[:, None])
        values, ids = logprobs.topk(most, dim=-1)
        parts += [part.flatten() for part in (own, values, ids)]
    told = torch.cat([part.double() for part in parts]).cpu().numpy()
    tokens, is_nan, leaves_none = told[: 3 * len(rows)].reshape(3, -1)
    results: list[SampledToken | TandemError] = [SampledToken(int(token)) for token in tokens]
    if wanted:
        of_chosen, of_top, top_ids = np.split(told[3 * len(rows) :], np.cumsum([len(wanted), len(wanted) * most]))
        for place, index in enumerate(wanted):
            count = min(rows[index].params.num_logprobs, most)
            of_row = slice(place * most, place * most + count)
            top = tuple(zip(top_ids[of_row].astype(int).tolist(), of_top[of_row].tolist(), strict=True))
            results[index] = SampledToken(int(tokens[index]), float(of_chosen[place]), top)
    for index, row in enumerate(rows):
        if index in failed:
            results[index] = failed[index]
        elif is_nan[index]:
            results[index] = nan_logits()
        elif leaves_none[index] and (row.params.allowed_token_ids or row.params.bad_words):
            results[index] = nothing_left()
    return results


def _rows_of(tensor: torch.Tensor, indices: list[int]) -> torch.Tensor:
    """These rows; where they are all, the tensor itself."""
    if len(indices) == len(tensor):  # they rise
        return tensor
    return tensor[_ids(indices, tensor.device)]


def _ids(indices: list[int], device: torch.device) -> torch.Tensor:
    return to_device(np.array(indices, np.int64), device)
