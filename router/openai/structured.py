"""Fields that ask for a form of the output: OpenAI's `response_format` and vLLM's `structured_outputs`."""

from __future__ import annotations

from typing import Any

import orjson

from router.openai.depth import MAX_DEPTH, is_deep
from router.openai.fields import Accepted, Boolean, Elsewhere, Field, NotYet, Object, OneOf, Schema, Scope, Text
from router.openai.grammar import WHITESPACE, AskedGrammar, closed, of_choices, of_grammar, of_regex, of_schema
from router.openai.model_card import ModelCard
from router.openai.refusal import refuse, shown
from tandem.core.config import LimitsConfig


class _JsonSchema:
    """A JSON schema."""

    def read(self, value: Any, path: str, _: Scope) -> Any:
        if not isinstance(value, (dict, bool)):
            refuse(path, "is missing" if value is None else f"must be a JSON schema, an object, not {shown(value)}")
        return value

    def schema(self, _: LimitsConfig, __: ModelCard) -> Schema:
        return {"type": ["object", "boolean"]}


class _SchemaOrText(_JsonSchema):
    """A JSON schema, or the text of one."""

    def read(self, value: Any, path: str, scope: Scope) -> Any:
        if isinstance(value, str):
            try:
                value = orjson.loads(value)
            except orjson.JSONDecodeError as error:
                refuse(path, f"must be a JSON schema; it is a text that is not JSON: {error}")
            if is_deep(value):
                refuse(path, f"is nested too deeply: more than {MAX_DEPTH} objects and lists in another")
        return super().read(value, path, scope)

    def schema(self, _: LimitsConfig, __: ModelCard) -> Schema:
        text = {"type": "string", "pattern": r"^\s*(\{[\s\S]*\}|true|false)\s*$"}
        return {"anyOf": [{"type": ["object", "boolean"]}, text]}


class ByType:
    """The form of an output by its `type`, as OpenAI has it.

    Args:
        rows: the fields; `type` is one of `text`, `json_object` and `json_schema`.
        way: names of the fields, one in the other, that lead to the schema.
    """

    def __init__(self, rows: Object, *way: str) -> None:
        self._rows = rows
        self._way = way

    def read(self, value: Any, path: str, scope: Scope) -> AskedGrammar | None:
        held = self._rows.read(value, path, scope)
        if held["type"] == "text":
            return None
        if held["type"] == "json_object":
            return of_schema({"type": "object"}, path, scope.limits)
        for name in self._way:
            path = f"{path}.{name}"
            if name not in held:
                refuse(path, "is missing")
            held = held[name]
        return of_schema(held, path, scope.limits)

    def schema(self, limits: LimitsConfig, card: ModelCard) -> Schema:
        is_by_schema = {"properties": {"type": {"const": "json_schema"}}, "required": ["type"]}
        has_one = {"properties": {self._way[0]: {"type": "object"}}, "required": [self._way[0]]}
        return {**self._rows.schema(limits, card), "if": is_by_schema, "then": has_one}


#: The types that `ByType` knows.
FORM_TYPE = Field("type", OneOf("text", "json_object", "json_schema"), is_required=True)


def with_schema(schema: Field) -> tuple[Field, ...]:
    """OpenAI's fields of a schema; `schema` is the one that holds it."""
    return (
        Field("name", Text(), about="For the client alone."),
        Field("description", Text(), about="For the client alone: the model does not see it."),
        schema,
        Field("strict", Boolean(), about="The schema holds in either case; what cannot be enforced is refused."),
    )


_SCHEMA = Field("schema", _JsonSchema(), about="The output is JSON that follows it.", is_required=True)
#: OpenAI's `response_format`.
RESPONSE_FORMAT = ByType(
    Object([
        FORM_TYPE,
        Field("json_schema", Object(with_schema(_SCHEMA)), about="With the type `json_schema`."),
        Field("schema", Elsewhere("the type json_schema, with json_schema.schema")),
    ]),
    "json_schema",
    "schema",
)  # fmt: skip


