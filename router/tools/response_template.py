"""Reads messages by a checkpoint's own `response_template`, with transformers' parser. It is the router's only use of
transformers, which loads no torch for it, and is loaded itself where a checkpoint has such a template alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import ResponseTemplate, load_response_template

from router.tools.blocks import called
from router.tools.defects import read_or_none
from router.tools.formats import ToolFormat
from router.tools.pieces import Called, Piece, Said, Thought, ToolUse, add_piece
from tandem.core.errors import ModelLoadError

#: More than any marker; a longer text that may become one is text.
_MAX_HELD_CHARS = 4096
_LOOK_BEHIND = 256
_CALLS = "tool_calls"
_THOUGHTS = frozenset(["reasoning_content", "reasoning", "thinking"])


def format_of_template(
    source: dict[str, Any], special_texts: Sequence[str], by_table: ToolFormat | None
) -> ToolFormat | None:
    """The format that a checkpoint's template describes.

    Args:
        special_texts: of the tokenizer's special tokens.
        by_table: the format that the chat template speaks of, by whose grammar the model can be made to call.

    Returns:
        `None` where the template knows no calls, or leaves text out: no field takes what stands outside of all others.

    Raises:
        ModelLoadError: it is none.
    """
    template = _loaded(source)
    if template.implicit is None or _CALLS not in template.fields:
        return None
    written = list(_texts_in(source))
    return ToolFormat(
        "response_template",
        tuple(text for text in special_texts if any(text in part or re.escape(text) in part for part in written)),
        partial(TemplateReader, template),
        wants_prompt=True,
        form=by_table.form if by_table else None,
        close=by_table.close if by_table else "",
    )


def _texts_in(value: Any) -> Iterator[str]:
    """All texts of the template's fields and of what begins a message; patterns as they are written."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for part in value.values() for text in _texts_in(part))
    elif isinstance(value, list):
        yield from (text for part in value for text in _texts_in(part))


def _loaded(source: dict[str, Any]) -> ResponseTemplate:
    try:
        return load_response_template(source)
    except ValueError as error:
        raise ModelLoadError(f"tokenizer_config.json: response_template cannot be read: {error}") from error


class TemplateReader:
    """One output.

    The parser is fed character by character, so that a call which it cannot read ends at the same place however the
    stream was cut: what it had of it comes out as text then, and a new parser goes on behind.
    """

    def __init__(self, template: ResponseTemplate, use: ToolUse, prompt: str) -> None:
        """`prompt`: its end, in which the template may have begun the message."""
        self._template = template
        self._tools = list(use.tools)
        self._unread: list[str] = []  # text that no event has told of yet: markers, and calls
        has_begun = template.start_anchor_re.search(prompt) is not None
        begun = read_or_none(lambda: self._new_parser(prompt)) if has_begun else None
        # Where the prompt's part of the message cannot be read, what is behind it may be.
        self._parser = begun or self._new_parser("")

    def push(self, text: str) -> list[Piece]:
        """See `router.tools.pieces.Reader`."""
        pieces: list[Piece] = []
        for char in text:
            self._unread.append(char)
            events = read_or_none(partial(self._parser.feed, char))
            if events is not None:
                self._take(events, pieces)
            if events is None or self._parser.num_held > _MAX_HELD_CHARS:
                self._begin_anew(pieces)
        return pieces

    def finish(self) -> list[Piece]:
        """See `router.tools.pieces.Reader`."""
        pieces: list[Piece] = []
        ended = read_or_none(self._parser.finalize)
        if ended is None:
            self._begin_anew(pieces)
        else:
            self._take(ended[1], pieces)
        return pieces

    @property
    def num_held(self) -> int:
        """See `router.tools.pieces.Reader`."""
        return sum(map(len, self._unread))

    def _new_parser(self, prefix: str) -> _Parser:
        return _Parser(self._template, prefix, self._tools)

    def _begin_anew(self, pieces: list[Piece]) -> None:
        """What could not be read is text."""
        add_piece(Said("".join(self._unread)), pieces)
        self._unread = []
        self._parser = self._new_parser("")

    def _take(self, events: list[dict[str, Any]], pieces: list[Piece]) -> None:
        for event in events:
            field, kind = event["field"], event["type"]
            if field == _CALLS:
                if kind == "region_close":
                    self._call(event["value"], self._told(event), pieces)
            elif kind == "region_chunk":
                piece = Thought(event["text"]) if field in _THOUGHTS else Said(event["text"])
                add_piece(piece, pieces)
                self._told(event)

    def _told(self, event: dict[str, Any]) -> str:
        """The text up to this event, which is not unread any more."""
        text = "".join(self._unread)
        end = len(text) - event["num_behind"]
        self._unread = [text[end:]]
        return text[:end]

    def _call(self, value: Any, text: str, pieces: list[Piece]) -> None:
        calls = read_or_none(lambda: _calls_of(value))
        if calls is None:
            add_piece(Said(text), pieces)
        pieces += calls or []


class _Parser(ResponseParser):  # type: ignore[misc]  # it has no types
    """transformers' parser, without its growing cost: it would copy all that it has read for each character.

    Its events say how many characters behind them it has read (`num_behind`).
    """

    _buffer: str
    _pos: int
    _body: str

    def __init__(self, template: ResponseTemplate, prefix: str, tools: list[dict[str, Any]]) -> None:
        self._parts: list[str] = []  # of the body of the open region
        super().__init__(template, prefix=prefix, tools=[*tools])

    @property
    def num_held(self) -> int:
        """Characters that may become a marker."""
        return len(self._buffer) - self._pos

    def feed(self, text: str) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = super().feed(text)
        if self._pos > _MAX_HELD_CHARS:  # some stays: a marker's pattern may look back
            self._buffer, self._pos = self._buffer[self._pos - _LOOK_BEHIND :], _LOOK_BEHIND
        return events

    def _accumulate(self, events: list[dict[str, Any]], text: str) -> None:
        num_before = len(events)
        super()._accumulate(events, text)
        self._parts.append(self._body)
        self._body = ""
        for event in events[num_before:]:
            event["num_behind"] = self.num_held - len(text)

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        num_before = len(events)
        self._body = "".join(self._parts)
        self._parts.clear()
        super()._close_current(events)
        for event in events[num_before:]:
            event["num_behind"] = self.num_held


def _calls_of(value: Any) -> list[Called]:
    found = []
    for call in value if isinstance(value, list) else [value]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise ValueError("a call must be an object")
        found.append(called(function.get("name"), function.get("arguments", {})))
    return found
