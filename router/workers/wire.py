"""Where the wire contract meets the router's own words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from router.request import events
from router.request.journal import Journal
from router.request.prompt_scores import PromptScores
from router.request.request import Request, TokenGiven
from tandem.core.identity import WorkerKey
from tandem.core.prompt_scores import TokenScore
from tandem.rpc.convert import error_from_proto, sampling_to_proto
from tandem.rpc.v1 import common_pb2, decode_pb2, prefill_pb2

_FINISH_REASONS = {
    common_pb2.FINISH_REASON_UNSPECIFIED: None,
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
}


def reserve(
    request: Request,
    journal: Journal,
    *,
    age_s: float,
    slack_s: float,
    max_local_tokens: int,
    unpaced: bool = False,
) -> decode_pb2.DecodeCommand:
    """Ask decode for pages; it may compute up to `max_local_tokens` of the prompt by itself instead: paced in a first
    attempt, unless it is `unpaced`."""
    reserve = decode_pb2.Reserve(
        **_spec(request, journal, age_s, slack_s),
        max_local_tokens=max_local_tokens,
        unpaced=unpaced,
        tpot_s=_tpot_s(request),
    )
    return decode_pb2.DecodeCommand(reserve=reserve)


def _tpot_s(request: Request) -> float:
    """0: nobody says. For what runs in the background no prompt gives way."""
    return 0.0 if request.targets is None or request.is_background else request.targets.tpot_beside_prompts_s


def start_prefill(
    request: Request, journal: Journal, decode: common_pb2.WorkerInfo | None, *, age_s: float, slack_s: float
) -> prefill_pb2.PrefillCommand:
    """`decode`: where the pages go; `None`: the prompt is pooled."""
    start = prefill_pb2.StartPrefill(**_spec(request, journal, age_s, slack_s), decode=decode, pools=request.pools)
    return prefill_pb2.PrefillCommand(start=start)


def _spec(request: Request, journal: Journal, age_s: float, slack_s: float) -> dict[str, Any]:
    """What both roles are told of an attempt, alike; `tandem.worker.wire.spec_from_proto` reads it."""
    return {
        "request_id": request.request_id,
        "attempt": journal.attempt,
        "priority": request.priority,
        "prompt_ids": request.prompt_ids,
        "sampling": sampling_to_proto(request.sampling),
        "num_choices": request.num_choices,
        "journal": _journal_to_proto(journal),
        "age_s": age_s,
        "slack_s": slack_s,
        "scoring": _scoring_to_proto(journal.prompt_scores),
        "cache_salt": request.cache_salt,
    }


def attach_grant(request_id: str, granted: events.Granted) -> prefill_pb2.PrefillCommand:
    attach = prefill_pb2.AttachGrant(request_id=request_id, attempt=granted.attempt, grant=granted.grant)
    return prefill_pb2.PrefillCommand(attach=attach)


def end_choice(request_id: str, attempt: int, choice: int) -> decode_pb2.DecodeCommand:
    """Nobody wants more of this choice of several."""
    ended = decode_pb2.EndChoice(request_id=request_id, attempt=attempt, choice=choice)
    return decode_pb2.DecodeCommand(end_choice=ended)


def meet(decode: Iterable[common_pb2.WorkerInfo]) -> prefill_pb2.PrefillCommand:
    """Have prefill connect with these before a request needs them."""
    return prefill_pb2.PrefillCommand(meet=prefill_pb2.Meet(decode=decode))


def release(request_id: str) -> prefill_pb2.PrefillCommand:
    return prefill_pb2.PrefillCommand(release=prefill_pb2.Release(request_id=request_id))


def _journal_to_proto(journal: Journal) -> Iterable[common_pb2.ChoiceJournal]:
    """What the client has; choices without a token are left out."""
    return [
        common_pb2.ChoiceJournal(choice=number, token_ids=choice.token_ids, finished=choice.is_finished)
        for number, choice in enumerate(journal.choices)
        if choice.token_ids
    ]


def _scoring_to_proto(scores: PromptScores | None) -> common_pb2.PromptScoring | None:
    """What is left to tell of the prompt."""
    if scores is None:
        return None
    return common_pb2.PromptScoring(num_top=scores.num_top, num_known=len(scores.tokens))


def token_from_proto(token: common_pb2.Token) -> TokenGiven:
    return TokenGiven(
        token.attempt,
        token.choice,
        token.index,
        token.token_id,
        _FINISH_REASONS[token.finish_reason],
        token.logprob,
        tuple([(top.token_id, top.logprob) for top in token.top_logprobs]) if token.top_logprobs else (),
    )


def _score_from_proto(token: common_pb2.TokenScore) -> TokenScore:
    top = tuple((top.token_id, top.logprob) for top in token.top_logprobs)
    return TokenScore(token.logprob, token.rank, top)


def event_from_proto(message: Any, worker: WorkerKey) -> events.Event | None:
    """What a worker says of a request, other than its tokens; `None` where its message concerns none."""
    match message:
        case decode_pb2.Grant():
            return events.Granted(message.attempt, message)
        case decode_pb2.Admitted():
            return events.Admitted(message.attempt)
        case decode_pb2.ComputesHere():
            return events.LocalPrefillStarted(message.attempt, message.num_cached_tokens)
        case prefill_pb2.PrefillStarted():
            return events.PrefillStarted(message.attempt, message.num_cached_tokens)
        case prefill_pb2.HandoffDone():
            return events.HandoffDone(message.attempt)
        case prefill_pb2.PrefillEnded():
            return events.PrefillEnded(message.attempt)
        case common_pb2.PromptScored():
            return events.PromptScored(message.attempt, message.first, tuple(map(_score_from_proto, message.tokens)))
        case prefill_pb2.PromptPooled():
            return events.PromptPooled(message.attempt, tuple(message.values))
        case common_pb2.AttemptFailed():
            return events.AttemptFailed(message.attempt, worker, error_from_proto(message.error))
    return None
