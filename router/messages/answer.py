"""Answers of `/v1/messages`: the message, and the events of a stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import orjson

from router.messages.errors import message_error_body
from router.openai.endpoint import Setting
from router.openai.schema import ParsedRequest
from router.request.request import Delta, Usage
from router.tools.pieces import Called, Piece, Said, new_call_id
from tandem.core.errors import TandemError

Event = dict[str, Any]

_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
#: While a call is held back until it is whole, a client hears of it once in so many tokens.
_TOKENS_A_PING = 64


class Message:
    """One answer: an `Encoder`. A whole answer grows as a streamed one does; its events are not told."""

    def __init__(self, stops: Sequence[str], parsed: ParsedRequest, setting: Setting) -> None:
        """`stops`: the texts that the client wants to end at."""
        self._setting = setting
        self._model, self._stops = parsed.model, stops
        self._reader = setting.reader(parsed)
        self._blocks = _Blocks()
        self._last: Delta | None = None
        self._num_silent = 0  # tokens since the last frame

    def gather(self, _: int, delta: Delta) -> None:
        for _event in self._events(delta):
            pass

    def body(self, usages: Sequence[Usage]) -> bytes:
        # The arguments of a call are JSON already.
        content = [
            {**block, "input": orjson.Fragment(block["input"])} if block["type"] == "tool_use" else block
            for block in self._blocks.blocks
        ]
        return orjson.dumps({**self._base(content), **self._stop(), "usage": _usage(usages)})

    def opening(self) -> bytes:
        num_input = sum(len(request.prompt_ids) for request in self._setting.requests)
        usage = {"input_tokens": num_input, "output_tokens": 0}
        message = {**self._base([]), "stop_reason": None, "stop_sequence": None, "usage": usage}
        return _framed([{"type": "message_start", "message": message}]) + _PING

    def frames(self, _: int, delta: Delta) -> bytes:
        frames = _framed(self._events(delta))
        self._num_silent = 0 if frames else self._num_silent + len(delta.tokens)
        if self._num_silent < _TOKENS_A_PING:
            return frames
        self._num_silent = 0
        return _PING

    def closing(self, usages: Sequence[Usage]) -> bytes:
        ended = {"type": "message_delta", "delta": self._stop(), "usage": _usage(usages)}
        return _framed([ended, {"type": "message_stop"}])

    def failure(self, error: TandemError) -> bytes:
        return _framed([message_error_body(error, self._setting.request_id)])

    def _base(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        own_id = f"msg_{self._setting.request_id}"
        return {"id": own_id, "type": "message", "role": "assistant", "model": self._model, "content": content}

    def _events(self, delta: Delta) -> Iterator[Event]:
        pieces = list(self._reader.push(delta.text))
        if delta.finish_reason is not None:
            pieces += self._reader.finish()
            self._last = delta
        for piece in pieces:
            yield from self._blocks.take(piece)
        if delta.finish_reason is not None:
            yield from self._blocks.end()

    def _stop(self) -> dict[str, Any]:
        last = self._last
        reason = "end_turn"
        if last is not None and last.finish_reason == "length":
            reason = "max_tokens"
        elif self._blocks.has_calls:
            reason = "tool_use"
        elif last is not None and last.stopped_by in self._stops:
            return {"stop_reason": "stop_sequence", "stop_sequence": last.stopped_by}
        return {"stop_reason": reason, "stop_sequence": None}


class _Blocks:
    """The blocks of one message. At most the last one, of text or thinking, is open."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []  # the input of a call: JSON, as a text
        self.has_calls = False
        self._texts: list[str] = []  # of the open block
        self._open = ""  # its kind; empty: none is open

    def take(self, piece: Piece) -> Iterator[Event]:
        if isinstance(piece, Called):
            yield from self.end()
            yield from self._call(piece)
            return
        kind = "text" if isinstance(piece, Said) else "thinking"
        if kind != self._open:
            yield from self.end()
            self._open = kind
            # No one signs what this model thought.
            block = {"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})}
            self.blocks.append(block)
            yield {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)}
        self._texts.append(piece.text)
        delta = {"type": f"{kind}_delta", kind: piece.text}
        yield {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}

    def end(self) -> Iterator[Event]:
        """No more text comes to the open block."""
        if not self._open:
            return
        self.blocks[-1][self._open] = "".join(self._texts)
        self._texts, self._open = [], ""
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}

    def _call(self, call: Called) -> Iterator[Event]:
        self.has_calls = True
        index = len(self.blocks)
        block = {"type": "tool_use", "id": new_call_id("toolu"), "name": call.name}
        self.blocks.append({**block, "input": call.arguments})
        yield {"type": "content_block_start", "index": index, "content_block": {**block, "input": {}}}
        delta = {"type": "input_json_delta", "partial_json": call.arguments}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}


def _usage(usages: Sequence[Usage]) -> dict[str, Any]:
    """Tokens of the prompt that a cache had are told apart from the others."""
    num_cached = sum(usage.num_cached_tokens or 0 for usage in usages)
    return {
        "input_tokens": sum(usage.num_prompt_tokens for usage in usages) - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": sum(usage.num_output_tokens for usage in usages),
    }


def _framed(events: Iterable[Event]) -> bytes:
    return b"".join(b"event: " + e["type"].encode() + b"\ndata: " + orjson.dumps(e) + b"\n\n" for e in events)
