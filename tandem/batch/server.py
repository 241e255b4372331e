"""A server's HTTP API as `tandem batch` uses it. Blocks; one thread at a time."""

from __future__ import annotations

import contextlib
import http.client
import json
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tandem.core.addresses import split_url
from tandem.core.client_key import KEY_VARIABLES, api_key
from tandem.core.errors import ConfigError, NotRunningError

_CONNECT_S = 10.0
_ANSWER_S = 3600.0
_PIECE = 1 << 20

Answer = tuple[int, bytes, dict[str, str]]
"""Status, body, and head by names in lower case."""


class RefusedError(ConfigError):
    """The server has answered with an error."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Server:
    """Args: url: of the server; `/v1` at its end may be there or not."""

    def __init__(self, url: str) -> None:
        try:
            parts = split_url(url if "//" in url else f"http://{url}")
        except ValueError as error:
            raise ConfigError(f"{url!r} is no URL; write it like http://host:8000", key="--url") from error
        self.url = url.rstrip("/").removesuffix("/v1")
        self._parts = parts
        self._connection: http.client.HTTPConnection | None = None
        self._aborted = False

    def send(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        """Raises `NotRunningError`: nothing answers."""
        key = api_key()
        head = {**({"authorization": f"Bearer {key}"} if key else {}), **(headers or {})}
        is_new = self._connection is None
        try:
            return self._exchange(method, path, body, head)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            if not (is_new or self._aborted or isinstance(body, Iterator)):  # the server may have closed what was open
                return self.send(method, path, body, headers)
            why = str(error) or type(error).__name__
            raise NotRunningError(f"{self.url} does not answer: {why}", key="--url") from error

    def _exchange(self, method: str, path: str, body: Any, head: dict[str, str]) -> Answer:
        if self._connection is None:
            kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
            self._connection = kind(str(self._parts.hostname), self._parts.port, timeout=_CONNECT_S)
            self._connection.connect()
            if self._aborted:  # while it was connected, or before
                raise ConnectionAbortedError("it was broken off")
            self._connection.sock.settimeout(_ANSWER_S)
        prefix = self._parts.path.rstrip("/").removesuffix("/v1")
        self._connection.request(method, prefix + path, body, head)
        answer = self._connection.getresponse()
        return answer.status, answer.read(), {name.lower(): value for name, value in answer.getheaders()}

    def abort(self) -> None:
        """End the exchange under way, if there is one, and begin none any more; from any thread."""
        self._aborted = True
        if (connection := self._connection) is not None and connection.sock is not None:
            with contextlib.suppress(OSError):  # it has ended by itself
                connection.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """JSON. Raises `RefusedError`, and as `send` does."""
        raw = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"} if raw else {}
        return json.loads(self._read(*self.send(method, path, raw, headers)[:2]))

    def content(self, file_id: str) -> bytes:
        """Raises as `ask` does."""
        return self._read(*self.send("GET", f"/v1/files/{file_id}/content")[:2])

    def upload(self, file: Path) -> str:
        """The id of the file there. Raises as `ask` does."""
        boundary = secrets.token_hex(16)
        head = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--{boundary}\r\n'
            f'Content-Disposition: form-data; name="file"; filename="requests.jsonl"\r\n'
            "Content-Type: application/jsonl\r\n\r\n"
        ).encode()
        tail = f"\r\n--{boundary}--\r\n".encode()

        def pieces() -> Iterator[bytes]:
            yield head
            with file.open("rb") as content:
                while piece := content.read(_PIECE):
                    yield piece
            yield tail

        headers = {
            "content-type": f"multipart/form-data; boundary={boundary}",
            "content-length": str(len(head) + file.stat().st_size + len(tail)),
        }
        return str(json.loads(self._read(*self.send("POST", "/v1/files", pieces(), headers)[:2]))["id"])

    def _read(self, status: int, body: bytes) -> bytes:
        if status == 200:
            return body
        if status == 401:
            raise RefusedError(f"{self.url} wants an API key: set {' or '.join(KEY_VARIABLES)}", status)
        try:
            message = str(json.loads(body)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            message = f"{self.url} answers with {status}"
        raise RefusedError(message, status)
