"""Small HTTP helpers that keep token ids beside texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

TIMEOUT_S = 60.0


@dataclass
class Answer:
    """One answer, whichever way it came; lists are by choice."""

    texts: list[str]
    token_ids: list[list[int]]
    finish_reasons: list[str | None]
    error: dict[str, Any] | None = None
    done: bool = True  # of a stream: `[DONE]` came
    usage: dict[str, Any] | None = field(default=None)


def complete(url: str, prompt: str | list[int], **fields: Any) -> Answer:
    """`POST /v1/completions`, whole; the test fails unless it is a 200."""
    body = {"model": "*", "prompt": prompt, "temperature": 0, "return_token_ids": True, **fields}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    data = answer.json()
    choices = data["choices"]
    return Answer(
        [c["text"] for c in choices],
        [c["token_ids"] for c in choices],
        [c["finish_reason"] for c in choices],
        usage=data["usage"],
    )


def events(url: str, prompt: str | list[int], **fields: Any) -> Iterator[dict[str, Any] | None]:
    """The events of a streamed completion as they come; `None` is `[DONE]`."""
    body = {"model": "*", "prompt": prompt, "temperature": 0, "return_token_ids": True, "stream": True, **fields}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=TIMEOUT_S) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: "):
                payload = line.removeprefix("data: ")
                yield None if payload == "[DONE]" else json.loads(payload)


def stream(url: str, prompt: str | list[int], **fields: Any) -> Answer:
    """A streamed completion, gathered."""
    num_choices = fields.get("n", 1)
    answer = Answer([""] * num_choices, [[] for _ in range(num_choices)], [None] * num_choices, done=False)
    for event in events(url, prompt, **fields):
        if event is None:
            answer.done = True
            continue
        if "error" in event:
            answer.error = event["error"]
            continue
        for choice in event["choices"]:
            index = choice["index"]
            answer.texts[index] += choice["text"]
            answer.token_ids[index] += choice.get("token_ids") or []
            answer.finish_reasons[index] = choice["finish_reason"] or answer.finish_reasons[index]
    return answer
