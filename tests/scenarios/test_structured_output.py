"""Structured output with real processes and the embedded model, by the clients that people use."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from tests.scenarios.client import complete, stream
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
