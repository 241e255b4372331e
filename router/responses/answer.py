"""Answers of `/v1/responses`: the response object, and the events of a stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from router.openai.endpoint import Setting
from router.openai.logprobs import TextOffsets, chat_logprobs
from router.openai.schema import ParsedRequest
from router.request.request import Delta, TokenGiven, Usage
from router.responses.output import Event, Output, is_reasoning
from router.tools.pieces import Said, ToolUse
from tandem.core.errors import InvalidRequestError, OverloadedError, TandemError


class Response:
    """One answer: an `Encoder`. A whole answer grows as a streamed one does; its events are not told."""

    def __init__(self, parsed: ParsedRequest, given: dict[str, Any], setting: Setting) -> None:
        """`given`: the fields of the body that are set, most of which the answer repeats, and its `text`."""
        self._setting = setting
        self._reader = setting.reader(parsed)
        self._output = Output(setting.request_id)
        self._finish_reason: str | None = None
        self._num_reasoning_tokens = 0
        request = setting.requests[0]
        tells_logprobs = parsed.sampling.num_logprobs >= 0
        # Of the output's tokens; `None`: no log-probabilities are told.
        self._offsets = (
            TextOffsets(setting.tokenizer, request.prompt_ids, request.shown_ids) if tells_logprobs else None
        )
        self._num_chars = 0  # of the output, whatever became of them
        # Tokens whose log-probabilities no text has brought yet, and where each begins and ends in the output.
        self._untold: list[tuple[int, int, TokenGiven]] = []
        self._num_events = 0
        self._base = _base(parsed, given, setting)

    # -- an encoder's

    def gather(self, _: int, delta: Delta) -> None:
        for _event in self._events(delta):
            pass

    def body(self, usages: Sequence[Usage]) -> bytes:
        return orjson.dumps(self._ended(usages))

    def opening(self) -> bytes:
        begun = {**self._base, "status": "in_progress", "output": [], "usage": None}
        return self._framed({"type": f"response.{name}", "response": begun} for name in ("created", "in_progress"))

    def frames(self, _: int, delta: Delta) -> bytes:
        return self._framed(self._events(delta))

    def closing(self, usages: Sequence[Usage]) -> bytes:
        response = self._ended(usages)
        return self._framed([{"type": f"response.{response['status']}", "response": response}])

    def failure(self, error: TandemError) -> bytes:
        """The item that the failure cut off has what was given of it."""
        told = {
            "code": _error_code(error),
            "message": error.message,
            "type": error.code,
            "request_id": self._setting.request_id,
            "retryable": error.retryable,
        }
        cut = list(self._output.break_off())
        response = {**self._base, "status": "failed", "output": self._output.items, "usage": None, "error": told}
        return self._framed([*cut, {"type": "response.failed", "response": response}])

    # -- inside

    def _events(self, delta: Delta) -> Iterable[Event]:
        pieces = list(self._reader.push(delta.text))
        if delta.finish_reason is not None:
            pieces += self._reader.finish()
            self._finish_reason = delta.finish_reason
        if is_reasoning(pieces):
            self._num_reasoning_tokens += len(delta.tokens)
        self._num_chars += len(delta.text)
        if self._offsets is not None:
            begins = self._offsets.following(token.token_id for token in delta.tokens)
            self._untold += zip(begins, [*begins[1:], self._offsets.end], delta.tokens, strict=True)
        for number, piece in enumerate(pieces, start=1):
            logprobs: Sequence[Any] = ()
            if isinstance(piece, Said):
                logprobs = self._logprobs_of(piece, is_last=number == len(pieces))
            yield from self._output.take(piece, logprobs)
        if pieces:  # those of reasoning and of calls are told nowhere
            self._untold = []
        if delta.finish_reason is not None:
            yield from self._output.end("incomplete" if delta.finish_reason == "length" else "completed")

    def _logprobs_of(self, said: Said, *, is_last: bool) -> Sequence[Any]:
        """Those of its tokens: before it there may be some that only part it from reasoning.

        `is_last`: nothing follows it but what is not certain yet, so it is known where it stands.
        """
        if self._offsets is None:
            return ()
        start = self._num_chars - self._reader.num_held - len(said.text) if is_last else 0
        tokens = [token for begin, end, token in self._untold if begin >= start or end > start]
        self._untold = []
        entries: list[Any] = chat_logprobs(self._setting.tokenizer, tokens)["content"]
        return entries

    def _ended(self, usages: Sequence[Usage]) -> dict[str, Any]:
        is_cut = self._finish_reason == "length"
        return {
            **self._base,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._output.items,
            "usage": self._usage(usages),
        }

    def _usage(self, usages: Sequence[Usage]) -> dict[str, Any]:
        num_input = sum(usage.num_prompt_tokens for usage in usages)
        num_output = sum(usage.num_output_tokens for usage in usages)
        num_cached = sum(usage.num_cached_tokens or 0 for usage in usages)
        return {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
            "total_tokens": num_input + num_output,
        }

    def _framed(self, events: Iterable[Event]) -> bytes:
        frames = []
        for event in events:
            data = orjson.dumps({**event, "sequence_number": self._num_events})
            frames.append(b"event: " + event["type"].encode() + b"\ndata: " + data + b"\n\n")
            self._num_events += 1
        return b"".join(frames)


def _base(parsed: ParsedRequest, given: dict[str, Any], setting: Setting) -> dict[str, Any]:
    """What every state of the response says."""
    use = parsed.tool_use
    repeated = ("instructions", "max_output_tokens", "max_tool_calls", "metadata", "prompt_cache_key", "reasoning",
                "safety_identifier", "text", "user")  # fmt: skip
    return {
        "id": f"resp_{setting.request_id}",
        "object": "response",
        "created_at": setting.created,
        "model": parsed.model,
        "error": None,
        "incomplete_details": None,
        "parallel_tool_calls": use.may_be_parallel,
        "temperature": parsed.sampling.temperature,
        "top_p": parsed.sampling.top_p,
        "top_logprobs": max(parsed.sampling.num_logprobs, 0),
        "tool_choice": _chosen(use),
        "tools": [_tool(tool["function"], use) for tool in use.tools],
        "background": False,
        "previous_response_id": None,
        "service_tier": "default",
        "store": False,
        "truncation": "disabled",
        **{name: given.get(name) for name in repeated},
    }


def _tool(function: dict[str, Any], use: ToolUse) -> dict[str, Any]:
    return {"type": "function", "strict": function["name"] in use.strict, **function}


def _chosen(use: ToolUse) -> Any:
    names = [{"type": "function", "name": name} for name in sorted(use.only or ())]
    if len(names) == 1 and use.choice == "required":
        return names[0]
    return {"type": "allowed_tools", "mode": use.choice, "tools": names} if names else use.choice


def _error_code(error: TandemError) -> str:
    """One of the codes that OpenAI's clients know."""
    if isinstance(error, OverloadedError):
        return "rate_limit_exceeded"
    return "invalid_prompt" if isinstance(error, InvalidRequestError) else "server_error"
