"""What the embedded model says, by `transformers` itself: float32, eager attention."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tandem.core.model_path import resolve_model
from tests.hosts.report import SAME
from tests.scenarios.client import Answer


@functools.cache
def _model() -> Any:
    return AutoModelForCausalLM.from_pretrained(
        resolve_model("embedded"), dtype=torch.float32, attn_implementation="eager"
    ).eval()


def expected(prompt: list[int], num_tokens: int) -> list[int]:
    """The tokens behind a prompt."""
    return _expected(tuple(prompt), num_tokens)


@functools.cache
def _expected(prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    with torch.no_grad():
        out = _model().generate(torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None)
    return list(out[0, len(prompt) :].tolist())


def assert_right_or_typed_error(answer: Answer, tokens: list[int]) -> str:
    """All tokens, or a typed error behind the first of them; what the client saw, in a word."""
    assert not answer.broken, answer.broken
    if answer.error is None:
        assert answer.done
        assert answer.token_ids == [tokens]
        return SAME
    for name in ("code", "type", "message", "request_id"):
        assert answer.error.get(name), f"{name} is missing: {answer.error}"
    assert isinstance(answer.error.get("retryable"), bool), answer.error
    assert answer.token_ids[0] == tokens[: len(answer.token_ids[0])]
    return str(answer.error["code"])
