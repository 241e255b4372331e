"""Answers that show a lot of their prompts: they are bounded, made once, and made beside the loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from router.openai.answer_size import scored_entries
from router.openai.fields import PromptBounds
from router.openai.prompt_part import PromptPart
from router.openai.responses import Answer
from router.openai.schema import parse_completion
from tandem.core.config import LimitsConfig
from tandem.core.prompt_scores import TokenScore
from tests.support.router_site import Site, frames, in_background

MakeSite = Callable[..., Site]
MANY = 200  # tokens; with 20 alternatives for each, an answer is large


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": "x" * 51, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt": "x" * 51, "echo": True, "logprobs": 1}, "logprobs"),
        ({"prompt": "x" * 51, "echo": True, "logprobs": 1, "stream": True}, "logprobs"),
        ({"prompt": ["x" * 26, list(b"x" * 25)], "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt": "x" * 26, "n": 2, "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_more_log_probabilities_of_prompts_than_are_given_at_once_are_refused_by_name(
    make_site: MakeSite, body: dict[str, Any], field: str
) -> None:
    site = make_site({"limits.max_prompt_logprobs": 100})
    refused = site.post(**body, max_tokens=1)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == field
    assert "limits.max_prompt_logprobs" in refused.json()["error"]["message"]
    assert site.post(prompt="x" * 50, prompt_logprobs=1, max_tokens=1).status_code == 200


def test_a_long_prompt_with_all_alternatives_passes_alone_and_not_twice() -> None:
    limits, bounds = LimitsConfig(), PromptBounds(2, None)
    asked = {"model": "toy", "prompt": "x", "prompt_logprobs": limits.max_logprobs}
    assert scored_entries(parse_completion(asked, limits, bounds), 32 << 10) <= limits.max_prompt_logprobs
    assert scored_entries(parse_completion({**asked, "n": 2}, limits, bounds), 32 << 10) > limits.max_prompt_logprobs


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
def test_others_are_served_while_a_large_answer_is_made(
    make_site: MakeSite, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    name = "frames" if stream else "body"
    site, may_go_on, has_begun, make = make_site(), threading.Event(), threading.Event(), getattr(Answer, name)

    def held(self: Answer, *args: Any) -> bytes:
        has_begun.set()
        assert may_go_on.wait(10)
        made: bytes = make(self, *args)
        return made

    monkeypatch.setattr(Answer, name, held)
    asked = {"prompt": "x" * MANY, "max_tokens": 1, "echo": True, "logprobs": 20, "stream": stream}
    under_way = in_background(site, **asked)
    assert has_begun.wait(10)
    try:
        assert httpx.get(f"{site.url}/v1/models", timeout=5).status_code == 200
    finally:
        may_go_on.set()
    answer = under_way.result()
    choices = [f["choices"][0] for f in frames(answer)] if stream else answer.json()["choices"]
    assert sum(len(choice["logprobs"]["tokens"]) for choice in choices) == MANY + 1


@pytest.mark.parametrize("stream", [False, True])
def test_what_an_answer_shows_of_a_prompt_is_made_once_for_all_choices(
    site: Site, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    looked_at, best = [], PromptPart._best

    def counted(self: PromptPart, token_id: int, score: TokenScore | None, num_top: int) -> Any:
        looked_at.append(token_id)
        return best(self, token_id, score, num_top)

    monkeypatch.setattr(PromptPart, "_best", counted)
    answer = site.post(prompt="Hallo", n=4, max_tokens=2, echo=True, logprobs=1, return_token_ids=True, stream=stream)
    assert answer.status_code == 200, answer.text
    assert looked_at == list(b"Hallo")


def test_a_prompt_of_several_slices_is_whole(site: Site) -> None:
    asked = {"prompt": "x" * 250, "max_tokens": 2, "echo": True, "logprobs": 1, "prompt_logprobs": 1}
    (choice,) = site.post(**asked, return_token_ids=True).json()["choices"]
    assert choice["logprobs"]["text_offset"] == list(range(252))
    assert [len(choice["logprobs"][key]) for key in ("tokens", "token_logprobs", "top_logprobs")] == [252] * 3
    assert (len(choice["prompt_logprobs"]), choice["prompt_token_ids"]) == (250, list(b"x" * 250))
