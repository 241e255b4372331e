"""JSON schemas with instances, in the manner of the public JSON Schema test suite.

`jsonschema` says which instances are valid. Where there are properties, instances have them in the schema's order: so
they are generated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import jsonschema

Schema = Any


@dataclass(frozen=True)
class Case:
    name: str
    schema: Schema
    instances: tuple[Any, ...]

    def split(self) -> tuple[list[Any], list[Any]]:
        """Those that are valid, and the others."""
        check = jsonschema.Draft202012Validator(self.schema)
        valid = [instance for instance in self.instances if check.is_valid(instance)]
        return valid, [instance for instance in self.instances if not check.is_valid(instance)]


#: One of each type, and some more.
ANY = (None, True, False, 0, -3, 2.5, "", "x", [], [1], {}, {"a": 1})
NUMBERS = (-11, -10, -1, 0, 1, 2, 3, 5, 7, 9, 10, 11, 99, 100, 101, 1000, -2.5, 0.5, 1.5, 9.99, 10.01, "5", None)
TEXTS = ("", "a", "ab", "abc", "abcd", "é", "日本", "a\nb", 'a"b', "a\\b", "\t", "🙂🙂", "x" * 10, "x" * 11, 1, None)
LISTS: tuple[Any, ...] = (
    [], [1], [1, 2], [1, 2, 3], [1, 2, 3, 4], ["a"], ["a", "b"], ["a", 1], [1, "a"], [None], [[1]], [[]], [{}],
    [True, False], [1, "a", True], [1, "a", True, None], "x", {}, None,
)  # fmt: skip


def cases() -> list[Case]:
    families = (
        types, numbers, strings, enums, arrays, objects, maps, combined, references, real, with_descriptions,
        unsupported,
    )  # fmt: skip
    return [Case(f"{family.__name__} {number}", *found) for family in families for number, found in enumerate(family())]


Found = Iterator[tuple[Schema, tuple[Any, ...]]]


def types() -> Found:
    names = ("null", "boolean", "integer", "number", "string", "array", "object")
    for name in names:
        yield {"type": name}, ANY
    for first, second in pairwise(names):
        yield {"type": [first, second]}, ANY
    yield {"type": list(names)}, ANY
    yield {}, ANY
    yield True, ANY
    yield {"type": ["string", "null"], "maxLength": 1}, ANY
    yield {"type": ["integer", "string"], "minimum": 0, "minLength": 1}, ANY


def numbers() -> Found:
    for kind, least, most in product(("integer", "number"), (None, -10, 0, 1), (None, 10, 100)):
        bounds = {"minimum": least, "maximum": most}
        yield {"type": kind, **{key: value for key, value in bounds.items() if value is not None}}, NUMBERS
    for kind in ("integer", "number"):
        yield {"type": kind, "exclusiveMinimum": 0}, NUMBERS
        yield {"type": kind, "exclusiveMaximum": 10}, NUMBERS
        yield {"type": kind, "exclusiveMinimum": -1, "exclusiveMaximum": 101}, NUMBERS
        yield {"type": kind, "minimum": 5, "exclusiveMaximum": 11}, NUMBERS
    for step in (2, 3, 5, 10):
        yield {"type": "integer", "multipleOf": step}, NUMBERS
    yield {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100}, NUMBERS
    yield {"type": "number", "minimum": 0.5, "maximum": 9.99}, NUMBERS
    yield {"type": "number", "minimum": -2.5, "maximum": -1}, NUMBERS
    yield {"type": "number", "multipleOf": 0.5}, (0.5, 1, 1.5, 0.25, 7, "x")


def strings() -> Found:
    for least, most in ((0, 3), (1, 1), (2, 4), (3, None), (None, 0), (None, 10), (11, None), (1, 2)):
        bounds = {"minLength": least, "maxLength": most}
        yield {"type": "string", **{key: value for key, value in bounds.items() if value is not None}}, TEXTS
    plain = ("", "a", "b", "ab", "aab", "abc", "A", "1", "12", "123", "a1", "cat", "a-b", "2020-01-02", "x@y.z", "é", 1)
    for pattern in (
        "^a+$", "^[a-c]+$", "^[0-9]{2,3}$", "^(cat|dog)$", "^a?b*$", "a", "^a", "b$", "^[A-Z]", "^\\d+$",
        "^[^0-9]*$", "^.$", "^\\d{4}-\\d{2}-\\d{2}$", "^[a-z]+-[a-z]+$", "^\\S+@\\S+$", "^$", "^(a|b|c){2}$", "[0-9]",
        "^é$",
    ):  # fmt: skip
        yield {"type": "string", "pattern": pattern}, plain
    # Of ASCII, as in ECMAScript; Python's takes others too.
    yield {"type": "string", "pattern": "^\\w+$"}, ("", "a", "a1", "a-b", "_", 1)
    yield {"type": "string", "pattern": "^[a-z]*$", "maxLength": 2}, plain
    yield {"type": "string", "pattern": "^[a-z]*$", "minLength": 2}, plain


def enums() -> Found:
    for values in (
        ["a"], ["a", "ab", "abc"], [1, 2, 3], [None], [True], [True, False], [1, "1"], ["", "x"], [None, "x", 0],
        [[1], [1, 2]], [{}, {"a": 1}], ["日本", "é"], ['a"b', "a\\b"], [2.5, -3], list(range(20)),
    ):  # fmt: skip
        yield {"enum": values}, (*ANY, *TEXTS, 1, 2, 3, 4, "1", [1, 2], 19, 20)
    for value in ("x", 0, None, False, [1], {"a": 1}, "日本", 2.5):
        yield {"const": value}, (*ANY, "日本", 2)
    yield {"type": "string", "enum": ["a", "b", 1]}, (*TEXTS, "b")
    yield {"type": "integer", "enum": [1, 5, 10], "maximum": 5}, NUMBERS


def arrays() -> Found:
    yield {"type": "array", "items": {"type": "integer"}}, LISTS
    yield {"type": "array", "items": {"type": "string"}}, LISTS
    yield {"type": "array", "items": {"type": ["integer", "string"]}}, LISTS
    yield {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}, LISTS
    yield {"type": "array", "items": False}, LISTS
    yield {"type": "array", "items": True, "maxItems": 2}, LISTS
    for least, most in ((0, 1), (1, 2), (2, 3), (3, None), (None, 0), (4, 4), (1, None)):
        bounds = {"minItems": least, "maxItems": most}
        known = {key: value for key, value in bounds.items() if value is not None}
        yield {"type": "array", **known}, LISTS
        yield {"type": "array", "items": {"type": "integer"}, **known}, LISTS
    first, second = {"type": "integer"}, {"type": "string"}
    yield {"type": "array", "prefixItems": [first, second]}, LISTS
    yield {"type": "array", "prefixItems": [first, second], "items": False}, LISTS
    yield {"type": "array", "prefixItems": [first, second], "items": {"type": "boolean"}}, LISTS
    yield {"type": "array", "prefixItems": [first, second], "minItems": 2}, LISTS
    yield {"type": "array", "prefixItems": [first], "items": {"type": "integer"}, "maxItems": 3}, LISTS
    yield {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1}, LISTS


OBJECTS: tuple[Any, ...] = (
    {}, {"a": 1}, {"a": "x"}, {"b": "x"}, {"b": 1}, {"a": 1, "b": "x"}, {"a": 1, "b": 2}, {"a": 1, "b": "x", "c": None},
    {"a": 1, "c": 3}, {"c": 3}, {"a": 1, "b": "x", "d": []}, {"x": 1}, {"a": None}, {"": 1}, [], "a", None, 3,
)  # fmt: skip


def objects() -> Found:
    a, b = {"a": {"type": "integer"}}, {"b": {"type": "string"}}
    c = {"c": {"type": ["null", "integer"]}}
    for required in ([], ["a"], ["b"], ["a", "b"]):
        for closed in ({}, {"additionalProperties": False}, {"additionalProperties": {"type": "integer"}}):
            yield {"type": "object", "properties": {**a, **b}, "required": required, **closed}, OBJECTS
    yield {"type": "object", "properties": {**a, **b, **c}, "additionalProperties": False}, OBJECTS
    yield {"type": "object", "properties": {**a, **b, **c}, "required": ["c"]}, OBJECTS
    yield {"type": "object", "required": ["a"]}, OBJECTS
    yield {"type": "object", "required": ["a", "b"]}, OBJECTS
    yield {"properties": a}, OBJECTS
    yield {"type": "object", "properties": {"a": True}, "required": ["a"]}, OBJECTS
    yield {"type": "object", "properties": {"a": False}}, OBJECTS
    yield {"type": "object", "properties": {"": {"type": "integer"}}, "required": [""]}, OBJECTS
    yield {"type": "object", "additionalProperties": False}, OBJECTS
    names = ('a"b', "a\\b", "é", "日本", "a b", "\n")
    odd = {"type": "object", "properties": {n: {"type": "integer"} for n in names}, "required": list(names)}
    yield odd, (dict.fromkeys(names, 1), dict.fromkeys(names[1:], 1), dict.fromkeys(names, "x"))
    inner = {"type": "object", "properties": a, "required": ["a"], "additionalProperties": False}
    outer = {"type": "object", "properties": {"o": inner}, "required": ["o"], "additionalProperties": False}
    yield outer, ({"o": {"a": 1}}, {"o": {}}, {"o": {"a": "x"}}, {"o": {"a": 1, "b": 1}}, {}, {"o": 1})


def maps() -> Found:
    pool: tuple[Any, ...] = (
        {}, {"x": 1}, {"x": 1, "y": 2}, {"x": 1, "y": 2, "z": 3}, {"x": "s"}, {"n1": 1}, {"n1": "s"},
        {"n1": 1, "x": "s"}, {"s_a": "t"}, {"s_a": 1}, {"ab": 1}, {"abc": 1}, [], None,
    )  # fmt: skip
    integer, text = {"type": "integer"}, {"type": "string"}
    yield {"type": "object", "additionalProperties": integer}, pool
    yield {"type": "object", "additionalProperties": {"type": ["integer", "string"]}}, pool
    yield {"type": "object", "patternProperties": {"^n": integer}, "additionalProperties": text}, pool
    yield {"type": "object", "patternProperties": {"^n": integer}, "additionalProperties": False}, pool
    yield {"type": "object", "patternProperties": {"^n": integer, "^s_": text}, "additionalProperties": False}, pool
    yield {"type": "object", "patternProperties": {"^[a-z]$": integer}, "additionalProperties": False}, pool
    for least, most in ((1, None), (None, 1), (1, 2), (2, None), (None, 0)):
        bounds = {"minProperties": least, "maxProperties": most}
        known = {key: value for key, value in bounds.items() if value is not None}
        yield {"type": "object", "additionalProperties": integer, **known}, pool


def combined() -> Found:
    integer, text, none = {"type": "integer"}, {"type": "string"}, {"type": "null"}
    yield {"anyOf": [integer, text]}, ANY
    yield {"anyOf": [integer, {"type": "integer", "minimum": 5}]}, NUMBERS
    yield {"anyOf": [{"const": "a"}, {"const": "b"}, none]}, (*TEXTS, "b")
    yield {"anyOf": [text, none], "maxLength": 1}, TEXTS
    yield {"type": "string", "anyOf": [{"maxLength": 1}, {"minLength": 10}]}, TEXTS
    yield {"anyOf": [{"type": "array", "items": integer}, {"type": "array", "items": text}]}, LISTS
    yield {"anyOf": [{"type": "array", "maxItems": 1}, {"type": "object"}]}, (*LISTS, *OBJECTS)
    yield {"oneOf": [integer, text]}, ANY
    yield {"oneOf": [{"const": "a"}, {"const": "b"}]}, (*TEXTS, "b")
    yield {"oneOf": [text, none, {"type": "boolean"}]}, ANY
    kinds = [
        {
            "type": "object",
            "properties": {"kind": {"const": kind}, "value": of},
            "required": ["kind", "value"],
            "additionalProperties": False,
        }
        for kind, of in (("int", integer), ("text", text))
    ]
    tagged = (
        {"kind": "int", "value": 1}, {"kind": "text", "value": "x"}, {"kind": "int", "value": "x"},
        {"kind": "text", "value": 1}, {"kind": "other", "value": 1}, {"value": 1}, {"kind": "int"}, {},
    )  # fmt: skip
    yield {"anyOf": kinds}, tagged
    yield {"oneOf": kinds}, tagged
    yield {"type": "array", "items": {"anyOf": kinds}, "maxItems": 2}, tuple([item] for item in tagged)
    yield {"allOf": [integer, {"minimum": 5}]}, NUMBERS
    yield {"allOf": [{"type": "integer", "minimum": 0}, {"type": "integer", "maximum": 10}]}, NUMBERS
    yield {"allOf": [text, {"maxLength": 3}, {"minLength": 2}]}, TEXTS
    yield {"allOf": [{"type": ["integer", "string"]}, {"type": ["string", "null"]}]}, ANY
    a = {"type": "object", "properties": {"a": integer}, "required": ["a"]}
    b = {"type": "object", "properties": {"b": text}, "required": ["b"]}
    yield {"allOf": [a, b]}, OBJECTS
    yield {**a, "allOf": [b]}, OBJECTS
    yield {"allOf": [a, {"properties": {"a": {"maximum": 0}}}]}, (*OBJECTS, {"a": 0})
    yield {"anyOf": [a, b]}, OBJECTS
    yield {"type": "integer", "anyOf": [{"maximum": 0}, {"minimum": 100}]}, NUMBERS
    yield {"allOf": [{"anyOf": [integer, text]}, {"anyOf": [text, none]}]}, ANY
    yield {"type": "array", "items": {"anyOf": [integer, none]}, "minItems": 1}, LISTS


def references() -> Found:
    yield {"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}}, ANY
    yield {"$ref": "#/definitions/n", "definitions": {"n": {"type": "string"}}}, ANY
    yield {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "boolean"}}}, ANY
    yield {"$ref": "#/$defs/n", "minimum": 5, "$defs": {"n": {"type": "integer"}}}, NUMBERS
    yield {"$defs": {"p": {"$ref": "#/$defs/q"}, "q": {"enum": ["a", "b"]}}, "$ref": "#/$defs/p"}, (*TEXTS, "b")
    trees: tuple[Any, ...] = (
        {"v": 1}, {"v": 1, "next": None}, {"v": 1, "next": {"v": 2, "next": None}}, {"v": 1, "next": {"v": "x"}},
        {"v": 1, "next": {"v": 2, "next": {"v": 3, "next": None}}}, {"v": 1, "next": {}}, {}, None, {"v": 1, "next": 3},
    )  # fmt: skip
    link = {
        "type": "object",
        "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/link"}]}},
        "required": ["v"],
        "additionalProperties": False,
    }
    yield {"$ref": "#/$defs/link", "$defs": {"link": link}}, trees
    yield {**link, "properties": {**link["properties"], "next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}}}, trees
    nested: tuple[Any, ...] = ([], [[]], [[], [[]]], [1], [[1]], {}, [[[[]]]])
    yield {"type": "array", "items": {"$ref": "#"}}, nested
    yield {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}, nested
    node = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
        "required": ["name", "children"],
        "additionalProperties": False,
    }
    leaf = {"name": "x", "children": []}
    pair, broken = ({"name": "y", "children": children} for children in ([leaf, leaf], [{"name": "z"}]))
    forest = (leaf, pair, broken, {"name": "x"}, [])
    yield {"$defs": {"node": node}, "$ref": "#/$defs/node"}, forest
    yield {"$defs": {"node": node}, "type": "array", "items": {"$ref": "#/$defs/node"}}, ([leaf], [], [1], [broken])
    yield {"properties": {"a": {"type": "integer"}, "b": {"$ref": "#/properties/a"}}, "type": "object"}, (
        {"a": 1, "b": 2}, {"a": 1, "b": "x"}, {"b": 3}, {},
    )  # fmt: skip
    expression = {
        "anyOf": [
            {"type": "integer"},
            {
                "type": "object",
                "properties": {"op": {"enum": ["+", "*"]}, "l": {"$ref": "#"}, "r": {"$ref": "#"}},
                "required": ["op", "l", "r"],
                "additionalProperties": False,
            },
        ]
    }
    plus = {"op": "+", "l": 1, "r": {"op": "*", "l": 2, "r": 3}}
    yield expression, (1, plus, {"op": "-", "l": 1, "r": 2}, {"op": "+", "l": 1}, {"op": "+", "l": 1, "r": "x"}, None)


def real() -> Found:
    """As tools and extractions have them."""
    weather = {
        "type": "object",
        "properties": {
            "location": {"type": "string", "description": "City and state"},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        },
        "required": ["location"],
        "additionalProperties": False,
    }
    yield weather, (
        {"location": "Paris"}, {"location": "Paris", "unit": "celsius"}, {"unit": "celsius"}, {"location": 1},
        {"location": "Paris", "unit": "kelvin"}, {"location": "Paris", "x": 1},
    )  # fmt: skip
    person = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "email": {"anyOf": [{"type": "string", "pattern": "^[^@ ]+@[^@ ]+$"}, {"type": "null"}]},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
        },
        "required": ["name", "age", "email", "tags"],
        "additionalProperties": False,
    }
    ann = {"name": "Ann", "age": 30, "email": "a@b.c", "tags": ["x", "y"]}
    yield person, (
        ann, {**ann, "email": None}, {**ann, "age": 151}, {**ann, "age": -1}, {**ann, "name": ""},
        {**ann, "email": "ab"}, {**ann, "tags": ["a"] * 4}, {"name": "Ann", "age": 30},
        {**ann, "more": 1}, {**ann, "age": "30"},
    )  # fmt: skip
    steps = {
        "type": "object",
        "properties": {
            "steps": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"explanation": {"type": "string"}, "output": {"type": "string"}},
                    "required": ["explanation", "output"],
                    "additionalProperties": False,
                },
            },
            "final_answer": {"type": "string"},
        },
        "required": ["steps", "final_answer"],
        "additionalProperties": False,
    }
    step = {"explanation": "Add 1.", "output": "x = 2"}
    yield steps, (
        {"steps": [step, step], "final_answer": "2"}, {"steps": [], "final_answer": ""}, {"steps": [step]},
        {"steps": [{"output": "x"}], "final_answer": "2"}, {"steps": step, "final_answer": "2"}, [],
    )  # fmt: skip
    point = {"type": "array", "prefixItems": [{"type": "number"}, {"type": "number"}], "items": False, "minItems": 2}
    shape = {
        "type": "object",
        "properties": {
            "type": {"const": "LineString"},
            "coordinates": {"type": "array", "items": point, "minItems": 2},
        },
        "required": ["type", "coordinates"],
        "additionalProperties": False,
    }
    yield shape, (
        {"type": "LineString", "coordinates": [[0, 1], [2.5, -3]]}, {"type": "LineString", "coordinates": [[0, 1]]},
        {"type": "Point", "coordinates": [[0, 1], [1, 1]]}, {"type": "LineString", "coordinates": [[0, 1], [1]]},
        {"type": "LineString", "coordinates": [[0, 1], [1, 2, 3]]},
    )  # fmt: skip
    for number in (1, 5, 20):
        fields = {f"field_{index}": {"type": "integer"} for index in range(number)}
        closed = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
        full = dict.fromkeys(fields, 7)
        yield closed, (full, {**full, "field_0": "x"}, {**full, "more": 1}, dict(list(full.items())[1:]), {})


def with_descriptions() -> Found:
    """Keywords that only describe change nothing."""
    for extra in (
        {"title": "T"}, {"description": "D"}, {"default": 3}, {"examples": [1]}, {"$comment": "C"},
        {"deprecated": True}, {"readOnly": True}, {"$schema": "https://json-schema.org/draft/2020-12/schema"}, {"$id": "https://x.y/z"},
        {"title": "T", "description": "D", "default": None, "examples": []},
    ):  # fmt: skip
        yield {"type": "integer", **extra}, ANY


def unsupported() -> Found:
    """What may be refused, and must not be passed over."""
    yield {"not": {"type": "string"}}, ANY
    yield {"type": "array", "uniqueItems": True}, (*LISTS, [1, 1])
    yield {"type": "array", "contains": {"type": "string"}}, LISTS
    yield {"type": "object", "dependentRequired": {"a": ["b"]}}, OBJECTS
    yield {"type": "object", "propertyNames": {"maxLength": 1}}, (*OBJECTS, {"ab": 1})
    yield {"if": {"type": "integer"}, "then": {"minimum": 5}}, NUMBERS
    yield {"type": "string", "pattern": "^(?!a)"}, TEXTS
    yield {"oneOf": [{"type": "integer"}, {"type": "integer", "minimum": 5}]}, NUMBERS
    yield {"type": "object", "unevaluatedProperties": False}, OBJECTS
    yield {"type": "array", "prefixItems": [{"type": "integer"}], "unevaluatedItems": False}, LISTS


#: By format: texts that are right, and texts that are not. `jsonschema` checks formats only with more packages.
FORMATS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "date": (("2024-02-29", "1999-12-31"), ("2024-13-01", "24-01-01", "2024-1-1", "")),
    "time": (("12:30:00Z", "23:59:59+01:00"), ("25:00:00Z", "12:30", "")),
    "date-time": (
        ("2024-02-29T12:30:00Z", "1999-12-31T23:59:59.123+01:00"),
        ("2024-02-29", "2024-02-29T25:00:00Z", ""),
    ),
    "duration": (("P1D", "PT1H30M"), ("1D", "P", "")),
    "email": (("a@b.c", "first.last@example.com"), ("a", "@b.c", "")),
    "hostname": (("example.com", "a-b.c"), ("-a.b", "a..b")),
    "ipv4": (("127.0.0.1", "255.255.255.255"), ("256.0.0.1", "1.2.3", "")),
    "ipv6": (("::1", "fe80::1:2"), ("1:2", ":::", "")),
    "uuid": (("123e4567-e89b-12d3-a456-426614174000",), ("123e4567", "123e4567-e89b-12d3-a456-42661417400z", "")),
    "uri": (("https://example.com/a?b=c",), ("a b", "")),
}
