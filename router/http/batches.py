"""`/v1/files` and `/v1/batches`, as OpenAI has them, over the directory of batches."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from router.batches.lease import Wake
from router.batches.records import Batch, new_id
from router.batches.store import NotFoundError, Page, Store
from router.http.bodies import Bodies
from router.http.exchange import check_encoding
from router.http.uploads import Uploads
from router.openai.refusal import refuse, shown
from router.openai.schema import parse_body
from router.request.tenant import Tenant
from tandem.core.config import BatchesConfig

Endpoint = Callable[[Request], Awaitable[Response]]

FILES, BATCHES = "/v1/files", "/v1/batches"
PATHS = (FILES, f"{FILES}/{{id}}", f"{FILES}/{{id}}/content", BATCHES, f"{BATCHES}/{{id}}", f"{BATCHES}/{{id}}/cancel")
OFF = "files and batches are switched off here; name a directory for them in batches.directory and restart the router"
_FIELDS = ("input_file_id", "endpoint", "completion_window", "metadata")
_WINDOW = re.compile(r"([1-9][0-9]{0,6})(s|m|h|d)")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_MAX_WINDOW_S = 30 * 86400
_MAX_METADATA, _MAX_KEY_CHARS, _MAX_TEXT_CHARS = 16, 64, 512
_MOST_FILES, _MOST_BATCHES, _USUAL_BATCHES = 10_000, 100, 20


def routes_where_off() -> list[Route]:
    """Every path answers why there is nothing."""

    async def off(_: Request) -> Response:
        raise NotFoundError(OFF)

    return [Route(path, off, methods=["GET", "POST", "DELETE"]) for path in PATHS]


class BatchRoutes:
    """The routes; they work in every router, whichever leads the queue."""

    def __init__(self, store: Store, wake: Wake, bodies: Bodies, config: BatchesConfig, served: Sequence[str]) -> None:
        """`served`: the endpoints that a batch may name."""
        self._store, self._wake, self._bodies = store, wake, bodies
        self._served = served
        self._uploads = Uploads(store, config.max_file_bytes)

    def routes(self) -> list[Route]:
        def at(path: str, by_method: Mapping[str, Endpoint]) -> Route:
            async def endpoint(request: Request) -> Response:
                return await by_method["GET" if request.method == "HEAD" else request.method](request)

            return Route(path, endpoint, methods=list(by_method))

        files, file, content, batches, batch, cancel = PATHS
        return [
            at(files, {"POST": self._upload, "GET": self._list_files}),
            at(file, {"GET": self._file, "DELETE": self._delete}),
            at(content, {"GET": self._content}),
            at(batches, {"POST": self._create, "GET": self._list_batches}),
            at(batch, {"GET": self._batch}),
            at(cancel, {"POST": self._cancel}),
        ]

    # -- files

    async def _upload(self, request: Request) -> Response:
        check_encoding(request)
        try:
            stored = await self._uploads.take(request, self._owner(request))
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        return _json(stored.shown())

    async def _list_files(self, request: Request) -> Response:
        query = request.query_params
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            refuse("order", f"must be asc or desc, not {shown(order)}")
        page = await asyncio.to_thread(
            partial(
                self._store.files,
                self._owner(request),
                after=query.get("after", ""),
                limit=_limit(request, _MOST_FILES, _MOST_FILES),
                newest_first=order == "desc",
                purpose=query.get("purpose", ""),
            )
        )
        return _listing(page)

    async def _file(self, request: Request) -> Response:
        file = await asyncio.to_thread(self._store.file, self._owner(request), _id(request))
        return _json(file.shown())

    async def _delete(self, request: Request) -> Response:
        await asyncio.to_thread(self._store.delete_file, self._owner(request), _id(request))
        return _json({"id": _id(request), "object": "file", "deleted": True})

    async def _content(self, request: Request) -> Response:
        owner = self._owner(request)
        file = await asyncio.to_thread(self._store.file, owner, _id(request))
        return FileResponse(
            self._store.data_of(owner, file.id), media_type="application/octet-stream", filename=file.filename
        )

    # -- batches

    async def _create(self, request: Request) -> Response:
        check_encoding(request)
        owner = self._owner(request)
        try:
            async with self._bodies.read(request) as raw:
                body = await self._bodies.work_on(raw, lambda: parse_body(raw))
                batch = self._new(body)
        except ClientDisconnect:
            return Response(status_code=499)
        await asyncio.to_thread(self._add, owner, batch)
        self._wake.tell()
        return _json(batch.shown())

    def _add(self, owner: str, batch: Batch) -> None:
        self._store.file(owner, batch.input_file_id)
        self._store.add_batch(owner, batch)

    def _new(self, body: Mapping[str, Any]) -> Batch:
        unknown = next((name for name in body if name not in _FIELDS), None)
        if unknown is not None:
            refuse(unknown[:64], f"is not served here; known are {', '.join(_FIELDS)}")
        file_id, endpoint, window = (_text(body, name) for name in _FIELDS[:3])
        if endpoint not in self._served:
            refuse("endpoint", f"must be one of {', '.join(self._served)}, not {shown(endpoint)}")
        now_s = time.time()
        return Batch(
            id=new_id("batch_", now_s),
            endpoint=endpoint,
            input_file_id=file_id,
            completion_window=window,
            created_at=int(now_s),
            expires_at=int(now_s) + _window_s(window),
            metadata=_metadata(body.get("metadata")),
        )

    async def _list_batches(self, request: Request) -> Response:
        page = await asyncio.to_thread(
            partial(
                self._store.batches,
                self._owner(request),
                after=request.query_params.get("after", ""),
                limit=_limit(request, _USUAL_BATCHES, _MOST_BATCHES),
            )
        )
        return _listing(page)

    async def _batch(self, request: Request) -> Response:
        batch = await asyncio.to_thread(self._store.batch, self._owner(request), _id(request))
        return _json(batch.shown())

    async def _cancel(self, request: Request) -> Response:
        batch = await asyncio.to_thread(self._store.cancel, self._owner(request), _id(request))
        self._wake.tell()
        return _json(batch.shown())

    def _owner(self, request: Request) -> str:
        tenant: Tenant = request.scope["state"]["tenant"]
        return tenant.owner


def _json(value: object) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")


def _listing(page: Page) -> Response:
    data = [item.shown() for item in page.items]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return _json({"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": page.has_more})


def _id(request: Request) -> str:
    return str(request.path_params["id"])


def _limit(request: Request, usual: int, most: int) -> int:
    text = request.query_params.get("limit", str(usual))
    if not re.fullmatch(r"[0-9]{1,6}", text) or not 1 <= int(text) <= most:
        refuse("limit", f"must be a whole number from 1 to {most}, not {shown(text)}")
    return int(text)


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str):
        refuse(name, "is missing" if value is None else f"must be a text, not {shown(value)}")
    return value


def _window_s(window: str) -> int:
    match = _WINDOW.fullmatch(window)
    window_s = int(match[1]) * _UNIT_S[match[2]] if match else 0
    if not 0 < window_s <= _MAX_WINDOW_S:
        refuse("completion_window", f"must be a time such as 24h, of at most 30d, not {shown(window)}")
    return window_s


def _metadata(value: Any) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) > _MAX_METADATA:
        refuse("metadata", f"must be an object of at most {_MAX_METADATA} texts, not {shown(value)}")
    for key, text in value.items():
        if len(key) > _MAX_KEY_CHARS or not isinstance(text, str) or len(text) > _MAX_TEXT_CHARS:
            refuse(
                "metadata",
                f"has keys of at most {_MAX_KEY_CHARS} characters and texts of at most {_MAX_TEXT_CHARS}; "
                f"{shown(key)} is none",
            )
    return value
