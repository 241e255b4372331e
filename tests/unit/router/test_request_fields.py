"""The table of request fields: parsing, refusal by name and the OpenAPI document say the same of every row."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from router.messages.fields import COUNT, MESSAGE
from router.messages.openapi import MESSAGES
from router.messages.read import read_count, read_message
from router.openai.fields import Accepted, Elsewhere, Field, NotYet, Object, PromptBounds
from router.openai.model_card import ModelCard
from router.openai.openapi import document
from router.openai.request_fields import CHAT, COMPLETION, FIELDS
from router.openai.schema import ParsedRequest, parse_body, parse_chat, parse_completion
from router.openai.tokenize import requests_from
from router.responses.fields import RESPONSE
from router.responses.openapi import RESPONSES
from router.responses.read import read_response
from tandem.core import config as configuration
from tandem.core.config import Config, LimitsConfig
from tandem.core.errors import InvalidRequestError
from tandem.core.sampling import SamplingParams
from tandem.core.tokenizer import Tokenizer
from tests.support.router_site import write_checkpoint
from tests.support.tool_site import TOOL_TEMPLATE

#: None of them is the default.
LIMITS = LimitsConfig(max_choices=3, max_logprobs=5, most_urgent_priority=-2)
#: So large a context that nothing here depends on it: JSON Schema cannot say what does.
CONTEXT = 1 << 33
BOUNDS = PromptBounds(max_prompts=100, max_context=CONTEXT)


def parse_response(body: dict[str, Any], limits: LimitsConfig, bounds: PromptBounds) -> ParsedRequest:
    return read_response(body, limits, bounds).parsed


def parse_message(body: dict[str, Any], limits: LimitsConfig, bounds: PromptBounds) -> ParsedRequest:
    return read_message(body, limits, bounds).parsed


KINDS: dict[str, Any] = {
    "completion": (COMPLETION, parse_completion, "CompletionRequest"),
    "chat": (CHAT, parse_chat, "ChatRequest"),
    "response": (RESPONSE, parse_response, "ResponseRequest"),
    "message": (MESSAGE, parse_message, "MessageRequest"),
    "count": (COUNT, read_count, "CountRequest"),
}
MOST_TOKENS = (1 << 31) - 1
VALID: dict[str, dict[str, Any]] = {
    "completion": {"model": "toy", "prompt": "y", "max_tokens": MOST_TOKENS},
    "chat": {"model": "toy", "messages": [{"role": "user", "content": "y"}], "max_tokens": MOST_TOKENS},
    "response": {"model": "toy", "input": "y", "max_output_tokens": MOST_TOKENS},
    "message": {"model": "toy", "messages": [{"role": "user", "content": "y"}], "max_tokens": MOST_TOKENS},
    "count": {"model": "toy", "messages": [{"role": "user", "content": "y"}]},
}
#: Fields that may be there with others only.
_STREAMED = {"stream_options": {"stream": True}}
#: All that are asked for: a schema cannot say that what is chosen is there.
_TOOLS = ("f", "x", "1", "tool")
_NESTED = {"tools": [{"type": "function", "function": {"name": name}} for name in _TOOLS]}
_FLAT = {"tools": [{"type": "function", "name": name} for name in _TOOLS]}
_OWN_TOOLS = {"tools": [{"name": name, "input_schema": {}} for name in _TOOLS]}
_ASKED = {"include": ["message.output_text.logprobs"]}
NEEDED: dict[str, dict[str, Any]] = {
    "completion": _STREAMED,
    "chat": {**_STREAMED, "top_logprobs": {"logprobs": True}, "tool_choice": _NESTED},
    "response": {"top_logprobs": _ASKED, "tool_choice": _FLAT},
    "message": {"tool_choice": _OWN_TOOLS},
    "count": {"tool_choice": _OWN_TOOLS},
}

#: What objects inside a field need.
USUAL: dict[str, Any] = {
    **{"role": "user", "content": "x", "type": "text", "text": "x", "name": "f", "input_schema": {}, "id": "i"},
    **{"function": {"name": "f"}, "input": {}, "tool_use_id": "i", "call_id": "i", "output": "x", "arguments": "{}"},
    **{"refusal": "x", "schema": {"type": "integer"}, "thinking": "x", "tool_calls": [{"function": {"name": "f"}}]},
}

#: Values that are wrong for most kinds, and right for some.
ODD: list[Any] = [
    None, True, False, 0, 1, 2, -1, 1.0, 1.5, "", "x", "1", "tool", [],
    ["x"], ["x", ""], [1], [1.0], [1.5], [True], [None],
    [[1], "x"], [[]], ["x", 1], {}, {"x": 1}, {"1": 1}, {"1": None}, {"01": 1}, {"-1": 1}, {"1000000000": 1},
]  # fmt: skip


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelCard, Tokenizer]:
    directory: Path = write_checkpoint(tmp_path_factory.mktemp("m") / "toy", template=TOOL_TEMPLATE + "{# </think> #}")
    tokenizer = Tokenizer.from_dir(directory)
    return ModelCard.from_dir(directory, configuration.load(None), tokenizer), tokenizer


def schemas(card: ModelCard, kind: str) -> dict[str, Any]:
    """What the document says of each field."""
    described = document(dataclasses.replace(Config(), limits=LIMITS), card, (RESPONSES, MESSAGES))
    properties: dict[str, Any] = described["components"]["schemas"][KINDS[kind][2]]["properties"]
    return properties


def parsed(kind: str, **fields: Any) -> ParsedRequest:
    """By way of bytes: a number that JSON cannot carry must not pass as one that it can."""
    return KINDS[kind][1](parse_body(json.dumps({**VALID[kind], **fields}).encode()), LIMITS, BOUNDS)


def usual_of(schema: dict[str, Any]) -> dict[str, Any]:
    """What an object of this schema must have."""
    properties = schema.get("properties", {})
    return {name: usual_value(name, properties.get(name, {})) for name in schema.get("required", [])}


def usual_value(name: str, schema: dict[str, Any]) -> Any:
    """A value that does for the property of this name."""
    if "const" in schema:
        return schema["const"]
    if name in USUAL:
        value = USUAL[name]
        return value if value in schema.get("enum", [value]) else schema["enum"][0]
    if "enum" in schema:
        return schema["enum"][0]
    return [usual_of(schema["items"])] if "items" in schema else usual_of(schema)


def around(schema: dict[str, Any]) -> Iterator[Any]:
    """Values just inside and just outside of what `schema` says."""
    for part in schema.get("anyOf", []):
        yield from around(part)
    is_whole = "integer" in schema.get("type", [])
    for bound in (schema[key] for key in ("minimum", "maximum", "exclusiveMinimum") if key in schema):
        yield from (bound - 1, bound, bound + 1)
        if not is_whole:
            yield from (math.nextafter(bound, -math.inf), math.nextafter(bound, math.inf))
    yield from [*schema.get("enum", []), schema.get("const")]
    if "items" in schema:
        items = list(around(schema["items"])) or ["x"]
        yield from ([item] for item in items)
        for number in (schema.get("minItems", 0), schema.get("maxItems", 2)):
            yield from (["x"] * count for count in (max(number - 1, 0), number, number + 1))
    if isinstance(schema.get("additionalProperties"), dict):
        yield from ({"1": value} for value in around(schema["additionalProperties"]))
    known = {name: [*around(part), *ODD] for name, part in schema.get("properties", {}).items()}
    usual = usual_of(schema)
    yield from ({**usual, name: value} for name, values in known.items() for value in values)
    yield from ({key: value for key, value in usual.items() if key != left_out} for left_out in usual)


#: Of the last item of a list JSON Schema has no word.
BEYOND_SCHEMA = "must not end with a tool_use"


def refusal(kind: str, name: str, value: Any, model: tuple[ModelCard, Tokenizer]) -> InvalidRequestError | None:
    card, tokenizer = model
    try:
        wanted = parsed(kind, **NEEDED[kind].get(name, {}), **{name: value})
        # The vocabulary is checked there.
        requests_from(wanted, tokenizer=tokenizer, card=card, max_context=CONTEXT, client_request_id="r", arrived_s=0.0)
    except InvalidRequestError as error:
        return error
    return None


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_is_in_the_document_and_nothing_else_is(kind: str, given: Any) -> None:
    rows: Object = KINDS[kind][0]
    names = [row.name for row in rows.fields]
    assert len(set(names)) == len(names), "a field with two rows"
    assert list(schemas(given[0], kind)) == names
    if kind in ("completion", "chat"):
        assert {row.name for row in FIELDS if row.of in (kind, "both")} == set(names)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_parsing_takes_what_the_document_allows_and_refuses_what_it_forbids(kind: str, given: Any) -> None:
    """Bounds too: the values come from them, those that are configured included."""
    differences, counts = [], {True: 0, False: 0}
    for name, schema in schemas(given[0], kind).items():
        allowed = jsonschema.Draft202012Validator(schema)
        for value in [*around(schema), *ODD]:
            error = refusal(kind, name, value, given)
            counts[error is None] += 1
            is_beyond_schema = error is not None and BEYOND_SCHEMA in error.message
            if allowed.is_valid(value) != (error is None) and not is_beyond_schema:
                differences.append((name, value, error))
            if error is not None:
                assert error.field is not None
                assert error.field.split("[")[0].split(".")[0] == name
                assert name in error.message
    assert differences == []
    assert min(counts.values()) > 500


def walked(kind: str, described: dict[str, Any]) -> Iterator[tuple[Field, str, dict[str, Any], list[dict[str, Any]]]]:
    """Each row, those of objects in it too, with its full name and bodies that hold it with all sorts of values."""
    for row in KINDS[kind][0].fields:
        schema, needed = described[row.name], NEEDED[kind].get(row.name, {})
        if not isinstance(row.kind, Object):
            yield row, row.name, needed, [{**needed, row.name: value} for value in [*around(schema), *ODD]]
            continue
        for inner in row.kind.fields:
            values = [*around(schema["properties"][inner.name]), *ODD]
            usual = usual_of(schema)
            base = {**needed, **({row.name: usual} if usual else {})}
            bodies = [{**needed, row.name: {**usual, inner.name: value}} for value in values]
            yield inner, f"{row.name}.{inner.name}", base, bodies


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_every_documented_field_is_obeyed_accepted_or_refused_by_name(kind: str, given: Any) -> None:
    for row, name, without, bodies in walked(kind, schemas(given[0], kind)):
        base, meanings, errors = dataclasses.replace(parsed(kind, **without), reasoning_fields=()), [], []
        for body in bodies:
            try:
                meanings.append(dataclasses.replace(parsed(kind, **body), reasoning_fields=()))
            except InvalidRequestError as error:
                errors.append(error.message)
        if (kind, name) != ("response", "tools"):  # those that a provider runs are left out, and named
            assert not any(meaning.ignored_fields for meaning in meanings)
        if isinstance(row.kind, (Accepted, NotYet, Elsewhere)):
            assert set(map(repr, meanings)) == {repr(base)}, f"{name} is not obeyed, and changes something"
        else:
            assert any(meaning != base for meaning in meanings), f"{name} is documented, and changes nothing"
        if isinstance(row.kind, Accepted):
            assert not errors
        if isinstance(row.kind, Elsewhere):
            assert len(set(errors)) == 1
            assert errors[0].startswith(f"{name} is not taken here; use ")
        if isinstance(row.kind, NotYet):
            assert set(errors) == {f"{name} {row.kind.rule}"}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "count"])
def test_a_default_is_what_an_absent_field_means(kind: str) -> None:
    defaults = {row.name: row.default for row in KINDS[kind][0].fields if row.default is not None}
    assert len(defaults) > 10
    for name, default in defaults.items():
        assert parsed(kind, **{name: default}) == parsed(kind)


def test_every_row_becomes_what_there_is() -> None:
    of_request = {field.name for field in dataclasses.fields(ParsedRequest)}
    of_sampling = {f"sampling.{field.name}" for field in dataclasses.fields(SamplingParams)}
    assert {row.becomes for row in FIELDS if row.becomes} <= of_request | of_sampling


@pytest.mark.parametrize("rows", [RESPONSE, MESSAGE], ids=["responses", "messages"])
def test_what_changes_the_answer_of_a_chat_is_obeyed_or_refused_in_other_apis_too(rows: Object) -> None:
    known = {row.name for row in rows.fields}
    chat = {row.name for row in CHAT.fields if not isinstance(row.kind, Accepted)}
    assert chat <= known, f"these would be ignored: {sorted(chat - known)}"
