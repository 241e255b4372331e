"""One description of a field: how it is read, and what the OpenAPI document says of it.

A kind of value has two methods. `read` checks a JSON value and gives what it means, or raises an error that names the
field; `schema` says the same in JSON Schema, so far as that can.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, NamedTuple, Protocol

from router.openai.model_card import ModelCard
from router.openai.refusal import refuse, shown
from tandem.core.config import LimitsConfig

Schema = dict[str, Any]

_MAX_SESSION_CHARS = 256
_MAX_EXACT = 1 << 53  # up to here a float is the integer that was written


@dataclass(frozen=True)
class PromptBounds:
    """Bounds that are checked before a prompt is read token by token: a body may hold millions."""

    max_prompts: int
    max_context: int | None  # tokens of prompt and output together; `None`: not known


class Scope(NamedTuple):
    """What all reads of one body share."""

    limits: LimitsConfig
    bounds: PromptBounds
    ignored: list[str]  # the full names of the fields that nobody knows


class Kind(Protocol):
    """A kind of value."""

    def read(self, value: Any, path: str, scope: Scope, /) -> Any:
        """What `value` means. Raises `InvalidRequestError`, naming `path`."""
        ...

    def schema(self, limits: LimitsConfig, card: ModelCard, /) -> Schema: ...


@dataclass(frozen=True)
class Field:
    """One field of an object."""

    name: str
    kind: Kind
    default: Any = None  # what an absent field means; `None`: the code that obeys the field knows
    about: str = ""
    becomes: str = ""  # the attribute of `ParsedRequest`; empty: the code in `router.openai.schema` makes more of it
    of: Literal["completion", "chat", "both"] = "both"
    is_required: bool = False  # its kind refuses `None`

    def schema(self, limits: LimitsConfig, card: ModelCard) -> Schema:
        schema = self.kind.schema(limits, card)
        said = {"description": self.about, "default": self.default}
        known = {key: value for key, value in said.items() if value not in ("", None)}
        return {**(schema if self.is_required else nullable(schema)), **known}


class Object:
    """An object with these fields. A field that is `null` counts as absent, as in OpenAI's API."""

    def __init__(self, fields: Iterable[Field], *, is_open: bool = False) -> None:
        self.fields = tuple(fields)
        self._by_name = {field.name: field for field in self.fields}
        self._required = tuple(field for field in self.fields if field.is_required)
        self._is_open = is_open  # other fields are kept as they are

    def read(self, value: Any, path: str, scope: Scope) -> dict[str, Any]:
        """The fields that are set, by name."""
        if not isinstance(value, dict):
            refuse(path, f"must be an object, not {shown(value)}")
        prefix = f"{path}." if path else ""
        given: dict[str, Any] = {}
        unknown = []
        for name, item in value.items():
            if item is None:
                continue
            if (known := self._by_name.get(name)) is not None:
                given[name] = known.kind.read(item, prefix + name, scope)
            elif self._is_open:
                given[name] = item
            else:
                unknown.append(prefix + name)
        for field in self._required:
            if value.get(field.name) is None:
                field.kind.read(None, prefix + field.name, scope)
        scope.ignored[:0] = sorted(unknown)  # before those of the objects in it
        return given

    def schema(self, limits: LimitsConfig, card: ModelCard) -> Schema:
        required = [field.name for field in self._required]
        return {
            "type": "object",
            "properties": {field.name: field.schema(limits, card) for field in self.fields},
            **({"required": required} if required else {}),
        }


@dataclass(frozen=True)
class Boolean:
    def read(self, value: Any, path: str, _: Scope) -> bool:
        if not isinstance(value, bool):
            refuse(path, f"must be true or false, not {shown(value)}")
        return value

    def schema(self, _: LimitsConfig, __: ModelCard) -> Schema:
        return {"type": "boolean"}


@dataclass(frozen=True)
class Text:
    empty: str = ""  # the refusal of an empty or missing text; without it an empty one is taken
    longest: int | None = None  # in characters

    def read(self, value: Any, path: str, _: Scope) -> str:
        if value is None or (value == "" and self.empty):
            refuse(path, self.empty or "is missing")
        if not isinstance(value, str):
            refuse(path, f"must be a text, not {shown(value)}")
        if self.longest is not None and len(value) > self.longest:
            refuse(path, f"must have at most {self.longest} characters, not {len(value)}")
        return value

    def schema(self, _: LimitsConfig, __: ModelCard) -> Schema:
        bounds = {"minLength": 1 if self.empty else None, "maxLength": self.longest}
        return {"type": "string", **{key: bound for key, bound in bounds.items() if bound is not None}}


class OneOf:
    """One of these texts."""

    def __init__(self, *texts: str) -> None:
        self._texts = texts

    def read(self, value: Any, path: str, _: Scope) -> str:
        if value not in self._texts:
            refuse(path, f"must be one of {', '.join(self._texts)}, not {shown(value)}")
        return str(value)

    def schema(self, _: LimitsConfig, __: ModelCard) -> Schema:
        return {"enum": list(self._texts)}


@dataclass(frozen=True)
class Limit:
    """A bound that is configured."""

    key: str  # in `limits`
    why: str = ""  # the end of the message


Bound = float | Limit | None


