"""The Responses API, through OpenAI's official client, against scripted workers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseFunctionToolCall, ResponseOutputMessage, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from tandem.core import config as configuration
from tests.support.router_site import EOS, Site, in_background
from tests.support.scripted_worker import ScriptedDecode
from tests.support.tool_site import ARGUMENTS, CALL, TOOL_TEMPLATE, WEATHER, opened_tool_site, prompt_of, says

TOOL: Any = {"type": "function", "name": "weather", "description": "Of a city.", "parameters": WEATHER, "strict": False}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture
def site(tool_site: Site) -> Site:
    says(tool_site, "Hello there.")
    return tool_site


def events(site: Site, **body: Any) -> list[Any]:
    """The events of a stream, each valid by the client's own type, and its name."""
    response = site.post("/v1/responses", stream=True, **{"input": "Hi", **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    told = []
    for frame in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        EVENT.validate_python(event, strict=True)
        assert name == f"event: {event['type']}"
        told.append(event)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    return told


def test_a_response_is_answered_whole(site: Site) -> None:
    body = site.post("/v1/responses", input="Hi", instructions="Be kind.", metadata={"a": "b"}).json()
    answer = Response.model_validate(body, strict=True)
    assert answer.output_text == "Hello there."
    assert (answer.status, answer.model, answer.instructions) == ("completed", "toy", "Be kind.")
    assert answer.metadata == {"a": "b"}
    assert body["store"] is False
    assert answer.usage is not None
    num_prompt = len(site.prefill.wait_for("start").prompt_ids)
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (num_prompt, 13)
    (message,) = answer.output
    assert isinstance(message, ResponseOutputMessage)
    assert message.status == "completed"
    assert prompt_of(site) == "[system]Be kind.[user]Hi[assistant]"


def test_a_stream_tells_each_step_as_openai_does(site: Site) -> None:
    told = events(site)
    kinds = [event["type"].removeprefix("response.") for event in told]
    opening = ["created", "in_progress", "output_item.added", "content_part.added"]
    closing = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert kinds == [*opening, *["output_text.delta"] * 12, *closing]
    assert "".join(e["delta"] for e in told if e["type"] == "response.output_text.delta") == "Hello there."
    assert {e["item_id"] for e in told if "item_id" in e} == {told[2]["item"]["id"]}
    begun, ended = told[0]["response"], told[-1]["response"]
    assert (begun["status"], begun["output"], begun["usage"]) == ("in_progress", [], None)
    assert ended["output"] == [told[-2]["item"]]
    assert ended["usage"]["output_tokens"] == 13
    assert told[2]["item"]["content"] == []


@pytest.mark.long
def test_the_official_client_streams_and_gathers(site: Site) -> None:
    plain = list(site.openai().responses.create(model="toy", input="Hi", stream=True))
    assert plain[-1].type == "response.completed"
    with site.openai().responses.stream(model="toy", input="Hi") as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(texts) == final.output_text == "Hello there."


def test_an_answer_that_is_cut_is_incomplete(site: Site) -> None:
    whole = site.openai().responses.create(model="toy", input="Hi", max_output_tokens=5)
    assert (whole.status, whole.output_text) == ("incomplete", "Hello")
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    told = events(site, max_output_tokens=5)
    assert told[-1]["type"] == "response.incomplete"
    assert told[-2]["item"]["status"] == "incomplete"


def test_a_call_of_a_tool_is_an_item(site: Site) -> None:
    says(site, f"I look.\n{CALL}")
    answer = site.openai().responses.create(model="toy", input="Hi", tools=[TOOL])
    message, call = answer.output
    assert answer.output_text == "I look."
    assert isinstance(message, ResponseOutputMessage)
    assert isinstance(call, ResponseFunctionToolCall)
    assert (call.name, call.arguments, call.status) == ("weather", ARGUMENTS, "completed")
    assert call.call_id.startswith("call_")
    assert json.dumps(WEATHER) in prompt_of(site)


def test_a_streamed_call_has_its_events(site: Site) -> None:
    says(site, CALL + CALL)
    told = events(site, tools=[TOOL])
    kinds = [event["type"].removeprefix("response.") for event in told]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert kinds == ["created", "in_progress", *call, *call, "completed"]
    assert [e["output_index"] for e in told if "output_index" in e] == [0] * 4 + [1] * 4
    assert [e["delta"] for e in told if "delta" in e] == [ARGUMENTS] * 2
    with site.openai().responses.stream(model="toy", input="Hi", tools=[TOOL]) as stream:
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["function_call"] * 2


def test_a_conversation_comes_back_as_items(site: Site) -> None:
    """What a client that keeps the conversation sends: its own items, and those that it was given."""
    says(site, f"I look. {CALL}")
    client = site.openai()
    first = client.responses.create(model="toy", input=[{"role": "user", "content": "Hi"}], tools=[TOOL])
    call = first.output[1]
    assert isinstance(call, ResponseFunctionToolCall)
    items: Any = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]},
        {"role": "user", "content": "Hi"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "xyz"},
        *(item.model_dump() for item in first.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": "20 °C"},
    ]
    says(site, "It is 20 °C.")
    second = client.responses.create(model="toy", input=items, tools=[TOOL])
    assert second.output_text == "It is 20 °C."
    assert prompt_of(site, 2).endswith(
        '[system]Be kind.[user]Hi[assistant]I look.<tool_call>{"name": "weather", "arguments": {"city": "Kyōto"}}'
        "</tool_call>[tool]<tool_response>20 °C</tool_response>[assistant]"
    )


