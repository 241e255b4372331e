"""What chats have of their own: how the prompt ends, variables of the template, reasoning; against scripted workers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.router_site import BOS, Site, frames, opened_site, write_checkpoint

USER = {"role": "user", "content": "x"}
#: Shows each message, documents, a variable, and reasoning that it opens unless it is switched off.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{{ eos_token }}"
    "{% endfor %}"
    "{% for d in documents or [] %}({{ d.title }}){% endfor %}{% if tone %}<{{ tone }}>{% endif %}"
    "{% if add_generation_prompt %}[assistant]{% if enable_thinking is not defined or enable_thinking %}<think>\n"
    "{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with opened_site(write_checkpoint(tmp_path_factory.mktemp("thinking") / "m", template=TEMPLATE)) as site:
        yield site


@pytest.fixture(autouse=True)
def _forget(thinking: Site) -> None:
    thinking.prefill.received.clear()


def says(site: Site, text: str) -> None:
    """Whatever is asked, this comes."""
    tokens = [*text.encode(), 0]
    site.prefill.script = site.decode.script = lambda prompt, choice, index: tokens[index]


def ask(site: Site, *messages: dict[str, Any], **fields: Any) -> httpx.Response:
    return site.post("/v1/chat/completions", messages=list(messages) or [USER], max_tokens=90, **fields)


def message_of(site: Site, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    response = ask(site, *messages, **fields)
    assert response.status_code == 200, response.text
    message: dict[str, Any] = response.json()["choices"][0]["message"]
    return message


def prompt_of(site: Site) -> str:
    ids = list(site.prefill.wait_for("start").prompt_ids)
    assert ids[0] == BOS
    return bytes(token if token else 36 for token in ids[1:]).decode()  # `$` ends a message


def test_the_prompt_ends_where_the_assistant_answers_or_with_the_last_message(thinking: Site) -> None:
    says(thinking, "y")
    for fields, end in (
        ({}, "[user]x$[assistant]<think>\n"),
        ({"add_generation_prompt": False}, "[user]x$"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "[user]x$[assistant]<think>\n\n</think>\n\n"),
        ({"reasoning_effort": "none"}, "[user]x$[assistant]<think>\n\n</think>\n\n"),
        ({"reasoning_effort": "low"}, "[user]x$[assistant]<think>\n"),
        ({"enable_thinking": False}, "[user]x$[assistant]<think>\n\n</think>\n\n"),
        ({"enable_thinking": True, "reasoning_effort": "none"}, "[user]x$[assistant]<think>\n"),
        ({"thinking": {"type": "disabled"}, "enable_thinking": False, "reasoning_effort": "high"},
         "[user]x$[assistant]<think>\n\n</think>\n\n"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "[user]x$[assistant]<think>\n"),
        ({"chat_template_kwargs": {"tone": "kind", "enable_thinking": False}, "reasoning_effort": "high"},
         "[user]x$<kind>[assistant]<think>\n\n</think>\n\n"),
        ({"documents": [{"title": "a"}, {"title": "b"}], "add_generation_prompt": False}, "[user]x$(a)(b)"),
    ):  # fmt: skip
        ask(thinking, **fields)
        assert prompt_of(thinking) == end
        thinking.prefill.received.clear()


def test_a_last_message_is_continued_and_echoed(thinking: Site) -> None:
    says(thinking, " and on")
    begun = {"role": "assistant", "content": "It goes on"}
    message = message_of(thinking, USER, begun, continue_final_message=True)
    assert prompt_of(thinking) == "[user]x$[assistant]It goes on"
    assert message["content"] == " and on"
    fields: dict[str, Any] = {"continue_final_message": True, "echo": True}
    assert message_of(thinking, USER, begun, **fields)["content"] == "It goes on and on"
    streamed = frames(ask(thinking, USER, begun, **fields, stream=True))
    assert "".join(f["choices"][0]["delta"].get("content", "") for f in streamed) == "It goes on and on"
    assert message_of(thinking, USER, echo=True)["content"] is None, "there is nothing of the assistant's"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"add_generation_prompt": True}}, "chat_template_kwargs.add_generation_prompt"),
        ({"chat_template": "x"}, "chat_template"),
        ({"reasoning_effort": "some"}, "reasoning_effort"),
        ({"reasoning": {"enabled": False}}, "reasoning"),
        ({"enable_thinking": False, "thinking": {"type": "enabled"}}, "enable_thinking"),
        ({"thinking": {"type": "perhaps"}}, "thinking.type"),
        ({"stream_reasoning": False}, "stream_reasoning"),
        ({"documents": ["text"]}, "documents"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_name(thinking: Site, fields: dict[str, Any], named: str) -> None:
    response = ask(thinking, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == named


def test_variables_that_the_template_does_not_read_are_named(thinking: Site) -> None:
    says(thinking, "y")
    response = ask(thinking, chat_template_kwargs={"self": 1, "zebra": 2, "tone": "kind"}, apple=1)
    assert sorted(response.headers["tandem-ignored-fields"].split(", ")) == [
        "apple", "chat_template_kwargs.self", "chat_template_kwargs.zebra"
    ]  # fmt: skip


def test_documents_that_nobody_would_read_are_refused(site: Site) -> None:
    response = ask(site, documents=[{"title": "a"}])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "documents")


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("hm, so</think>\n\nHello", "hm, so", "\n\nHello"),
        ("hm, so", "hm, so", None),
        ("</think>Hello", None, "Hello"),
    ],
)
def test_reasoning_is_apart_and_has_both_names(thinking: Site, text: str, reasoning: Any, content: Any) -> None:
    says(thinking, text)
    message = message_of(thinking)
    assert (message.get("reasoning"), message.get("reasoning_content")) == (reasoning, reasoning)
    assert message["content"] == content
    deltas = [f["choices"][0]["delta"] for f in frames(ask(thinking, stream=True))]
    for name, whole in (("reasoning", reasoning), ("reasoning_content", reasoning), ("content", content)):
        assert "".join(delta.get(name, "") for delta in deltas) == (whole or "")
    assert deltas[0] == {"role": "assistant", "content": ""}


def test_reasoning_may_be_left_out_or_left_where_it_is(thinking: Site) -> None:
    says(thinking, "hm</think>Hello")
    assert message_of(thinking, include_reasoning=False) == {"role": "assistant", "content": "Hello", "refusal": None}
    deltas = [f["choices"][0]["delta"] for f in frames(ask(thinking, include_reasoning=False, stream=True))]
    assert "".join(delta.get("content", "") for delta in deltas) == "Hello"
    assert not any("reasoning" in delta for delta in deltas)
    assert message_of(thinking, separate_reasoning=False)["content"] == "hm</think>Hello"


def test_without_a_switch_in_the_prompt_nothing_is_reasoning(thinking: Site) -> None:
    says(thinking, "Hello")
    message = message_of(thinking, reasoning_effort="none")
    assert message == {"role": "assistant", "content": "Hello", "refusal": None}


def test_reasoning_is_apart_in_other_apis_too(thinking: Site) -> None:
    says(thinking, "hm</think>Hello")
    response = thinking.post("/v1/responses", input="x", max_output_tokens=90).json()
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
    assert response["output"][1]["content"][0]["text"] == "Hello"
    message = thinking.post("/v1/messages", messages=[USER], max_tokens=90).json()
    assert [block["type"] for block in message["content"]] == ["thinking", "text"]
    assert (message["content"][0]["thinking"], message["content"][1]["text"]) == ("hm", "Hello")


@pytest.mark.processes
def test_an_output_with_a_form_is_all_content(thinking: Site) -> None:
    """The grammar holds from the first token on, though the prompt ends within reasoning."""
    says(thinking, "{}")
    message = message_of(thinking, response_format={"type": "json_object"})
    assert message == {"role": "assistant", "content": "{}", "refusal": None}


def test_what_an_assistant_has_thought_reaches_the_template_under_any_name(thinking: Site) -> None:
    says(thinking, "y")
    for name in ("reasoning", "reasoning_content", "thinking"):
        thought = {"role": "assistant", "content": "b", name: "hm"}
        ask(thinking, USER, thought, USER, add_generation_prompt=False)
        assert prompt_of(thinking) == "[user]x$[assistant]<think>hm</think>b$[user]x$"
        thinking.prefill.received.clear()


@pytest.mark.long
def test_a_switch_of_reasoning_that_the_model_lacks_is_refused_or_named(site: Site, tmp_path: Path) -> None:
    for wanted in ({"enable_thinking": True}, {"thinking": {"type": "enabled"}}):
        refused = ask(site, **wanted)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(wanted)))
    assert "tandem-ignored-fields" not in ask(site, enable_thinking=False).headers, "it thinks in no case"
    always = write_checkpoint(tmp_path / "toy", template="{{ messages[0].content }}<think>{# </think> #}")
    with opened_site(always) as thinking:
        assert ask(thinking, enable_thinking=False).headers["tandem-ignored-fields"] == "enable_thinking"


@pytest.mark.long
@pytest.mark.parametrize("effort", [None, "high"])
@pytest.mark.parametrize("wanted", [True, False])
def test_a_template_that_knows_efforts_alone_is_told_of_one(tmp_path: Path, wanted: bool, effort: str | None) -> None:
    checkpoint = write_checkpoint(tmp_path / "toy", template="<s>{{ messages[0].content }}:{{ reasoning_effort }}")
    with opened_site(checkpoint) as site:
        ask(site, enable_thinking=wanted, **({"reasoning_effort": effort} if effort else {}))
        assert prompt_of(site) == f"x:{(effort or 'medium') if wanted else 'none'}"


def test_a_model_without_reasoning_has_no_such_fields(site: Site) -> None:
    assert message_of(site, reasoning_effort="high").keys() == {"role", "content", "refusal"}


@pytest.mark.long
def test_marks_that_are_special_tokens_part_the_text_and_are_not_in_it(tmp_path: Path) -> None:
    """As `[THINK]` is one of Mistral's models: other special tokens stay hidden."""
    template = "{{ messages[0].content }}{% if x %}[THINK][/THINK]{% endif %}"
    checkpoint = write_checkpoint(tmp_path / "m", template=template)
    path = checkpoint / "tokenizer.json"
    described = json.loads(path.read_text())
    for token_id, content in ((301, "[THINK]"), (302, "[/THINK]")):
        described["added_tokens"].append({**described["added_tokens"][0], "id": token_id, "content": content})
        described["model"]["vocab"][content] = token_id
    path.write_text(json.dumps(described))
    with opened_site(checkpoint) as site:
        tokens = [301, *b"hm", BOS, 302, *b"Hello", 0]
        site.prefill.script = site.decode.script = lambda prompt, choice, index: tokens[index]
        message = message_of(site)
        assert (message["reasoning"], message["content"]) == ("hm", "Hello")
        assert site.post(prompt="x", max_tokens=90).json()["choices"][0]["text"] == "hmHello"
