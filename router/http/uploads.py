"""Uploads of files as OpenAI's clients send them, `multipart/form-data`: parsed as they come, onto disk."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from router.batches.disk import PARTIAL, sync_directory
from router.batches.records import StoredFile, new_id
from router.batches.store import Store
from router.http.clients import Shared, client_of
from router.openai.refusal import refuse, shown
from tandem.core.errors import InvalidRequestError, OverloadedError, RequestTooLargeError

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

_MAX_AT_ONCE = 8  # of one client, a half
_RETRY_AFTER_S = 5.0
#: So much is collected before it goes to the disk, in a thread.
_PIECE_BYTES = 1 << 20
_MAX_VALUE_BYTES, _MAX_PARTS, _MAX_NAME_CHARS = 1024, 16, 255
#: Of all of a form but the content of its file: parts, and what stands behind the last boundary.
_MAX_FORM_BYTES = 64 << 10
_FILE, _PURPOSE = "file", "purpose"


class Uploads:
    """All uploads of one router; runs on its loop."""

    def __init__(self, store: Store, max_bytes: int) -> None:
        """`max_bytes`: of one file."""
        self._store, self._max_bytes = store, max_bytes
        self._under_way = Shared(_MAX_AT_ONCE)

    async def take(self, request: Request, owner: str) -> StoredFile:
        """The file of `request`, once it is whole on disk.

        Raises:
            InvalidRequestError: it is no form, or a field is wrong.
            RequestTooLargeError: the file is larger than one may be.
            OverloadedError: too many come at once, or too many of this client.
            ClientDisconnect: the client went away.
        """
        boundary = _boundary(request)
        folder = self._store.folder_of_files(owner)
        partial = folder / f"{PARTIAL}{secrets.token_hex(8)}"
        client = client_of(request.scope, request.scope["state"]["tenant"])
        if not self._under_way.take(client, 1):
            raise OverloadedError("too many uploads are under way", retry_after_s=_RETRY_AFTER_S)
        try:
            return await self._taken(request, owner, folder, partial, boundary)
        finally:
            self._under_way.give_back(client, 1)
            partial.unlink(missing_ok=True)

    async def _taken(self, request: Request, owner: str, folder: Path, partial: Path, boundary: bytes) -> StoredFile:
        with partial.open("xb") as file:
            form = _Form(boundary, file, self._max_bytes)
            held = bytearray()
            async for part in request.stream():
                held += part
                if len(held) >= _PIECE_BYTES:
                    piece, held = bytes(held), bytearray()
                    await asyncio.to_thread(form.feed, piece)
            await asyncio.to_thread(form.end, bytes(held))
        purpose = form.values.get(_PURPOSE)
        if purpose is None:
            refuse(_PURPOSE, "is missing; send `batch`")
        if purpose != "batch":
            refuse(_PURPOSE, f"must be `batch`, the only one that is served here, not {shown(purpose)}")
        if not form.has_file:
            refuse(_FILE, "is missing; send the file as a part of this name")
        now_s = time.time()
        stored = StoredFile(new_id("file-", now_s), form.num_bytes, int(now_s), form.filename, purpose)

        def keep() -> None:
            partial.replace(folder / f"{stored.id}.data")
            sync_directory(folder)
            self._store.add_file(owner, stored)

        await asyncio.to_thread(keep)
        return stored


def _boundary(request: Request) -> bytes:
    kind, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise InvalidRequestError(
            "send the file as multipart/form-data, with the fields `purpose` and `file`: "
            "curl -F purpose=batch -F file=@requests.jsonl"
        )
    return boundary


@dataclass
class _Part:
    """What the parser has read of the head of a part, and of its content if that is a short value."""

    header_name: bytearray = field(default_factory=bytearray)
    header_value: bytearray = field(default_factory=bytearray)
    name: str = ""
    value: bytearray = field(default_factory=bytearray)


class _Form:
    """Reads a form of short values and one file, whose content goes into `file`. Blocks; one thread at a time."""

    def __init__(self, boundary: bytes, file: BinaryIO, max_bytes: int) -> None:
        self.values: dict[str, str] = {}
        self.filename, self.num_bytes, self.has_file = "", 0, False
        self._file, self._max_bytes = file, max_bytes
        self._part, self._num_parts, self._has_ended = _Part(), 0, False
        self._num_read = 0  # bytes of all of the form
        callbacks: MultipartCallbacks = {
            "on_part_begin": self._part_begins,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_ends,
            "on_part_data": self._data,
            "on_part_end": self._part_ends,
            "on_end": self._ends,
        }
        try:
            self._parser = MultipartParser(boundary, callbacks)
        except FormParserError as error:
            raise _malformed(error) from error

    def feed(self, piece: bytes) -> None:
        """Raises `InvalidRequestError`, `RequestTooLargeError`."""
        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise _malformed(error) from error
        self._num_read += len(piece)
        if self._num_read - self.num_bytes > _MAX_FORM_BYTES:
            raise RequestTooLargeError(f"the form is larger than {_MAX_FORM_BYTES} bytes without its file")

    def end(self, piece: bytes) -> None:
        """The last piece; what came is on disk then. Raises as `feed` does."""
        self.feed(piece)
        if not self._has_ended:
            raise InvalidRequestError("the form ends before its last boundary; send it whole")
        self._file.flush()
        os.fsync(self._file.fileno())

    # -- what the parser calls

    def _part_begins(self) -> None:
        self._part = _Part()
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise InvalidRequestError(f"the form has more than {_MAX_PARTS} parts")

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._part.header_name += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._part.header_value += data[start:end]

    def _header_ends(self) -> None:
        part = self._part
        if part.header_name.lower() == b"content-disposition":
            _, options = parse_options_header(bytes(part.header_value))
            part.name = options.get(b"name", b"").decode(errors="replace")
            if part.name == _FILE:
                if self.has_file:
                    refuse(_FILE, "must come once")
                self.has_file = True
                self.filename = _shown_name(options.get(b"filename", b"").decode(errors="replace"))
        part.header_name, part.header_value = bytearray(), bytearray()

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._part.name == _FILE:
            self.num_bytes += end - start
            if self.num_bytes > self._max_bytes:
                raise RequestTooLargeError(
                    f"the file is larger than {self._max_bytes} bytes (batches.max_file_bytes); split it"
                )
            self._file.write(memoryview(data)[start:end])
            return
        self._part.value += data[start:end]
        if len(self._part.value) > _MAX_VALUE_BYTES:
            refuse(self._part.name[:64], f"is longer than {_MAX_VALUE_BYTES} bytes")

    def _part_ends(self) -> None:
        name = self._part.name
        if name == _FILE:
            return
        if name != _PURPOSE:
            refuse(name[:64], "is not served here; leave it out, and delete the file when it is not needed any more")
        self.values[name] = self._part.value.decode(errors="replace")

    def _ends(self) -> None:
        self._has_ended = True


def _shown_name(name: str) -> str:
    """Only for people: no path of ours is made from it."""
    plain = name.replace("\\", "/").rpartition("/")[2]
    return "".join(c if c.isprintable() else "?" for c in plain)[:_MAX_NAME_CHARS] or "upload.jsonl"


def _malformed(error: FormParserError) -> InvalidRequestError:
    return InvalidRequestError(f"the body is no form: {error}")
