"""What both roles check of a request before they take it in: one bad token would fail a whole batch. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tandem.core.errors import InvalidRequestError
from tandem.worker.request import AttemptSpec, RequestLimits
from tandem.worker.sequence import finish_reason


def validate(spec: AttemptSpec, limits: RequestLimits) -> None:
    """Raises `InvalidRequestError` for a prompt that this worker's model cannot compute, for too many choices, and for
    journals that are not of one choice each."""
    request_id, num_tokens = spec.key.request_id, len(spec.prompt_ids)
    if spec.pools != (limits.pooling is not None):
        does, asked = ("pools", "generates") if limits.pooling is not None else ("generates", "pools")
        raise InvalidRequestError(f"this worker's model {does}; the request {asked}", request_id=request_id)
    most = limits.max_context if spec.pools else limits.max_context - 1  # else a token of output must fit
    if not 0 < num_tokens <= most:
        raise InvalidRequestError(
            f"the prompt has {num_tokens} tokens, must have 1 to {most}",
            field="prompt",
            request_id=request_id,
        )
    _check_ids(spec.prompt_ids, limits.vocab_size, request_id)
    if spec.params.grammar and spec.params.ignore_eos:
        raise InvalidRequestError("nothing would end an output by a grammar", field="ignore_eos", request_id=request_id)
    if spec.num_choices > limits.max_choices:
        raise InvalidRequestError(
            f"{spec.num_choices} choices, at most {limits.max_choices} go", field="n", request_id=request_id
        )
    choices = [entry.choice for entry in spec.journal]
    if len(set(choices)) < len(choices) or not all(0 <= choice < spec.num_choices for choice in choices):
        raise InvalidRequestError(
            f"journals of choices {choices}, of {spec.num_choices} choices", field="n", request_id=request_id
        )


def open_journals(spec: AttemptSpec, limits: RequestLimits) -> tuple[dict[int, list[int]], frozenset[int]]:
    """What clients have of the choices that go on, and which choices have ended.

    A choice has ended when the router says so, or when its last token ends it by the request's own rules: then
    nothing may follow it.

    Raises:
        InvalidRequestError: a token is not one of the model's.
    """
    going_on: dict[int, list[int]] = {}
    ended = set()
    for entry in spec.journal:
        ids = list(entry.token_ids)
        if entry.finished:
            ended.add(entry.choice)
        elif ids:
            _check_ids(ids, limits.vocab_size, spec.key.request_id)
            num_tokens = len(spec.prompt_ids) + len(ids)
            if finish_reason(spec.params, ids[-1], len(ids), num_tokens, limits.eos, limits.max_context) is None:
                going_on[entry.choice] = ids
            else:
                ended.add(entry.choice)
    return going_on, frozenset(ended)


def _check_ids(token_ids: Sequence[int], vocab_size: int, request_id: str) -> None:
    greatest = int(np.asarray(token_ids).max())
    if greatest >= vocab_size:
        raise InvalidRequestError(
            f"token {greatest} is not of this model: it has {vocab_size}", field="prompt", request_id=request_id
        )
