"""A checkpoint with a `response_template` of its own, which transformers' parser reads; against scripted workers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.router_site import Site, opened_site, write_checkpoint
from tests.support.tool_site import TOOL_TEMPLATE, WEATHER, says

TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
#: Its anchor is short: of the prompt only the end is looked at, and each character of it is a token here.
TEMPLATE: dict[str, Any] = {
    "start_anchor": "ant]",
    "fields": {
        "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json"},
        "content": {"content": "text"},
    },
}
MAX_QUEUED = 2


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("models") / "toy", context=8192, template=TOOL_TEMPLATE)
    file: Path = checkpoint / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "response_template": TEMPLATE}))
    with opened_site(checkpoint, {"scheduling.max_queued_requests": MAX_QUEUED}, max_context=8192) as site:
        yield site


def test_a_prompt_that_cannot_be_read_as_a_message_is_answered_and_keeps_no_place(site: Site) -> None:
    says(site, "Fine.")
    broken = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<tool_call>x</tool_call>"}]
    for _ in range(2 * MAX_QUEUED + 1):
        response = site.post(
            "/v1/chat/completions", messages=broken, tools=[TOOL], continue_final_message=True, stream=False
        )
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["message"]["content"] == "Fine."


def test_a_defect_while_the_answer_is_prepared_keeps_no_place(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """What may fail before there is a request to end must come before the place in the queue."""

    def fails(*_: Any) -> tuple[str, ...]:
        raise RuntimeError("a defect")

    says(site, "Fine.")
    body: Any = {"messages": [{"role": "user", "content": "Hi"}], "n": 16}  # as many places each
    with monkeypatch.context() as patch:
        patch.setattr("router.http.exchange.unread_variables", fails)
        statuses = {site.post("/v1/chat/completions", **body).status_code for _ in range(30)}
    assert statuses == {500}, "none of them is refused for the others"
    assert site.post("/v1/chat/completions", **body).status_code == 200
