"""What stands between the opening of a call and its end, read piece by piece. Pure.

A block is fed text and takes of it what is its own. The work for a piece does not grow with what came before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, Protocol

from router.tools.defects import read_or_none
from router.tools.json_text import dumps, elements, loads, members
from router.tools.pieces import Called
from router.tools.schema_kinds import Kind, ParameterKinds, is_of

#: Longer than any header between an opening and the arguments.
_MAX_HEADER_CHARS = 512
_SPACE = re.compile(r"\s*")
_IN_TEXT = re.compile(r'["\\]')
_IN_VALUE = re.compile(r'["{}\[\]]')


class State(Enum):
    """How far a block is."""

    OPEN = "it goes on"
    DONE = "its calls are known"
    BROKEN = "it holds no call: what it took is text"


class Block(Protocol):
    """One block; `calls` holds once it is DONE."""

    state: State
    calls: list[Called]

    def feed(self, text: str, at: int, /) -> int:
        """Take from `text[at:]`; return where what is not its own begins, `len(text)` while it is OPEN."""
        ...

    def finish(self) -> None:
        """The output has ended: the block becomes DONE or BROKEN."""
        ...


# -- calls


def called(name: Any, arguments: Any) -> Called:
    """Arguments that are a text are JSON, which stays as it is written. Raises `ValueError` where it is no call."""
    text = arguments if isinstance(arguments, str) else dumps(arguments)
    value = loads(text)
    if isinstance(value, str):
        text, value = value, loads(value)
    if not isinstance(name, str) or not name or not isinstance(value, dict):
        raise ValueError("a call needs a name, and arguments that are an object")
    name.encode()  # raises `UnicodeEncodeError`, a ValueError, for half a surrogate pair, which no answer can carry
    try:
        text.encode()
    except UnicodeEncodeError:
        text = dumps(value)
    return Called(name, text.strip())


def calls_of(text: str, arguments_key: str) -> list[Called]:
    """The calls of a JSON text: `{"name": …, "arguments": {…}}`, or a list of such. Raises `ValueError`."""
    value = loads(text)
    listed = value if isinstance(value, list) else [value]
    if not listed:
        raise ValueError("no call")
    found = []
    for call, written in zip(listed, elements(text) if isinstance(value, list) else [text], strict=True):
        if not isinstance(call, dict):
            raise ValueError("a call must be an object")
        found.append(called(call.get("name"), members(written).get(arguments_key, "{}")))
    return found


# -- blocks


class JsonScan:
    """Finds where a JSON object or list ends."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_text = self._is_escaped = False

    @property
    def is_in_text(self) -> bool:
        """Whether what comes next is within a string."""
        return self._is_in_text

    def feed(self, text: str, at: int) -> int | None:
        """Where the value ends, or `None`: not in this text. The first text begins with the value's bracket."""
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            found = (_IN_TEXT if self._is_in_text else _IN_VALUE).search(text, at)
            if found is None:
                return None
            at = found.end()
            sign = found[0]
            if sign == "\\":
                self._is_escaped = True
            elif sign == '"':
                self._is_in_text = not self._is_in_text
            else:
                self._depth += 1 if sign in "{[" else -1
                if self._depth == 0:
                    return at
        return None


class JsonBlock:
    """A JSON value, or several with `separator` between; then `close`, or where that is empty nothing more.

    With a separator only the output's end is the end.
    """

    def __init__(self, arguments_key: str, close: str = "", separator: str = "", names: frozenset[str] | None = None):
        """`names`: if given, other calls than of these are none."""
        self.state = State.OPEN
        self.calls: list[Called] = []
        self._key, self._close, self._separator, self._names = arguments_key, close, separator, names
        self._value: list[str] = []  # of the value that is being read; empty between values
        self._scan = JsonScan()
        self._num_closed = 0  # characters of `close` that have come
        self._wants_value = True

    def feed(self, text: str, at: int) -> int:
        while self.state is State.OPEN and at < len(text):
            if self._value:
                at = self._read_value(text, at)
                continue
            if self._num_closed == 0:
                at = _space_end(text, at)
                if at == len(text):
                    break
            read = self._begin_value if self._wants_value else self._read_between
            at = read(text, at)
        return at

    def finish(self) -> None:
        """A value that is whole needs no `close` any more."""
        if self.state is State.OPEN:
            is_whole = self.calls and not self._value and not self._wants_value
            self.state = State.DONE if is_whole else State.BROKEN

    def _begin_value(self, text: str, at: int) -> int:
        if text[at] not in "{[":
            self.state = State.BROKEN
            return at
        self._scan = JsonScan()
        return self._read_value(text, at)

    def _read_value(self, text: str, at: int) -> int:
        end = self._scan.feed(text, at)
        self._value.append(text[at:end])
        if end is None:
            return len(text)
        calls = read_or_none(lambda: calls_of("".join(self._value), self._key))
        if calls is None:
            self.state = State.BROKEN
            return end
        self._value, self._wants_value = [], False
        self.calls += calls
        if self._names is not None and any(call.name not in self._names for call in calls):
            self.state = State.BROKEN
        elif not self._close and not self._separator:
            self.state = State.DONE
        return end

    def _read_between(self, text: str, at: int) -> int:
        if self._separator:
            if text[at] != self._separator:
                self.state = State.BROKEN
                return at
            self._wants_value = True
            return at + 1
        if text[at] != self._close[self._num_closed]:
            self.state = State.BROKEN
            return at
        self._num_closed += 1
        if self._num_closed == len(self._close):
            self.state = State.DONE
        return at + 1


