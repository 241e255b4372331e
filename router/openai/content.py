"""Kinds of values that hold texts and token ids: prompts, messages, stops, biases."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from router.openai.fields import Field, NotYet, Number, Object, PromptBounds, Schema, Scope, Text, whole
from router.openai.model_card import ModelCard
from router.openai.refusal import refuse, shown
from router.openai.tool_fields import ToolCalls
from tandem.core.config import LimitsConfig
from tandem.core.errors import ContextLengthError

MESSAGE_ROLES = ("system", "developer", "user", "assistant", "tool", "function")

_TEXT: Schema = {"type": "string"}
_SOME_TEXT: Schema = {"type": "string", "minLength": 1}


def too_long(max_context: int, why: str, field: str | None) -> ContextLengthError:
    """Clients look for these words to shorten a conversation."""
    return ContextLengthError(
        f"This model's maximum context length is {max_context} tokens. However, {why}", field=field
    )


def prompt_too_long(max_context: int, num_tokens: int, field: str) -> ContextLengthError:
    """The error for a prompt that leaves no room for a token of output."""
    return too_long(max_context, f"{field} has {num_tokens} tokens, and one of output must fit; shorten it", field)


class TokenIds:
    """A list of token ids. That they are in the vocabulary is checked with the model (`router.openai.tokenize`)."""

    def read(self, value: Any, path: str, _: Scope) -> tuple[int, ...]:
        if not isinstance(value, list):
            refuse(path, f"must hold token ids, not {shown(value)}")
        if set(map(type, value)) <= {int}:  # all of them, as nearly always: twenty times as fast as one by one
            return tuple(value)
        token_ids = []
        for given in value:
            if (token_id := whole(given)) is None:
                refuse(path, f"must hold token ids, not {shown(given)}")
            token_ids.append(token_id)
        return tuple(token_ids)

    def schema(self, _: LimitsConfig, card: ModelCard) -> Schema:
        return {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": card.vocab_size - 1}}


_TOKEN_IDS = TokenIds()


class Prompt:
    """A text, a list of token ids, or a list of either: one prompt for each."""

    def read(self, value: Any, path: str, scope: Scope) -> tuple[str | tuple[int, ...], ...]:
        if value is None:
            refuse(path, "is missing")
        if isinstance(value, str):
            prompts: list[Any] = [value]
        elif isinstance(value, list) and value and not isinstance(value[0], (str, list)):
            prompts = [value]
        elif isinstance(value, list):
            prompts = value
        else:
            refuse(path, f"must be a text, token ids, or a list of either, not {shown(value)}")
        _check_bounds(prompts, path, scope.bounds)
        return tuple(p if isinstance(p, str) else _TOKEN_IDS.read(p, path, scope) for p in prompts)

    def schema(self, limits: LimitsConfig, card: ModelCard) -> Schema:
        ids = {**_TOKEN_IDS.schema(limits, card), "minItems": 1}
        several = {"type": "array", "items": {"anyOf": [_SOME_TEXT, ids]}, "minItems": 1}
        return {"anyOf": [_SOME_TEXT, ids, several]}


def _check_bounds(prompts: list[Any], path: str, bounds: PromptBounds) -> None:
    if not prompts or not all(prompts):
        refuse(path, "must not be empty")
    if len(prompts) > bounds.max_prompts:
        refuse(path, f"holds {len(prompts)} prompts; at most {bounds.max_prompts} are taken at once")
    for prompt in prompts:
        if isinstance(prompt, list) and bounds.max_context is not None and len(prompt) >= bounds.max_context:
            raise prompt_too_long(bounds.max_context, len(prompt), path)


class LogitBias:
    """A bias for each token id. Keys have no leading zero, so no two are the same id."""

    _TOKEN_ID = re.compile("^(0|[1-9][0-9]{0,8})$")
    _BIAS = Number(-100, 100)

    def read(self, value: Any, path: str, scope: Scope) -> tuple[tuple[int, float], ...]:
        if not isinstance(value, dict):
            refuse(path, f"must be an object, not {shown(value)}")
        for key in value:
            if not self._TOKEN_ID.fullmatch(key):
                refuse(path, f"must have token ids as keys, not {shown(key)}")
        return tuple(
            (int(key), 0.0 if bias is None else self._BIAS.read(bias, f"{path}.{key}", scope))
            for key, bias in value.items()
        )

    def schema(self, limits: LimitsConfig, card: ModelCard) -> Schema:
        return {
            "type": "object",
            "propertyNames": {"pattern": self._TOKEN_ID.pattern, "description": "A token id."},
            "additionalProperties": Field("", self._BIAS).schema(limits, card),
        }


@dataclass(frozen=True)
class Stops:
    """A text or several, none of them empty: an empty one would stop everything."""

    most: int

    def read(self, value: Any, path: str, _: Scope) -> tuple[str, ...]:
        stops = [value] if isinstance(value, str) else value
        if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
            refuse(path, f"must be a text or a list of texts, not {shown(value)}")
        if len(stops) > self.most:
            refuse(path, f"may hold {self.most} texts, not {len(stops)}")
        if not all(stops):
            refuse(path, "must not hold an empty text")
        return tuple(stops)

    def schema(self, _: LimitsConfig, __: ModelCard) -> Schema:
        return {"anyOf": [_SOME_TEXT, {"type": "array", "items": _SOME_TEXT, "maxItems": self.most}]}


# -- messages


class _Role:
    """The tokenizer knows which of these roles the model's chat template refuses."""

    def read(self, value: Any, path: str, _: Scope) -> str:
        if value not in MESSAGE_ROLES:
            refuse(path, f"must be one of {', '.join(MESSAGE_ROLES)}, not {shown(value)}")
        return str(value)

    def schema(self, _: LimitsConfig, card: ModelCard) -> Schema:
        return {"enum": [role for role in MESSAGE_ROLES if role not in card.refused_roles]}


