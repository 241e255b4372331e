"""What a decode worker tells its routers: plain data, made for the wire in `decode_worker.wire`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvtransfer.protocol.messages import AttemptKey, Grant
from tandem.worker.cache_report import CacheNews
from tandem.worker.request import AttemptFailed, PromptScored, TokenSampled
from tandem.worker.spans import Span


@dataclass(frozen=True, slots=True)
class GrantMade:
    """The answer to a reservation: pages that a prefill worker may fill."""

    grant: Grant


@dataclass(frozen=True, slots=True)
class ComputesHere:
    """The other answer: no prefill worker takes part, the prompt is computed here."""

    key: AttemptKey
    num_cached_tokens: int
    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class PromptComputed:
    """All of such a prompt is computed. `spans`: its chunks, in seconds before now."""

    key: AttemptKey
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Admitted:
    """The handoff is verified and in the batch, `admission_s` after its commit came."""

    key: AttemptKey
    admission_s: float


@dataclass(frozen=True, slots=True)
class WriterSuspected:
    """A prefill worker stays silent while it may still write: it must be killed."""

    worker_id: str
    incarnation: str


Event = (
    GrantMade
    | ComputesHere
    | PromptComputed
    | Admitted
    | PromptScored
    | TokenSampled
    | AttemptFailed
    | WriterSuspected
    | CacheNews
)

Emit = Callable[[dict[int, list[Event]]], None]
"""Sends events to routers, by session; from any thread."""