class NamedBlock:
    """A name, by the group `name` of `header`, then the arguments as a JSON object."""

    def __init__(self, header: re.Pattern[str]) -> None:
        self.state = State.OPEN
        self.calls: list[Called] = []
        self._pattern = header
        self._header = ""
        self._arguments: list[str] = []
        self._scan = JsonScan()

    def feed(self, text: str, at: int) -> int:
        if not self._arguments:
            brace = text.find("{", at)
            end = len(text) if brace < 0 else brace
            self._header += text[at:end]
            at = end
            if len(self._header) > _MAX_HEADER_CHARS:
                self.state = State.BROKEN
            if self.state is State.BROKEN or brace < 0:
                return at
        end_or_none = self._scan.feed(text, at)
        self._arguments.append(text[at:end_or_none])
        if end_or_none is None:
            return len(text)
        header = self._pattern.fullmatch(self._header.strip())
        name = header["name"] if header else None
        calls = read_or_none(lambda: [called(name, "".join(self._arguments))])
        self.calls, self.state = calls or [], State.DONE if calls else State.BROKEN
        return end_or_none

    def finish(self) -> None:
        if self.state is State.OPEN:
            self.state = State.BROKEN


class ClosedBlock:
    """Anything up to `close`; `parse` makes a call of it, or raises `ValueError`."""

    def __init__(self, close: str, parse: Callable[[str], Called]) -> None:
        self.state = State.OPEN
        self.calls: list[Called] = []
        self._close, self._parse = close, parse
        self._body: list[str] = []
        self._tail = ""  # the last characters of the body: `close` may have begun in them

    def feed(self, text: str, at: int) -> int:
        window = self._tail + text[at:]
        found = window.find(self._close)
        if found < 0:
            self._tail = window[-(len(self._close) - 1) :]
            self._body.append(text[at:])
            return len(text)
        end = at + found + len(self._close) - len(self._tail)
        self._body.append(text[at:end])
        self._end("".join(self._body).removesuffix(self._close))
        return end

    def finish(self) -> None:
        """The model may have ended its turn in place of the close."""
        if self.state is State.OPEN:
            self._end("".join(self._body))

    def _end(self, body: str) -> None:
        calls = read_or_none(lambda: [self._parse(body)])
        self.calls, self.state = calls or [], State.DONE if calls else State.BROKEN


def _space_end(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    assert space is not None
    return space.end()


# -- bodies that are not JSON

_JSON_SPACE = " \t\n\r"
_XML_CALL = re.compile(r"\s*<function=(?P<name>[^>\n]+)>(?P<body>.*?)</function>\s*", re.DOTALL)
_XML_OPENING = re.compile(r"\s*<parameter=(?P<key>[^>\n]+)>\n?")
_XML_CLOSE = "</parameter>"


def xml_call(body: str, kinds: ParameterKinds) -> Called:
    """Qwen3-Coder's `<function=NAME><parameter=KEY>VALUE</parameter></function>`.

    Values carry no type: each becomes what the tool's schema (`kinds`) says of it, else a text.
    """
    call = _XML_CALL.fullmatch(body)
    if call is None:
        raise ValueError("no function")
    name = call["name"].strip()
    arguments = {key: _typed(value, kinds.of(name, key)) for key, value in _xml_parameters(call["body"])}
    return called(name, "{" + ", ".join(f"{dumps(key)}: {value}" for key, value in arguments.items()) + "}")


def _xml_parameters(body: str) -> Iterator[tuple[str, str]]:
    """Keys and values. Raises `ValueError` at the first that has no end, so nothing is read twice."""
    at = 0
    while (opening := _XML_OPENING.match(body, at)) is not None:
        end = body.find(_XML_CLOSE, opening.end())
        if end < 0:
            raise ValueError("a parameter that does not end")
        yield opening["key"].strip(), body[opening.end() : end].removesuffix("\n")
        at = end + len(_XML_CLOSE)
    if body[at:].strip():
        raise ValueError("something beside parameters")


def _typed(text: str, kinds: frozenset[Kind]) -> str:
    """The JSON of a value. Where a string is allowed, `text` is one unless it is JSON of another kind that is; else it
    is a string only if it is no JSON."""
    others = kinds - {"string", "any"}
    written = text.strip(_JSON_SPACE)
    try:
        value = loads(written) if others else text
    except ValueError:
        return dumps(text)
    if len(others) == len(kinds) or any(is_of(value, kind) for kind in others):
        return written
    return dumps(text)


_GEMMA_CALL = re.compile(r"\s*call:(?P<name>[\w.-]+)\s*(?P<body>\{.*\})\s*", re.DOTALL)
#: What between two strings is not yet JSON as it is shown: keys, and what stands between parts. Other JSON may stand
#: there, and strings as JSON has them; one that does not end goes as far as the part, so that nothing is read twice.
_GEMMA_PART = re.compile(
    r'"(?:[^"\\]|\\(?s:.?))*+(?:"|\Z)|(?P<before>[{,])\s*(?P<key>[A-Za-z_][\w.-]*)\s*:\s*|(?P<sign>[:,])\s*'
)


def gemma_call(body: str, quote: str) -> Called:
    """Gemma's `call:NAME{key:<quote>text<quote>,other:1}`: keys are bare, texts stand between two `quote`."""
    call = _GEMMA_CALL.fullmatch(body)
    if call is None:
        raise ValueError("no call")
    parts = call["body"].split(quote)
    if len(parts) % 2 == 0:
        raise ValueError("a text that does not end")
    parts[0::2] = [_GEMMA_PART.sub(_as_json, part) for part in parts[0::2]]
    parts[1::2] = [dumps(part) for part in parts[1::2]]
    return called(call["name"], "".join(parts))


def _as_json(part: re.Match[str]) -> str:
    if part["key"] is not None:
        return f"{part['before'].replace(',', ', ')}{dumps(part['key'])}: "
    return part[0] if part["sign"] is None else f"{part['sign']} "
