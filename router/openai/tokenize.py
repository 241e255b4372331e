"""From a valid body to requests: tokenisation, and the checks that need the model."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from router.openai.content import prompt_too_long, too_long
from router.openai.model_card import ModelCard
from router.openai.reasoning import marks_of
from router.openai.refusal import refuse
from router.openai.request_fields import REASONING_SWITCHES
from router.openai.schema import ParsedRequest, TextPair
from router.request.request import Request
from router.tools.formats import is_read
from tandem.core.chat_template import ChatOptions
from tandem.core.errors import InvalidRequestError
from tandem.core.tokenizer import Tokenizer

_DEFAULT_COMPLETION_TOKENS = 16
_MAX_BAD_TOKENS = 20_000

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
    _check_spaces(parsed, tokenizer)
    bad_words = _bad_words(parsed, tokenizer)
    prompts = _prompts(parsed, tokenizer, card)
    shown_ids = _shown_ids(parsed, tokenizer, card)
    requests = []
    for text, given_ids in prompts:
        prompt_ids = _kept(given_ids, parsed, max_context)
        if not prompt_ids:
            refuse(field, "holds no token")
        max_tokens = _max_tokens(parsed, len(prompt_ids), max_context, field)
        # A new seed is drawn here and not by a worker, so that a retry elsewhere repeats it.
        seed = parsed.sampling.seed if parsed.has_seed else secrets.randbits(63)
        sampling = replace(parsed.sampling, max_tokens=max_tokens, seed=seed, bad_words=bad_words)
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
                num_prompt_logprobs=parsed.num_scored,
                gives_output=parsed.gives_output,
                cache_salt=parsed.cache_salt,
                asks_for_salt=bool(parsed.cache_salt),
                pools=parsed.pools,
                session=parsed.session,
                shows_stop=parsed.shows_stop,
                echoed_text=_echoed(parsed, text if prompt_ids is given_ids else None, prompt_ids, tokenizer),
            )
        )
    return requests


def token_ids(parsed: ParsedRequest, tokenizer: Tokenizer, card: ModelCard) -> list[list[int]]:
    """The token ids of each prompt. Raises `InvalidRequestError` where the model cannot be told of them."""
    return [ids for _, ids in _prompts(parsed, tokenizer, card)]


def _prompts(parsed: ParsedRequest, tokenizer: Tokenizer, card: ModelCard) -> list[tuple[str | None, list[int]]]:
    """Text and token ids of each prompt; a prompt that came as ids has no text."""
    _check_tools(parsed, card)
    _check_reasoning(parsed, tokenizer)
    check_documents(parsed.chat, tokenizer)
    prompts = (_rendered(parsed, tokenizer),) if parsed.kind == "chat" else parsed.prompts
    return [_encoded(prompt, parsed, tokenizer) for prompt in prompts]


def _encoded(
    prompt: str | tuple[int, ...] | TextPair, parsed: ParsedRequest, tokenizer: Tokenizer
) -> tuple[str | None, list[int]]:
    match prompt:
        case str():
            return prompt, tokenizer.encode(prompt, add_special_tokens=parsed.add_special_tokens)
        case TextPair(first, second):
            return None, tokenizer.encode(first, second, add_special_tokens=parsed.add_special_tokens)
    return None, list(prompt)


def _rendered(parsed: ParsedRequest, tokenizer: Tokenizer) -> str:
    use = parsed.tool_use
    options = replace(parsed.chat, variables={**_reasoning(parsed, tokenizer), **parsed.chat.variables})
    return tokenizer.render_chat(parsed.messages, use.tools if use.is_offered else None, options)


def _shown_ids(parsed: ParsedRequest, tokenizer: Tokenizer, card: ModelCard) -> frozenset[int]:
    """Special tokens that are part of the text: by some of them it is known what is a call, and what is reasoning."""
    if not parsed.hides_special_tokens:
        return tokenizer.special_ids
    if parsed.kind != "chat":
        return frozenset()
    of_calls = frozenset(card.markers.values()) if is_read(card.tool_format, parsed.tool_use) else frozenset()
    return of_calls | frozenset(tokenizer.special_ids_of(marks_of(tokenizer) or ()).values())


def _kept(prompt_ids: list[int], parsed: ParsedRequest, max_context: int | None) -> list[int]:
    """The end of a prompt that `truncate_prompt_tokens` leaves."""
    num_kept = parsed.truncate_prompt_tokens
    if num_kept == -1:
        wished = parsed.sampling.max_tokens if parsed.max_tokens_field is not None else 1
        num_kept = max(1, max_context - wished) if max_context is not None else None
    return prompt_ids if num_kept is None or len(prompt_ids) <= num_kept else prompt_ids[-num_kept:]


def _echoed(parsed: ParsedRequest, text: str | None, prompt_ids: list[int], tokenizer: Tokenizer) -> str:
    """What stands before each choice's text; `text`: of a prompt that came as text, and whole."""
    if not parsed.echo:
        return ""
    if parsed.kind == "chat":
        last = parsed.messages[-1]
        return str(last["content"]) if last["role"] == "assistant" else ""
    return text if text is not None else tokenizer.decode(prompt_ids, skip_special_tokens=parsed.hides_special_tokens)


