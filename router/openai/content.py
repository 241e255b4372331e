"""Kinds of values that hold texts and token ids: prompts, stops, biases."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from router.openai.fields import Field, Integer, Number, PromptBounds, Schema, Scope, whole
from router.openai.model_card import ModelCard
from router.openai.refusal import refuse, shown
from tandem.core.config import LimitsConfig
from tandem.core.errors import ContextLengthError

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


class TokenSet(TokenIds):
    """Token ids, each once; the order says nothing."""

    def __init__(self, most: int | None = None) -> None:
        self._most = most

    def read(self, value: Any, path: str, scope: Scope) -> tuple[int, ...]:
        token_ids = tuple(dict.fromkeys(super().read(value, path, scope)))
        if self._most is not None and len(token_ids) > self._most:
            refuse(path, f"may hold {self._most} token ids, not {len(token_ids)}")
        return token_ids


class KeptTokens:
    """How many tokens of a prompt are kept: a number, or -1 for as many as fit."""

    _SOME = Integer(1, (1 << 31) - 1)

    def read(self, value: Any, path: str, scope: Scope) -> int:
        return -1 if whole(value) == -1 else self._SOME.read(value, path, scope)

    def schema(self, limits: LimitsConfig, card: ModelCard) -> Schema:
        return {"anyOf": [{"const": -1}, self._SOME.schema(limits, card)]}


@dataclass(frozen=True)
class Texts:
    """A list of texts, none of them empty or of spaces alone."""

    most: int

    _SAYS_SOMETHING = re.compile(r"\S")

    def read(self, value: Any, path: str, _: Scope) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            refuse(path, f"must be a list of texts, not {shown(value)}")
        if len(value) > self.most:
            refuse(path, f"may hold {self.most} texts, not {len(value)}")
        if not all(map(self._SAYS_SOMETHING.search, value)):
            refuse(path, "must not hold a text of nothing but spaces")
        return tuple(value)

    def schema(self, _: LimitsConfig, __: ModelCard) -> Schema:
        text = {"type": "string", "pattern": self._SAYS_SOMETHING.pattern}
        return {"type": "array", "items": text, "maxItems": self.most}


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
    """A text or several, none of them empty: an empty one would stop everything. What one token may cost grows with
    their number and the square of their length, so both are bounded."""

    most: int = 16
    longest: int = 1024  # in characters

    def read(self, value: Any, path: str, _: Scope) -> tuple[str, ...]:
        stops = [value] if isinstance(value, str) else value
        if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
            refuse(path, f"must be a text or a list of texts, not {shown(value)}")
        if len(stops) > self.most:
            refuse(path, f"may hold {self.most} texts, not {len(stops)}")
        if not all(stops):
            refuse(path, "must not hold an empty text")
        if (length := max(map(len, stops), default=0)) > self.longest:
            refuse(path, f"may hold texts of {self.longest} characters, not {length}; give the beginning of it")
        return tuple(stops)

    def schema(self, _: LimitsConfig, __: ModelCard) -> Schema:
        text = {**_SOME_TEXT, "maxLength": self.longest}
        return {"anyOf": [text, {"type": "array", "items": text, "maxItems": self.most}]}
