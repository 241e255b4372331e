"""Errors in Anthropic's shape."""

from __future__ import annotations

from typing import Any

from tandem.core.errors import InvalidRequestError, TandemError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def message_error_body(error: TandemError, request_id: str) -> dict[str, Any]:
    """Anthropic's error, and in it what our clients need beside it: the field, our code, whether to send it again."""
    kind = _TYPES.get(error.http_status)
    if kind is None:
        kind = "invalid_request_error" if error.http_status < 500 else "api_error"
    told = {
        "type": kind,
        "message": error.message,
        "param": error.field if isinstance(error, InvalidRequestError) else None,
        "code": error.code,
        "retryable": error.retryable,
    }
    return {"type": "error", "error": told, "request_id": request_id}
