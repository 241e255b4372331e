"""Reading a JSON object field by field, with errors that name the field."""

from __future__ import annotations

import math
from typing import Any

from tandem.core.errors import InvalidRequestError

_MAX_EXACT = 1 << 53  # up to here a float is the integer that was written


class Fields:
    """One JSON object. A field that is `null` counts as absent, as in OpenAI's API."""

    def __init__(self, body: dict[str, Any], path: str = "") -> None:
        self._body = body
        self._path = path
        # Invariant: the names that some method was asked for.
        self._known: set[str] = set()

    def path(self, name: str) -> str:
        """The full name of a field, for messages."""
        return f"{self._path}.{name}" if self._path else name

    def raw(self, name: str) -> Any:
        """The value as it is, `None` where absent."""
        self._known.add(name)
        return self._body.get(name)

    def unknown(self) -> list[str]:
        """The fields that are set and that nobody asked for, sorted."""
        return sorted(name for name, value in self._body.items() if name not in self._known and value is not None)

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, not {shown(value)}")
        return value

    def integer(
        self, name: str, default: int | None = None, *, minimum: int | None = None, maximum: int | None = None
    ) -> int | None:
        value = self.raw(name)
        if value is None:
            return default
        number = whole(value)
        if number is None:
            is_large = isinstance(value, float) and abs(value) > _MAX_EXACT
            rule = "must be a whole number" + (" of at most 64 bits, written out" if is_large else "")
            raise self.error(name, f"{rule}, not {shown(value)}")
        self._check_range(name, number, minimum, maximum)
        return number

    def number(self, name: str, default: float, *, minimum: float | None = None, maximum: float | None = None) -> float:
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(name, f"must be a number, not {shown(value)}")
        if not math.isfinite(value):
            raise self.error(name, "must be finite")
        self._check_range(name, value, minimum, maximum)
        return float(value)

    def text(self, name: str) -> str | None:
        value = self.raw(name)
        if value is not None and not isinstance(value, str):
            raise self.error(name, f"must be a text, not {shown(value)}")
        return value

    def object(self, name: str) -> dict[str, Any] | None:
        value = self.raw(name)
        if value is not None and not isinstance(value, dict):
            raise self.error(name, f"must be an object, not {shown(value)}")
        return value

    def error(self, name: str, rule: str) -> InvalidRequestError:
        full = self.path(name)
        return InvalidRequestError(f"{full} {rule}", field=full)

    def _check_range(self, name: str, value: float, minimum: float | None, maximum: float | None) -> None:
        if minimum is not None and value < minimum:
            raise self.error(name, f"must be at least {minimum}, not {value}")
        if maximum is not None and value > maximum:
            raise self.error(name, f"must be at most {maximum}, not {value}")


def whole(value: Any) -> int | None:
    """`value` where it is a whole number, as JSON Schema means it: JSON knows one kind of number, so 5.0 is one.

    An integer of more than 64 bits arrives as a float that need not be what was sent: it is none.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) <= _MAX_EXACT else None


def shown(value: Any) -> str:
    """A short picture of a wrong value for a message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
