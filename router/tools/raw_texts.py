"""Texts of a schema's strings as terminals of a grammar, for formats that write them as they are. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llguidance import regex_to_lark

from router.tools.schema_kinds import InexpressibleError

_ANY = "/(?s:.*)/"
#: One character as JSON writes it between quotes. Half a surrogate pair is none, and `\\/` lets what may not come
#: within a call be written all the same.
_JSON_CHAR = (
    r'(?:[^"\\\x00-\x1f]|\\["\\\/bfnrt]|\\u(?:[0-9a-cA-CefEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2})'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})"
)
#: Texts that JSON writes as they are.
PLAIN = r'/[^"\\\x00-\x1f]*/'


def raw_text(says: Mapping[str, Any], without: Sequence[str], path: str) -> str:
    """Strings of which a schema says this, as they are; an expression in Lark's form.

    Args:
        without: texts that have no place in them.

    Raises `InexpressibleError`.
    """
    parts = _bounds(says, path, "(?s:.)") + _form(says, path)
    if (values := says.get("enum")) is not None:
        if not (kept := [value for value in values if not any(text in value for text in without)]):
            raise InexpressibleError(f"{path}.enum", f"none of it can be written where {without[0]} ends a text")
        parts.append(one_of(kept))
    return " & ".join([*(parts or [_ANY]), *_excluded(without)])


def json_text(says: Mapping[str, Any], without: Sequence[str], path: str) -> str:
    """The same as JSON, between quotes."""
    form, values = _form(says, path), says.get("enum")
    if values is not None and not form and not says.keys() & {"minLength", "maxLength"}:
        return one_of(values, lambda value: json_without(value, without))
    if not form and values is None:
        size = "*" if (size := _size(says, path)) is None else size
        body = f"/{_JSON_CHAR}{size}/"
    else:  # of the texts themselves something is said, so none is written otherwise
        parts = [PLAIN, *_bounds(says, path, "(?s:.)"), *form]
        body = " & ".join([*parts, *([one_of(values)] if values is not None else [])])
    body = " & ".join([body, *_excluded(without)])
    return f'"\\"" ({body}) "\\""'


def one_of(values: Sequence[str], written: Callable[[str], str] = str) -> str:
    """An expression of some texts."""
    return f"({' | '.join(quoted(written(value)) for value in values)})"


def quoted(text: str) -> str:
    """A text in Lark's form."""
    return json.dumps(text, ensure_ascii=False)


def json_without(value: str, without: Sequence[str]) -> str:
    """A string in JSON. Texts that have no place in it begin as an end tag does, of which the stroke is escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return text.replace("</", "<\\/") if any(part in text for part in without) else text


def escaped(text: str) -> str:
    """A text within a regular expression between slashes."""
    return re.escape(text).replace("/", "\\/")


def _excluded(without: Sequence[str]) -> list[str]:
    return [f"~/(?s:.*)({'|'.join(map(escaped, without))})(?s:.*)/"] if without else []


def _size(says: Mapping[str, Any], path: str) -> str | None:
    least, most = says.get("minLength", 0), says.get("maxLength")
    for value in (least, most):
        if value is not None and (not isinstance(value, int) or value < 0):
            raise InexpressibleError(path, "minLength and maxLength must be numbers of characters")
    if most is not None and most < least:
        raise InexpressibleError(path, "allows nothing: maxLength is less than minLength")
    return None if not least and most is None else f"{{{least},{'' if most is None else most}}}"


def _bounds(says: Mapping[str, Any], path: str, char: str) -> list[str]:
    size = _size(says, path)
    return [] if size is None else [f"/{char}{size}/"]


def _form(says: Mapping[str, Any], path: str) -> list[str]:
    form = []
    if (pattern := says.get("pattern")) is not None:
        if not isinstance(pattern, str):
            raise InexpressibleError(f"{path}.pattern", "must be a regular expression")
        form.append(f"/{_searched(regex_to_lark(pattern, 'dw'))}/")
    if (name := says.get("format")) is not None:
        if name not in _FORMATS:
            raise InexpressibleError(f"{path}.format", f"is none of {', '.join(_FORMATS)}")
        form.append(f"/{_FORMATS[name]}/")
    return form


def _searched(pattern: str) -> str:
    """An expression of texts in which `pattern` is found somewhere.

    Where it is bound to the begin or the end elsewhere than in its first and last place, the grammar is refused.
    """
    return "|".join(_unbound(part) for part in _alternatives(pattern))


def _unbound(part: str) -> str:
    begin, part = ("", part[1:]) if part.startswith("^") else ("(?s:.*)", part)
    ends = part.endswith("$") and (len(part) - len(part[:-1].rstrip("\\"))) % 2 == 1
    return f"{begin}(?:{part[:-1]})" if ends else f"{begin}(?:{part})(?s:.*)"


#: What has no alternatives of its own, and what opens, ends and parts groups.
_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|\[:\^?\w+:\]|[^\]\\])*\]|[()|]|.", re.DOTALL)


def _alternatives(pattern: str) -> list[str]:
    found, depth = [""], 0
    for part in _PART.findall(pattern):
        depth += (part == "(") - (part == ")")
        if part == "|" and depth == 0:
            found.append("")
        else:
            found[-1] += part
    return found


# -- formats, each so that what it matches is one by its RFC

_DATE = (
    r"[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_DURATION_TIME = r"T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DURATION_DATE = r"(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_ATOM = r"[A-Za-z0-9!#$%&'*+\/=?^_`{|}~-]{1,30}"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_HEX = r"[0-9a-fA-F]{1,4}"
_IPV6 = "|".join([
    rf"(?:{_HEX}:){{7}}{_HEX}",
    *(rf"(?:{_HEX}:){{{n}}}(?::{_HEX}){{1,{7 - n}}}" for n in range(1, 7)),
    rf":(?::{_HEX}){{1,7}}",
    rf"(?:{_HEX}:){{1,7}}:",
    "::",
])  # fmt: skip
_URI_CHAR = r"(?:[A-Za-z0-9._~:@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})"
_FORMATS: dict[str, str] = {
    "date-time": f"{_DATE}T{_TIME}",
    "date": _DATE,
    "time": _TIME,
    "duration": f"P(?:{_DURATION_DATE}(?:{_DURATION_TIME})?|{_DURATION_TIME}|[0-9]+W)",
    "email": rf"{_ATOM}(?:\.{_ATOM})?@{_HOST}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": f"(?:{_IPV6})",
    "uuid": r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]*:(?:\/\/{_HOST}(?::[0-9]{{1,5}})?(?:\/{_URI_CHAR}*)*"
    rf"|(?:{_URI_CHAR}+))(?:\?(?:{_URI_CHAR}|[\/?])*)?(?:#(?:{_URI_CHAR}|[\/?])*)?",
}