class _PartType:
    def read(self, value: Any, path: str, _: Scope) -> str:
        if value != "text":
            refuse(path, f"must be `text`, not {shown(value)}: this model reads text alone")
        return "text"

    def schema(self, _: LimitsConfig, __: ModelCard) -> Schema:
        return {"const": "text"}


class _Content:
    """A text, or a list of text parts, which become one."""

    _PART = Object(
        [Field("type", _PartType(), is_required=True), Field("text", Text(), is_required=True)], is_open=True
    )

    def read(self, value: Any, path: str, scope: Scope) -> str:
        if isinstance(value, list):
            return "\n".join(
                part if isinstance(part, str) else self._PART.read(part, f"{path}[{number}]", scope)["text"]
                for number, part in enumerate(value)
            )
        if not isinstance(value, str):
            refuse(path, f"must be a text or a list of text parts, not {shown(value)}")
        return value

    def schema(self, limits: LimitsConfig, card: ModelCard) -> Schema:
        part = {"anyOf": [_TEXT, self._PART.schema(limits, card)]}
        return {"anyOf": [_TEXT, {"type": "array", "items": part}]}


class _Message:
    """A message with content, or with calls of tools, or both.

    The chat template gets all other fields of a message as they are.
    """

    _FIELDS = Object(
        [
            Field("role", _Role(), is_required=True),
            Field("content", _Content()),
            Field("tool_calls", ToolCalls()),
            Field("function_call", NotYet()),
        ],
        is_open=True,
    )

    def read(self, value: Any, path: str, scope: Scope) -> dict[str, Any]:
        message = self._FIELDS.read(value, path, scope)
        if message.get("content") is None:
            if not message.get("tool_calls"):
                refuse(f"{path}.content", "is missing")
            message["content"] = ""  # templates join it with other text
        return message

    def schema(self, limits: LimitsConfig, card: ModelCard) -> Schema:
        has_content = {"required": ["content"], "properties": {"content": {"not": {"type": "null"}}}}
        calls = {"required": ["tool_calls"], "properties": {"tool_calls": {"type": "array", "minItems": 1}}}
        return {**self._FIELDS.schema(limits, card), "anyOf": [has_content, calls]}


MESSAGE = _Message()


class Messages:
    def read(self, value: Any, path: str, scope: Scope) -> tuple[dict[str, Any], ...]:
        if not isinstance(value, list) or not value:
            example = '[{"role": "user", "content": "Hello"}]'
            refuse(path, f"must be a list of at least one message, as {example}; it is {shown(value)}")
        return tuple(MESSAGE.read(message, f"{path}[{number}]", scope) for number, message in enumerate(value))

    def schema(self, limits: LimitsConfig, card: ModelCard) -> Schema:
        return {"type": "array", "minItems": 1, "items": MESSAGE.schema(limits, card)}
