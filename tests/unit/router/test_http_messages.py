"""Anthropic's Messages API, through its official client, against scripted workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent, ToolUseBlock
from anthropic.types.shared import ErrorResponse
from pydantic import TypeAdapter

from tests.support.router_site import Site, opened_site
from tests.support.tool_site import CALL, TOOL_TEMPLATE, WEATHER, opened_tool_site, prompt_of, says

TOOL: Any = {"name": "weather", "description": "Of a city.", "input_schema": WEATHER}
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
HI: Any = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def site(tool_site: Site) -> Site:
    says(tool_site, "Hello there.")
    return tool_site


@pytest.fixture
def client(site: Site) -> anthropic.Anthropic:
    return client_of(site)


def client_of(site: Site, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=site.url, api_key=key, max_retries=0, timeout=30)


def ask(site: Site, **body: Any) -> httpx.Response:
    return site.post("/v1/messages", **{"messages": HI, "max_tokens": 50, **body})


def events(site: Site, **body: Any) -> list[Any]:
    """The events of a stream but pings, each valid by the client's own type."""
    response = ask(site, stream=True, **body)
    assert response.status_code == 200, response.text
    told = []
    for frame in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] not in ("ping", "error"):
            EVENT.validate_python(event, strict=True)
        if event["type"] != "ping":
            told.append(event)
    return told


def test_a_message_is_answered_whole(site: Site) -> None:
    response = ask(site, system="Be kind.")
    answer = Message.model_validate(response.json(), strict=True)
    assert [block.model_dump(exclude_none=True) for block in answer.content] == [
        {"type": "text", "text": "Hello there."}
    ]
    assert (answer.stop_reason, answer.stop_sequence, answer.model) == ("end_turn", None, "toy")
    num_prompt = len(site.prefill.wait_for("start").prompt_ids)
    usage = answer.usage
    assert (usage.input_tokens + (usage.cache_read_input_tokens or 0), usage.output_tokens) == (num_prompt, 13)
    assert prompt_of(site) == "[system]Be kind.[user]Hi[assistant]"
    assert response.headers["request-id"] == response.headers["x-request-id"]


