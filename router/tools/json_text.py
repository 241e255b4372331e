"""JSON that models write: read as the standard has it, and its parts as they are written. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


def loads(text: str) -> Any:
    """JSON as it is in the standard: no NaN. Raises `ValueError`."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def dumps(value: Any) -> str:
    """Raises `ValueError` where it is nested too deeply, or holds a number that JSON has not."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair travels as an escape alone
        return json.dumps(value)
    return text


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def elements(text: str) -> list[str]:
    """The elements of a JSON list as they are written; `loads` has read `text`."""
    return [text[at:end] for _, at, end in _parts(text, lambda at: ("", at))]


def members(text: str) -> dict[str, str]:
    """The members of a JSON object as they are written; `loads` has read `text`. Of several of one name the last."""

    def key_at(at: int) -> tuple[str, int]:
        key, at = _DECODER.raw_decode(text, at)
        return key, _behind_space(text, _behind_space(text, at) + 1)  # the colon

    return {key: text[at:end] for key, at, end in _parts(text, key_at)}


def _parts(text: str, key_at: Callable[[int], tuple[str, int]]) -> Iterator[tuple[str, int, int]]:
    """Key, begin and end of each part between the brackets."""
    at = _behind_space(text, _behind_space(text, 0) + 1)
    while text[at] not in "]}":
        key, begin = key_at(at)
        _, end = _DECODER.raw_decode(text, begin)
        yield key, begin, end
        at = _behind_space(text, end)
        if text[at] == ",":
            at = _behind_space(text, at + 1)


def _behind_space(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    assert space is not None
    return space.end()
