"""What an endpoint that generates is made of: it reads a body, and makes what its client reads of what comes of it.

The life of a request is the same for all of them; `router.http.exchange` has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from router.openai.fields import PromptBounds
from router.openai.model_card import ModelCard
from router.openai.reasoning import reader_of
from router.openai.schema import ParsedRequest
from router.request.request import Delta, Request, Usage
from router.tools.pieces import PlainReader, Reader
from tandem.core.config import LimitsConfig
from tandem.core.errors import TandemError
from tandem.core.tokenizer import Tokenizer


class Encoder(Protocol):
    """Makes of the deltas of one request one body, or a stream of frames. It is used for one of them."""

    def gather(self, prompt: int, delta: Delta, /) -> None:
        """Keep a delta for the body."""
        ...

    def body(self, usages: Sequence[Usage], /) -> bytes:
        """The whole answer."""
        ...

    def opening(self) -> bytes:
        """The frames before those of the first delta; may be empty."""
        ...

    def frames(self, prompt: int, delta: Delta, /) -> bytes:
        """The frames of one delta; may be empty."""
        ...

    def closing(self, usages: Sequence[Usage], /) -> bytes:
        """The last frames of a stream that ended well."""
        ...

    def failure(self, error: TandemError, /) -> bytes:
        """The last frames of a stream that failed."""
        ...


@dataclass(frozen=True)
class Setting:
    """What an encoder needs to know beside what was asked."""

    requests: Sequence[Request]  # one for each prompt
    tokenizer: Tokenizer
    card: ModelCard
    request_id: str  # of the HTTP request
    created: int  # seconds since the epoch

    def reader(self, parsed: ParsedRequest) -> Reader:
        """Reads the answer to the first prompt, a chat's."""
        return reader_of(parsed, self.requests[0], self.card, self.tokenizer) or PlainReader()


@dataclass(frozen=True)
class Call:
    """A valid body: what is to be generated, and who tells of it.

    `encoder` gets `parsed` as it was served: calls that have to come have become a grammar.
    """

    parsed: ParsedRequest
    encoder: Callable[[ParsedRequest, Setting], Encoder]


#: From a body to what it asks for. Raises `InvalidRequestError`, naming the field.
ReadBody = Callable[[dict[str, Any], LimitsConfig, PromptBounds], Call]
