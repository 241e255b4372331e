"""What an answer shows of its prompt: the text, the token ids, and how likely each of its tokens was."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from itertools import islice
from typing import Any

import orjson

from router.openai.logprobs import TextOffsets, finite, token_name
from router.openai.schema import ParsedRequest
from router.request.request import Request
from tandem.core.prompt_scores import TokenScore
from tandem.core.tokenizer import Tokenizer

Scores = tuple[TokenScore | None, ...]

#: Tokens that are dumped at once: meanwhile no other thread runs.
_SLICE = 128


class PromptPart:
    """The part of one prompt in its answer. What it shows is made once, however many choices have it.

    Attributes:
        text: what stands before each choice's output.
        scores: of each token; none where they are not wanted, or not known yet. The first token has none.
    """

    def __init__(self, parsed: ParsedRequest, request: Request, tokenizer: Tokenizer) -> None:
        self.text = request.echoed_text
        self.scores: Scores = ()
        self._parsed = parsed
        self._tokenizer = tokenizer
        self.token_ids = request.prompt_ids
        self._shown_ids = request.shown_ids

    def offsets_behind(self) -> TextOffsets:
        """Of a choice's tokens, in the text that begins with the prompt's part."""
        return TextOffsets(self._tokenizer, self.token_ids, self._shown_ids, begin=len(self.text))

    @functools.cached_property
    def echoed_logprobs(self) -> dict[str, bytes | None]:
        """As `router.openai.logprobs.completion_logprobs`, of the prompt's tokens: elements of JSON arrays."""
        num_top = self._parsed.num_logprobs
        offsets = TextOffsets(self._tokenizer, shown_ids=self._shown_ids).following(self.token_ids)
        return {
            "tokens": _elements(token_name(self._tokenizer, token_id) for token_id in self.token_ids),
            "token_logprobs": _elements(score and finite(score.logprob) for score in self.scores),
            "top_logprobs": _elements(self._best(*pair, num_top) for pair in self._pairs()) if num_top else None,
            "text_offset": _elements(offsets),
        }

    @functools.cached_property
    def prompt_logprobs(self) -> orjson.Fragment:
        """vLLM's `prompt_logprobs`: by token id, each token's own and the likeliest ones."""
        return array_of(_elements(self._ranked(*pair) for pair in self._pairs()))

    @functools.cached_property
    def shown_ids(self) -> orjson.Fragment:
        return array_of(_elements(self.token_ids))

    def _pairs(self) -> Iterable[tuple[int, TokenScore | None]]:
        return zip(self.token_ids, self.scores, strict=True)

    def _best(self, token_id: int, score: TokenScore | None, num_top: int) -> dict[str, float] | None:
        if score is None:
            return None
        pairs = (*score.top_logprobs[:num_top], (token_id, score.logprob))
        return {token_name(self._tokenizer, token_id): finite(logprob) for token_id, logprob in pairs}

    def _ranked(self, token_id: int, score: TokenScore | None) -> dict[str, Any] | None:
        if score is None:
            return None
        top = score.top_logprobs[: self._parsed.num_prompt_logprobs]
        entries = {str(token_id): self._entry(token_id, score.logprob, score.rank)}
        for rank, (likely_id, logprob) in enumerate(top, start=1):
            entries.setdefault(str(likely_id), self._entry(likely_id, logprob, rank))
        return entries

    def _entry(self, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": token_name(self._tokenizer, token_id)}


def array_of(elements: bytes, more: list[Any] | None = None) -> orjson.Fragment:
    """The JSON array of `elements`, and `more` behind them."""
    behind = (b",", orjson.dumps(more)[1:-1]) if more else ()
    return orjson.Fragment(b"".join((b"[", elements, *behind, b"]")))


def _elements(values: Iterable[Any]) -> bytes:
    """As JSON, with commas between."""
    rest = iter(values)
    slices = iter(lambda: list(islice(rest, _SLICE)), [])
    return b",".join([orjson.dumps(some)[1:-1] for some in slices])
