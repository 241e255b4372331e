"""Grammars of calls, in Lark's form as llguidance reads it: for outputs that have to be calls, or whose calls have to
follow the schemas of their tools. What they let a model write is what its format reads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from router.tools.argument_rules import Arguments, Marker, Rules, json_arguments
from router.tools.raw_texts import escaped, quoted
from router.tools.schema_kinds import InexpressibleError


@dataclass(frozen=True)
class Messages:
    """Text beside calls, where a format has channels for it. Parts are as those of `CallForm`.

    A turn is any number of messages, then a call, or a last message.
    """

    thought: Sequence[str]  # what begins a message that is reasoning
    said: Sequence[str]  # what begins one that is said before a call
    last: Sequence[str]  # what begins the last one
    next: Sequence[str]  # what stands between a message and the next
    markers: Sequence[str]  # their texts have no place in text


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
    also: Sequence[tuple[Sequence[str], Sequence[str]]] = ()  # other ways to write `before` and `between`
    separator: str = ""  # between calls behind one opening; empty: each call has its own
    tail: str = ""
    arguments: Arguments = json_arguments
    is_json: bool = True  # a name stands between quotes, as JSON writes it
    name: str = r"[^\s<>\[\]{}\"]+"  # an expression of the names that its reader takes, where they are not in JSON
    is_single: bool = False  # a turn has one call at most
    messages: Messages | None = None  # text beside calls is in these; `None`: it stands there as it is


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
    """The grammar, in Lark's form.

    Raises `InexpressibleError`: no call of this format can be held to what is wanted of it.
    """
    is_single = wanted.is_single or form.is_single
    rules, calls = Rules(), []
    for name, schema in wanted.tools:
        if not form.is_json and not re.fullmatch(form.name, name):
            raise InexpressibleError("", f"the name {name!r} cannot be written")
        written = quoted(name) if form.is_json else name
        try:
            arguments = form.arguments(schema, rules, marker)
        except InexpressibleError as error:
            raise InexpressibleError("", f"of {name}: {error}") from error
        heads = " | ".join(
            " ".join([*_terms(before, marker), _text(written), *_terms(between, marker)])
            for before, between in [(form.before, form.between), *form.also]
        )
        head = f"({heads})" if form.also else heads
        calls.append(rules.rule(" ".join(part for part in [head, arguments, *_terms(form.after, marker)] if part)))
    instead = ""
    if wanted.instead is not None:
        instead = rules.json_rule({**wanted.instead, "x-guidance": wanted.spacing})
    start = _in_messages if form.messages else _start
    lines = start(form, instead, is_single=is_single, is_forced=wanted.is_forced, marker=marker)
    return "\n".join([lines, f"call: {' | '.join(calls)}", *rules.lines, ""])


def _start(form: CallForm, instead: str, *, is_single: bool, is_forced: bool, marker: Marker) -> str:
    rest = _rest(form, is_single)
    opening = marker(form.opening) if form.opening else '""'
    if is_forced:
        again = "" if is_single or form.separator else f" ({_text(_NEW_LINE)}? {opening} {rest})*"
        return f"start: {opening} {rest}{again}{f' | {instead}' if instead else ''}"
    if not form.opening:  # a call is the whole output, or there is none
        return f'start: {rest} | TEXT\nTEXT: /[^{{](?s:.*)/ | ""'
    times = "?" if is_single else "*"
    # A reader finds an opening by its text, so that is none of what is said, also where its token is a special one.
    text = f"TEXT: /(?s:.+)/ & ~/(?s:.*){escaped(form.opening)}(?s:.*)/"
    if opening.startswith("<"):  # its token is no text
        return f"start: TEXT? (opened {rest} TEXT?){times}\nopened: {opening}\n{text}"
    return f"start: (opened {rest}){times} TEXT?\nopened[suffix={opening}]: /(?s:.*)/\n{text}"


def _in_messages(form: CallForm, instead: str, *, is_single: bool, is_forced: bool, marker: Marker) -> str:
    messages = form.messages
    assert messages is not None
    follows = " ".join(_terms(messages.next, marker))
    begins = [messages.thought] if is_forced else [messages.thought, messages.said]
    before = " | ".join(f"{' '.join(_terms(begin, marker))} TEXT? {follows}" for begin in begins)
    rest = _rest(form, is_single)
    last = " ".join(_terms(messages.last, marker))
    said = f" | {last} {instead or 'TEXT?'}" if instead or not is_forced else ""
    texts = "|".join(map(escaped, messages.markers))
    return f"start: ({before})* ({rest}{said})\nTEXT: /(?s:.+)/ & ~/(?s:.*)({texts})(?s:.*)/"


_NEW_LINE = "\n"


def _rest(form: CallForm, is_single: bool) -> str:
    """What follows an opening."""
    again = f" ({_text(form.separator)} call)*" if form.separator and not is_single else ""
    return " ".join(part for part in (_text(form.head), f"call{again}", _text(form.tail)) if part)


def _terms(parts: Sequence[str], marker: Marker) -> list[str]:
    """Texts, and markers, which stand between two `\\0`."""
    return [marker(part[1:]) if part.startswith("\0") else _text(part) for part in parts]


def _text(text: str) -> str:
    return quoted(text) if text else ""
