"""The bodies of `/v1/completions` and `/v1/chat/completions`: what they hold, by the rows of
`router.openai.request_fields`, and what several fields mean together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import orjson

from router.openai.fields import Accepted, Object, PromptBounds, Scope
from router.openai.grammar import AskedGrammar
from router.openai.refusal import refuse, shown
from router.openai.request_fields import CHAT, COMPLETION
from router.openai.rows import Rows
from router.openai.tool_fields import tool_use
from router.tools.pieces import NO_TOOLS, ToolUse
from tandem.core.config import LimitsConfig
from tandem.core.errors import InvalidRequestError
from tandem.core.sampling import SamplingParams


@dataclass(frozen=True)
class ParsedRequest:
    """A valid body, before tokenisation."""

    kind: Literal["completion", "chat"]
    model: str
    sampling: SamplingParams  # `max_tokens` holds only where `max_tokens_field` names one, `seed` where `has_seed`
    has_seed: bool  # `False`: each prompt is to draw its own
    max_tokens_field: str | None  # the field that set `max_tokens`; `None`: the default is to be found
    num_choices: int
    stream: bool
    include_usage: bool
    return_token_ids: bool
    priority: int
    add_special_tokens: bool  # to the text of a prompt, by the tokenizer
    reasoning_fields: tuple[str, ...]  # those that are set; the model may have no such thing
    ignored_fields: tuple[str, ...]
    prompts: tuple[str | tuple[int, ...], ...] = ()  # of a completion: texts or token ids
    messages: tuple[dict[str, Any], ...] = ()  # of a chat
    prompt_field: str = "prompt"  # which errors name
    tool_use: ToolUse = NO_TOOLS
    stop: tuple[str, ...] = ()
    timeout_s: float | None = None
    grammar: AskedGrammar | None = None  # of the output; `sampling` has its text


def parse_body(raw: bytes) -> dict[str, Any]:
    """The JSON object of a body. Raises `InvalidRequestError`."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidRequestError(f"the body must be a JSON object, not {shown(body)}")
    return body


class _Parser:
    """From a body to what it means, for one endpoint."""

    def __init__(self, kind: Literal["completion", "chat"], rows: Object) -> None:
        self._kind = kind
        self._rows = Rows(rows)
        self._reasoning = [field.name for field in rows.fields if field.kind is Accepted.WITHOUT_REASONING]

    def parse(self, body: dict[str, Any], limits: LimitsConfig, bounds: PromptBounds) -> ParsedRequest:
        """Check a body. Raises `InvalidRequestError`, naming the field."""
        scope = Scope(limits, bounds, [])
        given, values = self._rows.read(body, scope)
        include_usage = _include_usage(values)
        grammar = _grammar(values)
        max_tokens_field = next((name for name in _MAX_TOKENS[self._kind] if name in given), None)
        return ParsedRequest(
            kind=self._kind,
            prompt_field="messages" if self._kind == "chat" else "prompt",
            sampling=self._sampling_params(values, max_tokens_field, grammar),
            grammar=grammar,
            has_seed="seed" in given,
            max_tokens_field=max_tokens_field,
            include_usage=include_usage,
            tool_use=tool_use(values) if self._kind == "chat" else NO_TOOLS,
            reasoning_fields=tuple(name for name in self._reasoning if name in given),
            ignored_fields=tuple(scope.ignored),
            **self._rows.others(values),
        )

    def _sampling_params(
        self, values: dict[str, Any], max_tokens_field: str | None, grammar: AskedGrammar | None
    ) -> SamplingParams:
        sampling = self._rows.sampling(values)
        if self._kind == "chat":
            sampling["num_logprobs"] = _chat_logprobs(values)
        sampling["grammar"] = grammar.text if grammar is not None else ""
        min_tokens, max_tokens = sampling["min_tokens"], values[max_tokens_field] if max_tokens_field else None
        if max_tokens is not None and min_tokens > max_tokens:
            refuse("min_tokens", f"must not exceed max_tokens ({max_tokens}), is {min_tokens}")
        return SamplingParams(max_tokens=max_tokens or max(min_tokens, 1), **sampling)


#: The first that is given holds.
_MAX_TOKENS = {"completion": ("max_tokens",), "chat": ("max_completion_tokens", "max_tokens")}


_GRAMMARS = ("response_format", "structured_outputs")


def _grammar(values: dict[str, Any]) -> AskedGrammar | None:
    asked = [name for name in _GRAMMARS if values.get(name) is not None]
    if len(asked) > 1:
        refuse(asked[1], f"cannot hold beside {asked[0]}; leave one of them out")
    if asked and values["ignore_eos"]:
        refuse("ignore_eos", f"cannot hold beside {asked[0]}: the output ends where its form is complete")
    return values[asked[0]] if asked else None


def _include_usage(values: dict[str, Any]) -> bool:
    if "stream_options" not in values:
        return False
    if not values["stream"]:
        refuse("stream_options", "needs stream to be true")
    return bool(values["stream_options"].get("include_usage"))


def _chat_logprobs(values: dict[str, Any]) -> int:
    if not values["logprobs"] and "top_logprobs" in values:
        refuse("top_logprobs", "needs logprobs to be true")
    return values.get("top_logprobs", 0) if values["logprobs"] else -1


parse_completion = _Parser("completion", COMPLETION).parse
parse_chat = _Parser("chat", CHAT).parse
