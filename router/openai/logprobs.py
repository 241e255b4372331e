"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.request.request import TokenGiven
from tandem.core.tokenizer import Tokenizer

_LOWEST = -9999.0  # OpenAI's stand-in for minus infinity, which JSON cannot hold


def completion_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[TokenGiven], *, wants_top: bool, offset: int
) -> dict[str, Any]:
    """`choices[].logprobs` of `/v1/completions`; `offset` is how many characters of output came before."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token_text(tokenizer, token.token_id))
    return {
        "tokens": [token_name(tokenizer, token.token_id) for token in tokens],
        "token_logprobs": [finite(token.logprob) for token in tokens],
        "top_logprobs": [_best(tokenizer, token) for token in tokens] if wants_top else None,
        "text_offset": offsets,
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


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """The characters that a token shows by itself; those of a special token or half a character are none."""
    if tokenizer.is_special(token_id):
        return ""
    return tokenizer.token_bytes(token_id).decode("utf-8", "ignore")


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
