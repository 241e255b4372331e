"""Tools on `/v1/chat/completions`, through OpenAI's official client, against scripted workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.support.router_site import EOS, Site, frames, opened_site
from tests.support.tool_site import ARGUMENTS, CALL, TOOL_TEMPLATE, WEATHER, opened_tool_site, prompt_of, says

TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": WEATHER}}
HI: Any = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def site(tool_site: Site) -> Site:
    says(tool_site, f"I look.\n{CALL}\n{CALL}")
    return tool_site


def ask(site: Site, **body: Any) -> Any:
    return site.post("/v1/chat/completions", **{"messages": HI, "tools": [TOOL], **body})


@pytest.mark.long
def test_calls_are_told_apart_from_text(site: Site) -> None:
    answer = ChatCompletion.model_validate(ask(site).json(), strict=True)
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
    calls = choice.message.tool_calls or []
    assert [(c.type, c.type == "function" and (c.function.name, c.function.arguments)) for c in calls] == [
        ("function", ("weather", ARGUMENTS))
    ] * 2
    assert len({call.id for call in calls}) == 2
    assert all(call.id.startswith("call_") for call in calls)
    assert json.dumps(TOOL) in prompt_of(site)


def test_streamed_deltas_join_to_the_whole_answer(site: Site) -> None:
    told = frames(ask(site, stream=True))
    chunks = [ChatCompletionChunk.model_validate(frame, strict=True) for frame in told]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "I look."
    calls: dict[int, list[str]] = {}
    for call in (call for delta in deltas for call in delta.tool_calls or []):
        assert call.function is not None
        calls.setdefault(call.index, []).append(call.function.arguments or "")
    assert {index: "".join(parts) for index, parts in calls.items()} == {0: ARGUMENTS, 1: ARGUMENTS}
    assert [c.choices[0].finish_reason for c in chunks][-1] == "tool_calls"
    with site.openai().chat.completions.stream(model="toy", messages=HI, tools=[TOOL]) as stream:
        final = stream.get_final_completion()
    assert [c.function.arguments for c in final.choices[0].message.tool_calls or []] == [ARGUMENTS] * 2


def test_no_tool_is_told_of_and_no_call_read_with_none(site: Site) -> None:
    message = ask(site, tool_choice="none").json()["choices"][0]["message"]
    assert message["content"] == f"I look.\n{CALL}\n{CALL}"
    assert "tool_calls" not in message
    assert "[tools]" not in prompt_of(site)


def test_a_malformed_call_is_text(site: Site) -> None:
    text = f"A {CALL.replace('}}', '}')} b"
    says(site, text)
    choice = ask(site).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")


def test_calls_and_results_reach_the_template(site: Site) -> None:
    says(site, "It is 20 °C.")
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    talk: Any = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "20 °C"},
    ]
    answer = site.openai().chat.completions.create(model="toy", messages=talk, tools=[TOOL])
    assert answer.choices[0].message.content == "It is 20 °C."
    assert prompt_of(site).endswith(
        '[user]Hi[assistant]<tool_call>{"name": "weather", "arguments": {"city": "Kyōto"}}</tool_call>'
        "[tool]<tool_response>20 °C</tool_response>[assistant]"
    )


@pytest.mark.long
@pytest.mark.parametrize("no_calls", [{"tool_calls": None, "audio": None}, {"tool_calls": []}, {}])
def test_a_message_without_calls_has_none_for_the_template(tmp_path: Path, no_calls: dict[str, Any]) -> None:
    """Llama 3's ask whether `tool_calls` is there, and OpenAI's client writes what is absent as null."""
    template = (
        "{% for m in messages %}{% if 'tool_calls' in m %}{% if m.tool_calls|length != 1 %}"
        "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}{% endif %}"
        "[{{ m.role }}]{{ m.content }}{% if 'audio' in m %}!{% endif %}{% endfor %}"
    )
    with opened_tool_site(tmp_path, template=template) as site:
        talk = [*HI, {"role": "assistant", "content": "Hello", **no_calls}, {"role": "user", "content": "You"}]
        answer = site.post("/v1/chat/completions", messages=talk, max_tokens=1)
        assert answer.status_code == 200, answer.text
        assert prompt_of(site) == "[user]Hi[assistant]Hello[user]You"


def test_half_a_surrogate_pair_in_the_arguments_of_a_call_does_not_end_a_conversation(site: Site) -> None:
    """A model may write one, and the answer that has it as an escape comes back with every later turn."""
    says(site, '<tool_call>{"name": "weather", "arguments": {"city": "\\ud83d"}}</tool_call>')
    message = ask(site).json()["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert call["function"]["arguments"] == '{"city": "\\ud83d"}'
    result = {"role": "tool", "tool_call_id": call["id"], "content": "?"}
    assert ask(site, messages=[*HI, message, result], max_tokens=1).status_code == 200
    assert '"arguments": {"city": "\ufffd"}' in prompt_of(site, 2)
    item = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": call["function"]["arguments"]}
    output = {"type": "function_call_output", "call_id": "c", "output": "?"}
    assert site.post("/v1/responses", input=[item, output], max_output_tokens=1).status_code == 200


def test_token_ids_and_log_probabilities_of_a_call_are_told(site: Site) -> None:
    whole = ask(site, return_token_ids=True, logprobs=True).json()["choices"][0]
    told = [f["choices"][0] for f in frames(ask(site, stream=True, return_token_ids=True, logprobs=True))]
    assert [i for choice in told for i in choice.get("token_ids", [])] == whole["token_ids"]
    streamed = [e["token"] for choice in told for e in (choice["logprobs"] or {"content": []})["content"]]
    assert streamed == [entry["token"] for entry in whole["logprobs"]["content"]]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]},
         "tools[0].function.parameters"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages[0].tool_calls[0].function"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(site: Site, body: dict[str, Any], param: str) -> None:
    response = ask(site, **body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


DEEP = "[" * 990 + "]" * 990  # more than Python would follow, less than the parser refuses
DEEP_SCHEMA = '{"not": ' * 990 + "{}" + "}" * 990
DEEP_TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": "@schema"}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"model": "@deep"}),
        ("/v1/chat/completions", {"tools": [DEEP_TOOL]}),
        ("/v1/chat/completions", {"structured_outputs": {"json": "@schema", "disable_additional_properties": True}}),
        ("/v1/chat/completions", {"structured_outputs": {"json": DEEP_SCHEMA, "disable_additional_properties": True}}),
        ("/v1/messages", {"max_tokens": 1, "tools": [{"name": "f", "input_schema": "@schema"}]}),
        ("/v1/messages/count_tokens", {"tools": [{"name": "f", "input_schema": "@schema"}]}),
        ("/tokenize", {"chat_template_kwargs": "@schema"}),
    ],
    ids=["model", "tool", "schema", "schema as text", "tool of a message", "counting", "tokenizing"],
)
def test_json_that_is_nested_too_deeply_is_refused(site: Site, path: str, body: dict[str, Any]) -> None:
    whole = json.dumps({"model": "toy", "messages": HI, **body})
    with site.http() as client:
        response = client.post(path, content=whole.replace('"@deep"', DEEP).replace('"@schema"', DEEP_SCHEMA))
    assert response.status_code == 400, response.text
    assert "nested too deeply" in response.text


def test_arguments_of_a_call_that_are_nested_too_deeply_stay_text(site: Site) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": f'{{"a": {DEEP[500:-500]}}}'}}
    talk = [*HI, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert ask(site, messages=talk, max_tokens=1).status_code == 200
    assert '{\\"a\\": [' in prompt_of(site)


@pytest.mark.long
def test_a_template_that_knows_no_tools_is_said_to(checkpoint: Path) -> None:
    with opened_site(checkpoint) as site:
        with pytest.raises(openai.BadRequestError, match="chat template knows none") as caught:
            site.openai().chat.completions.create(model="toy", messages=HI, tools=[TOOL])
        assert caught.value.param == "tools"
        called: Any = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f"}}]}
        with pytest.raises(openai.BadRequestError, match="knows no calls of tools"):
            site.openai().chat.completions.create(model="toy", messages=[*HI, called])


@pytest.mark.processes
def test_a_choice_that_has_to_call_travels_as_a_grammar(site: Site) -> None:
    says(site, CALL)
    answer = ask(site, tool_choice="required").json()
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    for command in (site.prefill.wait_for("start"), site.decode.wait_for("reserve")):
        assert "weather" in command.sampling.grammar
        assert "Of a city." not in command.sampling.grammar


@pytest.mark.processes
def test_a_schema_that_cannot_be_followed_is_refused_and_its_tools_named(site: Site) -> None:
    odd = {"type": "object", "properties": {"x": {"not": {"type": "string"}}}}
    tool = {"type": "function", "function": {"name": "odd", "parameters": odd}}
    assert ask(site, tools=[tool]).status_code == 200, "it is told of, and nothing has to follow it"
    response = ask(site, tools=[tool], tool_choice="required")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
    assert "not" in response.json()["error"]["message"]


MISTRAL = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{% if call.id|length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}"
    "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}"
    "{% if m.role == 'tool' %}{{ m.tool_call_id }}{% endif %}{% endfor %}"
)


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
def test_markers_that_are_special_tokens_are_read_and_never_shown(tmp_path: Path, stream: bool) -> None:
    specials = ("[TOOL_CALLS]", "[ARGS]", "[INST]")
    tokens = [*b"I look.", 303, 301, *b"weather", 302, *ARGUMENTS.encode(), EOS]
    with opened_tool_site(tmp_path, template=MISTRAL, specials=specials) as site:
        site.prefill.script = site.decode.script = lambda prompt, choice, index: tokens[min(index, len(tokens) - 1)]
        response = ask(site, stream=stream)
        told = [f["choices"][0] for f in frames(response)] if stream else [response.json()["choices"][0]]
        said = [choice["delta" if stream else "message"] for choice in told]
        assert "".join(one.get("content") or "" for one in said) == "I look."
        calls = [call["function"] for one in said for call in one.get("tool_calls", [])]
        assert "".join(call.get("name", "") for call in calls) == "weather"
        assert "".join(call["arguments"] for call in calls) == ARGUMENTS
        assert told[-1]["finish_reason"] == "tool_calls"
        plain = ask(site, tools=[]).json()["choices"][0]["message"]["content"]
        assert plain == f"I look.weather{ARGUMENTS}", "without tools no special token is text"


@pytest.mark.long
def test_a_model_that_thinks_is_read_with_strict_tools_as_without(tmp_path: Path) -> None:
    thinking = "{% if add_generation_prompt %}<think>{% else %}</think>{% endif %}"
    strict: Any = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    with opened_tool_site(tmp_path, template=TOOL_TEMPLATE + thinking) as site:
        says(site, f"Shall I?\n{CALL}</think>I look.\n{CALL}")
        response = ask(site, tools=[strict])
        assert response.headers["tandem-ignored-fields"] == "tools.strict"
        said = response.json()["choices"][0]["message"]
        assert said["reasoning_content"] == f"Shall I?\n{CALL}"
        assert said["content"] == "I look."
        assert [call["function"]["arguments"] for call in said["tool_calls"]] == [ARGUMENTS]


@pytest.mark.long
def test_a_model_that_always_writes_harmony_is_read_without_tools(tmp_path: Path) -> None:
    specials = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
    start, channel, message, end = range(301, 305)
    template = "{% if tools %}{{ tools }}{% endif %}{{ '<|start|>assistant<|channel|><|message|>'[:18] }}"
    tokens = [
        channel,
        *b"analysis",
        message,
        *b"Hm.",
        end,
        start,
        *b"assistant",
        channel,
        *b"final",
        message,
        *b"Hi",
        EOS,
    ]
    with opened_tool_site(tmp_path, template=template, specials=specials) as site:
        site.prefill.script = site.decode.script = lambda prompt, choice, index: tokens[min(index, len(tokens) - 1)]
        said = ask(site, tools=[]).json()["choices"][0]["message"]
        assert (said["content"], said["reasoning_content"]) == ("Hi", "Hm.")
        response = site.post("/v1/responses", input="Hi").json()
        assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
        assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 3
        kinds = [line[7:] for line in site.post("/v1/responses", input="Hi", stream=True).text.splitlines()
                 if line.startswith("event: ")]  # fmt: skip
        assert kinds.count("response.reasoning_text.delta") == 3
        message_body = site.post("/v1/messages", messages=HI, max_tokens=50).json()
        assert [block["type"] for block in message_body["content"]] == ["thinking", "text"]
