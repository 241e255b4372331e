"""Kinds of values that a chat has: messages, documents, variables of its template."""

from __future__ import annotations

from typing import Any

from router.openai.fields import Field, NotYet, Object, Schema, Scope, Text
from router.openai.model_card import ModelCard
from router.openai.refusal import refuse, shown
from router.openai.tool_fields import ToolCalls
from tandem.core.chat_template import RESERVED_VARIABLES
from tandem.core.config import LimitsConfig

MESSAGE_ROLES = ("system", "developer", "user", "assistant", "tool", "function")

_TEXT: Schema = {"type": "string"}


class _Role:
    """The tokenizer knows which of these roles the model's chat template refuses."""

    def read(self, value: Any, path: str, _: Scope) -> str:
        if value not in MESSAGE_ROLES:
            refuse(path, f"must be one of {', '.join(MESSAGE_ROLES)}, not {shown(value)}")
        return str(value)

    def schema(self, _: LimitsConfig, card: ModelCard) -> Schema:
        return {"enum": [role for role in MESSAGE_ROLES if role not in card.refused_roles]}


class _PartType:
    def read(self, value: Any, path: str, _: Scope) -> str:
        if value != "text":
            refuse(path, f"must be `text`, not {shown(value)}: this model reads text alone")
        return "text"

    def schema(self, _: LimitsConfig, __: ModelCard) -> Schema:
        return {"const": "text"}


class _Content:
    """A text, or a list of text parts, which become one."""

    _PART = Object(
        [Field("type", _PartType(), is_required=True), Field("text", Text(), is_required=True)], is_open=True
    )

    def read(self, value: Any, path: str, scope: Scope) -> str:
        if isinstance(value, list):
            return "\n".join(
                part if isinstance(part, str) else self._PART.read(part, f"{path}[{number}]", scope)["text"]
                for number, part in enumerate(value)
            )
        if not isinstance(value, str):
            refuse(path, f"must be a text or a list of text parts, not {shown(value)}")
        return value

    def schema(self, limits: LimitsConfig, card: ModelCard) -> Schema:
        part = {"anyOf": [_TEXT, self._PART.schema(limits, card)]}
        return {"anyOf": [_TEXT, {"type": "array", "items": part}]}


class _Message:
    """A message with content, or with calls of tools, or both.

    The chat template gets all other fields of a message as they are.
    """

    _FIELDS = Object(
        [
            Field("role", _Role(), is_required=True),
            Field("content", _Content()),
            Field("tool_calls", ToolCalls()),
            Field("function_call", NotYet()),
        ],
        is_open=True,
    )

    def read(self, value: Any, path: str, scope: Scope) -> dict[str, Any]:
        message = self._FIELDS.read(value, path, scope)
        if not message.get("tool_calls"):
            message.pop("tool_calls", None)  # templates ask whether it is there
        if "content" not in message:
            if "tool_calls" not in message:
                refuse(f"{path}.content", "is missing")
            message["content"] = ""  # templates join it with other text
        return message

    def schema(self, limits: LimitsConfig, card: ModelCard) -> Schema:
        has_content = {"required": ["content"], "properties": {"content": {"not": {"type": "null"}}}}
        calls = {"required": ["tool_calls"], "properties": {"tool_calls": {"type": "array", "minItems": 1}}}
        return {**self._FIELDS.schema(limits, card), "anyOf": [has_content, calls]}


MESSAGE = _Message()


class Messages:
    def read(self, value: Any, path: str, scope: Scope) -> tuple[dict[str, Any], ...]:
        if not isinstance(value, list) or not value:
            example = '[{"role": "user", "content": "Hello"}]'
            refuse(path, f"must be a list of at least one message, as {example}; it is {shown(value)}")
        return tuple(MESSAGE.read(message, f"{path}[{number}]", scope) for number, message in enumerate(value))

    def schema(self, limits: LimitsConfig, card: ModelCard) -> Schema:
        return {"type": "array", "minItems": 1, "items": MESSAGE.schema(limits, card)}


class Documents:
    """What a template for retrieval reads: a list of objects, each as it is."""

    def read(self, value: Any, path: str, _: Scope) -> tuple[dict[str, Any], ...]:
        if not isinstance(value, list) or not all(isinstance(document, dict) for document in value):
            refuse(path, f"must be a list of objects, not {shown(value)}")
        return tuple(value)

    def schema(self, _: LimitsConfig, __: ModelCard) -> Schema:
        return {"type": "array", "items": {"type": "object"}}


class Variables:
    """Variables of the chat template, but for those that fields of their own set."""

    def read(self, value: Any, path: str, _: Scope) -> dict[str, Any]:
        if not isinstance(value, dict):
            refuse(path, f"must be an object, not {shown(value)}")
        for name in value:
            if name in RESERVED_VARIABLES:
                refuse(f"{path}.{name}", f"is not to be set here; there is the field {name}")
        return value

    def schema(self, _: LimitsConfig, __: ModelCard) -> Schema:
        return {"type": "object", "propertyNames": {"not": {"enum": sorted(RESERVED_VARIABLES)}}}