def _bad_words(parsed: ParsedRequest, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The token ids of each bad word at the beginning of a text, and after a space where that makes another token."""
    found = []
    num_tokens = 0
    for word in dict.fromkeys(parsed.bad_words):
        plain, spaced = (tokenizer.encode(f"{gap}{word.lstrip()}", add_special_tokens=False) for gap in ("", " "))
        found.append(tuple(plain))
        if len(spaced) == len(plain) and spaced[:1] != plain[:1]:
            found.append(tuple(spaced))
        num_tokens += len(plain) + len(spaced)
        if num_tokens > _MAX_BAD_TOKENS:
            refuse("bad_words", f"may have {_MAX_BAD_TOKENS} tokens, with a space before each word and without")
    return tuple(word for word in found if word)


def _check_spaces(parsed: ParsedRequest, tokenizer: Tokenizer) -> None:
    """A text that is the sum of its tokens' bytes has no spaces of the tokenizer's own."""
    if not (parsed.has_spaces_between or parsed.hides_special_tokens or tokenizer.is_byte_exact):
        refuse("spaces_between_special_tokens", "must be true: this model's tokenizer puts spaces between tokens")


def _check_tools(parsed: ParsedRequest, card: ModelCard) -> None:
    if not parsed.tool_use.is_offered:
        return
    if not card.knows_tools:
        refuse("tools", "cannot be used with this model: its chat template knows none; leave them out")
    if card.tool_format is None:
        refuse("tools", "cannot be used with this model: how it writes calls is not known here; leave them out")


def _check_reasoning(parsed: ParsedRequest, tokenizer: Tokenizer) -> None:
    """A model without a switch for reasoning gives the same answer whatever effort is asked for."""
    if parsed.thinking and not (marks_of(tokenizer) or tokenizer.chat_variables & REASONING_SWITCHES):
        refuse(parsed.thinking_field, "cannot be had of this model: its chat template knows no reasoning; leave it out")
    if parsed.kind == "chat" and parsed.reasoning_fields and tokenizer.chat_variables & REASONING_SWITCHES:
        name = parsed.reasoning_fields[0]
        refuse(name, "is not supported and would change the answer of this model; use reasoning_effort")


def _reasoning(parsed: ParsedRequest, tokenizer: Tokenizer) -> dict[str, Any]:
    """The variables by which the chat template is told of reasoning: whether there is to be some, and how much."""
    known = tokenizer.chat_variables & REASONING_SWITCHES
    switches, wanted, effort = known - {"reasoning_effort"}, parsed.thinking, parsed.reasoning_effort
    if wanted is None and effort is not None and "reasoning_effort" not in known:
        wanted = effort != "none"
    elif wanted is not None and not switches:
        effort = (effort or "medium") if wanted else "none"
    variables: dict[str, Any] = dict.fromkeys(switches, wanted) if wanted is not None else {}
    if effort is not None and "reasoning_effort" in known:
        variables["reasoning_effort"] = effort
    return variables


def check_documents(options: ChatOptions, tokenizer: Tokenizer) -> None:
    """Refuse documents that nobody would read."""
    if options.documents and "documents" not in tokenizer.chat_variables:
        refuse("documents", "are not read by this model's chat template; put their text into a message")


def unread_variables(parsed: ParsedRequest, tokenizer: Tokenizer) -> tuple[str, ...]:
    """What the template does not read, and so changes nothing: of `chat_template_kwargs`, and a switch of reasoning."""
    unread = [f"chat_template_kwargs.{name}" for name in parsed.chat.variables.keys() - tokenizer.chat_variables]
    if parsed.thinking is False and marks_of(tokenizer) and not tokenizer.chat_variables & REASONING_SWITCHES:
        unread.append(parsed.thinking_field)
    return tuple(unread)


def _check_vocabulary(parsed: ParsedRequest, vocab_size: int) -> None:
    token_ids = {
        parsed.prompt_field: [i for prompt in parsed.prompts if isinstance(prompt, tuple) for i in prompt],
        "stop_token_ids": parsed.sampling.stop_token_ids,
        "allowed_token_ids": parsed.sampling.allowed_token_ids,
        "logit_bias": [i for i, _ in parsed.sampling.logit_bias],
    }
    for field, ids in token_ids.items():
        check_ids(field, ids, vocab_size)


def check_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"{field}: the token id {token_id} is outside the vocabulary of {vocab_size}", field=field
            )


def _max_tokens(parsed: ParsedRequest, num_prompt_tokens: int, max_context: int | None, field: str) -> int:
    """What the client asked for, or the default, cut to the context; an explicit wish is never cut."""
    if parsed.pools:
        if max_context is not None and num_prompt_tokens > max_context:
            raise too_long(max_context, f"{field} has {num_prompt_tokens} tokens; shorten it", field)
        return 1
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
