"""Grammars made of what a request asks for: schemas, expressions, choices, Lark and GBNF.

Nothing is compiled here. `router.http.grammars` does that, beside the loop, and so finds what cannot be followed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from dataclasses import field as with_default
from enum import Enum
from typing import Any
from urllib.parse import unquote

import orjson
from llguidance import LLMatcher

from router.openai.gbnf import lark_of
from router.openai.refusal import refuse, shown
from tandem.core.config import LimitsConfig

#: Between the parts of JSON: nothing, a space, or a new line with its indentation. Without a bound a model may write
#: spaces until its tokens are spent.
WHITESPACE = r" |\n[ \t]{0,40}"


# One text or expression within a grammar. The time of each mask grows with it, 4 ms for so many, and of three times as
# many the lexer could not follow the end.
_MAX_TEXT_BYTES = 8 << 10
# What of a schema only describes, unless it is referred to: that is a schema wherever it stands.
_DESCRIBES = frozenset(("title", "description", "default", "examples", "$comment"))
_REFERENCE = re.compile(r'"\$(?:ref|dynamicRef|recursiveRef)":"([^"]*)"')
# A text in JSON and in Lark's form. What is between its quotes is passed once, also where the end is missing. Lark has
# comments, too, and an expression may go over several lines; an escaped line end is an error in either.
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\Z)')
_QUOTED_OR_REGEX = re.compile(r'(?:#|//)[^\n]*|("(?:[^"\\\n]|\\.)*+["\\]?|/(?:[^/\\]|\\.)++[/\\]?)')


@dataclass(frozen=True, slots=True)
class AskedGrammar:
    """What an output is to follow.

    Attributes:
        text: as llguidance takes it, and as it travels; with `is_gbnf` in GBNF.
        field: that asked for it; refusals name it.
        schema: the JSON schema that it was made of; `None`: of none.
        spacing: what stands between the parts of that JSON, as llguidance's options.
        is_gbnf: whether it has to be read first: `as_read`.
    """

    text: str
    field: str
    schema: Any = None
    spacing: dict[str, Any] = with_default(default_factory=dict)
    is_gbnf: bool = False

    def as_read(self, limits: LimitsConfig) -> AskedGrammar:
        """The grammar as llguidance takes it. Not on a loop that serves others: GBNF is read in Python.

        Raises `InvalidRequestError`: it cannot be read.
        """
        if not self.is_gbnf:
            return self
        try:
            lark = lark_of(self.text)
        except Exception as error:  # noqa: BLE001 - the reader has no errors of its own
            refuse(self.field, f"looks like GBNF and cannot be read: {error}")
        return of_lark(lark, self.field, limits)


def of_schema(schema: Any, field: str, limits: LimitsConfig, *, whitespace: str | None = WHITESPACE) -> AskedGrammar:
    """JSON that follows `schema`, an object or true or false.

    Args:
        whitespace: a regular expression of what may stand between the parts of JSON; `None`: nothing may.
    """
    if not isinstance(schema, (dict, bool)):
        refuse(field, f"must be a JSON schema, an object, not {shown(schema)}")
    try:
        text = orjson.dumps(_as_object(schema)).decode()
    except orjson.JSONEncodeError:
        refuse(field, "is nested too deeply")
    _check_size(text, field, limits)
    _check_texts(schema, text, field)
    spacing = {
        "whitespace_flexible": whitespace is not None,
        "whitespace_pattern": whitespace,
        "item_separator": ",",
        "key_separator": ":",
    }
    # They go before the schema's own `x-guidance`, which could make whitespace endless or pass keywords over.
    overrides: Any = {**spacing, "coerce_one_of": False, "lenient": False}
    return AskedGrammar(LLMatcher.grammar_from_json_schema(text, overrides=overrides), field, schema, spacing)


def _check_texts(schema: Any, as_json: str, field: str) -> None:
    if not _longest(_QUOTED, as_json) > _MAX_TEXT_BYTES:
        return
    referred = {step for path in _REFERENCE.findall(as_json) for step in unquote(path).split("/")}
    passed_over = _DESCRIBES - referred
    ahead = [(field, schema, _Kind.SCHEMA)]
    while ahead:
        path, part, kind = ahead.pop()
        if isinstance(part, dict):
            for key, value in part.items():
                _check_text(key, path)
                if kind is not _Kind.SCHEMA or key not in passed_over:
                    ahead.append((f"{path}.{key}", value, _kind_at(kind, key)))
        elif isinstance(part, list):
            ahead.extend((f"{path}[{number}]", value, kind) for number, value in enumerate(part))
        elif isinstance(part, str):
            _check_text(part, path)


class _Kind(Enum):
    """What a part of a schema is. Keys are keywords in a schema alone: elsewhere `title` is one like any other."""

    SCHEMA = "schema"
    SCHEMAS = "schemas by names"
    DATA = "data"


def _kind_at(kind: _Kind, key: str) -> _Kind:
    if kind is _Kind.SCHEMA:
        return _Kind.SCHEMAS if key in _OF_NAMES else _Kind.DATA if key in ("const", "enum") else kind
    return _Kind.SCHEMA if kind is _Kind.SCHEMAS else kind


def _longest(of: re.Pattern[str], text: str) -> int:
    return max((len(found.encode()) - 2 for found in of.findall(text)), default=0)


def _check_text(text: str, path: str) -> None:
    if (size := len(text.encode())) > _MAX_TEXT_BYTES:
        refuse(path, f"has a text of {size} bytes; in a grammar one may have {_MAX_TEXT_BYTES}")


def _as_object(schema: dict[str, Any] | bool) -> dict[str, Any]:
    if isinstance(schema, dict):
        return schema
    return {} if schema else {"not": {}}


def of_regex(regex: str, field: str, limits: LimitsConfig) -> AskedGrammar:
    """Texts that the expression matches as a whole."""
    _check_size(regex, field, limits)
    return AskedGrammar(LLMatcher.grammar_from_regex(regex), field)


def of_choices(texts: Sequence[str], field: str, limits: LimitsConfig) -> AskedGrammar:
    """One of these texts."""
    for number, text in enumerate(texts):
        _check_text(text, f"{field}[{number}]")
    return of_lark(f"start: {' | '.join(orjson.dumps(text).decode() for text in texts)}", field, limits)


def of_lark(lark: str, field: str, limits: LimitsConfig) -> AskedGrammar:
    """What a grammar in Lark's form says, as llguidance reads it."""
    _check_size(lark, field, limits)
    if (longest := _longest(_QUOTED_OR_REGEX, lark)) > _MAX_TEXT_BYTES:
        refuse(field, f"has a text or expression of {longest} bytes; in a grammar one may have {_MAX_TEXT_BYTES}")
    return AskedGrammar(LLMatcher.grammar_from_lark(lark), field)


