"""All that can happen to a request under way: its only inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from router.request.request import TokenGiven
from tandem.core.errors import TandemError
from tandem.core.identity import WorkerKey
from tandem.core.prompt_scores import TokenScore
from tandem.rpc.v1.decode_pb2 import Grant


@dataclass(frozen=True, slots=True)
class Granted:
    """Decode has reserved pages; prefill gets the message as it is."""

    attempt: int
    grant: Grant


@dataclass(frozen=True, slots=True)
class PrefillStarted:
    """Prefill computes the prompt's first chunk."""

    attempt: int
    num_cached_tokens: int  # of the prompt, which it has already


@dataclass(frozen=True, slots=True)
class LocalPrefillStarted:
    """Decode computes what it lacks of the prompt by itself; all tokens come from there."""

    attempt: int
    num_cached_tokens: int  # of the prompt, which it has already


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log-probabilities of tokens of the prompt, from number `first` on; all come before the first token."""

    attempt: int
    first: int
    tokens: tuple[TokenScore, ...]


@dataclass(frozen=True, slots=True)
class PromptPooled:
    """The vector of a prompt, whole."""

    attempt: int
    values: tuple[float, ...]


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
    """Decode has verified the pages, and no longer needs prefill."""

    attempt: int


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """A worker gave up on the attempt."""

    attempt: int
    worker: WorkerKey
    error: TandemError


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker's stream broke or fell silent: all that it held for us is gone."""

    worker: WorkerKey
    error: TandemError
    is_planned: bool  # it was leaving, so this is no death


@dataclass(frozen=True, slots=True)
class WorkerSilent:
    """Nothing is heard of a worker for a while: it may be stopped or cut off, and is not lost yet."""

    worker: WorkerKey
    heard_s: float  # when it was last heard, by the loop's clock


@dataclass(frozen=True, slots=True)
class DecodeLeaves:
    """The decode worker drains: its requests are to go on elsewhere."""

    worker: WorkerKey


@dataclass(frozen=True, slots=True)
class TurnCame:
    """It is this request's turn to be placed."""


@dataclass(frozen=True, slots=True)
class MayMove:
    """It is this request's turn to leave its draining decode worker."""


@dataclass(frozen=True, slots=True)
class BrokenOff:
    """The request ends with this error: its client or the router goes away, or its time is over."""

    error: TandemError


@dataclass(frozen=True, slots=True)
class WorkersChanged:
    """A worker became ready or left: a waiting request may look again."""


@dataclass(frozen=True, slots=True)
class ChoicesEnded:
    """A token that was dealt with as it came has ended the last choice."""


@dataclass(frozen=True, slots=True)
class WaitOver:
    """The time is over in which a request waits for a worker, or for decode's word on a lost prefill."""


Event: TypeAlias = (
    TokenGiven
    | Granted
    | PrefillStarted
    | LocalPrefillStarted
    | PromptScored
    | PromptPooled
    | PrefillEnded
    | HandoffDone
    | Admitted
    | AttemptFailed
    | WorkerLost
    | WorkerSilent
    | DecodeLeaves
    | TurnCame
    | MayMove
    | BrokenOff
    | WorkersChanged
    | ChoicesEnded
    | WaitOver
)
