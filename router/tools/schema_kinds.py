"""What a JSON schema allows, kind by kind of value: for formats of calls that write each kind in another way. Pure.

References, `anyOf`, `oneOf`, `allOf` and lists of types are followed until each branch is of one kind.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import unquote

#: `any`: nothing says of which.
Kind = Literal["string", "null", "boolean", "integer", "number", "object", "array", "any"]

KINDS: tuple[Kind, ...] = ("string", "null", "boolean", "integer", "number", "object", "array")
#: They describe, or are of use only where they are referred to. What is no keyword says nothing either.
_DESCRIBE = frozenset(
    ("$schema", "$id", "id", "$anchor", "$comment", "$defs", "definitions", "title", "description", "default",
     "examples", "deprecated", "readOnly", "writeOnly", "contentEncoding", "contentMediaType", "x-guidance")
)  # fmt: skip
_FOLLOWED = frozenset(("$ref", "allOf", "anyOf", "oneOf", "type", "enum", "const"))
_OF_KIND: dict[str, frozenset[str]] = {
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "number": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
    "object": frozenset(("properties", "required", "additionalProperties")),
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems")),
}
_OF_KIND["integer"] = _OF_KIND["number"]
_REFUSED = frozenset(
    ("not", "if", "then", "else", "dependentSchemas", "dependentRequired", "dependencies", "patternProperties",
     "propertyNames", "minProperties", "maxProperties", "unevaluatedProperties", "unevaluatedItems", "additionalItems",
     "contains", "minContains", "maxContains", "uniqueItems", "$dynamicRef", "$recursiveRef")
)  # fmt: skip
#: What says of two of them, of which both hold, that their other half is of another schema's.
_TOGETHER = (frozenset(("properties", "required", "additionalProperties")), frozenset(("items", "prefixItems")))
#: Schemas of which several have to hold, and references, that one schema of a tool may lead through.
_MAX_STEPS = 5_000
#: Values of lists that are held against each other, of which several have to hold.
_MAX_VALUES = 100_000


class InexpressibleError(ValueError):
    """A schema says what no call of the format can be held to."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path}: {why}" if path else why)


@dataclass(frozen=True, slots=True)
class Branch:
    """Values of one kind.

    Attributes:
        says: what the schema says of such values; `enum` has only such, and there are no references.
        path: of the schema that says so.
    """

    kind: Kind
    says: Mapping[str, Any]
    path: str

    @property
    def values(self) -> Sequence[Any] | None:
        """Those that there are; `None`: they are not listed."""
        listed: Sequence[Any] | None = self.says.get("enum")
        return listed

    def of(self, kind: Kind) -> Branch:
        """What it says of values of this kind; of one that lists values, only of its own."""
        of_kind = {key: value for key, value in self.says.items() if key == "enum" or key in _OF_KIND.get(kind, ())}
        return Branch(kind, of_kind, self.path)


