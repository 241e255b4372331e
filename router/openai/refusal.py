"""Refusals that name the field and show what it held."""

from __future__ import annotations

from typing import Any, NoReturn

from tandem.core.errors import InvalidRequestError


def refuse(path: str, rule: str) -> NoReturn:
    raise InvalidRequestError(f"{path} {rule}", field=path)


def shown(value: Any) -> str:
    """A short picture of a wrong value for a message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
