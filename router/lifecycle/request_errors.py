"""Counts the requests that were answered with an error; the supervisor asks for them, and `tandem serve` shows them."""

from __future__ import annotations

from collections import Counter

from tandem.core.errors import CancelledError, TandemError
from tandem.rpc.v1 import common_pb2

_MAX_MESSAGE_CHARS = 300


class RequestErrors:
    """Counts since the router's start; probes of its health do not count. Not thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, int]] = Counter()  # by code and HTTP status
        self._newest: tuple[TandemError, str] | None = None

    def add(self, error: TandemError, request_id: str) -> None:
        """A request was answered with `error`; a cancelled one was not answered."""
        if isinstance(error, CancelledError):
            return
        self._counts[error.code, error.http_status] += 1
        self._newest = error, request_id

    def to_wire(self) -> common_pb2.RequestErrors:
        counts = [
            common_pb2.ErrorCount(code=code, http_status=status, count=count)
            for (code, status), count in self._counts.items()
        ]
        return common_pb2.RequestErrors(counts=counts, newest=self._newest and _newest(*self._newest))


def _newest(error: TandemError, request_id: str) -> common_pb2.Error:
    """A message may quote the client: what is not printable would not travel, and could command a terminal."""
    message = "".join(char if char.isprintable() else "?" for char in error.message[:_MAX_MESSAGE_CHARS])
    return common_pb2.Error(code=error.code, message=message, request_id=request_id)
