"""What a request says of single tokens, in a form that costs no walk over all of them for each token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tandem.core.sampling import SampleRow, SamplingParams

#: The other tokens of a bad word, and the last one.
_Word = tuple[list[int], int]


class TokenBounds:
    """The bounds of one choice's tokens.

    Attributes:
        biased: token ids, `biases` theirs.
        ends: tokens that end the output.
        allowed: all that may be chosen; `None`: no such bound.
    """

    def __init__(self, params: SamplingParams, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._params, self._vocab_size = params, vocab_size
        biases = [pair for pair in params.logit_bias if pair[0] < vocab_size]
        self.biased = np.array([token_id for token_id, _ in biases], np.int64)
        self.biases = np.array([bias for _, bias in biases], np.float64)
        eos = () if params.ignore_eos else eos_token_ids
        self.ends = _ids((*params.stop_token_ids, *eos), vocab_size)
        self.allowed = _ids(params.allowed_token_ids, vocab_size) if params.allowed_token_ids else None
        words = [(list(begun), last) for *begun, last in set(params.bad_words) if last < vocab_size]
        self._never = _ids([last for begun, last in words if not begun], vocab_size)
        self._words: dict[int, list[_Word]] = {}  # by the token that the last one may not follow
        for begun, last in words:
            if begun:
                self._words.setdefault(begun[-1], []).append((begun, last))

    @staticmethod
    def of(row: SampleRow, vocab_size: int, eos_token_ids: Sequence[int]) -> TokenBounds:
        """Those of `row`, made with its first token."""
        bounds = row.state.bounds
        if not isinstance(bounds, TokenBounds) or not bounds.is_of(row.params, vocab_size):
            bounds = row.state.bounds = TokenBounds(row.params, vocab_size, eos_token_ids)
        return bounds

    def is_of(self, params: SamplingParams, vocab_size: int) -> bool:
        return self._params is params and self._vocab_size == vocab_size

    def forbidden(self, output_ids: Sequence[int]) -> np.ndarray:
        """Tokens that would complete a bad word behind `output_ids`."""
        behind = self._words.get(output_ids[-1], ()) if output_ids else ()
        found = [last for begun, last in behind if output_ids[-len(begun) :] == begun]
        return np.concatenate([self._never, np.array(found, np.int64)]) if found else self._never


def _ids(token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    ids = np.unique(np.array(token_ids, np.int64))
    return ids[ids < vocab_size]
