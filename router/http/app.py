"""The HTTP face: routes, request ids, errors in OpenAI's shape."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.batches.queue import BatchQueue
from router.http.auth import OPEN_PATHS, ApiKeys
from router.http.background import Background, behind_all
from router.http.batches import BatchRoutes, routes_where_off
from router.http.batches_openapi import BATCHES
from router.http.bodies import Bodies
from router.http.counting import Counting
from router.http.error_shapes import error_body_at, is_of_messages, unforeseen
from router.http.exchange import STREAM_HEADERS, Exchange, send_error
from router.http.grammars import GrammarCheck
from router.http.live import Live, explained, live_page, wants_page
from router.http.metrics_page import MetricsPage
from router.http.tokenizing import Tokenizing
from router.http.welcome import endpoints, facts, welcome_page
from router.lifecycle.context import RouterContext
from router.lifecycle.request_errors import RequestErrors
from router.messages.openapi import MESSAGES
from router.messages.read import read_count, read_message
from router.openai.endpoint import ReadBody
from router.openai.model_card import ModelCard
from router.openai.openapi import document
from router.openai.pooling import POOLING
from router.openai.pooling_openapi import POOLING_PATHS
from router.openai.refusal import shown
from router.openai.responses import error_headers, read_chat, read_completion
from router.policy.choose import check_ready
from router.responses.openapi import RESPONSES
from router.responses.read import read_response
from tandem.core import metrics
from tandem.core.errors import AuthenticationError, DrainingError, InvalidRequestError, TandemError
from tandem.core.logging import bound
from tandem.core.version import version

_log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/@+=~-]{1,128}")
#: HEAD is GET whose body the server leaves out.
_READ = ["GET", "HEAD"]
_EXPLAIN = "/explain"
_QUIET_PATHS = ("/health", "/ping", "/load", "/metrics")
#: What a page may read of an answer beside what browsers show it anyway.
_EXPOSED_HEADERS = (
    "x-request-id",
    "request-id",
    "x-should-retry",
    "retry-after",
    "tandem-ignored-fields",
    "tandem-prompt-computed-by",
    *(f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")),
)


_GENERATING = {
    "/v1/completions": read_completion,
    "/v1/chat/completions": read_chat,
    "/v1/responses": read_response,
    "/v1/messages": read_message,
}


#: What a batch may ask for of a model that generates; of one that pools, whatever that serves. Counted apart.
_OF_BATCHES = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


def create_app(
    context: RouterContext,
    card: ModelCard,
    keys: ApiKeys,
    page: MetricsPage,
    live: Live,
    grammars: GrammarCheck,
    batches: BatchQueue | None = None,
) -> ASGIApp:
    """The ASGI application of one router; `keys` guard every route but those of `OPEN_PATHS`."""
    app = FastAPI(title="Tandem", openapi_url=None)
    _add_get_routes(app, context, card, keys, page)
    _add_live_routes(app, live)
    bodies = Bodies(context.config.limits.max_body_bytes)
    pooling = {path: read_for(card) for path, read_for in POOLING.items()}
    for path, read_body in {**_GENERATING, **pooling}.items():
        # A raw ASGI route: the exchange reads and writes by itself.
        app.router.routes.append(Route(path, Exchange(context, card, read_body, bodies, grammars), methods=["POST"]))
    counting = Counting(context, card, read_count, bodies)
    app.router.routes.append(Route("/v1/messages/count_tokens", counting, methods=["POST"]))
    tokenizing = Tokenizing(context, card, bodies)
    app.router.routes.append(Route("/tokenize", tokenizing.tokenize, methods=["POST"]))
    app.router.routes.append(Route("/detokenize", tokenizing.detokenize, methods=["POST"]))
    app.router.routes.extend(_batch_routes(batches, context, card, keys, bodies, grammars))
    app.state.errors = context.errors
    app.add_exception_handler(TandemError, _tandem_error)
    app.add_exception_handler(404, _http_error)
    app.add_exception_handler(405, _http_error)
    app.add_exception_handler(Exception, _unforeseen)
    guarded = _with_keys(app, keys, context.errors)
    return _with_request_ids(_with_cors(guarded, context.config.http.cors_origins), simulated=card.is_simulated)


def _batch_routes(
    batches: BatchQueue | None,
    context: RouterContext,
    card: ModelCard,
    keys: ApiKeys,
    bodies: Bodies,
    grammars: GrammarCheck,
) -> list[Route]:
    if batches is None:
        return routes_where_off()
    apart = replace(context, admission=batches.admission)
    served: dict[str, ReadBody] = {path: _GENERATING[path] for path in _OF_BATCHES}
    if card.pooling is not None:
        served = {path: read_for(card) for path, read_for in POOLING.items()}
    exchanges = {
        path: Exchange(apart, card, behind_all(read_body), bodies, grammars) for path, read_body in served.items()
    }
    batches.asks = Background(exchanges, keys.tenant_of, context.errors).ask
    config = context.config.batches
    return BatchRoutes(batches.store, batches.leader.wake, bodies, config, tuple(served)).routes()


def _with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Lets pages of these origins call it. Outside the check of keys: a browser's preflight carries none."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=[*_READ, "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=_EXPOSED_HEADERS,
    )


def _add_get_routes(app: FastAPI, context: RouterContext, card: ModelCard, keys: ApiKeys, page: MetricsPage) -> None:
    has_metrics = context.config.metrics.enabled
    has_batches = bool(context.config.batches.directory)
    served = endpoints(has_metrics=has_metrics, has_batches=has_batches)
    described = document(
        context.config, card, (RESPONSES, MESSAGES, POOLING_PATHS, *([BATCHES] if has_batches else []))
    )

    @app.api_route("/", methods=_READ)
    async def welcome(request: Request) -> Response:
        if wants_page(request.scope["headers"]):
            return live_page()
        if "application/json" in request.headers.get("accept", ""):
            return _json(facts(card, served))
        url = str(request.base_url).rstrip("/")
        return PlainTextResponse(welcome_page(card, served, url, needs_key=keys.are_required))

    @app.api_route("/v1/models", methods=_READ)
    async def models() -> Response:
        return _json({"object": "list", "data": card.listing()})

    @app.api_route("/v1/models/{name:path}", methods=_READ)
    async def model(request: Request) -> Response:
        # Not as the route found it: its pattern leaves out a newline at the end.
        name = request.scope["path"].removeprefix("/v1/models/").rstrip("/")
        if not name:
            return await models()
        card.check_name(name)
        return _json(card.entry(name))

    @app.api_route("/health", methods=_READ)
    async def health() -> Response:
        if context.admission.is_draining:
            raise DrainingError("the router is shutting down")
        check_ready(context.workers.snapshot())
        return _json({"status": "ok"})

    @app.api_route("/ping", methods=[*_READ, "POST"])
    async def ping() -> Response:
        """As `/health`, where load balancers look for it."""
        return await health()

    @app.api_route("/version", methods=_READ)
    async def served_version() -> Response:
        return _json({"version": version()})

    @app.api_route("/load", methods=_READ)
    async def load() -> Response:
        return _json({"server_load": context.open_exchanges.num})

    @app.api_route("/v1/cluster", methods=_READ)
    async def cluster() -> Response:
        return _json(context.workers.describe(card.own_name))

    @app.api_route("/openapi.json", methods=_READ)
    async def openapi() -> Response:
        return _json(described)

    if has_metrics:

        @app.api_route("/metrics", methods=_READ)
        async def exposition() -> Response:
            return Response(await page.text(), headers={"content-type": metrics.CONTENT_TYPE})


def _add_live_routes(app: FastAPI, live: Live) -> None:
    @app.get("/v1/events")
    async def events() -> Response:
        live.check_watchers()
        return StreamingResponse(live.events(), headers=STREAM_HEADERS, media_type="text/event-stream; charset=utf-8")

    @app.api_route("/v1/requests/{name:path}", methods=_READ)
    async def request(request: Request) -> Response:
        name = request.scope["path"].removeprefix("/v1/requests/").rstrip("\n")
        found = await live.request(name.removesuffix(_EXPLAIN))
        if name.endswith(_EXPLAIN):
            found = [explained(one) for one in found]
        return _json({"object": "list", "data": found})


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status, headers, media_type="application/json")


async def _tandem_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TandemError)
    request_id = request.scope["state"]["request_id"]
    if request.url.path not in _QUIET_PATHS:
        request.app.state.errors.add(error, request_id)
    body = error_body_at(request.url.path, error, request_id)
    return _json(body, error.http_status, error_headers(error))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    asked = f"{request.method} {shown(request.url.path)}"
    if error.status_code == 404:
        return await _tandem_error(request, NotServedError(f"{asked} is not served here; GET / says what is"))
    allowed = ", ".join(sorted((error.headers or {})["Allow"].split(", ")))
    answer = await _tandem_error(request, MethodNotAllowedError(f"{asked} is not possible; allowed here: {allowed}"))
    answer.headers["allow"] = allowed
    return answer


class NotServedError(InvalidRequestError):
    """No such path."""

    code = "not_found"
    http_status = 404


class MethodNotAllowedError(InvalidRequestError):
    """The path is served, but not with this method."""

    code = "method_not_allowed"
    http_status = 405


async def _unforeseen(request: Request, _: Exception) -> Response:
    """`_with_request_ids` logs the error; the client gets the id to ask about."""
    request_id = request.scope["state"]["request_id"]
    return await _tandem_error(request, unforeseen(request_id))


def _with_keys(app: ASGIApp, keys: ApiKeys, errors: RequestErrors) -> ASGIApp:
    """Lets pass what carries a key that holds, and what needs none; the first with its tenant in `scope`'s state."""

    async def gate(scope: Scope, receive: Receive, send: Send) -> None:
        if not _is_open(scope):
            try:
                scope["state"]["tenant"] = keys.check(scope["headers"])
            except AuthenticationError as error:
                await send_error(scope, send, error, errors)
                return
        await app(scope, receive, send)

    return gate


