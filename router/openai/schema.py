"""The bodies of `/v1/completions` and `/v1/chat/completions`: what they may hold, and what it means.

Every field falls in one of four classes: it is obeyed, here; it cannot change the answer and is accepted; it would
change the answer and is not there yet, so it is refused by name unless its value asks for nothing (both in
`router.openai.known_fields`); or nobody knows it, so it is ignored and named in the answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from router.openai.fields import Fields, shown, whole
from router.openai.known_fields import KNOWN_FIELDS, REASONING_FIELDS, STREAM_OPTIONS, Rule, is_harmless
from tandem.core.config import LimitsConfig
from tandem.core.errors import ContextLengthError, InvalidRequestError
from tandem.core.sampling import SamplingParams

MAX_STOPS = 16
MAX_SEED = (1 << 64) - 1
MAX_TIMEOUT_S = 7 * 24 * 3600.0
_MAX_INT32 = (1 << 31) - 1
_MAX_PENALTY = 100.0  # of a repetition: beyond, float32 logits overflow
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,8}")

MESSAGE_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


@dataclass(frozen=True)
class ParsedRequest:
    """A valid body, before tokenisation."""

    kind: Literal["completion", "chat"]
    model: str
    prompts: tuple[str | tuple[int, ...], ...]  # of a completion: texts or token ids
    messages: tuple[dict[str, Any], ...]  # of a chat
    sampling: SamplingParams  # `max_tokens` holds only where `max_tokens_field` names one, `seed` where `has_seed`
    has_seed: bool  # `False`: each prompt is to draw its own
    max_tokens_field: str | None  # the field that set `max_tokens`; `None`: the default is to be found
    num_choices: int
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    return_token_ids: bool
    priority: int
    timeout_s: float | None
    add_special_tokens: bool  # to the text of a prompt, by the tokenizer
    reasoning_fields: tuple[str, ...]  # those that are set; the model may have no such thing
    ignored_fields: tuple[str, ...]


@dataclass(frozen=True)
class PromptBounds:
    """What is refused before it is looked at token by token: a body may hold millions."""

    max_prompts: int
    max_context: int | None  # tokens of prompt and output together; `None`: not known


def too_long(max_context: int, why: str, field: str | None) -> ContextLengthError:
    """Clients look for these words to shorten a conversation."""
    return ContextLengthError(
        f"This model's maximum context length is {max_context} tokens. However, {why}", field=field
    )


def prompt_too_long(max_context: int, num_tokens: int, field: str) -> ContextLengthError:
    """Of a prompt that leaves no room for a token of output."""
    return too_long(max_context, f"{field} has {num_tokens} tokens, and one of output must fit; shorten it", field)


def parse_body(raw: bytes) -> dict[str, Any]:
    """The JSON object of a body. Raises `InvalidRequestError`."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidRequestError(f"the body must be a JSON object, not {shown(body)}")
    return body


def parse_completion(body: dict[str, Any], limits: LimitsConfig, bounds: PromptBounds) -> ParsedRequest:
    """Check a body of `/v1/completions`. Raises `InvalidRequestError`, naming the field."""
    fields = Fields(body)
    prompts = _prompts(fields, bounds)
    num_logprobs = fields.integer("logprobs", -1, minimum=0, maximum=limits.max_logprobs)
    max_tokens = fields.integer("max_tokens", minimum=1)
    return _common(
        fields,
        limits,
        kind="completion",
        prompts=prompts,
        messages=(),
        num_logprobs=-1 if num_logprobs is None else num_logprobs,
        max_tokens=max_tokens,
        max_tokens_field=None if max_tokens is None else "max_tokens",
    )


def parse_chat(body: dict[str, Any], limits: LimitsConfig, _: PromptBounds) -> ParsedRequest:
    """Check a body of `/v1/chat/completions`. Raises `InvalidRequestError`, naming the field."""
    fields = Fields(body)
    messages = _messages(fields)
    wants_logprobs = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", minimum=0, maximum=limits.max_logprobs)
    if top is not None and not wants_logprobs:
        raise fields.error("top_logprobs", "needs logprobs to be true")
    old, new = fields.integer("max_tokens", minimum=1), fields.integer("max_completion_tokens", minimum=1)
    name = "max_completion_tokens" if new is not None else "max_tokens" if old is not None else None
    return _common(
        fields,
        limits,
        kind="chat",
        prompts=(),
        messages=messages,
        num_logprobs=(top or 0) if wants_logprobs else -1,
        max_tokens=new if new is not None else old,
        max_tokens_field=name,
    )


