"""Kinds of values that speak of tools, in the spelling of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from router.openai.depth import is_deep
from router.openai.fields import Accepted, Boolean, Field, Kind, Object, OneOf, Schema, Scope, Text
from router.openai.model_card import ModelCard
from router.openai.refusal import refuse, shown
from router.tools.formats import normal_tool
from router.tools.json_text import loads
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
    Field(
        "strict",
        Boolean(),
        about="Whether calls follow the schema also where the model need not call. Where that cannot hold, "
        "`tandem-ignored-fields` has `tools.strict`.",
    ),
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

    def read(self, value: Any, path: str, scope: Scope) -> tuple[Tool, ...]:
        if not isinstance(value, list):
            refuse(path, f"must be a list of tools, not {shown(value)}")
        tools = []
        for number, given in enumerate(value):
            function = self._TOOL.read(given, f"{path}[{number}]", scope)["function"]
            normal = normal_tool(function["name"], function.get("description"), function.get("parameters"))
            tools.append(Tool(normal, function.get("strict", False)))
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
    return value if isinstance(value, dict) and not is_deep(value) else text


Choice = Literal["auto", "none", "required"]
_CHOICES: tuple[Choice, ...] = ("auto", "none", "required")


class Chosen(NamedTuple):
    """What is chosen of tools."""

    choice: Choice
    only: frozenset[str] | None = None  # the names of those that may be called; `None`: all


class ListOf:
    """A list of values of one kind, at least one."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind

    def read(self, value: Any, path: str, scope: Scope) -> list[Any]:
        if not isinstance(value, list) or not value:
            refuse(path, f"must be a list with at least one element, not {shown(value)}")
        return [self._kind.read(one, f"{path}[{number}]", scope) for number, one in enumerate(value)]

    def schema(self, limits: LimitsConfig, card: ModelCard) -> Schema:
        return {"type": "array", "items": self._kind.schema(limits, card), "minItems": 1}


class ToolChoice:
    """Whether the model may call tools, or has to, and which."""

    def __init__(self, function: Object, allowed: Object, named: Callable[[dict[str, Any]], str]) -> None:
        """
        Args:
            function: one tool, as this API names it.
            allowed: some tools.
            named: the name that `function` holds.
        """
        self._function, self._allowed, self._named = function, allowed, named

    def read(self, value: Any, path: str, scope: Scope) -> Chosen:
        if isinstance(value, dict) and value.get("type") == "allowed_tools":
            allowed = self._allowed.read(value, path, scope)
            allowed = allowed.get("allowed_tools", allowed)
            return Chosen(allowed["mode"], frozenset(map(self._named, allowed["tools"])))
        if isinstance(value, dict):
            return Chosen("required", frozenset([self._named(self._function.read(value, path, scope))]))
        found = next((choice for choice in _CHOICES if value == choice), None)
        if found is None:
            refuse(path, f"must be one of {', '.join(_CHOICES)}, or a tool, not {shown(value)}")
        return Chosen(found)

    def schema(self, limits: LimitsConfig, card: ModelCard) -> Schema:
        kinds = (self._function, self._allowed)
        return {"anyOf": [{"enum": list(_CHOICES)}, *(kind.schema(limits, card) for kind in kinds)]}


_MODE = Field("mode", OneOf("auto", "required"), is_required=True)


def _type(name: str) -> Field:
    return Field("type", Const(name), is_required=True)


def _nested_choice() -> ToolChoice:
    name = Object([Field("name", TOOL_NAME, is_required=True)])
    function = Object([_type("function"), Field("function", name, is_required=True)])
    allowed = Object([_MODE, Field("tools", ListOf(function), is_required=True)])
    return ToolChoice(
        function,
        Object([_type("allowed_tools"), Field("allowed_tools", allowed, is_required=True)]),
        lambda given: str(given["function"]["name"]),
    )


def flat_choice() -> ToolChoice:
    """As `/v1/responses` spells it."""
    function = Object([_type("function"), Field("name", TOOL_NAME, is_required=True)])
    allowed = Object([_type("allowed_tools"), _MODE, Field("tools", ListOf(function), is_required=True)])
    return ToolChoice(function, allowed, lambda given: str(given["name"]))


def tool_use(values: Mapping[str, Any]) -> ToolUse:
    """What the fields `tools`, `tool_choice` and `parallel_tool_calls` say together."""
    chosen: Chosen = values.get("tool_choice") or Chosen("auto")
    return use_of(values.get("tools", ()), chosen, may_be_parallel=values["parallel_tool_calls"])


class Tool(NamedTuple):
    """One tool of a request."""

    normal: dict[str, Any]  # as chat templates want it
    is_strict: bool


def use_of(tools: Sequence[Tool], chosen: Chosen, *, may_be_parallel: bool) -> ToolUse:
    """Raises `InvalidRequestError` where what is chosen is not there."""
    names = frozenset(tool.normal["function"]["name"] for tool in tools)
    for name in sorted(chosen.only or ()):
        if name not in names:
            refuse("tool_choice", f"names {shown(name)}, which is none of `tools`")
    if chosen.choice == "required" and not tools:
        refuse("tool_choice", "wants a tool to be called, and there are no `tools`")
    strict = frozenset(tool.normal["function"]["name"] for tool in tools if tool.is_strict)
    return ToolUse(tuple(tool.normal for tool in tools), chosen.choice, chosen.only, strict, may_be_parallel)


CHOICE_ABOUT = "`auto`: the model may call; `none`: it is told of no tool; `required`, or a tool: it has to call."

TOOL_FIELDS = (
    Field("tools", Tools(), about="Functions, where the model's chat template knows tools.", of="chat"),
    Field("tool_choice", _nested_choice(), about=CHOICE_ABOUT, of="chat"),
    Field("parallel_tool_calls", Boolean(), True, of="chat"),
)
