"""Every field of `/v1/responses`, one row each; `router.openai.request_fields` says what a row is."""

from __future__ import annotations

from typing import Any

from router.openai.fields import (
    Accepted,
    Boolean,
    Elsewhere,
    Field,
    Integer,
    Limit,
    NotYet,
    Object,
    Schema,
    Scope,
    Text,
)
from router.openai.model_card import ModelCard
from router.openai.refusal import refuse, shown
from router.openai.request_fields import EFFORT, as_in_chats
from router.openai.structured import FORM_TYPE, ByType, with_schema
from router.openai.tool_fields import CHOICE_ABOUT, FUNCTION_FIELDS, Const, JsonObject, Tool, flat_choice
from router.responses.items import Input
from router.tools.formats import normal_tool
from tandem.core.config import LimitsConfig


class _NotKept(NotYet):
    """It names something that an earlier request would have left here."""

    rule = "names what an earlier answer left, and none is kept here; send the whole conversation as `input`"


#: In `include`.
LOGPROBS = "message.output_text.logprobs"


class _Include:
    """Names of what an answer may hold beside; those that are not known add nothing."""

    def read(self, value: Any, path: str, _: Scope) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            refuse(path, f"must be a list of texts, not {shown(value)}")
        return tuple(value)

    def schema(self, _: LimitsConfig, __: ModelCard) -> Schema:
        return {"type": "array", "items": {"anyOf": [{"const": LOGPROBS}, {"type": "string"}]}}


#: Of `text.format`.
FORMAT_FIELDS = ("type", "name", "description", "schema", "strict")


_SCHEMA = Field("schema", JsonObject(), about="The output is JSON that follows it; with the type `json_schema`.")
#: As `response_format` of a chat, with the schema's fields beside its type.
_FORMAT = ByType(Object([FORM_TYPE, *with_schema(_SCHEMA)]), "schema")


class _Tools:
    """Functions that the model may call. Tools of other types, which a provider runs, are left out and named."""

    _FUNCTION = Object(
        [
            Field("type", Const("function"), is_required=True),
            *FUNCTION_FIELDS,
            Field("parameters", JsonObject(), about="A JSON Schema."),
            *(Field(name, Accepted.ALWAYS) for name in ("allowed_callers", "defer_loading", "output_schema")),
        ]
    )

    def read(self, value: Any, path: str, scope: Scope) -> tuple[Tool, ...]:
        if not isinstance(value, list):
            refuse(path, f"must be a list of tools, not {shown(value)}")
        tools = []
        for number, given in enumerate(value):
            place = f"{path}[{number}]"
            if isinstance(given, dict) and isinstance(given.get("type"), str) and given["type"] != "function":
                scope.ignored.append(f"{place} ({given['type']})")
                continue
            tool = self._FUNCTION.read(given, place, scope)
            normal = normal_tool(tool["name"], tool.get("description"), tool.get("parameters"))
            tools.append(Tool(normal, tool.get("strict", False)))
        return tuple(tools)

    def schema(self, limits: LimitsConfig, card: ModelCard) -> Schema:
        other = {"type": "object", "required": ["type"], "properties": {"type": {"type": "string", "not": _FUNCTION}}}
        function = [self._FUNCTION.schema(limits, card)] if card.knows_tools and card.tool_format else []
        return {"type": "array", "items": {"anyOf": [other, *function]}}


_FUNCTION = {"const": "function"}

_OWN = [
    Field("input", Input(), is_required=True),
    Field("instructions", Text(), about="A system message before all others."),
    Field("max_output_tokens", Integer(1), about="With the prompt at most the context."),
    Field("tools", _Tools(), about="Functions; tools that a provider runs are left out, and named in the answer."),
    Field("tool_choice", flat_choice(), about=CHOICE_ABOUT),
    Field("parallel_tool_calls", Boolean(), True),
    Field("top_logprobs", Integer(0, Limit("max_logprobs")), about="Told where `include` asks for them."),
    Field("include", _Include(), about="`message.output_text.logprobs` is obeyed; no other adds anything here."),
    Field("stream_options", Object([Field("include_obfuscation", Accepted.ALWAYS)])),
    Field("text", Object([Field("format", _FORMAT), Field("verbosity", NotYet("medium"))])),
    Field("response_format", Elsewhere("text.format")),
    Field("reasoning", Object([
        Field("effort", EFFORT, about="For the model's chat template, where it has such a variable."),
        *(Field(name, Accepted.ALWAYS) for name in ("summary", "generate_summary", "context", "mode")),
    ])),
    Field("store", Accepted.ALWAYS, about="Nothing is stored, whatever it says; the answer says so."),
    Field("previous_response_id", _NotKept()),
    Field("conversation", _NotKept()),
    Field("prompt", _NotKept()),
    Field("background", NotYet(False)),
    Field("truncation", NotYet("disabled")),
    *(Field(name, NotYet()) for name in ("context_management", "moderation")),
    *(Field(name, Accepted.ALWAYS) for name in
      ("metadata", "client_metadata", "safety_identifier", "service_tier", "max_tool_calls",
       "prompt_cache_options", "prompt_cache_retention", "access_programs", "image")),
]  # fmt: skip


RESPONSE = Object([*_OWN, *as_in_chats(_OWN)])