def test_tools_that_a_provider_runs_are_left_out_and_named(site: Site) -> None:
    response = site.post("/v1/responses", input="Hi", tools=[{"type": "web_search"}, TOOL, {"type": "local_shell"}])
    assert response.status_code == 200
    assert response.headers["tandem-ignored-fields"] == "tools[0] (web_search), tools[2] (local_shell)"
    assert [tool["name"] for tool in response.json()["tools"]] == ["weather"]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "none is kept here"),
        ({"conversation": "conv_1"}, "conversation", "none is kept here"),
        ({"background": True}, "background", "not supported yet"),
        ({"truncation": "auto"}, "truncation", "not supported yet"),
        ({"input": []}, "input", "at least one item"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "none is kept here"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type", "must be one of"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         "input[0].content[0].type", "reads text alone"),
        ({"top_logprobs": 2}, "top_logprobs", "include"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "name of a tool"),
        ({"guided_json": {}, "regex": "a"}, "regex", "use structured_outputs.regex"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_refused_by_name(site: Site, body: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        site.openai().responses.create(model="toy", extra_body={"input": "Hi", **body})
    assert caught.value.param == param
    assert words in caught.value.message


def test_log_probabilities_come_where_they_are_asked_for(site: Site) -> None:
    asked: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 3}
    answer = site.openai().responses.create(model="toy", input="Hi", **asked)
    (message,) = answer.output
    assert isinstance(message, ResponseOutputMessage)
    part = message.content[0]
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert [entry.token for entry in part.logprobs] == list("Hel")
    told = [e["logprobs"] for e in events(site, **asked) if e["type"] == "response.output_text.delta"]
    assert [[entry["token"] for entry in one] for one in told] == [["H"], ["e"], ["l"]]


@pytest.mark.long
def test_a_token_that_ends_reasoning_and_begins_the_answer_has_its_log_probability(tmp_path: Path) -> None:
    template = TOOL_TEMPLATE + "<think>{# </think> #}"
    with opened_tool_site(tmp_path, template=template, specials=["m.</think>I"]) as site:
        tokens = [ord("H"), 301, *b" am.", EOS]
        site.prefill.script = site.decode.script = lambda prompt, choice, index: tokens[min(index, len(tokens) - 1)]
        asked: Any = {"include": ["message.output_text.logprobs"], "skip_special_tokens": False}
        answer = site.post("/v1/responses", input="Hi", **asked).json()
        reasoning, message = answer["output"]
        assert reasoning["content"][0]["text"] == "Hm."
        (part,) = message["content"]
        assert part["text"].startswith("I am.")
        assert [entry["token"] for entry in part["logprobs"]][:5] == ["m.</think>I", " ", "a", "m", "."]


@pytest.mark.long
def test_tokens_that_part_reasoning_from_the_answer_have_no_place_in_it(tmp_path: Path) -> None:
    with opened_tool_site(tmp_path, template=TOOL_TEMPLATE + "<think>{# </think> #}") as site:
        says(site, "Hm.</think>Say <tool, é.")
        asked: Any = {"include": ["message.output_text.logprobs"], "tools": [TOOL]}
        told = [e["logprobs"] for e in events(site, **asked) if e["type"] == "response.output_text.delta"]
        texts = [bytes(byte for entry in one for byte in entry["bytes"]) for one in told]
        assert b"".join(texts).decode() == "Say <tool, é."


@pytest.mark.processes
@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({}, {"type": "text"}),
        ({"format": {"type": "json_object"}}, {"type": "json_object"}),
        ({"format": {"type": "json_schema", "name": "place", "schema": WEATHER, "strict": True, "description": None}},
         {"type": "json_schema", "name": "place", "schema": WEATHER, "strict": True}),
        ({"format": {"type": "json_schema", "schema": WEATHER}},
         {"type": "json_schema", "name": "schema", "schema": WEATHER}),
    ],
)  # fmt: skip
def test_the_form_that_was_obeyed_is_told(site: Site, asked: dict[str, Any], told: dict[str, Any]) -> None:
    body = site.post("/v1/responses", input="Hi", text=asked).json()
    assert body["text"] == {"format": told, "verbosity": "medium"}
    Response.model_validate(body, strict=True)


