"""One exchange with a client: the body in, the answer out, and whether the client is still there.

Written against raw ASGI: a token passes through here for each frame, so nothing is validated or copied twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import orjson
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.types import Message, Receive, Scope, Send

from router.http.bodies import Bodies
from router.http.clients import client_of
from router.http.error_shapes import error_body_at
from router.http.grammars import GrammarCheck
from router.http.protocol import ABORT, ARRIVED, WRITE_PART
from router.lifecycle.context import RouterContext
from router.lifecycle.deadline import check_deadline, passed_deadline
from router.lifecycle.delta_buffer import DeltaBuffer
from router.lifecycle.prompt_group import PromptGroup
from router.lifecycle.request_errors import RequestErrors
from router.lifecycle.serve import outcome_of
from router.openai.answer_size import answer_entries, check_scored, scored_entries
from router.openai.bound_calls import with_bound_calls
from router.openai.endpoint import Call, Encoder, ReadBody, Setting
from router.openai.fields import PromptBounds
from router.openai.model_card import ModelCard
from router.openai.pooling import check_generates
from router.openai.refusal import shown
from router.openai.responses import error_headers
from router.openai.schema import ParsedRequest, parse_body
from router.openai.tokenize import requests_from, unread_variables
from router.policy.choose import check_placeable
from router.request.request import Delta, Request
from router.request.targets import Targets
from router.request.tenant import Tenant
from tandem.core.errors import TandemError, UnsupportedEncodingError

_log = logging.getLogger(__name__)

_PARENT = ("traceparent", "tracestate")  # W3C Trace Context
_MAX_HEADER_CHARS = 1000
#: The header that names fields of the body which nobody knows.
IGNORED_FIELDS = "tandem-ignored-fields"
_MAX_NAMED_ROLES = 8


class Exchange:
    """Serves the POSTs of one endpoint."""

    def __init__(
        self, context: RouterContext, card: ModelCard, read_body: ReadBody, bodies: Bodies, grammars: GrammarCheck
    ) -> None:
        self._context = context
        self._card = card
        self._read_body = read_body
        self._bodies = bodies
        self._grammars = grammars

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun_s = self._context.clock.now()
        arrived_s = scope["state"].get(ARRIVED, begun_s)  # a batch comes over no connection
        request_id: str = scope["state"]["request_id"]
        tenant: Tenant = scope["state"]["tenant"]
        tenants = self._context.tenants
        try:
            # The cheapest checks first: under overload most requests end here, their bodies unread.
            tenants.check(tenant)
            self._context.admission.check(tenant.owner, tenant.weight)
            http = HttpRequest(scope, receive)
            check_encoding(http)
            call, requests, read_s = await self._requests(http, request_id, arrived_s, tenant)
            if call.parsed.grammar is not None:
                check_placeable(self._context.workers.snapshot())
                text = self._grammars.remembered(call.parsed.grammar)
                if text is None:
                    check = self._grammars.check(call.parsed.grammar, client_of(scope, tenant))
                    text = await self._while_wanted(check, receive, requests[0])
                requests = [replace(each, sampling=replace(each.sampling, grammar=text)) for each in requests]
            # Before the place in the queue: what fails here must not keep one.
            setting = Setting(requests, self._context.tokenizer, self._card, request_id, int(time.time()))
            unread = unread_variables(call.parsed, self._context.tokenizer)
            encoder = call.encoder(call.parsed, setting)
            headers = ignored_header((*call.parsed.ignored_fields, *unread))
            group = self._admit(http, call.parsed, requests, (begun_s, read_s), tenant)
            headers |= tenants.headers(tenant)
        except ClientDisconnect:
            self._context.metrics.requests.labels("cancelled").inc()
            tenants.count_end(tenant, "cancelled")
            return
        except TandemError as error:
            self._count_refused(error, tenant)
            await send_error(scope, send, error, self._context.errors)
            return
        with self._context.open_exchanges.entered(group.break_off):
            group.start()
            watcher = asyncio.create_task(_watch_client(receive, group), name="client watcher")
            try:
                answer = self._stream if call.parsed.stream else self._whole
                await answer(scope, send, group, call.parsed, encoder, headers)
            except BaseException:
                group.client_gone("the connection broke")
                raise
            finally:
                watcher.cancel()
                group.answered()

    async def _while_wanted(self, check: Coroutine[Any, Any, str], receive: Receive, request: Request) -> str:
        """What comes of the check of a grammar, unless the client goes away or its time-out passes before that."""
        timeout_s = request.timeout_s
        left_s = None if timeout_s is None else timeout_s - (self._context.clock.now() - request.arrived_s)
        checked, gone = asyncio.create_task(check, name="grammar check"), asyncio.create_task(_client_gone(receive))
        try:
            await asyncio.wait((checked, gone), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if checked.done():
                return checked.result()
            if gone.done():
                raise ClientDisconnect
            raise passed_deadline(request)
        finally:
            checked.cancel()
            gone.cancel()

    async def _requests(
        self, http: HttpRequest, request_id: str, arrived_s: float, tenant: Tenant
    ) -> tuple[Call, list[Request], float]:
        """What the body asks for, one request for each of its prompts, and when the body had come."""
        context, card = self._context, self._card
        max_context = card.context_within(context.workers.max_context())
        bounds = PromptBounds(context.config.scheduling.max_queued_requests, max_context)
        limits, secret = tenant.limits(context.config.limits), context.workers.cache_secret
        of_cluster = Targets.of(context.config, on_gpu=context.workers.is_on_gpu)

        def work() -> tuple[Call, list[Request]]:
            call = self._read_body(parse_body(raw), limits, bounds)
            card.check_name(call.parsed.model)
            if not call.parsed.pools:
                check_generates(card)
            bound = with_bound_calls(call.parsed, card, context.tokenizer, context.config.limits)
            call = replace(call, parsed=bound)
            requests = requests_from(
                call.parsed,
                tokenizer=context.tokenizer,
                card=card,
                max_context=bounds.max_context,
                client_request_id=request_id,
                arrived_s=arrived_s,
            )
            check_scored(call.parsed, requests, context.config.limits)
            salt = tenant.cache_salt(secret, call.parsed.cache_salt)
            slo = call.parsed.slo
            targets = of_cluster.but(tenant.ttft_ms, tenant.tpot_ms)
            targets = targets.asked(slo.get("ttft_ms", 0), slo.get("tpot_ms", 0))
            return call, [replace(each, tenant=tenant, cache_salt=salt, targets=targets) for each in requests]

        async with self._bodies.read(http) as raw:
            read_s = context.clock.now()
            return *await self._bodies.work_on(raw, work), read_s

    def _admit(
        self,
        http: HttpRequest,
        parsed: ParsedRequest,
        requests: list[Request],
        taken_s: tuple[float, float],
        tenant: Tenant,
    ) -> PromptGroup:
        """Give each request a place in the queue. `taken_s`: when it was taken up, and when its body had come."""
        context, num_tokens = self._context, sum(len(request.prompt_ids) for request in requests)
        check_placeable(context.workers.snapshot(), pools=parsed.pools)
        context.tenants.check(tenant, num_tokens)
        for request in requests:
            check_deadline(request, context)
        context.admission.enter(len(requests), parsed.num_choices, tenant.owner, tenant.weight)
        context.tenants.enter(tenant, num_tokens)
        max_tokens = context.config.limits.stream_buffer_tokens if parsed.stream else None
        parent = {name: http.headers[name] for name in _PARENT if name in http.headers}
        deltas = DeltaBuffer(max_tokens)
        return PromptGroup(requests, context, deltas, kind=parsed.kind, taken_s=taken_s, parent=parent)

    def _count_refused(self, error: TandemError, tenant: Tenant) -> None:
        outcome = outcome_of(error)
        self._context.metrics.requests.labels(outcome).inc()
        self._context.tenants.count_end(tenant, outcome)
        level = logging.DEBUG if outcome in ("overloaded", "rate_limited") else logging.INFO
        _log.log(level, "request refused as %s: %s (%s)", outcome, error.message, error.code)

    # -- answers

    async def _whole(
        self,
        scope: Scope,
        send: Send,
        group: PromptGroup,
        parsed: ParsedRequest,
        encoder: Encoder,
        headers: Mapping[str, str],
    ) -> None:
        deltas = group.deltas
        while items := await deltas.take():
            for prompt, delta in items:
                encoder.gather(prompt, delta)
        if deltas.error is not None:
            await send_error(scope, send, deltas.error, self._context.errors)
            return
        usages = group.usages
        body = await self._bodies.make(answer_entries(parsed, usages), lambda: encoder.body(usages))
        await send_body(send, 200, body, {**headers, **_prompt_header(group)})

    async def _stream(
        self,
        scope: Scope,
        send: Send,
        group: PromptGroup,
        parsed: ParsedRequest,
        encoder: Encoder,
        headers: Mapping[str, str],
    ) -> None:
        """Frame by frame. A client that reads too slowly is cut off; a close would wait until it has read on."""
        deltas, writer = group.deltas, asyncio.current_task()
        assert writer is not None
        items = await deltas.take()
        if not items and deltas.error is not None:  # nothing was sent yet: a plain error is possible
            await send_error(scope, send, deltas.error, self._context.errors)
            return
        deltas.on_overflow = writer.cancel
        try:
            headers = {**headers, **_prompt_header(group), **STREAM_HEADERS}
            await send(_start(200, "text/event-stream; charset=utf-8", headers))
            frames = encoder.opening()
            write_part = scope["state"].get(WRITE_PART)  # a batch has none
            if write_part is not None and parsed.num_scored < 0:
                deltas.write_now = lambda items: write_part(partial(_frames_of, encoder, items))
            while items:
                if parsed.num_scored >= 0:
                    num_tokens = sum(len(delta.prompt_scores) for _, delta in items)
                    work = partial(_frames_of, encoder, items)
                    frames += await self._bodies.make(scored_entries(parsed, num_tokens), work)
                else:
                    frames += _frames_of(encoder, items)
                if frames:
                    await send(_body(frames, more=True))
                frames = b""
                items = await deltas.take()
            if deltas.error is not None:
                self._context.errors.add(deltas.error, scope["state"]["request_id"])
                await send(_body(encoder.failure(deltas.error), more=False))
            else:
                await send(_body(encoder.closing(group.usages), more=False))
        except asyncio.CancelledError:
            if not deltas.has_overflowed:
                raise
            _log.warning("connection dropped: its client reads too slowly")
            scope["state"][ABORT]()
        finally:
            deltas.on_overflow, deltas.write_now = lambda: None, None


def _frames_of(encoder: Encoder, items: Sequence[tuple[int, Delta]]) -> bytes:
    return b"".join([encoder.frames(prompt, delta) for prompt, delta in items])


STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def check_encoding(http: HttpRequest) -> None:
    """Refuse a compressed body: its bound would hold for what was sent, not for what it becomes."""
    encoding = http.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise UnsupportedEncodingError(
            f"the body is encoded as {shown(encoding)}; send it as it is, without Content-Encoding"
        )


async def _watch_client(receive: Receive, group: PromptGroup) -> None:
    """Tell the group when the client goes away. The exchange cancels this at its end."""
    await _client_gone(receive)
    group.client_gone("the client went away")


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def ignored_header(ignored_fields: Sequence[str]) -> dict[str, str]:
    """The client chose the names: only printable ASCII goes into a header, and no space at its ends."""
    if not ignored_fields:
        return {}
    names = ", ".join(ignored_fields)[:_MAX_HEADER_CHARS]
    return {IGNORED_FIELDS: "".join(c if " " <= c <= "~" else "?" for c in names).strip(" ")}


def _prompt_header(group: PromptGroup) -> dict[str, str]:
    """The role that computes each prompt, if known when the answer begins; for many prompts, how many each role has."""
    roles = [role or "unknown" for role in group.prompts_at]
    if len(roles) > _MAX_NAMED_ROLES:
        roles = [f"{role} {count}" for role, count in sorted(Counter(roles).items())]
    return {"tandem-prompt-computed-by": ", ".join(roles)}


async def send_error(scope: Scope, send: Send, error: TandemError, errors: RequestErrors) -> None:
    """Answer with `error`, and count it."""
    request_id: str = scope["state"]["request_id"]
    errors.add(error, request_id)
    body = error_body_at(scope["path"], error, request_id)
    await send_body(send, error.http_status, orjson.dumps(body), error_headers(error))


async def send_body(send: Send, status: int, body: bytes, headers: Mapping[str, str]) -> None:
    length = {"content-length": str(len(body))}
    await send(_start(status, "application/json", {**headers, **length}))
    await send(_body(body, more=False))


def _start(status: int, content_type: str, headers: Mapping[str, str]) -> Message:
    pairs = [(b"content-type", content_type.encode())]
    pairs += [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": pairs}


def _body(body: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}
