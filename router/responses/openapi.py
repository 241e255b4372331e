"""What the OpenAPI document says of `/v1/responses`."""

from __future__ import annotations

from router.openai.described import Described, object_of
from router.openai.fields import Schema, nullable
from router.openai.openapi import generating
from router.responses.fields import RESPONSE

_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_STATUS: Schema = {"enum": ["in_progress", "completed", "incomplete"]}
_OBJECT: Schema = {"type": "object"}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _item(item_type: str, fields: Schema) -> Schema:
    return object_of({"id": _TEXT, "type": {"const": item_type}, "status": _STATUS, **fields})


_OUTPUT_TEXT = object_of(
    {"type": {"const": "output_text"}, "text": _TEXT, "annotations": _list(_OBJECT), "logprobs": _list(_OBJECT)}
)
_REASONING_TEXT = object_of({"type": {"const": "reasoning_text"}, "text": _TEXT})
_ITEM: Schema = {
    "anyOf": [
        _item("message", {"role": {"const": "assistant"}, "content": _list(_OUTPUT_TEXT)}),
        _item("reasoning", {"summary": _list(_OBJECT), "content": _list(_REASONING_TEXT)}),
        _item("function_call", {"call_id": _TEXT, "name": _TEXT, "arguments": _TEXT}),
    ]
}
_USAGE = object_of(
    {
        "input_tokens": _COUNT,
        "input_tokens_details": object_of({"cached_tokens": _COUNT, "cache_write_tokens": _COUNT}),
        "output_tokens": _COUNT,
        "output_tokens_details": object_of({"reasoning_tokens": _COUNT}),
        "total_tokens": _COUNT,
    }
)
_RESPONSE: Schema = {
    "type": "object",
    "required": ["id", "object", "created_at", "status", "model", "output", "usage", "error", "incomplete_details",
                 "tools", "tool_choice", "parallel_tool_calls", "store"],
    "properties": {
        "id": _TEXT,
        "object": {"const": "response"},
        "created_at": _COUNT,
        "status": {"enum": ["in_progress", "completed", "incomplete", "failed"]},
        "model": _TEXT,
        "output": _list(_ITEM),
        "usage": nullable(_USAGE),
        "error": nullable(
            object_of(
                {"code": _TEXT, "message": _TEXT, "type": _TEXT, "request_id": _TEXT, "retryable": {"type": "boolean"}}
            )
        ),
        "incomplete_details": nullable(object_of({"reason": {"const": "max_output_tokens"}})),
        "tools": _list(_OBJECT),
        "store": {"const": False},
    },
}  # fmt: skip
_EVENT: Schema = {
    "type": "object",
    "required": ["type", "sequence_number"],
    "properties": {"type": _TEXT, "sequence_number": _COUNT},
}
_STREAM = (
    "Server-sent events: `event: ` with the type of a ResponseEvent, and `data: ` with the event. The last is "
    "`response.completed`, `response.incomplete` or `response.failed`."
)

RESPONSES = Described(
    {"/v1/responses": {"post": generating("response", "ResponseRequest", "Response", "ResponseEvent", _STREAM)}},
    {"ResponseRequest": RESPONSE},
    {"Response": _RESPONSE, "ResponseEvent": _EVENT},
)
