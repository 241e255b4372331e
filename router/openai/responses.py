"""Answers in OpenAI's shapes: whole bodies, stream frames, errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from router.openai.endpoint import Call, Setting
from router.openai.fields import PromptBounds
from router.openai.logprobs import chat_logprobs, completion_logprobs
from router.openai.schema import ParsedRequest, parse_chat, parse_completion
from router.request.request import Delta, TokenGiven, Usage
from router.tools.formats import is_read, reader_for
from router.tools.pieces import Called, Piece, Reader, Said, Thought, new_call_id
from tandem.core.config import LimitsConfig
from tandem.core.errors import AuthenticationError, InvalidRequestError, OverloadedError, TandemError

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

    reader: Reader | None = None  # of its text; `None`: all of it is content
    text: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[Called] = field(default_factory=list)
    tokens: list[TokenGiven] = field(default_factory=list)
    finish_reason: str | None = None
    num_chars: int = 0  # shown so far
    is_begun: bool = False


class Answer:
    """One answer: gathers deltas into a body, or makes a stream frame of each. Choices are prompt × n + choice."""

    def __init__(self, parsed: ParsedRequest, setting: Setting) -> None:
        self._request_id = setting.request_id
        self._parsed = parsed
        self._requests = setting.requests
        self._tokenizer = setting.tokenizer
        self._is_chat = parsed.kind == "chat"
        form, use = setting.card.tool_format, parsed.tool_use
        self._is_read = self._is_chat and is_read(form, use)
        num_choices = len(setting.requests) * parsed.num_choices
        self._choices = [_Choice(reader_for(form, use) if self._is_read else None) for _ in range(num_choices)]
        name = "chat.completion" if self._is_chat else "text_completion"
        chunk_name = "chat.completion.chunk" if self._is_chat else name
        answer_id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{setting.request_id}"
        base = {"id": answer_id, "created": setting.created, "model": parsed.model}
        self._base = {**base, "object": name}
        self._chunk_base = {**base, "object": chunk_name}
        # A frame is this, its one choice, and the tail: only the choice is made anew for each.
        self._frame_head = b"data: " + orjson.dumps(self._chunk_base)[:-1] + b',"choices":['
        self._frame_tail = b'],"usage":null}\n\n' if parsed.include_usage else b"]}\n\n"

    # -- whole

    def gather(self, prompt: int, delta: Delta) -> None:
        """Keep a delta for the body."""
        choice = self._choices[prompt * self._parsed.num_choices + delta.choice]
        choice.tokens.extend(delta.tokens)
        for piece in _pieces(choice, delta):
            match piece:
                case Said():
                    choice.text.append(piece.text)
                case Thought():
                    choice.thoughts.append(piece.text)
                case Called():
                    choice.calls.append(piece)
        choice.finish_reason = _finish_reason(choice, delta)

    def body(self, usages: Sequence[Usage]) -> bytes:
        """The whole answer."""
        choices = [self._whole_choice(number, choice) for number, choice in enumerate(self._choices)]
        return orjson.dumps({**self._base, "choices": choices, "usage": usage_body(usages)})

    def _whole_choice(self, number: int, choice: _Choice) -> dict[str, Any]:
        said: dict[str, Any] = {"text": "".join(choice.text)}
        if self._is_chat:
            said = {"message": _message(choice)}
        shape = self._shape(number, said, choice.tokens, choice.finish_reason, offset=0)
        if self._parsed.return_token_ids:
            shape["prompt_token_ids"] = list(self._requests[number // self._parsed.num_choices].prompt_ids)
        return shape

    # -- streamed

    def opening(self) -> bytes:
        """Each choice opens with its first delta."""
        return b""

    def frames(self, prompt: int, delta: Delta) -> bytes:
        """The frames of one delta; a chat's first names the role."""
        number = prompt * self._parsed.num_choices + delta.choice
        choice = self._choices[number]
        if self._is_read:
            return self._read_frames(number, choice, delta)
        opening = b""
        said: dict[str, Any] = {"text": delta.text}
        if self._is_chat:
            said = {"delta": {"content": delta.text} if delta.text else {}}
            opening = self._opening(number, choice)
        shape = self._shape(number, said, delta.tokens, delta.finish_reason, offset=choice.num_chars)
        choice.num_chars += len(delta.text)
        return opening + self._frame(shape)

    def _opening(self, number: int, choice: _Choice) -> bytes:
        if choice.is_begun:
            return b""
        choice.is_begun = True
        return self._frame({"index": number, "delta": _OPENING, "logprobs": None, "finish_reason": None})

    def _read_frames(self, number: int, choice: _Choice, delta: Delta) -> bytes:
        """A frame for each piece of a message; the first has the tokens, the last the reason for the end."""
        said = [said for piece in _pieces(choice, delta) for said in _said(choice, piece)]
        reason = _finish_reason(choice, delta)
        tells_tokens = self._parsed.return_token_ids or self._parsed.sampling.num_logprobs >= 0
        if not said and (reason is not None or tells_tokens):
            said = [{}]
        shapes = [
            self._shape(
                number,
                {"delta": one},
                delta.tokens if n == 0 else [],
                reason if n == len(said) - 1 else None,
                offset=0,
            )
            for n, one in enumerate(said)
        ]
        if not shapes:
            return b""
        return self._opening(number, choice) + b"".join(map(self._frame, shapes))

    def closing(self, usages: Sequence[Usage]) -> bytes:
        """`[DONE]`, and the usage before it where `stream_options.include_usage` asked for it."""
        if not self._parsed.include_usage:
            return DONE_FRAME
        usage = {**self._chunk_base, "choices": [], "usage": usage_body(usages)}
        return b"data: " + orjson.dumps(usage) + b"\n\n" + DONE_FRAME

    def failure(self, error: TandemError) -> bytes:
        """The error alone, without `[DONE]`."""
        return b"data: " + orjson.dumps(error_body(error, self._request_id)) + b"\n\n"

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


