"""Kinds of values that speak of tools, in the spelling of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router.openai.fields import Accepted, Boolean, Field, NotYet, Object, Schema, Scope, Text
from router.openai.model_card import ModelCard
from router.openai.refusal import refuse, shown
from router.tools.blocks import loads
from router.tools.formats import normal_tool
from router.tools.pieces import ToolUse
from tandem.core.config import LimitsConfig

TOOL_NAME = Text("must be the name of a tool")
_ANY_OBJECT: Schema = {"type": "object"}


class JsonObject:
    """An object that is passed on as it is, such as a JSON Schema."""

    def read(self, value: Any, path: str, _: Scope) -> dict[str, Any]:
        if not isinstance(value, dict):
            refuse(path, f"must be an object, not {shown(value)}")
        return value

    def schema(self, _: LimitsConfig, __: ModelCard) -> Schema:
        return _ANY_OBJECT


class Const:
    """One text alone."""

    def __init__(self, value: str) -> None:
        self._value = value

    def read(self, value: Any, path: str, _: Scope) -> str:
        if value != self._value:
            refuse(path, f"must be `{self._value}`, not {shown(value)}")
        return self._value

    def schema(self, _: LimitsConfig, __: ModelCard) -> Schema:
        return {"const": self._value}


#: A tool's parts, however an API arranges them.
FUNCTION_FIELDS = (
    Field("name", TOOL_NAME, is_required=True),
    Field("description", Text()),
    Field("strict", NotYet(False)),
)


class Tools:
    """Functions that the model may call."""

    _TOOL = Object(
        [
            Field("type", Const("function"), is_required=True),
            Field("function", Object([*FUNCTION_FIELDS, Field("parameters", JsonObject(), about="A JSON Schema.")]),
                  is_required=True),
        ]
    )  # fmt: skip

    def read(self, value: Any, path: str, scope: Scope) -> tuple[dict[str, Any], ...]:
        if not isinstance(value, list):
            refuse(path, f"must be a list of tools, not {shown(value)}")
        tools = []
        for number, given in enumerate(value):
            function = self._TOOL.read(given, f"{path}[{number}]", scope)["function"]
            tools.append(normal_tool(function["name"], function.get("description"), function.get("parameters")))
        return tuple(tools)

    def schema(self, limits: LimitsConfig, card: ModelCard) -> Schema:
        schema = {"type": "array", "items": self._TOOL.schema(limits, card)}
        return schema if card.knows_tools and card.tool_format else {**schema, "maxItems": 0}


class ToolCalls:
    """The calls of an assistant's message. Arguments that are a JSON object become one; else they stay text."""

    _CALL = Object(
        [
            Field("id", Text()),
            Field("type", Const("function")),
            Field("function", Object([
                Field("name", TOOL_NAME, is_required=True),
                Field("arguments", Text(), about="A JSON object, as a text."),
            ]), is_required=True),
            Field("index", Accepted.ALWAYS),  # as streamed deltas have it
        ]
    )  # fmt: skip

    def read(self, value: Any, path: str, scope: Scope) -> list[dict[str, Any]]:
        if not isinstance(value, list):
            refuse(path, f"must be a list of calls, not {shown(value)}")
        calls = []
        for number, given in enumerate(value):
            call = self._CALL.read(given, f"{path}[{number}]", scope)
            function = call["function"]
            calls.append(normal_call(call.get("id", ""), function["name"], function.get("arguments", "")))
        return calls

    def schema(self, limits: LimitsConfig, card: ModelCard) -> Schema:
        return {"type": "array", "items": self._CALL.schema(limits, card)}


def normal_call(call_id: str, name: str, arguments: str | dict[str, Any]) -> dict[str, Any]:
    """A call as chat templates want it."""
    if isinstance(arguments, str):
        arguments = _object_of(arguments)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _object_of(text: str) -> str | dict[str, Any]:
    try:
        value = loads(text or "{}")
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


_CHOICES = ("auto", "none")


class ToolChoice:
    """Whether the model may call tools."""

    def read(self, value: Any, path: str, _: Scope) -> str:
        if value not in _CHOICES:
            refuse(path, f"must be one of {', '.join(_CHOICES)}, not {shown(value)}: more is not supported yet")
        return str(value)

    def schema(self, _: LimitsConfig, __: ModelCard) -> Schema:
        return {"enum": list(_CHOICES)}


def tool_use(values: Mapping[str, Any]) -> ToolUse:
    """What the fields `tools`, `tool_choice` and `parallel_tool_calls` say together."""
    return ToolUse(values.get("tools", ()), values["tool_choice"], values["parallel_tool_calls"])


TOOL_FIELDS = (
    Field("tools", Tools(), about="Functions, where the model's chat template knows tools.", of="chat"),
    Field("tool_choice", ToolChoice(), "auto", "With `none` the model is told of no tool.", of="chat"),
    Field("parallel_tool_calls", Boolean(), True, of="chat"),
)
