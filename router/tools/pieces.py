"""What a message is made of: text, reasoning, and calls of tools, in the order in which the model wrote them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol


@dataclass(frozen=True, slots=True)
class Said:
    """Text of the answer; not empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of the reasoning before it; not empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Called:
    """One whole call of a tool."""

    name: str
    arguments: str  # a JSON object


Piece = Said | Thought | Called


def add_piece(piece: Piece, pieces: list[Piece]) -> None:
    """Add to `pieces`; text that follows text of its kind is one piece with it, and empty text is none."""
    last = pieces[-1] if pieces else None
    if isinstance(piece, Called):
        pieces.append(piece)
    elif not piece.text:
        return
    elif isinstance(last, Said) and isinstance(piece, Said):
        pieces[-1] = Said(last.text + piece.text)
    elif isinstance(last, Thought) and isinstance(piece, Thought):
        pieces[-1] = Thought(last.text + piece.text)
    else:
        pieces.append(piece)


@dataclass(frozen=True)
class ToolUse:
    """What a request says of tools."""

    tools: tuple[dict[str, Any], ...]  # as chat templates want them: `{"type": "function", "function": {…}}`
    choice: Literal["auto", "none", "required"] = "auto"
    only: frozenset[str] | None = None  # those that may be called; `None`: all
    strict: frozenset[str] = frozenset()  # those whose calls follow their schemas, whatever the choice
    may_be_parallel: bool = True  # whether one turn may have several calls

    @property
    def is_offered(self) -> bool:
        """Whether the model is told of tools."""
        return bool(self.tools) and self.choice != "none"

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool["function"]["name"] for tool in self.tools)


NO_TOOLS = ToolUse(())


def new_call_id(kind: str) -> str:
    """An id for a call, which the client gives back with its result."""
    return f"{kind}_{secrets.token_hex(12)}"


class Reader(Protocol):
    """Reads the text of one choice as it comes. How the text is cut makes no difference to what comes out in all."""

    def push(self, text: str, /) -> Sequence[Piece]:
        """Take `text`; return what is certain by now."""
        ...

    def finish(self) -> Sequence[Piece]:
        """No more text comes: return the rest."""
        ...

    @property
    def num_held(self) -> int:
        """Characters at the end of what was taken that are not certain yet."""
        ...


class PlainReader:
    """All text is the answer's."""

    def push(self, text: str) -> Sequence[Piece]:
        return (Said(text),) if text else ()

    def finish(self) -> Sequence[Piece]:
        return ()

    @property
    def num_held(self) -> int:
        return 0
