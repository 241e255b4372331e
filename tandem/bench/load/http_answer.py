"""One HTTP/1.1 answer, read as its bytes come. Pure: bytes in, content out."""

from __future__ import annotations

import re

_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_RETRY_AFTER = re.compile(rb"\r\nretry-after: *(\d+)", re.IGNORECASE)
_CLOSES = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
_EVENTS = re.compile(rb"\r\ncontent-type: *text/event-stream", re.IGNORECASE)
_REQUEST_ID = re.compile(rb"\r\nx-request-id: *([^\r]*)", re.IGNORECASE)
_SERVER = re.compile(rb"\r\nserver: *([^\r]*)", re.IGNORECASE)
_MAX_HEAD_BYTES = 64 << 10


class MalformedAnswerError(ValueError):
    """The peer does not speak HTTP/1.1."""


class AnswerReader:
    """Reads a head, then a body of known length, in chunks, or up to the end of the connection.

    Attributes are meaningful once `has_head`.
    """

    def __init__(self) -> None:
        self.status = 0
        self.retry_after_s: int | None = None
        self.closes = False  # the connection serves no further request
        self.is_event_stream = False
        self.server = ""
        self.request_id = ""
        self.has_head = False
        self.is_complete = False
        self._buffer = b""
        self._is_chunked = False
        self._left: int | None = None  # bytes of the body, or of the chunk, that are to come; `None`: not known

    def feed(self, data: bytes) -> bytes:
        """The content that `data` completes. Raises `MalformedAnswerError`."""
        self._buffer += data
        if not self.has_head and not self._read_head():
            return b""
        if self._is_chunked:
            return self._read_chunks()
        content, self._buffer = self._buffer, b""
        if self._left is not None:
            content = content[: self._left]
            self._left -= len(content)
            self.is_complete = self._left == 0
        return content

    def end(self) -> None:
        """The connection has ended, which completes a body of no stated length."""
        self.is_complete = self.has_head and not self._is_chunked and not self._left

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > _MAX_HEAD_BYTES:
                raise MalformedAnswerError("the head of the answer has no end")
            return False
        head, self._buffer = self._buffer[:end], self._buffer[end + 4 :]
        status = _STATUS.match(head)
        if status is None:
            raise MalformedAnswerError(f"this is no HTTP/1.1: {head[:60]!r}")
        self.status = int(status[1])
        self.has_head = True
        self._is_chunked = _CHUNKED.search(head) is not None
        self.is_event_stream = _EVENTS.search(head) is not None
        length, after, server = _LENGTH.search(head), _RETRY_AFTER.search(head), _SERVER.search(head)
        if length and not self._is_chunked:
            self._left = int(length[1])
        if after:
            self.retry_after_s = int(after[1])
        if server:
            self.server = server[1].decode("latin-1")
        if request_id := _REQUEST_ID.search(head):
            self.request_id = request_id[1].decode("latin-1")
        has_bound = self._is_chunked or length is not None
        self.closes = not has_bound or _CLOSES.search(head) is not None
        return True

    def _read_chunks(self) -> bytes:
        """`<hex length>[;extension] CRLF <bytes> CRLF`, again and again; length 0 ends it (trailers are not read)."""
        buffer, start, content = self._buffer, 0, []
        while True:
            line_end = buffer.find(b"\r\n", start)
            if line_end < 0:
                break
            length = _chunk_length(buffer[start:line_end])
            begin, end = line_end + 2, line_end + 2 + length
            if len(buffer) < end + 2:
                break
            if buffer[end : end + 2] != b"\r\n":
                raise MalformedAnswerError("a chunk is longer than it says")
            start = end + 2
            if length == 0:
                self.is_complete = True
                break
            content.append(buffer[begin:end])
        self._buffer = buffer[start:]
        return b"".join(content)


def _chunk_length(line: bytes) -> int:
    try:
        return int(line.split(b";", 1)[0], 16)
    except ValueError:
        raise MalformedAnswerError(f"this is no length of a chunk: {line[:20]!r}") from None
