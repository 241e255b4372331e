"""Server-sent events, as they come in pieces (WHATWG HTML, "Server-sent events")."""

from __future__ import annotations


class EventParser:
    """Gives the data of each event once its blank line has come.

    Only `data` matters here: comments (keep-alives) and other fields are skipped, a space after the colon is optional,
    and lines end in LF or CRLF.
    """

    def __init__(self) -> None:
        self._rest = b""  # an unfinished line
        self._data: list[bytes] = []  # data lines of the unfinished event

    def feed(self, content: bytes) -> list[bytes]:
        """The data of all events that `content` completes, in order."""
        lines = (self._rest + content).split(b"\n")
        self._rest = lines.pop()
        events = []
        for line in lines:
            if line.endswith(b"\r"):
                line = line[:-1]
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
        return events
