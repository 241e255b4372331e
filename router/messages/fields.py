"""Every field of `/v1/messages`, one row each; `router.openai.request_fields` says what a row is."""

from __future__ import annotations

from typing import Any

from router.messages.content import Messages, TextBlocks
from router.openai.content import Stops
from router.openai.fields import (
    Accepted,
    Boolean,
    Elsewhere,
    Field,
    Integer,
    NotYet,
    Object,
    OneOf,
    Schema,
    Scope,
    SessionName,
)
from router.openai.grammar import AskedGrammar, of_schema
from router.openai.model_card import ModelCard
from router.openai.refusal import refuse, shown
from router.openai.request_fields import EFFORT, FIELDS, THINKING_FIELDS, as_in_chats
from router.openai.tool_fields import FUNCTION_FIELDS, TOOL_NAME, Chosen, Const, JsonObject, Tool
from router.tools.formats import normal_tool
from tandem.core.config import LimitsConfig


class _Tools:
    """Tools with a schema of their client's."""

    _TOOL = Object(
        [
            Field("type", Const("custom")),
            *FUNCTION_FIELDS,
            Field("input_schema", JsonObject(), is_required=True, about="A JSON Schema."),
            *(Field(name, Accepted.ALWAYS) for name in
              ("allowed_callers", "cache_control", "defer_loading", "eager_input_streaming", "input_examples")),
        ]
    )  # fmt: skip

    def read(self, value: Any, path: str, scope: Scope) -> tuple[Tool, ...]:
        if not isinstance(value, list):
            refuse(path, f"must be a list of tools, not {shown(value)}")
        tools = [self._TOOL.read(given, f"{path}[{number}]", scope) for number, given in enumerate(value)]
        return tuple(
            Tool(normal_tool(tool["name"], tool.get("description"), tool["input_schema"]), tool.get("strict", False))
            for tool in tools
        )

    def schema(self, limits: LimitsConfig, card: ModelCard) -> Schema:
        schema = {"type": "array", "items": self._TOOL.schema(limits, card)}
        return schema if card.knows_tools and card.tool_format else {**schema, "maxItems": 0}


class _ToolChoice:
    """Whether the model may call tools, or has to, and which; and whether it may call several."""

    _OF_ANY = Object([
        Field("type", OneOf("auto", "any", "none"), is_required=True),
        Field("disable_parallel_tool_use", Boolean()),
    ])  # fmt: skip
    _OF_ONE = Object([
        Field("type", Const("tool"), is_required=True),
        Field("name", TOOL_NAME, is_required=True),
        Field("disable_parallel_tool_use", Boolean()),
    ])  # fmt: skip

    def read(self, value: Any, path: str, scope: Scope) -> tuple[Chosen, bool]:
        """What is chosen, and whether there may be several calls."""
        if isinstance(value, dict) and value.get("type") == "tool":
            given = self._OF_ONE.read(value, path, scope)
            chosen = Chosen("required", frozenset([given["name"]]))
        else:
            given = self._OF_ANY.read(value, path, scope)
            chosen = Chosen("required" if given["type"] == "any" else given["type"])
        return chosen, not given.get("disable_parallel_tool_use", False)

    def schema(self, limits: LimitsConfig, card: ModelCard) -> Schema:
        return {"anyOf": [self._OF_ANY.schema(limits, card), self._OF_ONE.schema(limits, card)]}


class _Format:
    """JSON that follows a schema."""

    _FORMAT = Object([
        Field("type", Const("json_schema"), is_required=True),
        Field("schema", JsonObject(), about="The output is JSON that follows it.", is_required=True),
    ])  # fmt: skip

    def read(self, value: Any, path: str, scope: Scope) -> AskedGrammar:
        return of_schema(self._FORMAT.read(value, path, scope)["schema"], f"{path}.schema", scope.limits)

    def schema(self, limits: LimitsConfig, card: ModelCard) -> Schema:
        return self._FORMAT.schema(limits, card)


_OF_A_PROMPT = [
    *(field for field in FIELDS if field.name == "model"),
    Field("messages", Messages(), becomes="messages", is_required=True,
          about="A last one of the assistant is continued: the answer is what follows it."),
    Field("system", TextBlocks(), about="The system message, before all others."),
    Field("tools", _Tools(), about="Where the model's chat template knows tools; of the client's own, no other types."),
    Field("tool_choice", _ToolChoice(), about="`auto`: the model may call; `none`: it is told of no tool; `any`, or a "
          "`tool`: it has to call."),
    Field("thinking", Object(THINKING_FIELDS), about="Where the model's chat template knows reasoning; as long as the "
          "model likes. Without it, as the template has it."),
    Field("output_config", Object([Field("effort", EFFORT), Field("format", _Format())])),
    Field("metadata", Object([Field("user_id", SessionName())], is_open=True)),
    *(Field(name, NotYet()) for name in ("container", "mcp_servers")),
    # `context_management`: what may be left out of a prompt; here nothing is.
    *(Field(name, Accepted.ALWAYS) for name in
      ("cache_control", "context_management", "diagnostics", "inference_geo", "service_tier", "speed",
       "user_profile_id", "workspace_id", "betas")),
]  # fmt: skip

_OWN = [
    *_OF_A_PROMPT,
    Field("max_tokens", Integer(1), about="With the prompt at most the context.", is_required=True),
    Field("stop_sequences", Stops(), about="At most 16, of at most 1024 characters each.", becomes="stop"),
    Field("stop", Elsewhere("stop_sequences")),
    Field("response_format", Elsewhere("output_config.format")),
]

MESSAGE = Object([*_OWN, *as_in_chats(_OWN)])
COUNT = Object(_OF_A_PROMPT)
