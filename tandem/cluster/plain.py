"""What `tandem status --json` prints: a message as plain data, with all its fields. docs/deploy.md describes it."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message


def plain(message: Message) -> dict[str, Any]:
    """Numbers of every size are numbers, roles are `prefill` and `decode`. What is not set is there too: a message as
    `None`, all else as its zero."""
    return {field.name: _field(message, field) for field in message.DESCRIPTOR.fields}


def _field(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return dict(value)
    if field.is_repeated:
        return [_value(each, field) for each in value]
    if field.message_type is not None and not message.HasField(field.name):
        return None
    return _value(value, field)


def _value(value: Any, field: Any) -> Any:
    if field.message_type is not None:
        return plain(value)
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name.rpartition("_")[2].lower()
    return value
