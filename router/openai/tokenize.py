"""From a valid body to requests: tokenisation, and the checks that need the model."""

from __future__ import annotations

import dataclasses
import itertools
import secrets

from router.openai.content import prompt_too_long, too_long
from router.openai.model_card import ModelCard
from router.openai.refusal import refuse
from router.openai.request_fields import REASONING_SWITCHES
from router.openai.schema import ParsedRequest
from router.request.request import Request
from router.tools.formats import is_read
from tandem.core.errors import InvalidRequestError
from tandem.core.tokenizer import Tokenizer

_DEFAULT_COMPLETION_TOKENS = 16

_PROCESS_TAG = secrets.token_hex(4)
_counter = itertools.count(1)


def requests_from(
    parsed: ParsedRequest,
    *,
    tokenizer: Tokenizer,
    card: ModelCard,
    max_context: int | None,
    client_request_id: str,
    arrived_s: float,
) -> list[Request]:
    """One request for each prompt, in order.

    Raises:
        InvalidRequestError: a prompt is empty, too long or holds ids outside the vocabulary; names the field.
    """
    field = parsed.prompt_field
    _check_vocabulary(parsed, card.vocab_size)
    prompts = token_ids(parsed, tokenizer, card)
    is_chat_read = parsed.kind == "chat" and is_read(card.tool_format, parsed.tool_use)
    shown_ids = card.marker_ids if is_chat_read else frozenset()
    requests = []
    for prompt_ids in prompts:
        if not prompt_ids:
            refuse(field, "holds no token")
        max_tokens = _max_tokens(parsed, len(prompt_ids), max_context, field)
        # A new seed is drawn here and not by a worker, so that a retry elsewhere repeats it.
        seed = parsed.sampling.seed if parsed.has_seed else secrets.randbits(63)
        sampling = dataclasses.replace(parsed.sampling, max_tokens=max_tokens, seed=seed)
        requests.append(
            Request(
                # Workers remember ids, and clients reuse theirs: ours is never used twice.
                request_id=f"{client_request_id}#{_PROCESS_TAG}{next(_counter):x}",
                prompt_ids=tuple(prompt_ids),
                sampling=sampling,
                arrived_s=arrived_s,
                num_choices=parsed.num_choices,
                stop=parsed.stop,
                priority=parsed.priority,
                timeout_s=parsed.timeout_s,
                shown_ids=shown_ids,
            )
        )
    return requests


def token_ids(parsed: ParsedRequest, tokenizer: Tokenizer, card: ModelCard) -> list[list[int]]:
    """The token ids of each prompt. Raises `InvalidRequestError` where the model cannot be told of them."""
    _check_tools(parsed, card)
    _check_reasoning(parsed, tokenizer)
    prompts = (_rendered(parsed, tokenizer),) if parsed.kind == "chat" else parsed.prompts
    return [
        tokenizer.encode(prompt, add_special_tokens=parsed.add_special_tokens)
        if isinstance(prompt, str)
        else list(prompt)
        for prompt in prompts
    ]


def _rendered(parsed: ParsedRequest, tokenizer: Tokenizer) -> str:
    use = parsed.tool_use
    return tokenizer.render_chat(parsed.messages, use.tools if use.is_offered else None)


def _check_tools(parsed: ParsedRequest, card: ModelCard) -> None:
    if not parsed.tool_use.is_offered:
        return
    if not card.knows_tools:
        refuse("tools", "cannot be used with this model: its chat template knows none; leave them out")
    if card.tool_format is None:
        refuse("tools", "cannot be used with this model: how it writes calls is not known here; leave them out")


def _check_reasoning(parsed: ParsedRequest, tokenizer: Tokenizer) -> None:
    """A model without a switch for reasoning gives the same answer whatever effort is asked for."""
    if parsed.kind == "chat" and parsed.reasoning_fields and tokenizer.chat_variables & REASONING_SWITCHES:
        name = parsed.reasoning_fields[0]
        refuse(name, "is not supported yet and would change the answer of this model; leave it out")


def _check_vocabulary(parsed: ParsedRequest, vocab_size: int) -> None:
    token_ids = {
        "prompt": [i for prompt in parsed.prompts if not isinstance(prompt, str) for i in prompt],
        "stop_token_ids": parsed.sampling.stop_token_ids,
        "logit_bias": [i for i, _ in parsed.sampling.logit_bias],
    }
    for field, ids in token_ids.items():
        for token_id in ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequestError(
                    f"{field}: the token id {token_id} is outside the vocabulary of {vocab_size}", field=field
                )


def _max_tokens(parsed: ParsedRequest, num_prompt_tokens: int, max_context: int | None, field: str) -> int:
    """What the client asked for, or the default, cut to the context; an explicit wish is never cut."""
    asked = parsed.sampling.max_tokens if parsed.max_tokens_field is not None else None
    if max_context is None:
        if asked is None and parsed.kind == "chat":
            raise InvalidRequestError("set max_tokens: the model does not say how long its context is", field=field)
        return asked or _DEFAULT_COMPLETION_TOKENS
    room = max_context - num_prompt_tokens
    if room < 1:
        raise prompt_too_long(max_context, num_prompt_tokens, field)
    for wish, name in ((parsed.sampling.min_tokens, "min_tokens"), (asked or 0, parsed.max_tokens_field)):
        if wish > room:
            raise too_long(
                max_context,
                f"you requested {num_prompt_tokens + wish} tokens: {num_prompt_tokens} in {field} and {wish} by "
                f"{name}; shorten the one, or ask for at most {room}",
                name,
            )
    if asked is not None:
        return asked
    return room if parsed.kind == "chat" else min(max(_DEFAULT_COMPLETION_TOKENS, parsed.sampling.min_tokens), room)