def _common(
    fields: Fields,
    limits: LimitsConfig,
    *,
    kind: Literal["completion", "chat"],
    prompts: tuple[str | tuple[int, ...], ...],
    messages: tuple[dict[str, Any], ...],
    num_logprobs: int,
    max_tokens: int | None,
    max_tokens_field: str | None,
) -> ParsedRequest:
    model = fields.text("model")
    if not model:
        raise fields.error("model", "must name a model; GET /v1/models lists them")
    num_choices = fields.integer("n", 1, minimum=1, maximum=limits.max_choices) or 1
    stop, stream = _stop(fields), fields.boolean("stream")
    include_usage, ignored_options = _stream_options(fields, stream)
    timeout_s = fields.number("timeout", 0.0, maximum=MAX_TIMEOUT_S)
    if fields.raw("timeout") is not None and timeout_s <= 0:
        raise fields.error("timeout", f"must be above 0 seconds, not {timeout_s:g}")
    sampling = _sampling(fields, num_logprobs, max_tokens)
    priority = _priority(fields, limits)
    return_token_ids = fields.boolean("return_token_ids")
    # A chat's template writes the special tokens.
    add_special_tokens = fields.boolean("add_special_tokens", kind == "completion")
    return ParsedRequest(
        kind=kind,
        model=model,
        prompts=prompts,
        messages=messages,
        sampling=sampling,
        has_seed=fields.raw("seed") is not None,
        max_tokens_field=max_tokens_field,
        num_choices=num_choices,
        stop=stop,
        stream=stream,
        include_usage=include_usage,
        return_token_ids=return_token_ids,
        priority=priority,
        timeout_s=timeout_s or None,
        add_special_tokens=add_special_tokens,
        reasoning_fields=tuple(name for name in REASONING_FIELDS if fields.raw(name) is not None),
        ignored_fields=(*_ignored(fields, KNOWN_FIELDS), *ignored_options),
    )


def _ignored(fields: Fields, known: dict[str, Rule]) -> list[str]:
    """The full names of the fields that nobody knows; raises for one that is known and would change the answer."""
    ignored = []
    for name in fields.unknown():
        if name not in known:
            ignored.append(fields.path(name))
        elif not is_harmless(known[name], fields.raw(name)):
            raise fields.error(name, "is not supported yet and would change the answer; leave it out")
    return ignored


def _priority(fields: Fields, limits: LimitsConfig) -> int:
    priority, most_urgent = fields.integer("priority", 0, maximum=_MAX_INT32) or 0, limits.most_urgent_priority
    if priority < most_urgent:
        rule = f"must be at least {most_urgent} (limits.most_urgent_priority), not {priority}; lower is more urgent"
        raise fields.error("priority", rule)
    return priority


def _sampling(fields: Fields, num_logprobs: int, max_tokens: int | None) -> SamplingParams:
    top_k = fields.integer("top_k", 0, minimum=-1, maximum=_MAX_INT32) or 0
    top_p = fields.number("top_p", 1.0, maximum=1.0)
    if top_p <= 0:
        raise fields.error("top_p", f"must be in (0, 1], not {top_p:g}")
    repetition_penalty = fields.number("repetition_penalty", 1.0, maximum=_MAX_PENALTY)
    if repetition_penalty <= 0:
        raise fields.error("repetition_penalty", f"must be above 0, not {repetition_penalty:g}")
    seed = fields.integer("seed", 0, minimum=-(1 << 63), maximum=MAX_SEED) or 0
    min_tokens = fields.integer("min_tokens", 0, minimum=0, maximum=_MAX_INT32) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise fields.error("min_tokens", f"must not exceed max_tokens ({max_tokens}), is {min_tokens}")
    return SamplingParams(
        temperature=fields.number("temperature", 1.0, minimum=0.0, maximum=100.0),
        top_k=max(top_k, 0),  # -1 is vLLM's word for off
        top_p=top_p,
        min_p=fields.number("min_p", 0.0, minimum=0.0, maximum=1.0),
        repetition_penalty=repetition_penalty,
        presence_penalty=fields.number("presence_penalty", 0.0, minimum=-2.0, maximum=2.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0, minimum=-2.0, maximum=2.0),
        logit_bias=_logit_bias(fields),
        seed=seed & MAX_SEED,
        stop_token_ids=_token_ids(fields, "stop_token_ids", fields.raw("stop_token_ids") or []),
        max_tokens=max(max_tokens or 1, min_tokens, 1),
        min_tokens=min_tokens,
        ignore_eos=fields.boolean("ignore_eos"),
        num_logprobs=num_logprobs,
    )