@dataclass(frozen=True)
class _Range:
    minimum: Bound = None
    maximum: Bound = None
    above: float | None = None

    def check(self, value: float, path: str, limits: LimitsConfig) -> None:
        if self.above is not None and value <= self.above:
            refuse(path, f"must be above {self.above}, not {value}")
        if (least := _number(self.minimum, limits)) is not None and value < least:
            refuse(path, f"must be at least {_told(self.minimum, least, value)}")
        if (most := _number(self.maximum, limits)) is not None and value > most:
            refuse(path, f"must be at most {_told(self.maximum, most, value)}")

    def bounds(self, limits: LimitsConfig) -> Schema:
        found = {
            "minimum": _number(self.minimum, limits),
            "maximum": _number(self.maximum, limits),
            "exclusiveMinimum": self.above,
        }
        return {key: bound for key, bound in found.items() if bound is not None}


def _number(bound: Bound, limits: LimitsConfig) -> float | None:
    return getattr(limits, bound.key) if isinstance(bound, Limit) else bound


def _told(bound: Bound, number: float, value: float) -> str:
    key, why = (f" (limits.{bound.key})", bound.why) if isinstance(bound, Limit) else ("", "")
    return f"{number}{key}, not {value}{why}"


@dataclass(frozen=True)
class Integer(_Range):
    def read(self, value: Any, path: str, scope: Scope) -> int:
        number = whole(value)
        if number is None:
            is_large = isinstance(value, float) and abs(value) > _MAX_EXACT
            rule = "must be a whole number" + (" of at most 64 bits, written out" if is_large else "")
            refuse(path, f"{rule}, not {shown(value)}")
        self.check(number, path, scope.limits)
        return number

    def schema(self, limits: LimitsConfig, _: ModelCard) -> Schema:
        return {"type": "integer", **self.bounds(limits)}


@dataclass(frozen=True)
class Number(_Range):
    def read(self, value: Any, path: str, scope: Scope) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            refuse(path, f"must be a number, not {shown(value)}")
        if not math.isfinite(value):
            refuse(path, "must be finite")
        self.check(value, path, scope.limits)
        return float(value)

    def schema(self, limits: LimitsConfig, _: ModelCard) -> Schema:
        return {"type": "number", **self.bounds(limits)}


# -- fields that are known and not obeyed

#: Values that ask for nothing, in any field.
EMPTY: tuple[Any, ...] = (None, [], {}, "")


class Accepted(Enum):
    """Why a field is accepted whatever it holds."""

    ALWAYS = "Accepted; it does not change the answer."
    WITHOUT_REASONING = "Accepted where the model's chat template has no switch for reasoning; else refused."

    def read(self, value: Any, _: str, __: Scope) -> Any:
        return value

    def schema(self, _: LimitsConfig, __: ModelCard) -> Schema:
        return {"description": self.value}


class SessionName:
    """A text by which clients tell sessions apart. It does not change the answer, so anything else is accepted too."""

    def read(self, value: Any, _: str, __: Scope) -> str:
        return value[:_MAX_SESSION_CHARS] if isinstance(value, str) else ""

    def schema(self, _: LimitsConfig, __: ModelCard) -> Schema:
        return {
            "description": "Requests that name one text are a session (by `session_id`, else `prompt_cache_key`, else "
            "`user`). Of those of a tenant that wait the session goes first that has got least."
        }


class NotYet:
    """It would change the answer and is not there yet: refused, unless it asks for nothing (`harmless`, `EMPTY`)."""

    rule = "is not supported yet and would change the answer; leave it out"

    def __init__(self, *harmless: Any) -> None:
        self._harmless = (*harmless, *EMPTY)

    def read(self, value: Any, path: str, _: Scope) -> Any:
        # In Python True is 1; in JSON it is not.
        if not any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in self._harmless):
            refuse(path, self.rule)
        return value

    def schema(self, _: LimitsConfig, __: ModelCard) -> Schema:
        return {"enum": list(self._harmless), "description": "Not supported yet: only what asks for nothing is taken."}


class Elsewhere(NotYet):
    """It is spelled otherwise here: refused with that spelling, unless it asks for nothing."""

    def __init__(self, spelling: str, *harmless: Any) -> None:
        super().__init__(*harmless)
        self.rule = f"is not taken here; use {spelling}"

    def schema(self, _: LimitsConfig, __: ModelCard) -> Schema:
        return {"enum": list(self._harmless), "description": f"It {self.rule}."}


# -- helpers


def nullable(schema: Schema) -> Schema:
    """`schema` or null."""
    if "type" in schema:
        return {**schema, "type": [schema["type"], "null"]}
    if "enum" in schema and None not in schema["enum"]:
        return {**schema, "enum": [*schema["enum"], None]}
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    if "const" in schema:
        return {**{key: part for key, part in schema.items() if key != "const"}, "enum": [schema["const"], None]}
    if "enum" in schema and None not in schema["enum"]:
        return {**schema, "enum": [*schema["enum"], None]}
    return schema  # takes null already


def whole(value: Any) -> int | None:
    """`value` where it is a whole number, as JSON Schema means it: JSON knows one kind of number, so 5.0 is one.

    An integer of more than 64 bits arrives as a float that need not be what was sent: it is none.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) <= _MAX_EXACT else None
