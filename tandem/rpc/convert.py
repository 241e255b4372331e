"""Where the wire meets the domain: roles, errors and sampling parameters. Nothing else translates them."""

from __future__ import annotations

from typing import Final

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
    cls = error_class(message.code)
    request_id = message.request_id or None
    error: TandemError
    if issubclass(cls, HandoffError):
        error = cls(message.message, reason=message.reason, request_id=request_id)
    elif issubclass(cls, InvalidRequestError):
        error = cls(message.message, field=message.field or None, request_id=request_id)
    elif issubclass(cls, OverloadedError):
        error = cls(message.message, retry_after_s=message.retry_after_s or 1.0, request_id=request_id)
    else:
        error = cls(message.message)
        error.request_id = request_id
    error.retryable = message.retryable
    return error


def error_from_rpc(error: grpc.RpcError, what: str) -> TandemError:
    """The domain error of a failed call; `what` names the peer."""
    code = error.code() if isinstance(error, aio.AioRpcError) else None
    text = f"{what}: {error.details() if isinstance(error, aio.AioRpcError) else error}"
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED):
        return WorkerLostError(text)
    return TransportError(text)


def sampling_to_proto(params: SamplingParams) -> pb.Sampling:
    return pb.Sampling(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias),
        seed=params.seed,
        stop_token_ids=params.stop_token_ids,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        ignore_eos=params.ignore_eos,
        num_logprobs=params.num_logprobs,
    )


def sampling_from_proto(message: pb.Sampling) -> SamplingParams:
    """Raises `InvalidRequestError` as `SamplingParams` does."""
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        seed=message.seed,
        stop_token_ids=tuple(message.stop_token_ids),
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        ignore_eos=message.ignore_eos,
        num_logprobs=message.num_logprobs,
    )


def page_counts_to_proto(counts: PageCounts) -> pb.PageCounts:
    return pb.PageCounts(
        free=counts.free,
        used=counts.used,
        reserved=counts.reserved,
        cached=counts.cached,
        quarantined=counts.quarantined,
    )
