"""Reads harmony, in which gpt-oss writes: messages with a channel, and a recipient where one is a call. Pure.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
    <|message|>{…}<|call|>

The prompt ends with `<|start|>assistant`, so the output begins within a header.
"""

from __future__ import annotations

import re

from router.request.stop_strings import possible_start
from router.tools.blocks import JsonScan, called
from router.tools.defects import read_or_none
from router.tools.pieces import Piece, Said, Thought, add_piece

MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")

_MESSAGE, _START = "<|message|>", "<|start|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START)
_END = re.compile("|".join(map(re.escape, _ENDS)))
_MAX_HEADER_CHARS = 512
#: So many strings that never end are read anew, each with all that follows it; from then on every end is one.
_MAX_READ_ANEW = 4
_READ_ANEW_CHARS = 4096  # at once: what is cut off a window is copied for every message in it
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


class HarmonyReader:
    """One output of such a model."""

    def __init__(self) -> None:
        self._window = ""  # read, and not certain yet
        self._header: str | None = ""  # `None` within a message's body
        self._channel = ""
        self._recipient: str | None = None
        self._arguments: list[str] = []  # of a call: all of its body so far
        self._scan: JsonScan | None = None  # of a call, as long as its arguments go on: they may have ends in strings
        self._num_read_anew = 0

    def push(self, text: str) -> list[Piece]:
        """See `router.tools.pieces.Reader`."""
        self._window += text
        pieces: list[Piece] = []
        while self._window and (self._read_header() if self._header is not None else self._read_body(pieces)):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        """See `router.tools.pieces.Reader`."""
        pieces: list[Piece] = []
        while self._scan is not None and self._scan.is_in_text:
            # The string never ended, so the first end was one after all.
            pieces += self._read_anew("".join(self._arguments) + self._window)
        if self._header is not None:
            add_piece(Said(_bare(self._header + self._window)), pieces)
        else:
            self._tell(self._window, pieces)
            self._end_message(pieces)
        self._window, self._header = "", ""
        return pieces

    @property
    def num_held(self) -> int:
        """See `router.tools.pieces.Reader`."""
        return len(self._window) + len(self._header or "")

    def _read_anew(self, body: str) -> list[Piece]:
        """All that has come since a call's body began, now that the body ends with its first end."""
        self._window, self._scan, self._arguments = "", None, []
        self._num_read_anew += 1
        pieces: list[Piece] = []
        for at in range(0, len(body), _READ_ANEW_CHARS):
            pieces += self.push(body[at : at + _READ_ANEW_CHARS])
        return pieces

    def _read_header(self) -> bool:
        """Whether there is more to read."""
        assert self._header is not None
        header = self._header + self._window
        found = header.find(_MESSAGE)
        self._window = ""
        if found >= 0:
            self._begin_message(header[:found])
            self._window = header[found + len(_MESSAGE) :]
            return True
        self._header = header
        if len(header) > _MAX_HEADER_CHARS:  # a model that does not write harmony
            self._begin_message("<|channel|>final")
            self._window = header
            return True
        return False

    def _begin_message(self, header: str) -> None:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._channel = channel[1] if channel else "final"
        self._recipient = recipient[1] if recipient else None
        self._header, self._arguments = None, []
        is_scanned = self._recipient is not None and self._num_read_anew < _MAX_READ_ANEW
        self._scan = JsonScan() if is_scanned else None

    def _read_body(self, pieces: list[Piece]) -> bool:
        """Whether there is more to read."""
        window, at = self._window, 0
        while (found := _END.search(window, at)) is not None:
            self._follow(window[at : found.start()])
            if self._scan is None or not self._scan.is_in_text:
                break
            at = found.end()
        if found is None:
            keep = possible_start(window, _ENDS)
            self._follow(window[at:keep])
            self._tell(window[:keep], pieces)
            self._window = window[keep:]
            return False
        self._tell(window[: found.start()], pieces)
        self._end_message(pieces)
        # What follows is the next header, with or without `<|start|>assistant` before it.
        self._header, self._window = "", window[found.end() :]
        return True

    def _follow(self, text: str) -> None:
        """Go on in the arguments of a call; no end has a sign of JSON in it."""
        if self._scan is not None and self._scan.feed(text, 0) is not None:
            self._scan = None

    def _tell(self, text: str, pieces: list[Piece]) -> None:
        if not text:
            return
        if self._recipient is not None:
            self._arguments.append(text)
        elif self._channel == "analysis":
            add_piece(Thought(text), pieces)
        else:
            add_piece(Said(text), pieces)

    def _end_message(self, pieces: list[Piece]) -> None:
        if self._recipient is None:
            return
        recipient, body = self._recipient, "".join(self._arguments)
        calls = read_or_none(lambda: [called(recipient, body)])
        if calls is None:
            add_piece(Said(body), pieces)
        pieces += calls or []
        self._recipient = None


def _bare(header: str) -> str:
    """What a header that never became a message shows: nothing, if it is one; else its text."""
    return "" if header.removeprefix("assistant").lstrip().startswith("<|") or header == "assistant" else header
