"""ShareGPT's conversations: a JSON list of objects, each with the texts that were said in turn, without times.

    [{"id": "1", "conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi!"}]}]
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from tandem.core.tokenizer import Tokenizer

_MODELS = ("gpt", "chatgpt", "bing", "bard", "model", "assistant")
_SHOWN = 80

Count = Callable[[str], int]
"""Tokens of a text within a conversation."""


class Said(NamedTuple):
    """One text. `is_answer`: of a model."""

    text: str
    is_answer: bool


def conversations(text: str) -> Iterator[list[Said]]:
    """Raises ValueError, which names the conversation, and what is wrong with it."""
    told = json.loads(text)
    if not isinstance(told, list):
        raise ValueError(f"it must be a list of conversations, not {_shown(told)}")
    for number, conversation in enumerate(told, 1):
        try:
            yield [_said(one) for one in _turns(conversation)]
        except ValueError as error:
            raise ValueError(f"conversation {number}: {error}") from error


def _turns(conversation: Any) -> list[Any]:
    if not isinstance(conversation, dict):
        raise ValueError(f"it must be an object with `conversations`, not {_shown(conversation)}")
    turns = conversation.get("conversations") or []
    if not isinstance(turns, list):
        raise ValueError(f"`conversations` must be a list of what was said, not {_shown(turns)}")
    return turns


def _said(turn: Any) -> Said:
    if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
        raise ValueError(f'it must hold {{"from": "human", "value": "a text"}}, not {_shown(turn)}')
    return Said(turn["value"], turn.get("from") in _MODELS)


def _shown(value: Any) -> str:
    return json.dumps(value)[:_SHOWN]


def by_characters(per_token: float) -> Count:
    """A token has so many characters on average; no text that has any has none."""
    return lambda text: max(bool(text), round(len(text) / per_token))


def by_tokenizer(tokenizer: Tokenizer) -> Count:
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


def turn_lengths(said: Sequence[Said], count: Count) -> list[tuple[int, int]]:
    """Of each answer the tokens of all that was said before, and its own; answers to nothing are left out."""
    found, num_before = list[tuple[int, int]](), 0
    for text, is_answer in said:
        num = count(text)
        if is_answer and num_before and num:
            found.append((num_before, num))
        num_before += num
    return found
