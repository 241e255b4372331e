"""From the bodies of `/v1/messages` and `/v1/messages/count_tokens` to what they ask for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from router.messages.answer import Message
from router.messages.fields import COUNT, MESSAGE
from router.openai.endpoint import Call
from router.openai.fields import PromptBounds, Scope
from router.openai.refusal import refuse
from router.openai.rows import Rows
from router.openai.schema import ParsedRequest, check_min_tokens, form_of, session_of, thinking_of
from router.openai.tool_fields import Chosen, use_of
from tandem.core.chat_template import ChatOptions
from tandem.core.config import LimitsConfig
from tandem.core.sampling import SamplingParams

_MESSAGE, _COUNT = Rows(MESSAGE), Rows(COUNT)


def read_message(body: dict[str, Any], limits: LimitsConfig, bounds: PromptBounds) -> Call:
    """What the body of `/v1/messages` asks for."""
    parsed = _parsed(_MESSAGE, body, limits, bounds, "max_tokens")
    return Call(parsed, partial(Message, parsed.stop))


def read_count(body: dict[str, Any], limits: LimitsConfig, bounds: PromptBounds) -> ParsedRequest:
    """The prompt whose tokens the body of `/v1/messages/count_tokens` wants counted."""
    return _parsed(_COUNT, body, limits, bounds, None)


def _parsed(
    rows: Rows, body: dict[str, Any], limits: LimitsConfig, bounds: PromptBounds, max_tokens_field: str | None
) -> ParsedRequest:
    scope = Scope(limits, bounds, [])
    given, values = rows.read(body, scope)
    (chosen, may_be_parallel), sampling = values.get("tool_choice", (Chosen("auto"), True)), rows.sampling(values)
    max_tokens = values.get("max_tokens", 1)
    check_min_tokens(sampling.get("min_tokens", 0), max_tokens, "max_tokens")
    others = {"stream": False, "priority": 0, **rows.others(values)}
    system = values.get("system")
    others["messages"] = (*([{"role": "system", "content": system}] if system else []), *others["messages"])
    grammar = form_of("output_config.format", values.get("output_config", {}).get("format"), values)
    return ParsedRequest(
        chat=_chat_options(others["messages"]),
        kind="chat",
        prompt_field="messages",
        sampling=SamplingParams(max_tokens=max_tokens, grammar=grammar.text if grammar is not None else "", **sampling),
        grammar=grammar,
        has_seed="seed" in given,
        max_tokens_field=max_tokens_field,
        include_usage=True,
        session=given.get("metadata", {}).get("user_id") or session_of(given),
        reasoning_effort=values.get("output_config", {}).get("effort"),
        **thinking_of(values),
        ignored_fields=tuple(scope.ignored),
        tool_use=use_of(values.get("tools", ()), chosen, may_be_parallel=may_be_parallel),
        **others,
    )


def _chat_options(messages: Sequence[dict[str, Any]]) -> ChatOptions:
    """What the assistant has begun to say is continued."""
    if messages[-1]["role"] != "assistant":
        return ChatOptions()
    if "tool_calls" in messages[-1]:
        refuse("messages", "must not end with a tool_use: its tool_result has to follow")
    return ChatOptions(add_generation_prompt=False, continue_final_message=True)