@pytest.mark.long
def test_a_stream_that_fails_says_so_in_the_clients_terms(site: Site) -> None:
    site.decode.held_back.clear()
    try:
        told = events(site, timeout=0.3)
    finally:
        site.decode.held_back.set()
    assert told[-1]["type"] == "response.failed"
    error = told[-1]["response"]["error"]
    assert (error["code"], error["type"], error["retryable"]) == ("server_error", "deadline", False)
    assert error["message"] == "the deadline of 0.3 s passed"
    assert error["request_id"] in told[-1]["response"]["id"]


def test_a_stream_that_breaks_ends_with_what_was_given_and_whether_to_try_again(site: Site) -> None:
    site.decode.held_back.clear()
    try:
        before, lines = site.decode.count("reserve"), list[str]()
        body = {"model": "toy", "input": "Hi", "stream": True, "max_output_tokens": 20}
        with site.http() as client, client.stream("POST", "/v1/responses", json=body) as response:
            ahead = response.iter_lines()
            for line in ahead:
                lines.append(line)
                if "text.delta" in line:
                    break
            for number in range(1, configuration.load(None, {}).limits.max_attempts + 1):
                reserve = site.decode.wait_for("reserve", before + number)
                site.decode.fail(reserve.request_id, reserve.attempt, "worker_lost", retryable=True)
            lines += ahead
        told = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    finally:
        site.decode.held_back.set()
    failed, given = told[-1]["response"], [each["delta"] for each in told if each["type"].endswith("text.delta")]
    assert given
    (item,) = failed["output"]
    assert (item["status"], [part["text"] for part in item["content"]]) == ("incomplete", ["".join(given)])
    assert [each["type"] for each in told[-2:]] == ["response.output_item.done", "response.failed"]
    error = failed["error"]
    assert (error["type"], error["retryable"]) == ("worker_lost", True)
    assert error["message"]
    for each in told:
        TypeAdapter(ResponseStreamEvent).validate_python(each)


