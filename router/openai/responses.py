"""Answers in OpenAI's shapes: whole bodies, stream frames, errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from router.openai.endpoint import Call, Setting
from router.openai.fields import PromptBounds
from router.openai.logprobs import TextOffsets, chat_logprobs, completion_logprobs
from router.openai.prompt_part import PromptPart, array_of
from router.openai.reasoning import reader_of
from router.openai.schema import ParsedRequest, parse_chat, parse_completion
from router.request.request import Delta, TokenGiven, Usage
from router.tools.pieces import Called, Piece, Reader, Said, Thought, new_call_id
from tandem.core.config import LimitsConfig
from tandem.core.errors import AuthenticationError, InvalidRequestError, OverloadedError, RateLimitError, TandemError

DONE_FRAME = b"data: [DONE]\n\n"


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
        if isinstance(error, RateLimitError):
            headers |= error.headers
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
    offsets: TextOffsets | None = None  # of its tokens, where they are told
    text: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[Called] = field(default_factory=list)
    tokens: list[TokenGiven] = field(default_factory=list)
    finish_reason: str | None = None
    num_tokens: int = 0  # of what was streamed
    is_begun: bool = False
    plain_head: bytes = b""  # of a frame that says nothing but a text; once the choice is begun

    @property
    def goodness(self) -> float:
        """The log-probability of a token, on the average."""
        return sum(token.logprob for token in self.tokens) / max(1, len(self.tokens))


class Answer:
    """One answer: gathers deltas into a body, or makes a stream frame of each. Choices are prompt × n + choice."""

    def __init__(self, parsed: ParsedRequest, setting: Setting) -> None:
        self._request_id = setting.request_id
        self._parsed = parsed
        self._tokenizer = tokenizer = setting.tokenizer
        self._is_chat = parsed.kind == "chat"
        self._tells_usage = parsed.continuous_usage
        self._tells_logprobs = parsed.num_logprobs >= 0
        self._prompts = [PromptPart(parsed, request, tokenizer) for request in setting.requests]
        self._choices = [
            _Choice(
                reader_of(parsed, request, setting.card, tokenizer) if self._is_chat else None,
                prompt.offsets_behind() if self._tells_logprobs and not self._is_chat else None,
            )
            for request, prompt in zip(setting.requests, self._prompts, strict=True)
            for _ in range(parsed.num_choices)
        ]
        name = "chat.completion" if self._is_chat else "text_completion"
        chunk_name = "chat.completion.chunk" if self._is_chat else name
        answer_id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{setting.request_id}"
        base = {"id": answer_id, "created": setting.created, "model": parsed.model}
        self._base = {**base, "object": name}
        self._chunk_base = {**base, "object": chunk_name}
        # A frame is this, its one choice, and the tail: only the choice is made anew for each.
        self._frame_head = b"data: " + orjson.dumps(self._chunk_base)[:-1] + b',"choices":['
        self._frame_tail = b'],"usage":null}\n\n' if parsed.include_usage else b"]}\n\n"
        # Most frames say a text and nothing else: of these only the text is made anew.
        self._is_plain = not (self._tells_usage or self._tells_logprobs or parsed.return_token_ids)
        end = b"}" if self._is_chat else b""
        self._plain_tail = end + b',"logprobs":null,"finish_reason":null}' + self._frame_tail

    # -- whole

    def gather(self, prompt: int, delta: Delta) -> None:
        """Keep a delta for the body."""
        if delta.prompt_scores:
            self._prompts[prompt].scores = delta.prompt_scores
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
        shown = [pair for number, prompt in enumerate(self._prompts) for pair in self._shown(number, prompt)]
        # One at a time: while orjson works, no other thread does.
        choices = [
            orjson.Fragment(orjson.dumps(self._whole_choice(number, *pair))) for number, pair in enumerate(shown)
        ]
        of_prompt = self._about_prompt(self._prompts[0]) if self._is_chat else {}
        return orjson.dumps({**self._base, "choices": choices, "usage": usage_body(usages), **of_prompt})

    def _shown(self, number: int, prompt: PromptPart) -> list[tuple[PromptPart, _Choice]]:
        """The best choices of one prompt, or all."""
        num_choices, num_shown = self._parsed.num_choices, self._parsed.num_shown
        choices = self._choices[number * num_choices :][:num_choices]
        if num_shown < num_choices:
            choices = sorted(choices, key=lambda choice: -choice.goodness)[:num_shown]
        return [(prompt, choice) for choice in choices]

    def _whole_choice(self, number: int, prompt: PromptPart, choice: _Choice) -> dict[str, Any]:
        text = prompt.text + "".join(choice.text)
        said = {"message": self._message(choice, text)} if self._is_chat else {"text": text}
        echoed = prompt if self._parsed.echo else None
        shape = self._shape(number, said, choice.tokens, choice.finish_reason, choice.offsets, echoed=echoed)
        return shape if self._is_chat else shape | self._about_prompt(prompt)

    def _message(self, choice: _Choice, text: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if choice.thoughts or choice.calls:
            message["content"] = text or None
        if choice.thoughts and self._parsed.includes_reasoning:
            message |= _reasoning("".join(choice.thoughts))
        if choice.calls:
            message["tool_calls"] = [_call_shape(call) for call in choice.calls]
        return message

    def _about_prompt(self, prompt: PromptPart) -> dict[str, Any]:
        """vLLM's fields: in a completion they are the choice's, in a chat the answer's."""
        parsed = self._parsed
        about: dict[str, Any] = {}
        if parsed.num_prompt_logprobs >= 0:
            about["prompt_logprobs"] = prompt.prompt_logprobs
        if parsed.return_token_ids:
            about["prompt_token_ids"] = prompt.shown_ids
        return about

    # -- streamed

    def opening(self) -> bytes:
        """Each choice opens with its first delta."""
        return b""

    def frames(self, prompt: int, delta: Delta) -> bytes:
        """The frames of one delta; before a choice's first stands what opens it."""
        number = prompt * self._parsed.num_choices + delta.choice
        choice = self._choices[number]
        if choice.reader is not None:
            return self._read_frames(number, choice, self._prompts[prompt], delta)
        if self._is_plain and choice.is_begun and delta.finish_reason is None and delta.text:
            return b"".join((choice.plain_head, orjson.dumps(delta.text), self._plain_tail))
        opening = b"" if choice.is_begun else self._opening(number, choice, self._prompts[prompt], delta)
        said: dict[str, Any] = {"text": delta.text}
        if self._is_chat:
            said = {"delta": {"content": delta.text} if delta.text else {}}
        shape = self._shape(number, said, delta.tokens, delta.finish_reason, choice.offsets)
        if not self._tells_usage:
            return opening + self._frame(shape)
        choice.num_tokens += len(delta.tokens)
        return opening + self._frame(shape, self._usage_so_far(self._prompts[prompt], choice))

    def _opening(self, number: int, choice: _Choice, prompt: PromptPart, delta: Delta) -> bytes:
        """A chat's role, the echo of a completion's prompt, the prompt's token ids; nothing where none is wanted."""
        choice.is_begun = True
        key = b'"delta":{"content":' if self._is_chat else b'"text":'
        choice.plain_head = self._frame_head + b'{"index":%d,' % number + key
        prompt.scores = delta.prompt_scores or prompt.scores
        ids = {"prompt_token_ids": prompt.shown_ids} if self._parsed.return_token_ids else {}
        usage = self._usage_so_far(prompt, choice)
        if self._is_chat:
            said = {"role": "assistant", "content": prompt.text}
            shape = {"index": number, "delta": said, "logprobs": None, "finish_reason": None}
            return self._frame(shape, {**ids, **(usage or {})} or None)
        if not (self._parsed.echo or ids):
            return b""
        echoed = prompt if self._parsed.echo else None
        shape = self._shape(number, {"text": prompt.text}, [], None, choice.offsets, echoed=echoed) | ids
        return self._frame(shape, usage)

    def _usage_so_far(self, prompt: PromptPart, choice: _Choice) -> dict[str, Any] | None:
        if not self._tells_usage:
            return None
        return {"usage": usage_body([Usage(len(prompt.token_ids), choice.num_tokens, None)])}

    def _read_frames(self, number: int, choice: _Choice, prompt: PromptPart, delta: Delta) -> bytes:
        """A frame for each piece of a message; the first has the tokens, the last the reason for the end."""
        pieces = _pieces(choice, delta)
        if not self._parsed.includes_reasoning:
            pieces = [piece for piece in pieces if not isinstance(piece, Thought)]
        said = [said for piece in pieces for said in _said(choice, piece)]
        reason = _finish_reason(choice, delta)
        choice.num_tokens += len(delta.tokens)
        tells_tokens = self._parsed.return_token_ids or self._tells_logprobs
        if not said and (reason is not None or tells_tokens):
            said = [{}]
        shapes = [
            self._shape(
                number,
                {"delta": one},
                delta.tokens if n == 0 else [],
                reason if n == len(said) - 1 else None,
            )
            for n, one in enumerate(said)
        ]
        if not shapes:
            return b""
        opening = b"" if choice.is_begun else self._opening(number, choice, prompt, delta)
        usage = self._usage_so_far(prompt, choice)
        return opening + b"".join([self._frame(shape, usage) for shape in shapes])

    def closing(self, usages: Sequence[Usage]) -> bytes:
        """`[DONE]`, and the usage before it where `stream_options.include_usage` asked for it."""
        if not self._parsed.include_usage:
            return DONE_FRAME
        usage = {**self._chunk_base, "choices": [], "usage": usage_body(usages)}
        return b"data: " + orjson.dumps(usage) + b"\n\n" + DONE_FRAME

    def failure(self, error: TandemError) -> bytes:
        """The error alone, without `[DONE]`."""
        return b"data: " + orjson.dumps(error_body(error, self._request_id)) + b"\n\n"

    def _frame(self, choice: dict[str, Any], more: dict[str, Any] | None = None) -> bytes:
        """`more`: of the chunk, beside what all have."""
        if more is None:
            return b"".join((self._frame_head, orjson.dumps(choice), self._frame_tail))
        usage = {"usage": None} if self._parsed.include_usage else {}
        return b"data: " + orjson.dumps({**self._chunk_base, "choices": [choice], **usage, **more}) + b"\n\n"

    def _shape(
        self,
        number: int,
        said: dict[str, Any],
        tokens: Sequence[TokenGiven],
        finish_reason: str | None,
        offsets: TextOffsets | None = None,
        *,
        echoed: PromptPart | None = None,
    ) -> dict[str, Any]:
        """One choice with what it says.

        Args:
            offsets: the choice's, whose next tokens these are; of a completion, where log-probabilities are told.
            echoed: the prompt, where this says it too.
        """
        logprobs = self._logprobs(tokens, offsets, echoed=echoed) if self._tells_logprobs else None
        shape = {"index": number, **said, "logprobs": logprobs, "finish_reason": finish_reason}
        if self._parsed.return_token_ids:
            shape["token_ids"] = [token.token_id for token in tokens]
        return shape

    def _logprobs(
        self, tokens: Sequence[TokenGiven], offsets: TextOffsets | None, *, echoed: PromptPart | None
    ) -> dict[str, Any]:
        if offsets is None:
            return chat_logprobs(self._tokenizer, tokens)
        wants_top = self._parsed.num_logprobs > 0
        of_output = completion_logprobs(self._tokenizer, tokens, wants_top=wants_top, offsets=offsets)
        if echoed is None:
            return of_output
        of_prompt = echoed.echoed_logprobs
        return {
            key: None if (elements := of_prompt[key]) is None else array_of(elements, values)
            for key, values in of_output.items()
        }


def _pieces(choice: _Choice, delta: Delta) -> Sequence[Piece]:
    if choice.reader is None:
        return (Said(delta.text),) if delta.text else ()
    pieces = choice.reader.push(delta.text)
    return pieces if delta.finish_reason is None else [*pieces, *choice.reader.finish()]


def _finish_reason(choice: _Choice, delta: Delta) -> str | None:
    return "tool_calls" if choice.calls and delta.finish_reason == "stop" else delta.finish_reason


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
    return Call(parsed, Answer)