def _pieces(choice: _Choice, delta: Delta) -> Sequence[Piece]:
    if choice.reader is None:
        return (Said(delta.text),) if delta.text else ()
    pieces = choice.reader.push(delta.text)
    return pieces if delta.finish_reason is None else [*pieces, *choice.reader.finish()]


def _finish_reason(choice: _Choice, delta: Delta) -> str | None:
    return "tool_calls" if choice.calls and delta.finish_reason == "stop" else delta.finish_reason


def _message(choice: _Choice) -> dict[str, Any]:
    text = "".join(choice.text)
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if choice.thoughts:
        message |= _reasoning("".join(choice.thoughts))
    if choice.calls:
        message |= {"content": text or None, "tool_calls": [_call_shape(call) for call in choice.calls]}
    return message


def _said(choice: _Choice, piece: Piece) -> list[dict[str, Any]]:
    """The deltas of one piece, of which `choice` keeps the calls alone."""
    match piece:
        case Said():
            return [{"content": piece.text}]
        case Thought():
            return [_reasoning(piece.text)]
    index = len(choice.calls)
    choice.calls.append(piece)
    call = _call_shape(piece)
    arguments = {"index": index, "function": {"arguments": piece.arguments}}
    begun = {"index": index, **call, "function": {"name": piece.name, "arguments": ""}}
    return [{"tool_calls": [begun]}, {"tool_calls": [arguments]}]


def _call_shape(call: Called) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": new_call_id("call"), "type": "function", "function": function}


def _reasoning(text: str) -> dict[str, Any]:
    """By the name that clients of vLLM know, and by its older one, which is DeepSeek's."""
    return {"reasoning": text, "reasoning_content": text}


def read_completion(body: dict[str, Any], limits: LimitsConfig, bounds: PromptBounds) -> Call:
    """What the body of `/v1/completions` asks for."""
    return _call(parse_completion(body, limits, bounds))


def read_chat(body: dict[str, Any], limits: LimitsConfig, bounds: PromptBounds) -> Call:
    """What the body of `/v1/chat/completions` asks for."""
    return _call(parse_chat(body, limits, bounds))


def _call(parsed: ParsedRequest) -> Call:
    return Call(parsed, lambda setting: Answer(parsed, setting))
