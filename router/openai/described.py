"""What each API adds to the OpenAPI document, and words for it."""

from __future__ import annotations

from dataclasses import dataclass

from router.openai.fields import Object, Schema


@dataclass(frozen=True)
class Described:
    """What a room of another API adds to the document."""

    paths: Schema
    requests: dict[str, Object]  # by name
    answers: Schema


def ref(name: str) -> Schema:
    """One of the document's schemas."""
    return {"$ref": f"#/components/schemas/{name}"}


def object_of(required: Schema, optional: Schema | None = None) -> Schema:
    """An object with these properties and no others."""
    properties = {**required, **(optional or {})}
    return {"type": "object", "required": list(required), "properties": properties, "additionalProperties": False}
