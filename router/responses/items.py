"""The items of `input` as the messages of a chat."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from router.openai.fields import Accepted, Field, Kind, Object, Schema, Scope, Text
from router.openai.model_card import ModelCard
from router.openai.refusal import refuse, shown
from router.openai.tool_fields import TOOL_NAME, Const, normal_call
from tandem.core.config import LimitsConfig

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text")


class _Role:
    def read(self, value: Any, path: str, _: Scope) -> str:
        if value not in _ROLES:
            refuse(path, f"must be one of {', '.join(_ROLES)}, not {shown(value)}")
        return str(value)

    def schema(self, _: LimitsConfig, __: ModelCard) -> Schema:
        return {"enum": list(_ROLES)}


class _PartType:
    def read(self, value: Any, path: str, _: Scope) -> str:
        if value not in _TEXT_PARTS:
            refuse(path, f"must be one of {', '.join(_TEXT_PARTS)}, not {shown(value)}: this model reads text alone")
        return str(value)

    def schema(self, _: LimitsConfig, __: ModelCard) -> Schema:
        return {"enum": list(_TEXT_PARTS)}


class TextContent:
    """A text, or a list of parts, which become one."""

    _PART = Object(
        [Field("type", _PartType(), is_required=True), Field("text", Text(), is_required=True)], is_open=True
    )
    _REFUSAL = Object([Field("type", Const("refusal"), is_required=True), Field("refusal", Text(), is_required=True)])

    def read(self, value: Any, path: str, scope: Scope) -> str:
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            refuse(path, f"must be a text or a list of text parts, not {shown(value)}")
        return "\n".join(self._part(part, f"{path}[{number}]", scope) for number, part in enumerate(value))

    def _part(self, part: Any, path: str, scope: Scope) -> str:
        if isinstance(part, dict) and part.get("type") == "refusal":  # the model's own, from an earlier answer
            return str(self._REFUSAL.read(part, path, scope)["refusal"])
        return str(self._PART.read(part, path, scope)["text"])

    def schema(self, limits: LimitsConfig, card: ModelCard) -> Schema:
        parts = [self._PART.schema(limits, card), self._REFUSAL.schema(limits, card)]
        return {"anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": parts}}]}


_CONTENT = TextContent()
_KNOWN = Accepted.ALWAYS  # what an answer has beside, and comes back with it


def _item(item_type: str, *fields: Field) -> Object:
    told = [Field(name, _KNOWN) for name in ("id", "status")]
    return Object([Field("type", Const(item_type), is_required=item_type != "message"), *fields, *told])


class _Thoughts:
    """The text of a reasoning item; what a provider has encrypted is not for us."""

    def read(self, value: Any, path: str, _: Scope) -> str:
        if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
            refuse(path, f"must be a list of reasoning parts, not {shown(value)}")
        return "\n".join(part["text"] for part in value if isinstance(part.get("text"), str))

    def schema(self, _: LimitsConfig, __: ModelCard) -> Schema:
        return {"type": "array", "items": {"type": "object"}}


_ITEMS: Mapping[str, Object] = {
    "message": _item(
        "message",
        Field("role", _Role(), is_required=True),
        Field("content", _CONTENT, is_required=True),
        Field("phase", _KNOWN),
    ),
    "function_call": _item(
        "function_call",
        Field("call_id", Text(), is_required=True),
        Field("name", TOOL_NAME, is_required=True),
        Field("arguments", Text(), is_required=True, about="A JSON object, as a text."),
        Field("namespace", _KNOWN),
        Field("caller", _KNOWN),
    ),
    "function_call_output": _item(
        "function_call_output",
        Field("call_id", Text(), is_required=True),
        Field("output", _CONTENT, is_required=True),
        Field("name", _KNOWN),
        Field("namespace", _KNOWN),
        Field("caller", _KNOWN),
    ),
    "reasoning": _item(
        "reasoning",
        Field("summary", _KNOWN),
        Field("content", _Thoughts()),
        Field("encrypted_content", _KNOWN),
    ),
}


class Input:
    """A text, which is the user's, or items."""

    def read(self, value: Any, path: str, scope: Scope) -> tuple[dict[str, Any], ...]:
        if isinstance(value, str):
            return ({"role": "user", "content": value},)
        if not isinstance(value, list) or not value:
            refuse(path, f"must be a text or a list of at least one item, not {shown(value)}")
        return messages_of([self._item(item, f"{path}[{number}]", scope) for number, item in enumerate(value)])

    def _item(self, item: Any, path: str, scope: Scope) -> dict[str, Any]:
        if not isinstance(item, dict):
            refuse(path, f"must be an object, not {shown(item)}")
        kind = item.get("type") or "message"
        if kind == "item_reference":
            refuse(path, "refers to an item of an earlier answer, and none is kept here; send the item itself")
        if not isinstance(kind, str) or kind not in _ITEMS:
            refuse(f"{path}.type", f"must be one of {', '.join(_ITEMS)}, not {shown(kind)}")
        return {**_ITEMS[kind].read(item, path, scope), "type": kind}

    def schema(self, limits: LimitsConfig, card: ModelCard) -> Schema:
        kinds: Iterable[Kind] = _ITEMS.values()
        items = {"anyOf": [kind.schema(limits, card) for kind in kinds]}
        return {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": items}]}


def messages_of(items: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """A chat's messages. What the model did in one turn is one message: its reasoning, its text, and its calls."""
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None  # the assistant's, which may go on
    for item in items:
        kind = item["type"]
        if kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
            turn = None
        elif kind == "message" and item["role"] != "assistant":
            messages.append({"role": item["role"], "content": item["content"]})
            turn = None
        else:
            if turn is None or not _goes_on(turn, item):
                turn = {"role": "assistant", "content": ""}
                messages.append(turn)
            _add(turn, item)
    # A turn of reasoning alone, whose text is not for us, was none.
    return tuple(message for message in messages if message.keys() > {"role", "content"} or message["content"]
                 or message["role"] != "assistant")  # fmt: skip


def _goes_on(turn: dict[str, Any], item: dict[str, Any]) -> bool:
    """Whether `item` belongs to the same message: no text follows text or calls."""
    return item["type"] == "function_call" or not (turn["content"] or "tool_calls" in turn)


def _add(turn: dict[str, Any], item: dict[str, Any]) -> None:
    match item["type"]:
        case "message":
            turn["content"] = item["content"]
        case "reasoning" if item.get("content"):
            turn["reasoning_content"] = item["content"]
        case "function_call":
            call = normal_call(item["call_id"], item["name"], item["arguments"])
            turn.setdefault("tool_calls", []).append(call)