def test_a_stream_tells_each_step_as_anthropic_does(site: Site) -> None:
    told = events(site)
    deltas = ["content_block_delta"] * 12
    assert [event["type"] for event in told] == [
        "message_start", "content_block_start", *deltas, "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert "".join(e["delta"]["text"] for e in told if e["type"] == "content_block_delta") == "Hello there."
    assert told[0]["message"]["content"] == []
    assert told[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert told[-2]["usage"]["output_tokens"] == 13


def test_the_official_client_streams_and_gathers(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model="toy", max_tokens=50, messages=HI) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "Hello there."
    assert final.content[0].type == "text"
    assert final.content[0].text == text
    assert final.stop_reason == "end_turn"
    plain = list(client.messages.create(model="toy", max_tokens=50, messages=HI, stream=True))
    assert plain[-1].type == "message_stop"


def test_the_reason_for_the_end_is_told(site: Site, client: anthropic.Anthropic) -> None:
    cut = client.messages.create(model="toy", max_tokens=5, messages=HI)
    assert cut.stop_reason == "max_tokens"
    stopped = client.messages.create(model="toy", max_tokens=50, messages=HI, stop_sequences=["zz", "there"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "there")
    assert stopped.content[0].type == "text"
    assert stopped.content[0].text == "Hello "
    assert events(site, stop_sequences=["there"])[-2]["delta"]["stop_sequence"] == "there"


def test_a_call_of_a_tool_is_a_block(site: Site, client: anthropic.Anthropic) -> None:
    says(site, f"I look.\n{CALL}")
    answer = client.messages.create(model="toy", max_tokens=200, messages=HI, tools=[TOOL])
    text, call = answer.content
    assert answer.stop_reason == "tool_use"
    assert text.type == "text"
    assert text.text == "I look."
    assert isinstance(call, ToolUseBlock)
    assert (call.name, call.input) == ("weather", {"city": "Kyōto"})
    assert call.id.startswith("toolu_")
    assert json.dumps(WEATHER) in prompt_of(site)
    with client.messages.stream(model="toy", max_tokens=200, messages=HI, tools=[TOOL]) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["text", "tool_use"]
    assert final.content[1].type == "tool_use"
    assert final.content[1].input == {"city": "Kyōto"}
    assert final.stop_reason == "tool_use"


def test_a_number_that_python_has_not_leaves_the_answer_json(site: Site, client: anthropic.Anthropic) -> None:
    says(site, CALL.replace('"Kyōto"', "1e400"))
    response = ask(site, tools=[TOOL], max_tokens=200)
    assert '"input":{"city": 1e400}' in response.text
    assert events(site, tools=[TOOL], max_tokens=200)[2]["delta"]["partial_json"] == '{"city": 1e400}'
    call = client.messages.create(model="toy", max_tokens=200, messages=HI, tools=[TOOL]).content[0]
    assert isinstance(call, ToolUseBlock)


def test_a_client_hears_of_a_long_call_that_is_not_whole_yet(site: Site) -> None:
    long = CALL.replace("Kyōto", "x" * 300)
    says(site, long)
    response = ask(site, stream=True, tools=[TOOL], max_tokens=1000)
    assert response.text.count("event: ping") == 1 + len(long) // 64


def test_a_conversation_comes_back_as_blocks(site: Site, client: anthropic.Anthropic) -> None:
    says(site, f"I look. {CALL}")
    first = client.messages.create(model="toy", max_tokens=200, messages=HI, tools=[TOOL])
    call = first.content[1]
    assert isinstance(call, ToolUseBlock)
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "20 °C"}]}
    says(site, "It is 20 °C.")
    second = client.messages.create(
        model="toy",
        max_tokens=200,
        system=[
            {"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "kind"},
        ],
        messages=[
            *HI,
            first.to_param(),
            {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
        ],
        tools=[TOOL],
    )
    assert second.content[0].type == "text"
    assert second.content[0].text == "It is 20 °C."
    assert prompt_of(site, 2).endswith(
        '[system]Be\nkind[user]Hi[assistant]I look.<tool_call>{"name": "weather", "arguments": {"city": "Kyōto"}}'
        "</tool_call>[tool]<tool_response>20 °C</tool_response>[user]And now?[assistant]"
    )


def test_what_the_assistant_has_begun_is_continued(site: Site, client: anthropic.Anthropic) -> None:
    says(site, " and on")
    asked: Any = {"model": "toy", "messages": [*HI, {"role": "assistant", "content": "It goes"}]}
    answer = client.messages.create(**asked, max_tokens=50)
    assert prompt_of(site) == "[user]Hi[assistant]It goes"
    assert answer.content[0].type == "text"
    assert answer.content[0].text == " and on"
    counted = client.messages.count_tokens(**asked)
    assert counted.input_tokens == len(site.prefill.wait_for("start").prompt_ids)
    use = {"type": "tool_use", "id": "a", "name": "weather", "input": {}}
    with pytest.raises(anthropic.BadRequestError, match="tool_result has to follow"):
        client.messages.create(**{**asked, "messages": [*HI, {"role": "assistant", "content": [use]}]}, max_tokens=5)


def test_the_model_is_told_that_a_tool_has_failed(site: Site) -> None:
    use = {"type": "tool_use", "id": "a", "name": "weather", "input": {}}
    failed = {"type": "tool_result", "tool_use_id": "a", "content": "no such city", "is_error": True}
    talk = [*HI, {"role": "assistant", "content": [use]}]
    for number, (result, told) in enumerate(
        [(failed, "Error: no such city"), ({**failed, "content": []}, "Error"), ({**failed, "is_error": False},
         "no such city")], start=1
    ):  # fmt: skip
        ask(site, messages=[*talk, {"role": "user", "content": [result]}])
        assert prompt_of(site, number).endswith(f"[tool]<tool_response>{told}</tool_response>[assistant]")


def test_tokens_are_counted_as_they_would_be_read(site: Site, client: anthropic.Anthropic) -> None:
    asked: Any = {"model": "toy", "messages": HI, "system": "Be kind.", "tools": [TOOL]}
    counted = client.messages.count_tokens(**asked)
    MessageTokensCount.model_validate(counted.model_dump(), strict=True)
    client.messages.create(**asked, max_tokens=1)
    assert counted.input_tokens == len(site.prefill.wait_for("start").prompt_ids)
    with pytest.raises(anthropic.BadRequestError, match="messages"):
        client.messages.count_tokens(model="toy", messages=[])


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_tokens": None}, "max_tokens must be a whole number"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
         "messages[0].content[0].type must be one of text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
         "messages[0].content[0].type must be one of text, tool_result"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking cannot be had of this model"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type must be `custom`"),
        ({"container": "c"}, "container is not supported yet"),
        ({"stop_sequences": ["x" * 1025]}, "stop_sequences may hold texts of 1024 characters, not 1025"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_refused_in_anthropics_shape(site: Site, body: dict[str, Any], words: str) -> None:
    response = ask(site, **body)
    error = ErrorResponse.model_validate(response.json(), strict=True)
    assert response.status_code == 400
    assert error.error.type == "invalid_request_error"
    assert error.error.message.startswith(words)
    assert error.request_id == response.headers["request-id"]


def test_errors_have_anthropics_types(site: Site, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(model="none", max_tokens=5, messages=HI)
    assert caught.value.type == "not_found_error"
    assert caught.value.request_id is not None
    with site.http() as http:
        wrong = http.get("/v1/messages")
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (405, "invalid_request_error")


@pytest.mark.long
def test_a_stream_that_fails_ends_with_an_error(site: Site, client: anthropic.Anthropic) -> None:
    site.decode.held_back.clear()
    try:
        stream = client.messages.create(
            model="toy", max_tokens=5, messages=HI, stream=True, extra_body={"timeout": 2.0}
        )
        with pytest.raises(anthropic.APIStatusError) as caught:
            list(stream)
    finally:
        site.decode.held_back.set()
    assert caught.value.type == "timeout_error"


@pytest.mark.long
def test_keys_are_taken_as_each_client_sends_them(checkpoint: Path, tmp_path: Path) -> None:
    key = "sk-0123456789abcdef"
    keys = tmp_path / "keys"
    keys.write_text(key)
    keys.chmod(0o600)
    with opened_site(checkpoint, {"http.api_keys_file": str(keys)}) as site:
        assert client_of(site, key).messages.create(model="toy", max_tokens=2, messages=HI).type == "message"
        bearer = anthropic.Anthropic(base_url=site.url, auth_token=key, api_key=None, max_retries=0)
        assert bearer.messages.create(model="toy", max_tokens=2, messages=HI).type == "message"
        with pytest.raises(anthropic.AuthenticationError) as caught:
            client_of(site, "sk-wrong").messages.create(model="toy", max_tokens=2, messages=HI)
        assert caught.value.type == "authentication_error"
        both = {"authorization": f"Bearer {key}", "x-api-key": "sk-another-0123456"}
        with site.http(headers=both) as http:
            refused = http.post("/v1/messages", json={"model": "toy", "max_tokens": 2, "messages": HI})
        assert refused.status_code == 401


@pytest.mark.processes
def test_a_tool_that_has_to_be_called_travels_as_a_grammar(site: Site, client: anthropic.Anthropic) -> None:
    says(site, CALL)
    asked: Any = {"model": "toy", "max_tokens": 200, "messages": HI, "tools": [TOOL]}
    choices: list[Any] = [{"type": "any"}, {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}]
    for number, choice in enumerate(choices, start=1):
        answer = client.messages.create(**asked, tool_choice=choice)
        assert answer.stop_reason == "tool_use"
        assert "weather" in site.prefill.wait_for("start", number).sampling.grammar
    with pytest.raises(anthropic.BadRequestError, match="none of `tools`"):
        client.messages.create(**asked, tool_choice={"type": "tool", "name": "other"})


@pytest.mark.processes
def test_an_answer_follows_a_schema(site: Site, client: anthropic.Anthropic) -> None:
    says(site, '{"city": "Oslo"}')
    form: Any = {"format": {"type": "json_schema", "schema": WEATHER}}
    client.messages.create(model="toy", max_tokens=50, messages=HI, output_config=form)
    assert "city" in site.prefill.wait_for("start").sampling.grammar


@pytest.mark.long
def test_thinking_is_a_block_of_its_own(tmp_path: Path) -> None:
    template = TOOL_TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    with opened_tool_site(tmp_path, template=template) as site:
        client = client_of(site)
        says(site, f"<think>Hm.</think>I look.{CALL}")
        thinking: Any = {"type": "enabled", "budget_tokens": 1024}
        asked: Any = {"model": "toy", "max_tokens": 200, "messages": HI, "tools": [TOOL]}
        with client.messages.stream(**asked, thinking=thinking) as stream:
            streamed = stream.get_final_message()
        whole = client.messages.create(**asked, thinking=thinking)
        for message in (streamed, whole):
            assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
            assert message.content[0].type == "thinking"
            assert message.content[0].thinking == "Hm."
        assert not prompt_of(site).endswith("<think></think>")
        says(site, "No.")
        conversation: Any = [*HI, whole.to_param(), {"role": "user", "content": "And?"}]
        client.messages.create(**{**asked, "messages": conversation}, thinking={"type": "disabled"})
        assert prompt_of(site, 3).endswith("[user]And?[assistant]<think></think>")