class _Choices:
    """Texts, of which the output is one."""

    def read(self, value: Any, path: str, _: Scope) -> list[str]:
        if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
            refuse(path, f"must be a list of texts, none of them empty, not {shown(value)}")
        return value

    def schema(self, _: LimitsConfig, __: ModelCard) -> Schema:
        return {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1}


#: Each makes a grammar of what the field holds, as `of_regex`; `json` and `json_object` have options.
_OF_TEXT = {"regex": of_regex, "choice": of_choices, "grammar": of_grammar}
_WAYS = ("json", "json_object", *_OF_TEXT)
_OF_JSON = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")


class StructuredOutputs:
    """vLLM's."""

    _FIELDS = Object([
        Field("json", _SchemaOrText(), about="The output is JSON that follows this schema."),
        Field("json_object", Boolean(), about="The output is a JSON object."),
        Field("regex", Text("must not be empty"), about="It matches the whole output; in the syntax of Rust's regex."),
        Field("choice", _Choices(), about="The output is one of these texts."),
        Field("grammar", Text("must not be empty"), about="The output follows it; in Lark's form or in GBNF."),
        Field("disable_any_whitespace", Boolean(), False, "Nothing stands between the parts of JSON."),
        Field("disable_additional_properties", Boolean(), False,
              "Objects with `properties` have no others, unless they have `additionalProperties`."),
        Field("whitespace_pattern", Text("must not be empty"),
              about="A regular expression of what may stand between the parts of JSON."),
        Field("disable_fallback", Accepted.ALWAYS),  # to another library; there is one
        Field("structural_tag", NotYet()),
    ])  # fmt: skip

    def read(self, value: Any, path: str, scope: Scope) -> AskedGrammar:
        given = self._FIELDS.read(value, path, scope)
        ways = [name for name in _WAYS if name in given and not (name == "json_object" and not given[name])]
        if len(ways) != 1:
            refuse(path, f"must have one of {', '.join(_WAYS)}, and has {' and '.join(ways) or 'none'}")
        way, options = ways[0], [name for name in _OF_JSON if given.get(name)]
        if make := _OF_TEXT.get(way):
            if options:
                refuse(f"{path}.{options[0]}", f"is of JSON, and does not go with {way}")
            return make(given[way], f"{path}.{way}", scope.limits)
        schema = given["json"] if way == "json" else {"type": "object"}
        if given.get("disable_additional_properties"):
            schema = closed(schema)
        return of_schema(schema, f"{path}.{way}", scope.limits, whitespace=_whitespace(given, path))

    def schema(self, limits: LimitsConfig, card: ModelCard) -> Schema:
        ways = [_only(way) for way in _WAYS]
        return {**self._FIELDS.schema(limits, card), "if": {"type": "object"}, "then": {"anyOf": ways}}


_OFF: Schema = {"enum": [False, None]}
_UNSET: Schema = {"type": "null"}


def _only(way: str) -> Schema:
    """What the object is where it goes this way."""
    properties: dict[str, Schema] = dict.fromkeys(_WAYS, _UNSET) | {"json_object": _OFF}
    properties[way] = {"const": True} if way == "json_object" else {"not": _UNSET}
    alone: Schema = {"properties": properties, "required": [way]}
    if way in _OF_TEXT:
        properties |= dict.fromkeys(_OF_JSON, _OFF) | {"whitespace_pattern": _UNSET}
        return alone
    one_whitespace = [{"properties": {"disable_any_whitespace": _OFF}}, {"properties": {"whitespace_pattern": _UNSET}}]
    return {**alone, "anyOf": one_whitespace}


def _whitespace(given: dict[str, Any], path: str) -> str | None:
    pattern: str | None = given.get("whitespace_pattern")
    if not given.get("disable_any_whitespace"):
        return pattern or WHITESPACE
    if pattern is not None:
        refuse(f"{path}.whitespace_pattern", "does not go with disable_any_whitespace")
    return None
