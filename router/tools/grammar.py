"""Grammars of calls, in Lark's form as llguidance reads it: for outputs that have to be calls, or whose calls have to
follow the schemas of their tools. What they let a model write is what its format reads."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

#: A marker in a grammar: its token where it is a special one, else its text.
Marker = Callable[[str], str]

#: Between the parts of arguments stands what most templates write there.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True)
class CallForm:
    """How calls are written, in parts: what is a marker stands in the grammar as its token.

    opening (head call separator call … tail | call)        call: before NAME between ARGUMENTS after
    """

    opening: str = ""  # a marker; before each call, or before all where there is a `separator`
    head: str = ""
    before: Sequence[str] = ()
    between: Sequence[str] = ()
    after: Sequence[str] = ()
    separator: str = ""  # between calls behind one opening; empty: each call has its own
    tail: str = ""
    is_json: bool = True  # a name stands between quotes, as JSON writes it
    is_single: bool = False  # a turn has one call at most
    prelude: str = ""  # in Lark's form, `MARKER(…)` for markers: what may come before the opening
    has_plain_text: bool = True  # text beside calls stands there as it is


@dataclass(frozen=True)
class Wanted:
    """What calls are wanted.

    Attributes:
        tools: (name, schema of the arguments) of those that may be called; a schema that is `None` may be any object.
        is_forced: whether there is nothing but calls; else there is text, with calls or without.
        is_single: whether there is one call at most.
        instead: a schema of JSON that may come in place of calls; with `is_forced`.
        spacing: what stands between the parts of that JSON, as llguidance's options.
    """

    tools: Sequence[tuple[str, dict[str, Any] | None]]
    is_forced: bool
    is_single: bool
    instead: Any = None
    spacing: dict[str, Any] = field(default_factory=dict)


def grammar_of(form: CallForm, wanted: Wanted, marker: Marker) -> str:
    """The grammar, in Lark's form."""
    is_single = wanted.is_single or form.is_single
    rules = [f"call: {' | '.join(f'call{n}' for n in range(len(wanted.tools)))}"]
    for number, (name, schema) in enumerate(wanted.tools):
        quoted = json.dumps(name, ensure_ascii=False) if form.is_json else name
        parts = [*_terms(form.before, marker), _text(quoted), *_terms(form.between, marker), f"arguments{number}"]
        rules.append(f"call{number}: {' '.join([*parts, *_terms(form.after, marker)])}")
        given = {**(_ANY_OBJECT if schema is None else schema), "x-guidance": _SPACING}
        rules.append(f"arguments{number}: %json {json.dumps(given, ensure_ascii=False)}")
    start = _start(form, is_single=is_single, is_forced=wanted.is_forced, marker=marker)
    if wanted.instead is not None:
        start += " | instead"
        given = {**wanted.instead, "x-guidance": wanted.spacing}
        rules.append(f"instead: %json {json.dumps(given, ensure_ascii=False)}")
    return "\n".join([start, *rules, ""])


def _start(form: CallForm, *, is_single: bool, is_forced: bool, marker: Marker) -> str:
    rest = _rest(form, is_single)
    opening = marker(form.opening) if form.opening else '""'
    if is_forced:
        again = "" if is_single or form.separator else f" ({_text(_NEW_LINE)}? {opening} {rest})*"
        return f"start: {_prelude(form, marker)}{opening} {rest}{again}"
    if not form.opening:  # a call is the whole output, or there is none
        return f'start: {rest} | TEXT\nTEXT: /[^{{](?s:.*)/ | ""'
    times = "?" if is_single else "*"
    if opening.startswith("<"):  # its token is no text
        return f"start: TEXT? (opened {rest} TEXT?){times}\nopened: {opening}\nTEXT: /(?s:.+)/"
    return (
        f"start: (opened {rest}){times} TEXT?\n"
        f"opened[suffix={opening}]: /(?s:.*)/\n"
        f"TEXT: /(?s:.+)/ & ~/(?s:.*){_escaped(form.opening)}(?s:.*)/"
    )


_NEW_LINE = "\n"


def _rest(form: CallForm, is_single: bool) -> str:
    """What follows an opening."""
    again = f" ({_text(form.separator)} call)*" if form.separator and not is_single else ""
    return " ".join(part for part in (_text(form.head), f"call{again}", _text(form.tail)) if part)


def _prelude(form: CallForm, marker: Marker) -> str:
    prelude = form.prelude
    while "MARKER(" in prelude:
        before, _, rest = prelude.partition("MARKER(")
        name, _, behind = rest.partition(")")
        prelude = f"{before}{marker(name)}{behind}"
    return f"{prelude} " if prelude else ""


def _terms(parts: Sequence[str], marker: Marker) -> list[str]:
    """Texts, and markers, which stand between two `\\0`."""
    return [marker(part[1:]) if part.startswith("\0") else _text(part) for part in parts]


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _escaped(text: str) -> str:
    """A text within a regular expression between slashes."""
    return re.escape(text).replace("/", "\\/")