def _is_open(scope: Scope) -> bool:
    """Whether it needs no key: the page for browsers is the same everywhere, and asks for the key itself."""
    return scope["path"] in OPEN_PATHS or (scope["path"] == "/" and wants_page(scope["headers"]))


def _with_request_ids(app: ASGIApp, *, simulated: bool) -> ASGIApp:
    """Takes or makes `X-Request-Id`, puts it on every log line and into the answer, and logs each exchange.

    `simulated`: each answer says that it means nothing.
    """
    fixed = [(b"x-tandem-simulated", b"true")] if simulated else []

    async def identified(scope: Scope, receive: Receive, send: Send) -> None:
        request_id = _given_id(scope) or secrets.token_hex(16)
        scope["state"]["request_id"] = request_id
        began_s, status = time.monotonic(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode()), *fixed]
                if is_of_messages(scope["path"]):
                    message["headers"].append((b"request-id", request_id.encode()))
            await send(message)

        with bound(request_id=request_id):
            try:
                await app(scope, receive, send_with_id)
            except Exception:  # noqa: BLE001 - the last border: where uvicorn would log it, the id is not bound any more
                _log.exception("unforeseen error in an exchange")
            finally:
                # Under overload a line for each refusal would cost more than the refusal: they are only counted.
                level = logging.DEBUG if scope["path"] in _QUIET_PATHS or status == 429 else logging.INFO
                took_s = time.monotonic() - began_s
                _log.log(level, "%s %r answered with %d in %.6f s", scope["method"], scope["path"], status, took_s)

    return identified


def _given_id(scope: Scope) -> str | None:
    """The client's id, unless it could not be a header or stand in a log."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return str(value.decode())
    return None
