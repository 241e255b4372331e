"""The HTTP face of a cluster, as a program reads it: single answers, and events as they come. Blocks."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from urllib.parse import SplitResult, quote

from tandem.cluster.client import TIMEOUT_S, Where, find_started, supervisor
from tandem.core.addresses import split_url
from tandem.core.client_key import KEY_VARIABLES, api_key
from tandem.core.errors import ConfigError, NotRunningError, WorkerLostError
from tandem.rpc.v1 import supervisor_pb2

_CONNECT_S = 10.0


class Face:
    """Args: url: of a router, or of what stands before it; a path in it goes before those of the requests."""

    def __init__(self, url: str) -> None:
        """Raises `ConfigError` for what is no URL."""
        try:
            parts = split_url(url if "//" in url else f"http://{url}")
        except ValueError as error:
            raise ConfigError(f"{url!r} is no URL; write it like http://host:8000", key="--url") from error
        self.url = url.rstrip("/")
        self._parts = parts

    def read(self, path: str) -> Any:
        """A JSON answer. Raises as `_open` does."""
        with closing(self._connection()) as connection:
            answer = self._open(connection, path)
            try:
                return json.loads(answer.read())
            except (OSError, http.client.HTTPException) as error:
                raise NotRunningError(f"{self.url} broke off its answer: {error}", key="--url") from error
            except ValueError as error:
                raise ConfigError(f"what answers at {self.url} is no Tandem of this version", key="--url") from error

    def events(self) -> Iterator[dict[str, Any]]:
        """Of `/v1/events`, until the router leaves: in order, killed, or silent for long. Raises as `_open` does."""
        with closing(self._connection()) as connection:
            answer = self._open(connection, "/v1/events")
            while line := _next_line(answer):
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])

    def _connection(self) -> http.client.HTTPConnection:
        parts: SplitResult = self._parts
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        return kind(str(parts.hostname), parts.port, timeout=_CONNECT_S)

    def _open(self, connection: http.client.HTTPConnection, path: str) -> http.client.HTTPResponse:
        """Raises:
        NotRunningError: nothing answers there.
        ConfigError: it answers with an error, or is no Tandem of this version.
        """
        key = api_key()
        try:
            connection.request("GET", self._parts.path.rstrip("/") + path, headers=_headers(key))
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise NotRunningError(f"{self.url} does not answer: {error}", key="--url") from error
        if answer.status != 200:
            raise ConfigError(_refusal(answer, self.url, has_key=bool(key)))
        return answer


def find(where: Where, url: str | None) -> Face:
    """The face at `url`, else that of a router of the cluster which `where` means.

    Raises:
        NotRunningError: there is no such cluster.
        ConfigError: it still starts, or there is more than one to choose from.
        WorkerLostError: its supervisor does not answer, or no router serves.
    """
    if url:
        return Face(url)
    with supervisor(find_started(where)) as stub:
        cluster = stub.GetCluster(supervisor_pb2.GetClusterRequest(), timeout=TIMEOUT_S)
    found = next((router.url for router in cluster.routers if router.url and router.state == "ready"), None)
    if found is None:
        raise WorkerLostError("no router of the cluster serves now; `tandem status` says why")
    return Face(found)


def _next_line(answer: http.client.HTTPResponse) -> bytes:
    """Empty at its end, wherever that is: an event is a whole line."""
    try:
        line = answer.readline()
    except (OSError, http.client.HTTPException):
        return b""
    return line if line.endswith(b"\n") else b""


def escaped(name: str) -> str:
    return quote(name, safe="")


def _headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def _refusal(answer: http.client.HTTPResponse, url: str, *, has_key: bool) -> str:
    if answer.status == 401:
        names = " or ".join(KEY_VARIABLES)
        return f"{url} does not take the API key of {names}" if has_key else f"{url} asks for an API key: set {names}"
    try:
        return str(json.loads(answer.read())["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{url} answers {answer.status} {answer.reason}; is it a Tandem of this version?"
