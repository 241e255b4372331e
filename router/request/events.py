"""All that can happen to a request under way, in past tense: its only inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from router.request.request import TokenGiven
from tandem.core.errors import TandemError
from tandem.core.identity import WorkerKey
from tandem.rpc.v1.decode_pb2 import Grant


@dataclass(frozen=True, slots=True)
class Granted:
    """Decode has reserved pages; the message goes on to prefill as it is."""

    attempt: int
    grant: Grant


@dataclass(frozen=True, slots=True)
class PrefillStarted:
    """Prefill computes the prompt's first chunk."""

    attempt: int
    num_cached_tokens: int  # of the prompt, that it has already


@dataclass(frozen=True, slots=True)
class LocalPrefillStarted:
    """Decode computes what it lacks of the prompt by itself; all tokens come from there."""

    attempt: int
    num_cached_tokens: int  # of the prompt, that it has already


@dataclass(frozen=True, slots=True)
class PrefillEnded:
    """Every choice ended with its first token: there is no handoff."""

    attempt: int


@dataclass(frozen=True, slots=True)
class HandoffDone:
    """Decode has acknowledged the pages to prefill."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Admitted:
    """Decode has verified the pages: from here on it needs prefill no more."""

    attempt: int


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """A worker gave up on the attempt."""

    attempt: int
    worker: WorkerKey
    error: TandemError


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker's stream broke or fell silent: all it held for us is gone."""

    worker: WorkerKey
    error: TandemError
    is_planned: bool  # it was leaving: no death


@dataclass(frozen=True, slots=True)
class DecodeLeaves:
    """The decode worker drains: its requests shall go on elsewhere."""

    worker: WorkerKey


@dataclass(frozen=True, slots=True)
class MayMove:
    """It is this request's turn to leave its draining decode worker."""


@dataclass(frozen=True, slots=True)
class RouterLeaves:
    """The router stops and waits no longer; the client is still there."""

    why: str


@dataclass(frozen=True, slots=True)
class ClientGone:
    """The client closed its connection, or reads too slowly."""

    why: str


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The client's own `timeout` is over."""


@dataclass(frozen=True, slots=True)
class WorkersChanged:
    """A worker became ready or left: a waiting request may look again."""


@dataclass(frozen=True, slots=True)
class WaitOver:
    """The time that a request waits for a worker is over."""


Event: TypeAlias = (
    TokenGiven
    | Granted
    | PrefillStarted
    | LocalPrefillStarted
    | PrefillEnded
    | HandoffDone
    | Admitted
    | AttemptFailed
    | WorkerLost
    | DecodeLeaves
    | MayMove
    | ClientGone
    | RouterLeaves
    | DeadlinePassed
    | WorkersChanged
    | WaitOver
)
