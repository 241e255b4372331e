"""The shape of an error's body: that of the API whose path was asked."""

from __future__ import annotations

from typing import Any

from router.messages.errors import message_error_body
from router.openai.responses import error_body
from tandem.core.errors import InternalError, TandemError

_MESSAGES = "/v1/messages"


def is_of_messages(path: str) -> bool:
    """Whether `path` is of Anthropic's API."""
    return path == _MESSAGES or path.startswith(f"{_MESSAGES}/")


def error_body_at(path: str, error: TandemError, request_id: str) -> dict[str, Any]:
    """The body of an error at `path`, which is empty where none was read."""
    return (message_error_body if is_of_messages(path) else error_body)(error, request_id)


def unforeseen(request_id: str) -> InternalError:
    """What a client is told of an error of ours; whoever catches it logs it."""
    return InternalError(f"an unforeseen error; the log has it under {request_id}")
