"""The HTTP face: routes, request ids, errors in OpenAI's shape."""

from __future__ import annotations

import re
import secrets
import time
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.auth import OPEN_PATHS, ApiKeys
from router.bodies import Bodies
from router.exchange import Exchange, Parser, send_error
from router.model_card import ModelCard
from router.openai_schema import parse_chat, parse_completion
from router.openapi import document
from router.responses import error_body, error_headers
from router.story import House
from tandem.core import metrics
from tandem.core.errors import (
    AuthenticationError,
    DrainingError,
    InternalError,
    InvalidRequestError,
    TandemError,
)
from tandem.core.logging import bound, get_logger

log = get_logger(__name__)

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/@+=~-]{1,128}")
_QUIET_PATHS = ("/health", "/metrics")


def create_app(house: House, card: ModelCard, keys: ApiKeys) -> ASGIApp:
    """The ASGI application of one router; `keys` guard every route but `/health`."""
    app = FastAPI(title="Tandem", openapi_url=None)
    _add_model_routes(app, card)
    _add_cluster_routes(app, house, card)
    bodies = Bodies(house.config.limits.max_body_bytes)
    _add_post(app, "/v1/completions", Exchange(house, card, parse_completion, bodies))
    _add_post(app, "/v1/chat/completions", Exchange(house, card, parse_chat, bodies))
    app.add_exception_handler(TandemError, _tandem_error)
    app.add_exception_handler(404, _http_error)
    app.add_exception_handler(405, _http_error)
    app.add_exception_handler(Exception, _unforeseen)
    return RequestIds(ApiKeyGate(app, keys))


def _add_post(app: FastAPI, path: str, exchange: Exchange) -> None:
    """A raw ASGI route: the exchange reads and writes by itself."""
    app.router.routes.append(Route(path, exchange, methods=["POST"]))


def _add_model_routes(app: FastAPI, card: ModelCard) -> None:
    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": card.listing()})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        card.check_name(name)
        return _json(card.entry(name))


def _add_cluster_routes(app: FastAPI, house: House, card: ModelCard) -> None:
    @app.get("/health")
    async def health() -> Response:
        if house.admission.is_draining:
            raise DrainingError("the router is shutting down")
        house.cluster.check_ready()
        return _json({"status": "ok"})

    @app.get("/v1/cluster")
    async def cluster() -> Response:
        return _json(house.cluster.describe(card.own_name))

    described = document(house.config, card)

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return _json(described)

    if house.config.metrics.enabled:

        @app.get("/metrics")
        async def exposition() -> Response:
            return Response(house.metrics.exposition(), headers={"content-type": metrics.CONTENT_TYPE})


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status, headers, media_type="application/json")


async def _tandem_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TandemError)
    return _error_response(request, error)


def _error_response(request: Request, error: TandemError, status: int | None = None) -> Response:
    body = error_body(error, request.scope["state"]["request_id"])
    return _json(body, status or error.http_status, error_headers(error))


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    rule = "has no such method" if status == 405 else "is not served here"
    message = f"{request.method} {request.url.path} {rule}"
    answer = _error_response(request, NotServedError(message), status)
    if isinstance(error, HTTPException) and error.headers:  # `Allow`
        answer.headers.update(error.headers)
    return answer


class NotServedError(InvalidRequestError):
    """No such path, or not with this method."""

    code = "not_found"
    http_status = 404


async def _unforeseen(request: Request, _: Exception) -> Response:
    """The server logs the error itself; the client gets its id to ask about."""
    request_id = request.scope["state"]["request_id"]
    return _error_response(request, InternalError(f"an unforeseen error; the log has it under {request_id}"))


class ApiKeyGate:
    """Lets pass what carries a key that holds, and what needs none."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                self._keys.check(scope["headers"])
            except AuthenticationError as error:
                await send_error(send, error, scope["state"]["request_id"])
                return
        await self._app(scope, receive, send)


class RequestIds:
    """Takes or makes `X-Request-Id`, puts it on every log line and into the answer, and logs each exchange."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _given_id(scope) or secrets.token_hex(16)
        scope.setdefault("state", {})["request_id"] = request_id
        began_s, status = time.monotonic(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        with bound(request_id=request_id):
            try:
                await self._app(scope, receive, send_with_id)
            finally:
                # Refusals under overload are counted, not told one by one: that would cost more than they do.
                level = log.debug if scope["path"] in _QUIET_PATHS or status == 429 else log.info
                level(
                    "http",
                    method=scope["method"],
                    path=scope["path"],
                    status=status,
                    duration_s=round(time.monotonic() - began_s, 6),
                )


def _given_id(scope: Scope) -> str | None:
    """The client's id; one that could not be a header or a log field is replaced."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return str(value.decode())
    return None


__all__ = ["Parser", "RequestIds", "create_app"]
