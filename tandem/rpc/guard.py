"""What happens to every call before its handler: the caller's role is checked, then the request is decoded."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from tandem.rpc.permissions import PeerRole, may_call, role_from_uris

if TYPE_CHECKING:  # generic in its stubs only
    Handler = grpc.RpcMethodHandler[Any, Any]
    Interceptor = aio.ServerInterceptor[Any, Any]
else:
    Interceptor = aio.ServerInterceptor

_log = logging.getLogger(__name__)

_SECURITY_TYPE, _PLAIN = "transport_security_type", [b"insecure"]
_URIS = "peer_uri"  # the URIs among the verified certificate's alternative names


class RoleGuard(Interceptor):
    """Lets a call through when the certificate's role may make it; else it ends with PERMISSION_DENIED.

    A plain connection has no role and is not checked: whether a port takes such connections was decided when it
    was bound. `num_denied` counts refusals by (method, role).
    """

    def __init__(self) -> None:
        self.num_denied: Counter[tuple[str, PeerRole | None]] = Counter()

    async def intercept_service(  # type: ignore[override]  # the stubs do not know of `None`, gRPC does
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        return None if handler is None else self._guarded(handler, handler_call_details.method)

    def _guarded(self, handler: Any, method: str) -> Handler:
        """The same handler, but it gets its requests as bytes: only what an allowed peer sends is decoded."""
        kind = f"{_shape(handler.request_streaming)}_{_shape(handler.response_streaming)}"
        inner, decode = getattr(handler, kind), handler.request_deserializer

        async def one(request: Any, context: Any) -> Any:
            await self._check(method, context)
            reading = _Reading(decode)
            argument = reading.stream(request) if handler.request_streaming else reading.one(request)
            await reading.abort_if_bad(context)
            reply = await inner(argument, context)
            await reading.abort_if_bad(context)
            return reply

        async def many(request: Any, context: Any) -> AsyncIterator[Any]:
            await self._check(method, context)
            reading = _Reading(decode)
            argument = reading.stream(request) if handler.request_streaming else reading.one(request)
            await reading.abort_if_bad(context)
            async for message in inner(argument, context):
                yield message
            await reading.abort_if_bad(context)

        make = getattr(grpc, f"{kind}_rpc_method_handler")
        guarded: Handler = make(
            many if handler.response_streaming else one,
            request_deserializer=None,
            response_serializer=handler.response_serializer,
        )
        return guarded

    async def _check(self, method: str, context: Any) -> None:
        connection = context.auth_context()
        if connection.get(_SECURITY_TYPE) == _PLAIN:
            return
        role = role_from_uris(connection.get(_URIS, ()))
        if may_call(role, method):
            return
        self.num_denied[method, role] += 1
        shown = role or "a certificate without a role"
        _log.warning("refused %s to %s at %s (%d times)", method, shown, context.peer(), self.num_denied[method, role])
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"{shown} may not call {method}")


class _Reading:
    """The requests of one call. Bytes that cannot be decoded end them; then the call ends with INVALID_ARGUMENT."""

    def __init__(self, decode: Callable[[bytes], Any]) -> None:
        self._decode = decode
        self._error: DecodeError | None = None

    def one(self, request: bytes) -> Any:
        try:
            return self._decode(request)
        except DecodeError as error:
            self._error = error
            return None

    async def stream(self, requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for request in requests:
            message = self.one(request)
            if self._error is not None:
                return
            yield message

    async def abort_if_bad(self, context: Any) -> None:
        if self._error is not None:
            _log.warning("undecodable bytes from %s: %s", context.peer(), self._error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"these bytes are no request: {self._error}")


def _shape(streaming: bool) -> str:
    return "stream" if streaming else "unary"
