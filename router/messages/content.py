"""Anthropic's messages and their blocks as the messages of a chat."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from router.openai.fields import Accepted, Boolean, Field, Object, Schema, Scope, Text
from router.openai.model_card import ModelCard
from router.openai.refusal import refuse, shown
from router.openai.tool_fields import TOOL_NAME, Const, JsonObject, normal_call
from tandem.core.config import LimitsConfig

_KNOWN = Accepted.ALWAYS
#: What a block may have that says nothing about its meaning.
_BESIDE = tuple(Field(name, _KNOWN) for name in ("cache_control", "citations", "caller", "toolset_name"))


def _block(block_type: str, *fields: Field) -> Object:
    return Object([Field("type", Const(block_type), is_required=True), *fields, *_BESIDE])


_TEXT = _block("text", Field("text", Text(), is_required=True))


class Blocks:
    """A text, or blocks of the types that are known where it stands. Gives the blocks: one of `text` for a text."""

    def __init__(self, known: Mapping[str, Object]) -> None:
        self._known = known

    def read(self, value: Any, path: str, scope: Scope) -> list[dict[str, Any]]:
        if isinstance(value, str):
            return [{"type": "text", "text": value}]
        if not isinstance(value, list):
            refuse(path, f"must be a text or a list of blocks, not {shown(value)}")
        return [self._one(block, f"{path}[{number}]", scope) for number, block in enumerate(value)]

    def _one(self, block: Any, path: str, scope: Scope) -> dict[str, Any]:
        if not isinstance(block, dict):
            refuse(path, f"must be an object, not {shown(block)}")
        kind = block.get("type")
        if not isinstance(kind, str) or kind not in self._known:
            refuse(f"{path}.type", f"must be one of {', '.join(self._known)}, not {shown(kind)}: more is not read here")
        return self._known[kind].read(block, path, scope)

    def schema(self, limits: LimitsConfig, card: ModelCard) -> Schema:
        blocks = {"anyOf": [kind.schema(limits, card) for kind in self._known.values()]}
        return {"anyOf": [{"type": "string"}, {"type": "array", "items": blocks}]}


_OF_TEXT = Blocks({"text": _TEXT})


class TextBlocks:
    """A text, or blocks of text, which become one."""

    def read(self, value: Any, path: str, scope: Scope) -> str:
        return _joined(_OF_TEXT.read(value, path, scope))

    def schema(self, limits: LimitsConfig, card: ModelCard) -> Schema:
        return _OF_TEXT.schema(limits, card)


_RESULT = _block(
    "tool_result",
    Field("tool_use_id", Text(), is_required=True),
    Field("content", TextBlocks()),
    Field("is_error", Boolean(), about="The model reads `Error: ` before the content."),
)
_USE = _block(
    "tool_use",
    Field("id", Text(), is_required=True),
    Field("name", TOOL_NAME, is_required=True),
    Field("input", JsonObject(), is_required=True),
)
_THINKING = _block("thinking", Field("thinking", Text(), is_required=True), Field("signature", _KNOWN))
_REDACTED = _block("redacted_thinking", Field("data", _KNOWN))


def _message_of(role: str, *blocks: tuple[str, Object]) -> Object:
    return Object(
        [
            Field("role", Const(role), is_required=True),
            Field("content", Blocks({"text": _TEXT, **dict(blocks)}), is_required=True),
        ]
    )


_MESSAGES: Mapping[str, Object] = {
    "user": _message_of("user", ("tool_result", _RESULT)),
    "assistant": _message_of(
        "assistant", ("tool_use", _USE), ("thinking", _THINKING), ("redacted_thinking", _REDACTED)
    ),
    "system": _message_of("system"),
}


class Messages:
    """Messages, as those of a chat."""

    def read(self, value: Any, path: str, scope: Scope) -> tuple[dict[str, Any], ...]:
        if not isinstance(value, list) or not value:
            refuse(path, f"must be a list of at least one message, not {shown(value)}")
        messages: list[dict[str, Any]] = []
        for number, given in enumerate(value):
            messages += self._one(given, f"{path}[{number}]", scope)
        return tuple(messages)

    def _one(self, given: Any, path: str, scope: Scope) -> list[dict[str, Any]]:
        if not isinstance(given, dict):
            refuse(path, f"must be an object, not {shown(given)}")
        role = given.get("role")
        if not isinstance(role, str) or role not in _MESSAGES:
            refuse(f"{path}.role", f"must be one of {', '.join(_MESSAGES)}, not {shown(role)}")
        return _chat_messages(role, _MESSAGES[role].read(given, path, scope)["content"])

    def schema(self, limits: LimitsConfig, card: ModelCard) -> Schema:
        kinds = [kind.schema(limits, card) for kind in _MESSAGES.values()]
        return {"type": "array", "minItems": 1, "items": {"anyOf": kinds}}


def _chat_messages(role: str, blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if role == "assistant":
        return [_assistant(blocks)]
    results = [_result(block) for block in blocks if block["type"] == "tool_result"]
    text = [block for block in blocks if block["type"] == "text"]
    # Templates want the results right behind the calls.
    return [*results, *([{"role": role, "content": _joined(text)}] if text or not results else [])]


def _assistant(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": _joined(b for b in blocks if b["type"] == "text")}
    if thoughts := [block["thinking"] for block in blocks if block["type"] == "thinking"]:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls := [block for block in blocks if block["type"] == "tool_use"]:
        message["tool_calls"] = [normal_call(call["id"], call["name"], call["input"]) for call in calls]
    return message


def _result(block: dict[str, Any]) -> dict[str, Any]:
    content = block.get("content", "")
    if block.get("is_error"):  # templates know no other way to say it
        content = f"Error: {content}" if content else "Error"
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}


def _joined(blocks: Iterable[dict[str, Any]]) -> str:
    return "\n".join(block["text"] for block in blocks)
