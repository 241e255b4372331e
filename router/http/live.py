"""The live page, the events that feed it, and the way of single requests, of every router of the cluster."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import suppress
from importlib import resources
from typing import Any, TypeVar

import orjson
from fastapi.responses import HTMLResponse

from router.lifecycle.context import RouterContext
from router.observe.feed import Seen, joined, part_of, read_part
from router.workers.other_routers import OtherRouters
from tandem.core.errors import InvalidRequestError, OverloadedError

_log = logging.getLogger(__name__)
Told = TypeVar("Told")

MAX_WATCHERS = 32
"""Pages that one router feeds."""
MAX_WORKERS = 128
"""Of each pool, that a page is told of."""
_EVERY_S = 1.0
_PART, _REQUEST = "live part", "request"  # kinds of questions of one router to another
_ID_PREFIX = re.compile("^(cmpl-|chatcmpl-|resp_|msg_)")  # before the request's id in the id of a body
#: What `explained` takes over.
_OF_REQUEST = ("id", "router", "prompt_tokens", "cached_tokens")
_OF_CHOICE = ("number", "prefill", "decode", "why", "candidates")
_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)


class UnknownRequestError(InvalidRequestError):
    """No request of this id is remembered."""

    code = "unknown_request"
    http_status = 404


class Live:
    """What people may see of one router's requests, and of the others'."""

    def __init__(self, context: RouterContext, model: str, name: str, others: OtherRouters) -> None:
        self._others = others
        others.on_question(_PART, self._tell_part)
        others.on_question(_REQUEST, self._tell_requests)
        self._context, self._model, self._name = context, model, name or "router"
        self._num_watchers = 0
        # The workers as they were in this second.
        self._made_at, self._made = -1, orjson.Fragment(b"{}")
        self._over = asyncio.Event()
        self._misread = set[tuple[str, str]]()  # routers and kinds of questions, of which the log tells

    def close(self) -> None:
        """The router leaves: no page is fed any more. A page then asks again, and meets another router."""
        self._over.set()

    # -- events

    def check_watchers(self) -> None:
        """Raises `OverloadedError` where as many pages are fed as may be."""
        if self._num_watchers >= MAX_WATCHERS:
            raise OverloadedError(f"{MAX_WATCHERS} pages watch this router already; close one", retry_after_s=60)

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events, one a second: first the last minutes, then what is new."""
        seen: dict[str, Seen] = {}
        self._num_watchers += 1
        try:
            while not self._over.is_set():
                # A router that does not answer takes as long as others wait for it: that is part of the second.
                next_at = self._context.clock.now() + _EVERY_S
                told = await self._parts(seen)
                # One that did not answer this time has told what it has told.
                seen |= {name: Seen.of(part) for name, part in told.items()}
                state = {**joined(told.values()), "cluster": self._cluster()}
                yield b"data: " + orjson.dumps(state) + b"\n\n"
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._over.wait(), max(0.0, next_at - self._context.clock.now()))
        finally:
            self._num_watchers -= 1

    def _cluster(self) -> orjson.Fragment:
        """Made once a second, however many pages are fed."""
        second = int(self._context.clock.now() / _EVERY_S)
        if second != self._made_at:
            self._made_at = second
            self._made = orjson.Fragment(orjson.dumps(self._context.workers.outline(self._model, MAX_WORKERS)))
        return self._made

    async def _parts(self, seen: Mapping[str, Seen]) -> dict[str, dict[str, Any]]:
        """By router; without those that did not answer."""
        own = self._own_part(seen.get(self._name, Seen()))
        parts = {self._name: own}
        if self._others:
            told_before = {name: [point.second, point.num_ended] for name, point in seen.items()}
            asked = {"until": own["now"], "seen": told_before}
            parts |= self._read(_PART, await self._others.ask(_PART, orjson.dumps(asked)), read_part)
        return parts

    def _own_part(self, seen: Seen, until: int | None = None) -> dict[str, Any]:
        self._context.tally.settle()
        return part_of(self._context.recorder, self._name, seen, self._context.clock.now(), until)

    # -- single requests

    async def request(self, name: str) -> list[dict[str, Any]]:
        """All that is known of the requests of this id, which may be that of an answer's body.

        Raises:
            UnknownRequestError: of none.
        """
        for asked in dict.fromkeys((name, _ID_PREFIX.sub("", name))):  # a client may give an id that begins so, too
            if found := await self._requests(asked):
                return found
        raise UnknownRequestError(
            f"no request {name!r} is remembered; x-request-id of an answer names it, and each router remembers "
            "its last 1,000"
        )

    async def _requests(self, name: str) -> list[dict[str, Any]]:
        """This router's of exactly this id, or else those of the others."""
        if found := self._own_requests(name):
            return found
        told = await self._others.ask(_REQUEST, name.encode())
        return [request for part in self._read(_REQUEST, told, _read_requests).values() for request in part]

    def _own_requests(self, name: str) -> list[dict[str, Any]]:
        now_s = self._context.clock.now()
        return [{**trace.describe(now_s), "router": self._name} for trace in self._context.recorder.find(name)]

    # -- other routers

    def _read(self, kind: str, told: Mapping[str, bytes | None], read: Callable[[bytes], Told]) -> dict[str, Told]:
        """By router what it has told, without those that did not answer, or not what was asked: one of another version
        takes nothing from what the others tell."""
        found = {}
        for name, text in told.items():
            if text is None:
                continue
            try:
                found[name] = read(text)
            except ValueError as error:
                if (name, kind) not in self._misread:
                    self._misread.add((name, kind))
                    _log.warning("%s does not answer %r as it is read here; no more is logged: %s", name, kind, error)
        return found

    def _tell_part(self, question: bytes) -> bytes:
        try:
            asked = orjson.loads(question)
            seen, until = Seen(*map(int, asked["seen"].get(self._name, ()))), int(asked["until"])
        except (TypeError, AttributeError, KeyError) as error:
            raise ValueError(f"this does not say what was seen: {error}") from error
        return orjson.dumps(self._own_part(seen, until), option=_KEYS)

    def _tell_requests(self, name: bytes) -> bytes:
        return orjson.dumps(self._own_requests(name.decode()))


def _read_requests(text: bytes) -> list[dict[str, Any]]:
    requests = orjson.loads(text)
    if not isinstance(requests, list) or not all(isinstance(request, dict) for request in requests):
        raise ValueError("these are no requests")
    return requests


_KEYS = orjson.OPT_NON_STR_KEYS


def wants_page(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether a browser asks."""
    return any(name == b"accept" and b"text/html" in value for name, value in headers)


def live_page() -> HTMLResponse:
    """The page itself: one file, the same for everybody; it holds nothing of this cluster."""
    html = resources.files("router.http").joinpath("live.html").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(_SCRIPT.findall(html)[0].encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {"content-security-policy": policy, "cache-control": "no-cache", "x-content-type-options": "nosniff"}
    return HTMLResponse(html, headers=headers)


def explained(request: Mapping[str, Any]) -> dict[str, Any]:
    """Why a request's workers were chosen: what `/v1/requests/{id}/explain` tells of what `Live.request` found."""
    attempts = [{key: attempt[key] for key in _OF_CHOICE} for attempt in request["attempts"]]
    return {**{key: request[key] for key in _OF_REQUEST}, "attempts": attempts}
