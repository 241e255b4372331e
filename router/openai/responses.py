"""Answers in OpenAI's shapes: whole bodies, stream frames, errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from router.openai.logprobs import chat_logprobs, completion_logprobs
from router.openai.schema import ParsedRequest
from router.request.request import Delta, Request, TokenGiven, Usage
from tandem.core.errors import AuthenticationError, InvalidRequestError, OverloadedError, TandemError
from tandem.core.tokenizer import Tokenizer

DONE_FRAME = b"data: [DONE]\n\n"
_OPENING = {"role": "assistant", "content": ""}


def error_body(error: TandemError, request_id: str) -> dict[str, Any]:
    """OpenAI's error object, and what a client needs beside it: which request it was and whether to send it again."""
    return {
        "error": {
            "message": error.message,
            "type": error.openai_type,
            "param": error.field if isinstance(error, InvalidRequestError) else None,
            "code": error.code,
            "request_id": request_id,
            "retryable": error.retryable,
        }
    }


def error_headers(error: TandemError) -> dict[str, str]:
    """What an error says beside its body. OpenAI's clients obey `x-should-retry` and `retry-after`."""
    headers = {"x-should-retry": "true" if error.retryable else "false"}
    if isinstance(error, OverloadedError):
        headers["retry-after"] = f"{max(1, math.ceil(error.retry_after_s))}"
    elif error.http_status == 503 and error.retryable:
        headers["retry-after"] = "1"
    elif isinstance(error, AuthenticationError):
        headers["www-authenticate"] = "Bearer"
    return headers


def error_frame(error: TandemError, request_id: str) -> bytes:
    """The last frame of a stream that fails."""
    return b"data: " + orjson.dumps(error_body(error, request_id)) + b"\n\n"


def usage_body(usages: Sequence[Usage]) -> dict[str, Any]:
    """OpenAI's `usage` over all prompts of a request."""
    num_prompt = sum(usage.num_prompt_tokens for usage in usages)
    num_output = sum(usage.num_output_tokens for usage in usages)
    body: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
    }
    cached = [usage.num_cached_tokens for usage in usages if usage.num_cached_tokens is not None]
    if len(cached) == len(usages):
        body["prompt_tokens_details"] = {"cached_tokens": sum(cached)}
    return body


@dataclass
class _Choice:
    """What one choice of the answer has so far."""

    text: list[str] = field(default_factory=list)
    tokens: list[TokenGiven] = field(default_factory=list)
    finish_reason: str | None = None
    num_chars: int = 0  # shown so far
    is_begun: bool = False


class Answer:
    """One answer: gathers deltas into a body, or makes a stream frame of each. Choices are prompt × n + choice."""

    def __init__(
        self, parsed: ParsedRequest, requests: Sequence[Request], tokenizer: Tokenizer, *, request_id: str, created: int
    ) -> None:
        self.request_id = request_id
        self._parsed = parsed
        self._requests = requests
        self._tokenizer = tokenizer
        self._is_chat = parsed.kind == "chat"
        self._choices = [_Choice() for _ in range(len(requests) * parsed.num_choices)]
        name = "chat.completion" if self._is_chat else "text_completion"
        chunk_name = "chat.completion.chunk" if self._is_chat else name
        answer_id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{request_id}"
        base = {"id": answer_id, "created": created, "model": parsed.model}
        self._base = {**base, "object": name}
        self._chunk_base = {**base, "object": chunk_name}
        # A frame is this, its one choice, and the tail: only the choice is made anew for each.
        self._frame_head = b"data: " + orjson.dumps(self._chunk_base)[:-1] + b',"choices":['
        self._frame_tail = b'],"usage":null}\n\n' if parsed.include_usage else b"]}\n\n"

    # -- whole

    def gather(self, prompt: int, delta: Delta) -> None:
        """Keep a delta for the body."""
        choice = self._choices[prompt * self._parsed.num_choices + delta.choice]
        choice.text.append(delta.text)
        choice.tokens.extend(delta.tokens)
        choice.finish_reason = delta.finish_reason

    def body(self, usages: Sequence[Usage]) -> bytes:
        """The whole answer."""
        choices = [self._whole_choice(number, choice) for number, choice in enumerate(self._choices)]
        return orjson.dumps({**self._base, "choices": choices, "usage": usage_body(usages)})

    def _whole_choice(self, number: int, choice: _Choice) -> dict[str, Any]:
        text = "".join(choice.text)
        said = {"message": {"role": "assistant", "content": text, "refusal": None}} if self._is_chat else {"text": text}
        shape = self._shape(number, said, choice.tokens, choice.finish_reason, offset=0)
        if self._parsed.return_token_ids:
            shape["prompt_token_ids"] = list(self._requests[number // self._parsed.num_choices].prompt_ids)
        return shape

    # -- streamed

    def frames(self, prompt: int, delta: Delta) -> bytes:
        """The frames of one delta; a chat's first names the role."""
        number = prompt * self._parsed.num_choices + delta.choice
        choice = self._choices[number]
        opening = b""
        said: dict[str, Any] = {"text": delta.text}
        if self._is_chat:
            said = {"delta": {"content": delta.text} if delta.text else {}}
            if not choice.is_begun:
                choice.is_begun = True
                opening = self._frame({"index": number, "delta": _OPENING, "logprobs": None, "finish_reason": None})
        shape = self._shape(number, said, delta.tokens, delta.finish_reason, offset=choice.num_chars)
        choice.num_chars += len(delta.text)
        return opening + self._frame(shape)

    def usage_frame(self, usages: Sequence[Usage]) -> bytes:
        """The frame before `[DONE]` where `stream_options.include_usage` asked for it."""
        if not self._parsed.include_usage:
            return b""
        return b"data: " + orjson.dumps({**self._chunk_base, "choices": [], "usage": usage_body(usages)}) + b"\n\n"

    def _frame(self, choice: dict[str, Any]) -> bytes:
        return b"".join((self._frame_head, orjson.dumps(choice), self._frame_tail))

    def _shape(
        self, number: int, said: dict[str, Any], tokens: Sequence[TokenGiven], finish_reason: str | None, *, offset: int
    ) -> dict[str, Any]:
        """One choice with what it says; `offset`: characters of its output that came before."""
        logprobs = self._logprobs(tokens, offset=offset)
        shape = {"index": number, **said, "logprobs": logprobs, "finish_reason": finish_reason}
        if self._parsed.return_token_ids:
            shape["token_ids"] = [token.token_id for token in tokens]
        return shape

    def _logprobs(self, tokens: Sequence[TokenGiven], *, offset: int) -> dict[str, Any] | None:
        num_logprobs = self._parsed.sampling.num_logprobs
        if num_logprobs < 0:
            return None
        if self._is_chat:
            return chat_logprobs(self._tokenizer, tokens)
        return completion_logprobs(self._tokenizer, tokens, wants_top=num_logprobs > 0, offset=offset)
