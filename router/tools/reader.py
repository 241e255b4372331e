"""Finds calls in the text of a model that writes them between markers. Pure.

Text that may still become a marker is held back. A call is held back until it is whole: what turns out to be none
comes out as the text that it is, so no character is ever lost but the markers of calls and the blank space around them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from router.request.stop_strings import possible_start
from router.tools.blocks import Block, State
from router.tools.pieces import Piece, Said, add_piece

#: So many blank characters before an opening, and after a call, belong to the call's frame.
_MAX_FRAME_SPACE = 64


class MarkedReader:
    """Reads text with blocks that begin with one of some openings."""

    def __init__(self, openings: Sequence[str], new_block: Callable[[], Block], *, at_start: str = "") -> None:
        """No opening is a part of another.

        Args:
            new_block: what follows an opening.
            at_start: characters with which the output begins if a block without an opening does.
        """
        self._openings = tuple(openings)
        self._new_block = new_block
        self._at_start = at_start
        self._block: Block | None = None
        self._held: list[str] = []  # all that the block has taken, its frame too
        self._window = ""  # read, and not certain yet
        # Whether a call came last: blank space at the end of the output is its frame then.
        self._is_after_call = False

    def push(self, text: str) -> list[Piece]:
        """See `router.tools.pieces.Reader`."""
        pieces: list[Piece] = []
        while text:
            block = self._block
            text = self._read_text(text, pieces) if block is None else self._read_block(block, text, pieces)
        return pieces

    def finish(self) -> list[Piece]:
        """See `router.tools.pieces.Reader`."""
        pieces: list[Piece] = []
        if self._block is not None:
            self._block.finish()
            self._end_block(self._block, pieces)
        if not (self._is_after_call and self._window.isspace()):
            self._say(self._window, pieces)
        self._window = ""
        return pieces

    @property
    def num_held(self) -> int:
        """See `router.tools.pieces.Reader`."""
        return len(self._window) + sum(map(len, self._held))

    def _read_text(self, text: str, pieces: list[Piece]) -> str:
        """Up to the next block; gives what follows its opening."""
        window, self._window = self._window + text, ""
        if self._at_start:
            begun = window.lstrip()
            if not begun and len(window) <= _MAX_FRAME_SPACE:
                self._window = window
                return ""
            starts, self._at_start = self._at_start, ""
            if begun and begun[0] in starts:
                self._open(window[: len(window) - len(begun)])
                return begun
        found = [(at, -len(opening)) for opening in self._openings if (at := window.find(opening)) >= 0]
        if not found:
            keep = _frame_start(window, possible_start(window, self._openings))
            self._say(window[:keep], pieces)
            self._window = window[keep:]
            return ""
        at, length = min(found)
        frame = _frame_start(window, at)
        self._say(window[:frame], pieces)
        self._open(window[frame : at - length])
        return window[at - length :]

    def _read_block(self, block: Block, text: str, pieces: list[Piece]) -> str:
        end = block.feed(text, 0)
        self._held.append(text[:end])
        if block.state is not State.OPEN:
            self._end_block(block, pieces)
        return text[end:]

    def _open(self, frame: str) -> None:
        self._block, self._held = self._new_block(), [frame]

    def _end_block(self, block: Block, pieces: list[Piece]) -> None:
        if block.state is State.DONE:
            pieces.extend(block.calls)
            self._is_after_call = True
        else:
            self._say("".join(self._held), pieces)
        self._block, self._held = None, []

    def _say(self, text: str, pieces: list[Piece]) -> None:
        if not text:
            return
        self._is_after_call = False
        add_piece(Said(text), pieces)


def _frame_start(window: str, end: int) -> int:
    """Where the blank space begins that ends at `end`, so far as it may belong to a frame."""
    least = max(0, end - _MAX_FRAME_SPACE)
    return least + len(window[least:end].rstrip())
