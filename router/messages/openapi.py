"""What the OpenAPI document says of `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from router.messages.fields import COUNT, MESSAGE
from router.openai.described import Described, object_of
from router.openai.fields import Schema, nullable
from router.openai.openapi import counting, generating

_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_BLOCK: Schema = {
    "anyOf": [
        object_of({"type": {"const": "text"}, "text": _TEXT}),
        object_of({"type": {"const": "thinking"}, "thinking": _TEXT, "signature": _TEXT}),
        object_of({"type": {"const": "tool_use"}, "id": _TEXT, "name": _TEXT, "input": {"type": "object"}}),
    ]
}
_MESSAGE = object_of(
    {
        "id": _TEXT,
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "model": _TEXT,
        "content": {"type": "array", "items": _BLOCK},
        "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
        "stop_sequence": nullable(_TEXT),
        "usage": object_of(
            {
                "input_tokens": _COUNT,
                "cache_creation_input_tokens": _COUNT,
                "cache_read_input_tokens": _COUNT,
                "output_tokens": _COUNT,
            }
        ),
    }
)
_EVENT: Schema = {"type": "object", "required": ["type"], "properties": {"type": _TEXT}}
_ERROR = object_of(
    {
        "type": {"const": "error"},
        "error": object_of(
            {
                "type": _TEXT,
                "message": _TEXT,
                "param": nullable(_TEXT),
                "code": _TEXT,
                "retryable": {"type": "boolean"},
            }
        ),
        "request_id": _TEXT,
    }
)
_STREAM = (
    "Server-sent events: `event: ` with the type of a MessageEvent, and `data: ` with the event. The last is "
    "`message_stop`, or an `error`."
)

MESSAGES = Described(
    {
        "/v1/messages": {
            "post": generating("message", "MessageRequest", "Message", "MessageEvent", _STREAM, "MessageError")
        },
        "/v1/messages/count_tokens": {
            "post": counting("countTokens", "CountRequest", "The tokens of the prompt.", "MessageError")
        },
    },
    {"MessageRequest": MESSAGE, "CountRequest": COUNT},
    {
        "Message": _MESSAGE,
        "MessageEvent": _EVENT,
        "MessageError": _ERROR,
        "TokenCount": object_of({"input_tokens": _COUNT}),
    },
)