class SchemaKinds:
    """Branches of the schemas in one, to which their references lead."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._num_steps = self._num_values = 0

    def branches(self, schema: Any, path: str = "") -> list[Branch]:
        """What `schema` allows: any of these; none: nothing.

        Raises `InexpressibleError`: it says more than its branches would.
        """
        return self._branches(schema, path, frozenset())

    def essence(self, schema: Any) -> Any:
        """What of `schema` says anything."""
        return {k: v for k, v in schema.items() if _says(k, v)} if isinstance(schema, dict) else schema

    def _branches(self, schema: Any, path: str, passed: frozenset[str]) -> list[Branch]:
        self._num_steps += 1
        if self._num_steps > _MAX_STEPS:
            raise InexpressibleError(path, "leads through too many schemas")
        if isinstance(schema, bool):
            return [Branch("any", {}, path)] if schema else []
        if not isinstance(schema, dict):
            raise InexpressibleError(path, "must be a JSON schema")
        says = self.essence(schema)
        for key in says:
            if key in _REFUSED:
                raise InexpressibleError(f"{path}.{key}", "such a call cannot be held to it")
        if (ref := says.pop("$ref", None)) is not None:
            if ref in passed:
                raise InexpressibleError(f"{path}.$ref", f"{ref} refers to itself")
            target = self._target(ref, path)
            return self._branches(self._both(says, target, path), path, passed | {ref})
        if (parts := says.pop("allOf", None)) is not None:
            for number, part in enumerate(_listed(parts, f"{path}.allOf")):
                says = self._both(says, part, f"{path}.allOf[{number}]")
            return self._branches(says, path, passed)
        for key in ("anyOf", "oneOf"):
            if (parts := says.pop(key, None)) is not None:
                found = [
                    self._branches(self._both(says, part, f"{path}.{key}[{number}]"), f"{path}.{key}[{number}]", passed)
                    for number, part in enumerate(_listed(parts, f"{path}.{key}"))
                ]
                if key == "oneOf":
                    _check_exclusive(found, f"{path}.oneOf")
                return [branch for part in found for branch in part]
        return _typed(says, path)

    def _target(self, ref: Any, path: str) -> Any:
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
            raise InexpressibleError(f"{path}.$ref", "must refer to a part of the same schema")
        part: Any = self._root
        for step in ref.split("/")[1:]:
            key = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(part, list) and key.isdecimal() and int(key) < len(part):
                part = part[int(key)]
            elif isinstance(part, dict) and key in part:
                part = part[key]
            else:
                raise InexpressibleError(f"{path}.$ref", f"{ref} is not there")
        return part

    def _both(self, one: Mapping[str, Any], other: Any, path: str) -> Any:
        """A schema of what both allow."""
        if isinstance(other, bool):
            return one if other else False
        if not isinstance(other, dict):
            raise InexpressibleError(path, "must be a JSON schema")
        other = self.essence(other)
        if not one or not other:
            return {**one, **other}
        for group in _TOGETHER:
            mine, others = group & one.keys(), group & other.keys()
            if mine and others and not (mine == others == {"required"}) and _differ(one, other, group):
                raise InexpressibleError(path, f"{' and '.join(sorted(mine | others))} are said in two places")
        if "enum" in one and "enum" in other:
            self._num_values += len(_listed(one["enum"], path)) + len(_listed(other["enum"], path))
            if self._num_values > _MAX_VALUES:
                raise InexpressibleError(path, "lists too many values, in as many parts")
        both = {**other, **one}
        for key in one.keys() & other.keys():
            both[key] = _of_both(key, one[key], other[key], path)
        return both


def _says(key: str, value: Any) -> bool:
    if key in _DESCRIBE or (key == "uniqueItems" and value is False):
        return False
    return key in _FOLLOWED or key in _REFUSED or any(key in keys for keys in _OF_KIND.values())


def _differ(one: Mapping[str, Any], other: Mapping[str, Any], group: Iterable[str]) -> bool:
    return any(one.get(key) != other.get(key) for key in group)


def _of_both(key: str, one: Any, other: Any, path: str) -> Any:
    if one == other and json.dumps(one) == json.dumps(other):
        return one
    if key in ("minimum", "exclusiveMinimum", "minLength", "minItems"):
        return max(one, other)
    if key in ("maximum", "exclusiveMaximum", "maxLength", "maxItems"):
        return min(one, other)
    if key == "required":
        return [*one, *(name for name in other if name not in one)]
    if key == "type":
        mine, others = _types(one, path), _types(other, path)
        both = [kind for kind in mine if kind in others or (kind == "integer" and "number" in others)]
        return both + [kind for kind in others if kind == "integer" and "number" in mine and kind not in both]
    if key == "enum":
        kept = {json.dumps(value) for value in _listed(other, path)}
        return [value for value in _listed(one, path) if json.dumps(value) in kept]
    raise InexpressibleError(f"{path}.{key}", "is said in two places")


def _listed(value: Any, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise InexpressibleError(path, "must be a list")
    return value


def _types(value: Any, path: str) -> list[Kind]:
    kinds = value if isinstance(value, list) else [value]
    if not all(kind in KINDS for kind in kinds):
        raise InexpressibleError(f"{path}.type", f"must be of {', '.join(KINDS)}")
    return kinds


def _typed(says: dict[str, Any], path: str) -> list[Branch]:
    values: list[Any] | None = _listed(says["enum"], f"{path}.enum") if "enum" in says else None
    if "const" in says:
        same = json.dumps(says["const"])
        values = [says["const"]] if values is None or same in map(json.dumps, values) else []
    if "type" in says:
        kinds = _types(says["type"], path)
    elif values is not None:
        kinds = list(dict.fromkeys(kind_of(value) for value in values))
    else:
        # Who speaks of properties or items means what has them.
        meant: tuple[Kind, ...] = ("object", "array")
        kinds = [kind for kind in meant if _OF_KIND[kind] & says.keys()] or ["any"]
    if "number" in kinds:
        kinds = [kind for kind in kinds if kind != "integer"]
    found = []
    for kind in dict.fromkeys(kinds):
        branch = Branch(kind, says, path) if kind == "any" else Branch("any", says, path).of(kind)
        if values is not None:
            if not (of_kind := [value for value in values if is_of(value, kind)]):
                continue
            branch = Branch(kind, {**branch.says, "enum": of_kind}, path)
        found.append(branch)
    return found


def kind_of(value: Any) -> Kind:
    """Of a value of JSON."""
    for kind, of in _PYTHON.items():
        if isinstance(value, of):
            return kind
    return "null"


#: A boolean is an integer in Python, so it comes before.
_PYTHON: dict[Kind, type] = {
    "boolean": bool, "string": str, "integer": int, "number": float, "object": dict, "array": list,
}  # fmt: skip


def is_of(value: Any, kind: Kind) -> bool:
    """Whether a value of JSON is of this kind."""
    return kind_of(value) == kind or (kind == "number" and kind_of(value) == "integer")


# -- objects


def members_of(branch: Branch) -> tuple[dict[str, Any], Sequence[str], Any]:
    """The properties of an object, the names of those that it must have, and the schema of all others."""
    properties, required = branch.says.get("properties", {}), branch.says.get("required", [])
    rest = branch.says.get("additionalProperties", True)
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise InexpressibleError(branch.path, "properties must be an object of schemas, and required a list of names")
    return {**properties, **{name: rest for name in required if name not in properties}}, required, rest


# -- schemas of which one alone may hold


_MAY_BOTH_HOLD = "more than one part may hold; use anyOf, or parts that exclude each other"


def _check_exclusive(parts: Sequence[Sequence[Branch]], path: str) -> None:
    """Raises `InexpressibleError` where not each two parts are known to exclude each other."""
    holders = [_Holder(number, branch) for number, part in enumerate(parts) for branch in part]
    if len(parts) > 1 and any(one.kind == "any" for one in holders):
        raise InexpressibleError(path, _MAY_BOTH_HOLD)
    of_value: dict[tuple[str, str], int] = {}
    for one in holders:
        if any(of_value.setdefault((one.kind, value), one.part) != one.part for value in one.values or ()):
            raise InexpressibleError(path, _MAY_BOTH_HOLD)
    num_left = _MAX_STEPS
    for kind in {one.kind for one in holders}:
        alike = [one for one in holders if one.kind == kind]
        for one in (each for each in alike if each.values is None):
            for other in alike:
                if other.part == one.part or (other.values is None and other.part < one.part):
                    continue
                num_left -= 1
                if num_left < 0:
                    raise InexpressibleError(path, "has too many parts that only their properties tell apart")
                if not one.excludes(other):
                    raise InexpressibleError(path, _MAY_BOTH_HOLD)


class _Holder:
    """A branch of one part of a `oneOf`, as it is compared with those of others.

    Attributes:
        part: the part's number.
        kind: of its values; integers are numbers.
        values: in JSON; `None`: they are not listed.
    """

    def __init__(self, part: int, branch: Branch) -> None:
        self.part = part
        self.kind = "number" if branch.kind == "integer" else branch.kind
        self.values = _in_json(branch.values)
        properties, required = branch.says.get("properties", {}), branch.says.get("required", ())
        listed = {name: _in_json(_tag_values(properties.get(name))) for name in required}
        self._tags = {name: values for name, values in listed.items() if values is not None}

    def excludes(self, other: _Holder) -> bool:
        """Of its kind: whether a property that both must have has other values in each."""
        shared = self._tags.keys() & other._tags.keys()
        return any(self._tags[name].isdisjoint(other._tags[name]) for name in shared)


def _in_json(values: Sequence[Any] | None) -> frozenset[str] | None:
    return None if values is None else frozenset(json.dumps(value) for value in values)


def _tag_values(schema: Any) -> Sequence[Any] | None:
    if not isinstance(schema, dict):
        return None
    return [schema["const"]] if "const" in schema else schema.get("enum")


# -- what readers ask


class ParameterKinds:
    """Kinds of the values of tools' parameters.

    Args:
        schemas: of the tools' arguments, by the tools' names. Clients may have written anything there.
    """

    def __init__(self, schemas: Mapping[str, Any]) -> None:
        self._schemas = schemas
        self._known: dict[tuple[str, str], frozenset[Kind]] = {}

    def of(self, tool: str, parameter: str) -> frozenset[Kind]:
        """Those that are allowed; `any` where nothing says of which."""
        if (kinds := self._known.get((tool, parameter))) is None:
            kinds = self._known[tool, parameter] = self._read(self._schemas.get(tool), parameter)
        return kinds

    def _read(self, schema: Any, parameter: str) -> frozenset[Kind]:
        if not isinstance(schema, dict):
            return frozenset(("any",))
        kinds = SchemaKinds(schema)
        try:
            (whole,) = kinds.branches(schema)
            properties, _, rest = members_of(whole)
            return frozenset(branch.kind for branch in kinds.branches(properties.get(parameter, rest)))
        except (ValueError, TypeError):  # what a grammar could not be made of may say all the same what is meant
            listing = schema.get("properties")
            said = listing.get(parameter) if isinstance(listing, dict) else None
            types = said.get("type") if isinstance(said, dict) else None
            listed = types if isinstance(types, list) else [types]
            return frozenset(kind for kind in KINDS if kind in listed) or frozenset(("any",))
