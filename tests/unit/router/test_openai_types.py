"""Bodies and events are of the types that OpenAI's own client has for them, strictly; what else is in them is ours.

Where OpenAI's server itself sends what its types do not say, that is allowed here too: `finish_reason` is null in the
events of a completion but the last one, and the first token of an echoed prompt has no log-probability.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from tests.support.router_site import Site, frames, opened_site

MESSAGES = [{"role": "user", "content": "x"}]
LOGPROBS: dict[str, Any] = {"completion": {"logprobs": 2}, "chat": {"logprobs": True, "top_logprobs": 2}}
FIELDS: list[dict[str, Any]] = [
    {},
    {"n": 2},
    {"return_token_ids": True},
    {"stop": "c"},
    {"timeout": 20, "seed": 1, "user": "me"},
    {"echo": True},
    {"include_stop_str_in_output": True, "stop": ["c"]},
]


@pytest.fixture(scope="module")
def site(checkpoint: Path) -> Iterator[Site]:
    """One for all: what it is asked leaves nothing behind."""
    with opened_site(checkpoint) as site:
        yield site


def valid(kind: type[BaseModel], body: dict[str, Any]) -> None:
    """Strictly: no text stands for a number, and no number for a truth value."""
    kind.model_validate_json(json.dumps(as_typed(body)), strict=True)


def as_typed(body: dict[str, Any]) -> dict[str, Any]:
    """Without what OpenAI's server sends and its types do not say."""
    body = copy.deepcopy(body)
    for choice in body["choices"]:
        if body["object"] == "text_completion":
            choice["finish_reason"] = choice["finish_reason"] or "stop"
            for key in ("token_logprobs", "top_logprobs"):
                if (choice["logprobs"] or {}).get(key, [0])[:1] == [None]:
                    del choice["logprobs"][key][0]
    return body


def asked(site: Site, kind: str, **fields: Any) -> httpx.Response:
    prompt: dict[str, Any] = {"prompt": "Hallo"} if kind == "completion" else {"messages": MESSAGES}
    path = "/v1/completions" if kind == "completion" else "/v1/chat/completions"
    response = site.post(path, **prompt, max_tokens=4, **fields)
    assert response.status_code == 200, response.text
    return response


@pytest.mark.parametrize("fields", FIELDS, ids=str)
@pytest.mark.parametrize("with_logprobs", [False, True])
@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_bodies_and_events_are_of_openais_types(
    site: Site, kind: str, with_logprobs: bool, fields: dict[str, Any]
) -> None:
    fields = {**fields, **(LOGPROBS[kind] if with_logprobs else {})}
    valid(Completion if kind == "completion" else ChatCompletion, asked(site, kind, **fields).json())
    options = {"include_usage": True, "continuous_usage_stats": "n" in fields}
    events = frames(asked(site, kind, **fields, stream=True, stream_options=options))
    assert len(events) >= 4
    for event in events:
        valid(Completion if kind == "completion" else ChatCompletionChunk, event)


def test_prompt_log_probabilities_and_models_are_too(site: Site) -> None:
    valid(Completion, asked(site, "completion", prompt_logprobs=2, best_of=2).json())
    valid(ChatCompletion, asked(site, "chat", prompt_logprobs=2).json())
    with site.http() as client:
        for model in client.get("/v1/models").json()["data"]:
            Model.model_validate_json(json.dumps(model), strict=True)
            assert model["max_model_len"] == 256
