"""The items of an answer as they grow; each step of them is an event."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from router.tools.pieces import Called, Piece, Said, Thought, new_call_id

Event = dict[str, Any]


class Output:
    """All items of one answer. At most the last one is open: a message, or reasoning, that may go on."""

    def __init__(self, request_id: str) -> None:
        self.items: list[dict[str, Any]] = []
        self._request_id = request_id
        self._open: _OpenText | None = None

    def take(self, piece: Piece, logprobs: Sequence[Any] = ()) -> Iterator[Event]:
        """Add a piece. `logprobs` are those of its tokens."""
        if isinstance(piece, Called):
            yield from self._close("completed")
            yield from self._call(piece)
            return
        kind = _MESSAGE if isinstance(piece, Said) else _REASONING
        if self._open is None or self._open.kind is not kind:
            yield from self._close("completed")
            yield from self._begin(kind)
        assert self._open is not None
        yield self._open.delta(piece.text, logprobs)

    def end(self, status: str) -> Iterator[Event]:
        """Nothing follows; `status` is that of the item which the end cut off. An empty answer is an empty message."""
        if not self.items:
            yield from self._begin(_MESSAGE)
        yield from self._close(status)

    def break_off(self) -> Iterator[Event]:
        """Nothing follows, as the answer has failed."""
        yield from self._close("incomplete")

    def _begin(self, kind: _TextKind) -> Iterator[Event]:
        index = len(self.items)
        item = {"id": f"{kind.prefix}_{self._request_id}_{index}", "type": kind.item, "status": "in_progress"}
        item |= kind.fields
        self.items.append({**item, "content": []})
        self._open = _OpenText(kind, index, self.items[index])
        yield {"type": "response.output_item.added", "output_index": index, "item": {**item, "content": []}}
        yield self._open.event("response.content_part.added", part=kind.part("", ()))

    def _close(self, status: str) -> Iterator[Event]:
        text, self._open = self._open, None
        if text is not None:
            yield from text.close(status)

    def _call(self, call: Called) -> Iterator[Event]:
        index = len(self.items)
        item: dict[str, Any] = {
            "id": f"fc_{self._request_id}_{index}",
            "type": "function_call",
            "status": "in_progress",
            "call_id": new_call_id("call"),
            "name": call.name,
            "arguments": "",
        }
        place = {"item_id": item["id"], "output_index": index}
        yield {"type": "response.output_item.added", "output_index": index, "item": item}
        yield {"type": "response.function_call_arguments.delta", **place, "delta": call.arguments}
        yield {"type": "response.function_call_arguments.done", **place, "arguments": call.arguments}
        done = {**item, "status": "completed", "arguments": call.arguments}
        self.items.append(done)
        yield {"type": "response.output_item.done", "output_index": index, "item": done}


class _TextKind:
    """What items of text have in common, and where they differ."""

    def __init__(self, item: str, prefix: str, part: str, event: str, fields: dict[str, Any], extra: dict[str, Any]):
        self.item, self.prefix, self.event, self.fields = item, prefix, event, fields
        self.tells_logprobs = bool(extra)
        self._part, self._extra = part, extra

    def part(self, text: str, logprobs: Iterable[Any]) -> dict[str, Any]:
        part = {"type": self._part, "text": text, **self._extra}
        return {**part, "logprobs": list(logprobs)} if self.tells_logprobs else part


_MESSAGE = _TextKind(
    "message", "msg", "output_text", "response.output_text", {"role": "assistant"}, {"annotations": []}
)
_REASONING = _TextKind("reasoning", "rs", "reasoning_text", "response.reasoning_text", {"summary": []}, {})


class _OpenText:
    """The item that goes on."""

    def __init__(self, kind: _TextKind, index: int, item: dict[str, Any]) -> None:
        self.kind = kind
        self._index, self._item = index, item
        self._texts: list[str] = []
        self._logprobs: list[Any] = []

    def event(self, name: str, **facts: Any) -> Event:
        place = {"item_id": self._item["id"], "output_index": self._index, "content_index": 0}
        return {"type": name, **place, **facts}

    def delta(self, text: str, logprobs: Sequence[Any]) -> Event:
        self._texts.append(text)
        self._logprobs.extend(logprobs)
        told = {"logprobs": list(logprobs)} if self.kind.tells_logprobs else {}
        return self.event(f"{self.kind.event}.delta", delta=text, **told)

    def close(self, status: str) -> Iterator[Event]:
        text = "".join(self._texts)
        part = self.kind.part(text, self._logprobs)
        self._item |= {"status": status, "content": [part]}
        told = {"logprobs": self._logprobs} if self.kind.tells_logprobs else {}
        yield self.event(f"{self.kind.event}.done", text=text, **told)
        yield self.event("response.content_part.done", part=part)
        yield {"type": "response.output_item.done", "output_index": self._index, "item": self._item}


def is_reasoning(pieces: Sequence[Piece]) -> bool:
    """Whether all that a delta brought is reasoning."""
    return bool(pieces) and all(isinstance(piece, Thought) for piece in pieces)