@pytest.mark.processes
def test_a_tool_that_has_to_be_called_travels_as_a_grammar(site: Site) -> None:
    says(site, CALL)
    client, named = site.openai(), {"type": "function", "name": "weather"}
    choices: list[Any] = ["required", named, {"type": "allowed_tools", "mode": "required", "tools": [named]}]
    for number, choice in enumerate(choices, start=1):
        answer = client.responses.create(model="toy", input="Hi", tools=[TOOL], tool_choice=choice)
        assert [item.type for item in answer.output] == ["function_call"]
        assert "weather" in site.prefill.wait_for("start", number).sampling.grammar
    body = site.post("/v1/responses", input="Hi", tools=[TOOL], tool_choice=named).json()
    assert Response.model_validate(body, strict=True).tool_choice is not None
    assert body["tool_choice"] == named


@pytest.mark.processes
def test_an_answer_follows_a_schema(site: Site) -> None:
    class Place(BaseModel):
        city: str

    says(site, '{"city": "Oslo"}')
    parsed = site.openai().responses.parse(model="toy", input="Hi", text_format=Place)
    assert parsed.output_parsed == Place(city="Oslo")
    assert "city" in site.prefill.wait_for("start").sampling.grammar


@pytest.mark.long
def test_reasoning_is_an_item_of_its_own(tmp_path: Path) -> None:
    template = TOOL_TEMPLATE + "{% if enable_thinking is defined and enable_thinking %}<think>{% endif %}{# </think> #}"
    with opened_tool_site(tmp_path, template=template) as site:
        says(site, f"Hm.</think>I look.{CALL}")
        asked: Any = {"tools": [TOOL], "reasoning": {"effort": "low", "summary": "auto"}}
        kinds = [event["type"] for event in events(site, **asked)]
        assert kinds.count("response.reasoning_text.delta") == 3
        answer = site.openai().responses.create(model="toy", input="Hi", **asked)
        assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
        assert answer.usage is not None
        assert answer.usage.output_tokens_details.reasoning_tokens == 3
        assert prompt_of(site).endswith("[assistant]<think>")
        says(site, "</think>No.")
        items: Any = [{"role": "user", "content": "Hi"}, *(item.to_dict() for item in answer.output)]
        again = site.openai().responses.create(model="toy", input=items, **asked)
        assert again.output_text == "No."


@pytest.mark.long
def test_a_call_goes_on_with_the_same_events_after_its_worker_is_lost(tmp_path: Path) -> None:
    def bare(frames: str) -> list[str]:
        """Without what differs from answer to answer."""
        return re.sub(r'[0-9a-f]{24,}|"created_at":\d+', "", frames).split("\n\n")

    with opened_tool_site(tmp_path) as site:
        says(site, f"I look.\n{CALL}")
        asked: Any = {"path": "/v1/responses", "input": "Hi", "tools": [TOOL], "stream": True, "seed": 1}
        unbroken = site.post(**asked)
        site.decode.held_back.clear()
        num_before = site.metrics()["tandem_itl_seconds_count"]
        under_way = in_background(site, prompt=None, max_tokens=None, **asked)
        reserve = site.decode.wait_for("reserve", 2)
        site.decode.wait_for("attach", 2)
        for index in range(1, 40):
            site.decode.emit(token=site.decode.token(reserve, 0, index))
        other = ScriptedDecode("decode-1")
        other.script = site.decode.script
        site.add(other)
        site.until_metric("tandem_itl_seconds_count", num_before + 39)
        site.decode.kill()
        broken = under_way.result()
        assert bytes(other.wait_for("reserve").journal[0].token_ids) == f"I look.\n{CALL}".encode()[:40]
        events = bare(broken.text)
        assert events == bare(unbroken.text)
        assert events[-2].startswith("event: response.completed")
        assert '"arguments":"{\\"city\\": \\"Kyōto\\"}"' in events[-2]
