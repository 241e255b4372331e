"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Any

from router.request.request import TokenGiven
from tandem.core.detokenizer import detokenizer_for
from tandem.core.tokenizer import Tokenizer

_LOWEST = -9999.0  # OpenAI's stand-in for minus infinity, which JSON cannot hold


class TextOffsets:
    """Where the tokens of a text begin in it, in characters; one within a character begins where that does.

    Told token by token: what one shows depends on those before it.
    """

    def __init__(
        self, tokenizer: Tokenizer, before: Sequence[int] = (), shown_ids: Set[int] = frozenset(), *, begin: int = 0
    ) -> None:
        """
        Args:
            before: the tokens before the text's, whose characters are `begin`.
            shown_ids: special tokens that are part of the text.
        """
        self._detokenizer = detokenizer_for(tokenizer, before, shown_ids)
        self._num_chars = begin

    @property
    def end(self) -> int:
        """Where the last one ends, so far as that is certain."""
        return self._num_chars

    def following(self, token_ids: Iterable[int]) -> list[int]:
        """Those of the text's next tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._num_chars)
            self._num_chars += len(self._detokenizer.push(token_id))
        return offsets


def completion_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[TokenGiven], *, wants_top: bool, offsets: TextOffsets
) -> dict[str, Any]:
    """`choices[].logprobs` of `/v1/completions`; `offsets`: of the choice whose next tokens these are."""
    return {
        "tokens": [token_name(tokenizer, token.token_id) for token in tokens],
        "token_logprobs": [finite(token.logprob) for token in tokens],
        "top_logprobs": [_best(tokenizer, token) for token in tokens] if wants_top else None,
        "text_offset": offsets.following(token.token_id for token in tokens),
    }


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenGiven]) -> dict[str, Any]:
    """`choices[].logprobs` of `/v1/chat/completions`."""
    content = [
        {
            **_chat_entry(tokenizer, token.token_id, token.logprob),
            "top_logprobs": [_chat_entry(tokenizer, token_id, logprob) for token_id, logprob in token.top_logprobs],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as one text; where its bytes are no text, OpenAI's `bytes:\\xe2\\x80`."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _best(tokenizer: Tokenizer, token: TokenGiven) -> dict[str, float]:
    """The k best, and the chosen token where it is not among them."""
    best = {token_name(tokenizer, token_id): finite(logprob) for token_id, logprob in token.top_logprobs}
    return best | {token_name(tokenizer, token.token_id): finite(token.logprob)}


def _chat_entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": token_name(tokenizer, token_id),
        "logprob": finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def finite(logprob: float) -> float:
    """A log-probability as JSON can hold it."""
    return logprob if logprob > _LOWEST else _LOWEST
