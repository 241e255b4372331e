"""Loops of agents by the official clients, with real processes and a random model of 32k context.

The model's calls are forced by the grammar, so each turn is: the model calls a tool, the tool runs, its result goes
back; at last the model answers in words. The conversation is the client's: nothing of it is kept here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import jsonschema
import openai
import pytest
from openai.types.responses import ResponseCompletedEvent, ResponseFunctionToolCall

from tandem.engine.random_model import ModelSpec, save
from tests.scenarios.processes import ProcessCluster, running
from tests.support.tool_site import TOOL_TEMPLATE

pytestmark = pytest.mark.processes

CONTEXT = 32_768
TURNS = 3
SCHEMAS: dict[str, dict[str, Any]] = {
    "read_file": {
        "type": "object",
        "properties": {"path": {"type": "string", "pattern": "^[a-z]{1,12}\\.py$"}},
        "required": ["path"],
        "additionalProperties": False,
    },
    "run": {
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": {"enum": ["ls", "-l", "pytest", "-q"]}, "minItems": 1, "maxItems": 3},
            "timeout_s": {"type": "integer", "minimum": 1, "maximum": 60},
        },
        "required": ["command", "timeout_s"],
        "additionalProperties": False,
    },
}
INSTRUCTIONS = (
    "You are a coding agent. " + "Work carefully, and change nothing that you were not asked to change. " * 40
)
TASK = "Make the tests pass."


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    directory = tmp_path_factory.mktemp("agents")
    model = save(ModelSpec(max_positions=CONTEXT), directory / "model")
    (model / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    with running(directory, model=str(model), config={"model": {"served_names": ["random"]}}) as cluster:
        yield cluster
        cluster.wait_idle()


def carried_out(name: str, arguments: dict[str, Any]) -> str:
    """What a tool says, which has checked what it was given."""
    jsonschema.validate(arguments, SCHEMAS[name])
    return f"def test(): pass  # {arguments['path']}" if name == "read_file" else "1 passed in 0.01s"


def test_an_agent_that_speaks_responses_works_through_its_tools(cluster: ProcessCluster) -> None:
    """As Codex does: streamed, without a store, the whole conversation sent each time, one call a turn."""
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=120)
    tools: Any = [
        {"type": "function", "name": name, "description": f"To {name}.", "parameters": schema, "strict": False}
        for name, schema in SCHEMAS.items()
    ]
    asked: Any = {
        "model": "random",
        "instructions": INSTRUCTIONS,
        "tools": [*tools, {"type": "web_search"}],
        "parallel_tool_calls": False,
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "a-session",
        "max_output_tokens": 512,
    }
    conversation: list[Any] = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": TASK}]}]
    for turn in range(TURNS):
        stream = client.responses.create(
            **asked, input=conversation, tool_choice="required", stream=True, extra_body={"seed": turn}
        )
        last = list(stream)[-1]
        assert isinstance(last, ResponseCompletedEvent), last
        (call,) = last.response.output
        assert isinstance(call, ResponseFunctionToolCall)
        result = carried_out(call.name, json.loads(call.arguments))
        conversation += [call.to_dict(), {"type": "function_call_output", "call_id": call.call_id, "output": result}]
    with client.responses.stream(**{**asked, "max_output_tokens": 24}, input=conversation, tool_choice="none") as ended:
        told = [event for event in ended]  # noqa: C416 - read as a client reads it
    assert told[-1].type in ("response.completed", "response.incomplete")
    answer = told[-1].response
    assert [item.type for item in answer.output] == ["message"]
    assert answer.usage is not None
    assert answer.usage.input_tokens > len(INSTRUCTIONS)


def test_an_agent_that_speaks_messages_works_through_its_tools(cluster: ProcessCluster) -> None:
    """As Claude Code does: streamed, with a system prompt of blocks that ask to be cached, several calls a turn."""
    client = anthropic.Anthropic(base_url=cluster.url, api_key="none", max_retries=0, timeout=120)
    asked: Any = {
        "model": "random",
        "system": [{"type": "text", "text": INSTRUCTIONS, "cache_control": {"type": "ephemeral"}}],
        "tools": [
            {"name": name, "description": f"To {name}.", "input_schema": schema} for name, schema in SCHEMAS.items()
        ],
    }
    conversation: list[Any] = [{"role": "user", "content": [{"type": "text", "text": TASK}]}]
    for turn in range(TURNS):
        choice: Any = {"type": "any", "disable_parallel_tool_use": True}
        counted = client.messages.count_tokens(**asked, messages=conversation, tool_choice=choice)
        with client.messages.stream(
            **asked, messages=conversation, max_tokens=512, tool_choice=choice, extra_body={"seed": turn}
        ) as stream:
            message = stream.get_final_message()
        assert message.stop_reason == "tool_use"
        assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == counted.input_tokens
        results = []
        for block in message.content:
            assert block.type == "tool_use"
            assert isinstance(block.input, dict)
            said = carried_out(block.name, block.input)
            results.append({"type": "tool_result", "tool_use_id": block.id, "content": said})
        conversation += [message.to_param(), {"role": "user", "content": results}]
    answer = client.messages.create(
        **asked, messages=conversation, max_tokens=24, tool_choice={"type": "none"}, extra_body={"seed": TURNS}
    )
    assert [block.type for block in answer.content] == ["text"]
    assert answer.stop_reason in ("end_turn", "max_tokens")


def test_a_chat_calls_the_same_whole_and_streamed(cluster: ProcessCluster) -> None:
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=120)
    asked: Any = {
        "model": "random",
        "messages": [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": TASK}],
        "tools": [
            {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
        ],
        "tool_choice": {"type": "function", "function": {"name": "run"}},
        "parallel_tool_calls": False,
        "seed": 11,
        "max_tokens": 512,
    }
    whole = client.chat.completions.create(**asked).choices[0]
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert whole.finish_reason == streamed.finish_reason == "tool_calls"
    calls = [choice.message.tool_calls or [] for choice in (whole, streamed)]
    ((one,), (other,)) = calls
    assert one.type == "function"
    assert other.type == "function"
    assert one.function.arguments == other.function.arguments
    assert carried_out("run", json.loads(one.function.arguments))
