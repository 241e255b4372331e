"""Every error that Tandem raises on purpose.

    TandemError
    ├── ConfigError                  a key of tandem.yaml or an option is wrong; names key and remedy
    │   └── NotRunningError          no cluster runs where one was looked for
    ├── InvalidRequestError          the client's request is wrong; names the field        400
    │   ├── SlowGrammarError         following its grammar takes too much computation      400
    │   ├── ContextLengthError       prompt and output together exceed the context         400
    │   ├── UnsupportedEncodingError the body of the request is compressed                 415
    │   ├── ModelNotFoundError       it names a model that is not served here              404
    │   ├── RequestTimeoutError      head or body of the request came too slowly           408
    │   └── RequestTooLargeError     the body of the request exceeds its bound             413
    ├── ModelLoadError               the checkpoint cannot be served
    │   └── UnsupportedModelError    its architecture failed the probe; names why
    ├── OverloadedError              a bounded queue is full                               429
    │   ├── RateLimitError           the tenant's limit a minute is used up                429
    │   └── UnmeetableDeadlineError  its first token would come after its `timeout`        429
    ├── NoWorkerError                a pool has no ready worker                            503
    ├── DrainingError                the worker takes no new work                          503
    ├── CancelledError               the client went away, or read too slowly              499
    ├── DeadlineError                the request's own `timeout` passed                    504
    ├── AuthenticationError          no valid API key                                      401
    ├── ForbiddenError               a caller's certificate does not allow the call        403
    ├── WorkerLostError              a worker died or fell silent                          502
    ├── WorkersDiedError             two workers died of this request, or with it          500
    ├── HandoffError                 the pages did not reach decode; `reason` says why     502
    ├── TransportError               the transport below the pages failed                  502
    ├── IncompatibleError            two sides differ in layout or protocol                503
    ├── IllegalTransitionError       a state machine was driven wrongly: a defect          500
    └── InternalError                anything unforeseen, the log has its cause            500

Each class knows its wire code, its HTTP status and whether it makes sense for the client to try again. Foreign errors
are translated at one border each: those of gRPC in `tandem.rpc`, of NIXL and torch.distributed in their transports, of
HTTP in `router.http.app`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

NOT_RUNNING = 3
"""Exit code of a command that was meant for a cluster, where none runs."""


class TandemError(Exception):
    """Root of the tree.

    Attributes:
        code: the name that travels on the wire and in OpenAI's `error.code`.
        http_status: what the HTTP face answers.
        retryable: whether the same request may succeed if it is sent again.
        openai_type: OpenAI's `error.type`.
    """

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    retryable: bool = False
    openai_type: ClassVar[str] = "server_error"

    def __init__(self, message: str, *, request_id: str | None = None, retryable: bool | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.request_id = request_id
        if retryable is not None:
            self.retryable = retryable


class ConfigError(TandemError):
    """A configured value is wrong. `key` is its dotted path in `tandem.yaml` or the option's name."""

    code = "config"

    def __init__(self, message: str, *, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


class NotRunningError(ConfigError):
    """Certain, unlike the silence of one that may run."""

    code = "not_running"


class InvalidRequestError(TandemError):
    """The request itself is wrong. `field` names the JSON field, `None` where it is the whole body."""

    code = "invalid_request"
    http_status = 400
    openai_type = "invalid_request_error"

    def __init__(self, message: str, *, field: str | None = None, request_id: str | None = None) -> None:
        super().__init__(message, request_id=request_id)
        self.field = field


class SlowGrammarError(InvalidRequestError):
    """To follow the grammar of a request takes more computation than it may."""

    code = "grammar_too_slow"


class ContextLengthError(InvalidRequestError):
    code = "context_length_exceeded"


class UnsupportedEncodingError(InvalidRequestError):
    code = "unsupported_content_encoding"
    http_status = 415


class ModelNotFoundError(InvalidRequestError):
    code = "model_not_found"
    http_status = 404


class RequestTimeoutError(InvalidRequestError):
    code = "request_timeout"
    http_status = 408
    retryable = True


class RequestTooLargeError(InvalidRequestError):
    code = "request_too_large"
    http_status = 413


class ModelLoadError(TandemError):
    code = "model_load"


class UnsupportedModelError(ModelLoadError):
    code = "unsupported_model"


class OverloadedError(TandemError):
    """A bounded queue is full. `retry_after_s` is the advice for `Retry-After`, in seconds."""

    code = "overloaded"
    http_status = 429
    retryable = True
    openai_type = "rate_limit_error"

    def __init__(self, message: str, *, retry_after_s: float = 1.0, request_id: str | None = None) -> None:
        super().__init__(message, request_id=request_id)
        self.retry_after_s = retry_after_s


class RateLimitError(OverloadedError):
    """A tenant asks for more than its limits a minute allow. `headers` tell of them."""

    code = "rate_limit_exceeded"

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: float = 1.0,
        headers: Mapping[str, str] | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s, request_id=request_id)
        self.headers = dict(headers or {})


class UnmeetableDeadlineError(OverloadedError):
    """The request's `timeout` is over before its first token can be there."""

    code = "deadline_unmeetable"


class NoWorkerError(TandemError):
    code = "no_worker"
    http_status = 503
    retryable = True
    openai_type = "service_unavailable_error"


class DrainingError(TandemError):
    code = "draining"
    http_status = 503
    retryable = True


class CancelledError(TandemError):
    code = "cancelled"
    http_status = 499


class DeadlineError(TandemError):
    code = "deadline"
    http_status = 504
    openai_type = "timeout_error"


class AuthenticationError(TandemError):
    code = "invalid_api_key"
    http_status = 401
    openai_type = "authentication_error"


class ForbiddenError(TandemError):
    code = "forbidden"
    http_status = 403
    openai_type = "permission_error"


class WorkerLostError(TandemError):
    code = "worker_lost"
    http_status = 502
    retryable = True


class WorkersDiedError(TandemError):
    code = "workers_died"


class HandoffError(TandemError):
    """A handoff was refused or failed. `reason` is one of `kvtransfer.protocol`'s refusal reasons."""

    code = "handoff"
    http_status = 502
    retryable = True

    def __init__(self, message: str, *, reason: str = "failed", request_id: str | None = None) -> None:
        super().__init__(message, request_id=request_id)
        self.reason = reason


class TransportError(TandemError):
    code = "transport"
    http_status = 502
    retryable = True


class IncompatibleError(TandemError):
    code = "incompatible"
    http_status = 503


class IllegalTransitionError(TandemError):
    code = "illegal_transition"


class InternalError(TandemError):
    """Unforeseen; the log has the cause under the same request id."""


def error_class(code: str) -> type[TandemError]:
    """The class of a wire code; `InternalError` for a code of a newer version."""
    return _BY_CODE.get(code, InternalError)


def _tree(root: type[TandemError]) -> list[type[TandemError]]:
    return [root, *(cls for child in root.__subclasses__() for cls in _tree(child))]


_BY_CODE: dict[str, type[TandemError]] = {cls.code: cls for cls in _tree(TandemError)}
_BY_CODE["internal"] = InternalError
