"""Where the wire meets the domain: roles, errors and sampling parameters. Nothing else translates them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Final

import grpc
from grpc import aio

from tandem.core.errors import (
    HandoffError,
    InvalidRequestError,
    OverloadedError,
    TandemError,
    TransportError,
    WorkerLostError,
    error_class,
)
from tandem.core.identity import Role
from tandem.core.pages import PageCounts
from tandem.core.sampling import SamplingParams
from tandem.core.step_times import PromptSteps
from tandem.rpc.v1 import common_pb2 as pb

#: Roles as they travel. A router is not among them: it is told of workers, and nobody is told of it.
ROLE_TO_PROTO: Final = {Role.PREFILL: pb.ROLE_PREFILL, Role.DECODE: pb.ROLE_DECODE}
ROLE_FROM_PROTO: Final = {number: role for role, number in ROLE_TO_PROTO.items()}


def error_to_proto(error: BaseException, request_id: str = "") -> pb.Error:
    """Any error as it travels; one that is not ours becomes `internal` with its class and text."""
    if not isinstance(error, TandemError):
        return pb.Error(code="internal", message=f"{type(error).__name__}: {error}", request_id=request_id)
    return pb.Error(
        code=error.code,
        message=error.message,
        request_id=error.request_id or request_id,
        retryable=error.retryable,
        reason=error.reason if isinstance(error, HandoffError) else "",
        field=(error.field or "") if isinstance(error, InvalidRequestError) else "",
        retry_after_s=error.retry_after_s if isinstance(error, OverloadedError) else 0.0,
    )


def error_from_proto(message: pb.Error) -> TandemError:
    """The domain error of a wire error."""
    error = error_class(message.code)(message.message)
    error.request_id, error.retryable = message.request_id or None, message.retryable
    if isinstance(error, HandoffError):
        error.reason = message.reason
    elif isinstance(error, InvalidRequestError):
        error.field = message.field or None
    elif isinstance(error, OverloadedError):
        error.retry_after_s = message.retry_after_s or 1.0
    return error


def error_from_rpc(error: grpc.RpcError, what: str) -> TandemError:
    """The domain error of a failed call; `what` names the peer."""
    code = error.code() if isinstance(error, aio.AioRpcError) else None
    text = f"{what}: {error.details() if isinstance(error, aio.AioRpcError) else error}"
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED):
        return WorkerLostError(text)
    return TransportError(text)


def by_name(value: Any) -> dict[str, Any]:
    """The fields of a dataclass, for a message with the same names. `asdict` would copy all that lies in them, too."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


def sampling_to_proto(params: SamplingParams) -> pb.Sampling:
    bad_words = [pb.TokenIds(token_ids=word) for word in params.bad_words]
    return pb.Sampling(**by_name(params) | {"logit_bias": dict(params.logit_bias), "bad_words": bad_words})


def sampling_from_proto(message: pb.Sampling) -> SamplingParams:
    """Raises `InvalidRequestError` as `SamplingParams` does."""
    plain = {field.name: getattr(message, field.name) for field in fields(SamplingParams)}
    plain["logit_bias"] = tuple(sorted(message.logit_bias.items()))
    plain["stop_token_ids"] = tuple(message.stop_token_ids)
    plain["allowed_token_ids"] = tuple(message.allowed_token_ids)
    plain["bad_words"] = tuple(tuple(word.token_ids) for word in message.bad_words)
    return SamplingParams(**plain)


def prompt_steps_to_proto(steps: PromptSteps) -> pb.PromptSteps:
    return pb.PromptSteps(**by_name(steps))


def prompt_steps_from_proto(message: pb.PromptSteps) -> PromptSteps:
    return PromptSteps(message.num_tokens, message.step_s, message.token_s)


def page_counts_to_proto(counts: PageCounts) -> pb.PageCounts:
    return pb.PageCounts(**by_name(counts))
