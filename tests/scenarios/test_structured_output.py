"""Structured output with real processes and the embedded model, by the clients that people use."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import httpx
import jsonschema
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from tests.scenarios.client import ask, complete, stream
from tests.scenarios.processes import ProcessCluster

pytestmark = pytest.mark.processes

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "legs": {"type": "integer", "minimum": 0, "maximum": 8},
        "kind": {"enum": ["cat", "bird"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 2},
    },
    "required": ["name", "legs", "kind", "tags"],
    "additionalProperties": False,
}
BY_SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}}
SAMPLED = {"temperature": 1.0, "seed": 5}
PROMPT = "Once upon a time, there was an animal."


@pytest.mark.parametrize("ask_for", [complete, stream], ids=["whole", "streamed"])
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {**SAMPLED, "n": 2}], ids=["greedy", "two sampled"])
def test_json_by_a_schema_parses_and_is_valid(cluster: ProcessCluster, ask_for: Any, sampling: dict[str, Any]) -> None:
    answer = ask_for(cluster.url, PROMPT, max_tokens=200, **BY_SCHEMA, **sampling)
    assert answer.finish_reasons == ["stop"] * sampling.get("n", 1)
    for text in answer.texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(answer.texts)) == len(answer.texts), "choices differ"


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {**SAMPLED, "n": 2}], ids=["greedy", "two sampled"])
def test_whole_and_streamed_give_the_same_bytes_and_so_does_asking_again(
    cluster: ProcessCluster, sampling: dict[str, Any]
) -> None:
    changed = {"presence_penalty": 0.5, "logit_bias": {"300": 3}, "top_k": 40}
    fields = {"max_tokens": 200, **BY_SCHEMA, **sampling, **changed}
    answers = [ask_for(cluster.url, PROMPT, **fields) for ask_for in (complete, stream, complete)]
    assert answers[0].token_ids == answers[1].token_ids == answers[2].token_ids
    assert answers[0].texts == answers[1].texts


class Animal(BaseModel):
    name: str = Field(max_length=12)
    legs: int = Field(ge=0, le=8)
    kind: Literal["cat", "bird"]
    friend: str | None


MESSAGES: Any = [{"role": "user", "content": "Tell me of an animal, as JSON."}]


def test_the_official_client_parses_into_a_model(cluster: ProcessCluster) -> None:
    with OpenAI(base_url=f"{cluster.url}/v1", api_key="unused") as client:
        whole = client.chat.completions.parse(
            model="any", messages=MESSAGES, response_format=Animal, max_tokens=200, temperature=0.9, seed=3, n=2
        )
        with client.chat.completions.stream(
            model="any", messages=MESSAGES, response_format=Animal, max_tokens=200, temperature=0.9, seed=3
        ) as events:
            streamed = events.get_final_completion()
        plain = client.chat.completions.create(
            model="any", messages=MESSAGES, response_format={"type": "json_object"}, max_tokens=40, temperature=0
        )
    assert [choice.finish_reason for choice in whole.choices] == ["stop", "stop"]
    assert all(isinstance(choice.message.parsed, Animal) for choice in whole.choices)
    assert streamed.choices[0].message.parsed == whole.choices[0].message.parsed
    assert (plain.choices[0].message.content or "").startswith("{")


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"choice": ["yes", "no", "perhaps not"]}, "yes|no|perhaps not"),
        ({"regex": "[a-f]{3}-[0-9]{2,4}"}, "[a-f]{3}-[0-9]{2,4}"),
        ({"grammar": 'start: "a" (" and " WORD){2,3}\nWORD: /[a-z]{1,8}/'}, "a( and [a-z]{1,8}){2,3}"),
        ({"grammar": 'root ::= [0-9]+ " " ("cat" | "dog") "s"?'}, "[0-9]+ (cat|dog)s?"),
        ({"json": {"enum": ["x", 3]}}, '"x"|3'),
        ({"regex": ""}, None),
    ],
    ids=lambda value: str(value)[:30],
)
def test_other_forms_hold(cluster: ProcessCluster, form: dict[str, Any], pattern: str | None) -> None:
    answer = ask(cluster.url, PROMPT, streamed=True, max_tokens=60, **SAMPLED, n=2, structured_outputs=form)
    if pattern is None:
        assert answer.status == 400
        return
    assert answer.error is None
    for text, reason in zip(answer.texts, answer.finish_reasons, strict=True):
        assert reason == "length" or re.fullmatch(pattern, text), text


def test_an_output_may_be_one_token_long_and_then_comes_from_prefill_alone(cluster: ProcessCluster) -> None:
    """The first token is chosen at prefill, all others at decode: both know the grammar."""
    first = complete(cluster.url, PROMPT, max_tokens=1, **BY_SCHEMA)
    assert (first.texts, first.finish_reasons) == (["{"], ["length"])
    empty = complete(cluster.url, PROMPT, max_tokens=5, structured_outputs={"regex": "(the)?"}, logit_bias={"2": 100})
    assert (empty.texts, empty.finish_reasons, len(empty.token_ids[0])) == ([""], ["stop"], 1)


def test_what_has_no_tokens_left_is_cut_off_and_says_so(cluster: ProcessCluster) -> None:
    answer = complete(cluster.url, PROMPT, max_tokens=7, **BY_SCHEMA)
    assert answer.finish_reasons == ["length"]
    assert len(answer.token_ids[0]) == 7
    with pytest.raises(json.JSONDecodeError):
        json.loads(answer.texts[0])


def test_min_tokens_gives_way_where_the_form_is_complete(cluster: ProcessCluster) -> None:
    form = {"structured_outputs": {"regex": "[a-z]{1,12}"}}
    short = complete(cluster.url, PROMPT, max_tokens=40, logit_bias={"2": 100}, **form)
    longer = complete(cluster.url, PROMPT, max_tokens=40, logit_bias={"2": 100}, min_tokens=4, **form)
    longest = complete(cluster.url, PROMPT, max_tokens=40, min_tokens=30, **form)
    assert len(short.token_ids[0]) < len(longer.token_ids[0]) == 5
    assert longest.finish_reasons == ["stop"]
    assert len(longest.texts[0]) == 12


def test_what_masks_cost_is_in_the_metrics_and_plain_requests_cost_none(cluster: ProcessCluster) -> None:
    def masks() -> float:
        return sum(cluster.metric("tandem_grammar_masks_total", role=role) for role in ("prefill", "decode"))

    complete(cluster.url, PROMPT, max_tokens=20, **BY_SCHEMA)
    cluster.wait_idle()
    before = masks()
    assert before > 0
    complete(cluster.url, PROMPT, max_tokens=20)
    cluster.wait_idle()
    assert masks() == before


def test_a_refusal_names_the_part_of_the_schema(cluster: ProcessCluster) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "moon phase"}}}
    body = {"model": "*", "prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=30)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("response_format.json_schema.schema.properties.a: ")