def _logit_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    biases = fields.object("logit_bias") or {}
    nested = Fields(biases, "logit_bias")
    for key in biases:
        if not _TOKEN_ID.fullmatch(key):  # as ids are written: no two keys are the same id
            raise InvalidRequestError(f"logit_bias: {shown(key)} is not a token id", field="logit_bias")
    return tuple((int(key), nested.number(key, 0.0, minimum=-100.0, maximum=100.0)) for key in biases)


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.raw("stop")
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise fields.error("stop", f"must be a text or a list of texts, not {shown(value)}")
    if len(stops) > MAX_STOPS:
        raise fields.error("stop", f"may hold {MAX_STOPS} texts, not {len(stops)}")
    if not all(stops):
        raise fields.error("stop", "must not hold an empty text")
    return tuple(stops)


def _stream_options(fields: Fields, stream: bool) -> tuple[bool, list[str]]:
    options = fields.object("stream_options")
    if options is None:
        return False, []
    if not stream:
        raise fields.error("stream_options", "needs stream to be true")
    nested = Fields(options, "stream_options")
    include_usage = nested.boolean("include_usage")
    return include_usage, _ignored(nested, STREAM_OPTIONS)


# -- prompts


def _prompts(fields: Fields, bounds: PromptBounds) -> tuple[str | tuple[int, ...], ...]:
    """A text, a list of token ids, or a list of either: one prompt for each."""
    value = fields.raw("prompt")
    if value is None:
        raise fields.error("prompt", "is missing")
    if isinstance(value, str):
        prompts: list[Any] = [value]
    elif isinstance(value, list) and value and not isinstance(value[0], (str, list)):
        prompts = [value]
    elif isinstance(value, list):
        prompts = value
    else:
        raise fields.error("prompt", f"must be a text, token ids, or a list of either, not {shown(value)}")
    if not prompts or not all(prompts):
        raise fields.error("prompt", "must not be empty")
    if len(prompts) > bounds.max_prompts:
        raise fields.error("prompt", f"holds {len(prompts)} prompts; at most {bounds.max_prompts} are taken at once")
    for prompt in prompts:
        if isinstance(prompt, list) and bounds.max_context is not None and len(prompt) >= bounds.max_context:
            raise prompt_too_long(bounds.max_context, len(prompt), "prompt")
    return tuple(p if isinstance(p, str) else _token_ids(fields, "prompt", p) for p in prompts)


def _token_ids(fields: Fields, name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise fields.error(name, f"must hold token ids, not {shown(value)}")
    token_ids = [whole(token_id) for token_id in value]
    for given, token_id in zip(value, token_ids, strict=True):
        if token_id is None:
            raise fields.error(name, f"must hold token ids, not {shown(given)}")
    return tuple(token_id for token_id in token_ids if token_id is not None)


def _messages(fields: Fields) -> tuple[dict[str, Any], ...]:
    value = fields.raw("messages")
    if not isinstance(value, list) or not value:
        example = '[{"role": "user", "content": "Hello"}]'
        raise fields.error("messages", f"must be a list of at least one message, as {example}; it is {shown(value)}")
    return tuple(_message(message, f"messages[{number}]") for number, message in enumerate(value))


def _message(message: Any, path: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequestError(f"{path} must be an object, not {shown(message)}", field=path)
    fields = Fields(message, path)
    role = fields.text("role")
    if role not in MESSAGE_ROLES:
        raise fields.error("role", f"must be one of {', '.join(MESSAGE_ROLES)}, not {shown(role)}")
    for name in ("tool_calls", "function_call"):
        if fields.raw(name):
            raise fields.error(name, "is not supported yet; leave it out")
    content = fields.raw("content")
    if isinstance(content, list):
        content = "\n".join(_part(part, f"{path}.content[{n}]") for n, part in enumerate(content))
    if not isinstance(content, str):
        raise fields.error("content", f"must be a text or a list of text parts, not {shown(content)}")
    return {**message, "content": content}


def _part(part: Any, path: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise InvalidRequestError(f"{path} must be an object, not {shown(part)}", field=path)
    fields = Fields(part, path)
    if fields.text("type") != "text":
        raise fields.error("type", f"must be `text`, not {shown(fields.raw('type'))}: this model reads text alone")
    text = fields.text("text")
    if text is None:
        raise fields.error("text", "is missing")
    return text
