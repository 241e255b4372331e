"""Every field of `/v1/messages`, one row each; `router.openai.request_fields` says what a row is."""

from __future__ import annotations

from typing import Any

from router.messages.content import Messages, TextBlocks
from router.openai.content import Stops
from router.openai.fields import Accepted, Boolean, Field, Integer, NotYet, Object, Schema, Scope
from router.openai.model_card import ModelCard
from router.openai.refusal import refuse, shown
from router.openai.request_fields import FIELDS, as_in_chats
from router.openai.tool_fields import FUNCTION_FIELDS, Const, JsonObject
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

    def read(self, value: Any, path: str, scope: Scope) -> tuple[dict[str, Any], ...]:
        if not isinstance(value, list):
            refuse(path, f"must be a list of tools, not {shown(value)}")
        tools = [self._TOOL.read(given, f"{path}[{number}]", scope) for number, given in enumerate(value)]
        return tuple(normal_tool(tool["name"], tool.get("description"), tool["input_schema"]) for tool in tools)

    def schema(self, limits: LimitsConfig, card: ModelCard) -> Schema:
        schema = {"type": "array", "items": self._TOOL.schema(limits, card)}
        return schema if card.knows_tools and card.tool_format else {**schema, "maxItems": 0}


class _ChoiceType:
    _KNOWN = ("auto", "none")

    def read(self, value: Any, path: str, _: Scope) -> str:
        if value not in self._KNOWN:
            refuse(path, f"must be one of {', '.join(self._KNOWN)}, not {shown(value)}: more is not supported yet")
        return str(value)

    def schema(self, _: LimitsConfig, __: ModelCard) -> Schema:
        return {"enum": list(self._KNOWN)}


_TOOL_CHOICE = Object([Field("type", _ChoiceType(), is_required=True), Field("disable_parallel_tool_use", Boolean())])

_OF_A_PROMPT = [
    *(field for field in FIELDS if field.name == "model"),
    Field("messages", Messages(), becomes="messages", is_required=True),
    Field("system", TextBlocks(), about="The system message, before all others."),
    Field("tools", _Tools(), about="Where the model's chat template knows tools; of the client's own, no other types."),
    Field("tool_choice", _TOOL_CHOICE, about="With `none` the model is told of no tool."),
    Field("thinking", NotYet({"type": "disabled"})),
    Field("output_config", Object([Field("effort", Accepted.WITHOUT_REASONING), Field("format", NotYet())])),
    *(Field(name, NotYet()) for name in ("container", "mcp_servers")),
    # `context_management`: what may be left out of a prompt; here nothing is.
    *(Field(name, Accepted.ALWAYS) for name in
      ("cache_control", "context_management", "diagnostics", "inference_geo", "metadata", "service_tier", "speed",
       "user_profile_id", "workspace_id", "betas")),
]  # fmt: skip

_OWN = [
    *_OF_A_PROMPT,
    Field("max_tokens", Integer(1), about="With the prompt at most the context.", is_required=True),
    Field("stop_sequences", Stops(most=16), becomes="stop"),
    Field("stop", NotYet(), about="It is `stop_sequences` here."),
]

MESSAGE = Object([*_OWN, *as_in_chats(_OWN)])
COUNT = Object(_OF_A_PROMPT)
