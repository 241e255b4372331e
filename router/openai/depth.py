"""How deeply JSON may be nested. What reads it calls itself for each level, and Python bounds that."""

from __future__ import annotations

from typing import Any

#: Levels of objects and lists, of a body or of JSON that a text in it holds.
MAX_DEPTH = 128
_NESTED = (dict, list)


def is_deep_json(raw: bytes, value: Any) -> bool:
    """As `is_deep` of the value that `raw` holds. One bracket opens one level: few cannot be nested too deeply."""
    return raw.count(b"{") + raw.count(b"[") > MAX_DEPTH and is_deep(value)


def is_deep(value: Any) -> bool:
    """Whether it has more levels than `MAX_DEPTH`."""
    level = [value] if isinstance(value, _NESTED) else []
    for _ in range(MAX_DEPTH):
        level = [
            part
            for whole in level
            for part in (whole.values() if isinstance(whole, dict) else whole)
            if isinstance(part, _NESTED)
        ]
        if not level:
            return False
    return True