# An attribute of a rule: `[temperature=0.5]`.
# No match goes on over another `[`, or many of them would take a time that grows with the square of their number.
_TEMPERATURE = re.compile(r"\[[^\[\]\"/]*\btemperature\s*=")
# What has one of these is no GBNF, whatever its literals have. Blank lines are passed one by one, for the same reason.
_LARK = re.compile(r"(?m)^[^\S\n]*(?:%llguidance\b|start\s*:(?!:))")
_RULE = "::="
_MAX_GBNF_RULES = 1000


def of_grammar(grammar: str, field: str, limits: LimitsConfig) -> AskedGrammar:
    """What a grammar in Lark's form or in GBNF says."""
    _check_size(grammar, field, limits)
    if _TEMPERATURE.search(grammar):
        refuse(field, "sets a temperature; that of the request holds for all of it")
    if grammar.lstrip().startswith("{"):  # llguidance's own JSON has options that are not to be set
        refuse(field, "must be a grammar in Lark's form or in GBNF, not JSON")
    if _RULE not in grammar or _LARK.search(grammar):
        return of_lark(grammar, field, limits)
    if (num_rules := grammar.count(_RULE)) > _MAX_GBNF_RULES:
        refuse(field, f"has {num_rules} rules of GBNF; at most {_MAX_GBNF_RULES} are taken")
    return AskedGrammar(grammar, field, is_gbnf=True)


def _check_size(text: str, field: str, limits: LimitsConfig) -> None:
    if (size := len(text.encode())) > limits.max_grammar_bytes:
        refuse(field, f"has {size} bytes; at most {limits.max_grammar_bytes} are taken (limits.max_grammar_bytes)")


def closed(schema: Any) -> Any:
    """`schema`, where objects with `properties` have no others unless they say so."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {key: closed(part) for key, part in schema.items()}
    if isinstance(parts.get("properties"), dict):
        parts.setdefault("additionalProperties", False)
    return parts


# -- the parts of a schema

# Definitions first: what is wrong in one is wrong wherever it is referred to.
_OF_NAMES = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
_OF_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_OF_ONE = (
    "items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else", "unevaluatedItems",
    "unevaluatedProperties",
)  # fmt: skip


def parts_of(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas right within a schema that are objects, each with its path from there."""
    if not isinstance(schema, dict):
        return
    for key in _OF_NAMES:
        if isinstance(named := schema.get(key), dict):
            yield from ((f".{key}.{name}", part) for name, part in named.items() if isinstance(part, dict))
    for key in _OF_LISTS:
        if isinstance(listed := schema.get(key), list):
            yield from ((f".{key}[{number}]", part) for number, part in enumerate(listed) if isinstance(part, dict))
    for key in _OF_ONE:
        if isinstance(one := schema.get(key), dict):
            yield f".{key}", one
