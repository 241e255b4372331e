"""What both roles check of a request before they take it in: one bad token would fail a whole batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tandem.core.errors import InvalidRequestError
from tandem.core.sampling import SamplingParams
from tandem.rpc.v1 import common_pb2 as pb
from tandem.worker.sequence import finish_reason


def check_prompt(prompt_ids: Sequence[int], vocab_size: int, max_context: int, request_id: str) -> None:
    """Raises `InvalidRequestError` for a prompt that this worker's model cannot compute."""
    if not 0 < len(prompt_ids) < max_context:
        raise InvalidRequestError(
            f"the prompt has {len(prompt_ids)} tokens, must have 1 to {max_context - 1}",
            field="prompt",
            request_id=request_id,
        )
    _check_ids(prompt_ids, vocab_size, request_id)


def check_choices(num_choices: int, most: int, request_id: str) -> None:
    """Raises `InvalidRequestError` for more choices than `limits.max_choices`."""
    if num_choices > most:
        raise InvalidRequestError(f"{num_choices} choices, at most {most} go", field="n", request_id=request_id)


def open_journals(
    journal: Iterable[pb.ChoiceJournal],
    params: SamplingParams,
    num_prompt: int,
    vocab_size: int,
    max_context: int,
    eos: frozenset[int],
    request_id: str,
) -> tuple[dict[int, list[int]], frozenset[int]]:
    """What clients have of the choices that go on, and which choices have ended.

    A choice has ended when the router says so, or when its last token ends it by the request's own rules: then
    nothing may follow it.

    Raises:
        InvalidRequestError: a token is not one of the model's.
    """
    going_on: dict[int, list[int]] = {}
    ended = set()
    for entry in journal:
        ids = list(entry.token_ids)
        if entry.finished:
            ended.add(entry.choice)
        elif ids:
            _check_ids(ids, vocab_size, request_id)
            if finish_reason(params, ids[-1], len(ids), num_prompt + len(ids), eos, max_context) is None:
                going_on[entry.choice] = ids
            else:
                ended.add(entry.choice)
    return going_on, frozenset(ended)


def _check_ids(token_ids: Sequence[int], vocab_size: int, request_id: str) -> None:
    greatest = max(token_ids)
    if greatest >= vocab_size:
        raise InvalidRequestError(
            f"token {greatest} is not of this model: it has {vocab_size}", field="prompt", request_id=request_id
        )
