"""Arguments of calls as rules of a grammar: in JSON by llguidance, and in what other formats make of them. Pure.

What follows the rules of a schema is read by its format's reader as arguments that the schema allows.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from router.tools.raw_texts import PLAIN, json_text, json_without, one_of, quoted, raw_text
from router.tools.schema_kinds import KINDS, Branch, InexpressibleError, Kind, SchemaKinds, members_of

#: A marker in a grammar: its token where it is a special one, else its text.
Marker = Callable[[str], str]

Schema = dict[str, Any]
#: The path of a tool's schema in what is said of it.
ROOT = "parameters"
#: Between the parts of arguments stands what most templates write there.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY_OBJECT: Schema = {"type": "object"}


class Rules:
    """Lines of a grammar. What is said twice is one of them."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._names: dict[tuple[str, str], str] = {}

    def rule(self, expression: str) -> str:
        """The name of a rule that says so."""
        return self._named("r", expression)

    def json_rule(self, schema: Schema) -> str:
        """Of what llguidance holds to a schema itself."""
        return self.rule(f"%json {json.dumps(schema, ensure_ascii=False)}")

    def terminal(self, expression: str) -> str:
        """The name of a terminal that says so."""
        return self._named("T", expression)

    def reserve(self) -> str:
        """The name of a rule that is yet to be defined."""
        name = f"v{len(self.lines)}"
        self.lines.append("")
        return name

    def define(self, name: str, expression: str) -> None:
        self.lines[int(name[1:])] = f"{name}: {expression}"

    def _named(self, prefix: str, expression: str) -> str:
        name = self._names.setdefault((prefix, expression), f"{prefix}{len(self.lines)}")
        if name == f"{prefix}{len(self.lines)}":
            self.lines.append(f"{name}: {expression}")
        return name


#: Makes rules of a schema of arguments, `None` for any; gives what stands for them in a rule. Raises
#: `InexpressibleError`, where the format cannot be held to the schema.
Arguments = Callable[[Schema | None, Rules, Marker], str]


def json_arguments(schema: Schema | None, rules: Rules, _: Marker) -> str:
    """A JSON object; what llguidance cannot hold it to, it refuses itself."""
    return rules.json_rule({**(_ANY_OBJECT if schema is None else schema), "x-guidance": _SPACING})


def xml_arguments(closes: Sequence[str]) -> Arguments:
    """Qwen3-Coder's parameters, of which `router.tools.blocks.xml_call` reads what they are.

    Args:
        closes: texts that end a parameter, or what it is in.
    """
    return lambda schema, rules, _: _said(_Parameters(schema or _ANY_OBJECT, rules, closes).all)


def gemma_arguments(quote: str, close: str) -> Arguments:
    """Gemma's object, which `router.tools.blocks.gemma_call` reads."""

    def arguments(schema: Schema | None, rules: Rules, marker: Marker) -> str:
        return _said(_Gemma(schema or _ANY_OBJECT, rules, marker(quote), (quote, close)).arguments)

    return arguments


def _said(make: Callable[[], str]) -> str:
    """What `make` gives. A client may write anything where a schema has numbers, names and lists."""
    try:
        return make()
    except InexpressibleError:
        raise
    except RecursionError as error:
        raise InexpressibleError(ROOT, "is nested too deeply, by its references too") from error
    except (TypeError, AttributeError, ValueError) as error:
        raise InexpressibleError(ROOT, "is no JSON schema") from error


# -- values

_NUMBERS = {"integer": r"/-?(?:0|[1-9][0-9]*)/", "number": r"/-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?/"}
_WORDS = {"null": '"null"', "boolean": '("true" | "false")'}


class _Values(ABC):
    """Rules of a schema's values, in a notation that has objects and lists as JSON has them.

    Args:
        without: texts that have no place in strings.
    """

    item_separator: str

    def __init__(self, root: Schema, rules: Rules, without: Sequence[str]) -> None:
        self.root = root
        self.kinds = SchemaKinds(root)
        self.rules = rules
        self.without = without
        self._known: dict[str, str] = {}

    def value(self, schema: Any, path: str) -> str:
        """The name of the rule of such values."""
        schema = {} if schema is True else schema
        key = json.dumps(self.kinds.essence(schema))
        if (name := self._known.get(key)) is None:
            self._known[key] = name = self.rules.reserve()  # known while it is made: a schema may be within itself
            branches = self.kinds.branches(schema, path)
            if not branches:
                raise InexpressibleError(path, "allows nothing")
            self.rules.define(name, " | ".join(self.branch(branch) for branch in branches))
        return name

    def branch(self, branch: Branch) -> str:
        if branch.kind == "any":
            return " | ".join(self.branch(branch.of(kind)) for kind in KINDS if kind != "integer")
        if branch.kind == "string":
            return self.text(branch.says, branch.path)
        if (values := branch.values) is not None and branch.kind not in _NUMBERS:
            if branch.says.keys() != {"enum"}:
                raise InexpressibleError(branch.path, "has values, and says more of them than their type")
            return f"({' | '.join(self.literal(value, branch.path) for value in values)})"
        if branch.kind == "object":
            return self.object(branch)
        if branch.kind == "array":
            return self._array(branch)
        return self.scalar(branch.kind, branch.says)

    def scalar(self, kind: Kind, says: Mapping[str, Any]) -> str:
        if kind in _WORDS:
            return _WORDS[kind]
        return self.rules.json_rule({**says, "type": kind, "x-guidance": _SPACING})

    def literal(self, value: Any, path: str) -> str:
        """What stands for one value."""
        if isinstance(value, str):
            return self.text({"enum": [value]}, path)
        if isinstance(value, dict):
            members = [f"{self.key(key, path)} {self.literal(part, path)}" for key, part in self.ordered(value)]
            return f'"{{" {self._joined(members)} "}}"'
        if isinstance(value, list):
            return f'"[" {self._joined([self.literal(part, path) for part in value])} "]"'
        return quoted(json.dumps(value))

    def object(self, branch: Branch) -> str:
        properties, required, rest = members_of(branch)
        members = [
            (
                f"{self.key(name, branch.path)} {self.value(schema, f'{branch.path}.properties.{name}')}",
                name in required,
            )
            for name, schema in self.ordered(properties)
            if schema is not False or name in required
        ]
        extra = "" if rest is False else self._extra(list(properties), rest, branch.path)
        return f'"{{" {self._members(members, extra)} "}}"'

    def _extra(self, names: Sequence[str], schema: Any, path: str) -> str:
        value = self.value(schema, f"{path}.additionalProperties")
        return self.rules.rule(f"{self.rules.terminal(self.other_key(names))} {value}")

    def _members(self, members: Sequence[tuple[str, bool]], extra: str) -> str:
        """Members in their order, those that are not required or not, with what parts them."""
        between = quoted(self.item_separator)
        more = f"({between} {extra})*" if extra else ""
        first = next((number for number, (_, is_required) in enumerate(members) if is_required), None)
        if first is not None:
            before = [f"({member} {between})?" for member, _ in members[:first]]
            behind = [
                f"{between} {member}" if is_required else f"({between} {member})?"
                for member, is_required in members[first + 1 :]
            ]
            return " ".join(part for part in (*before, members[first][0], *behind, more) if part)
        # Any may be the first: each with what may follow it.
        begins, rest = ([f"{extra} {more}"] if extra else []), more
        for member, _ in reversed(members):
            begins.append(f"{member} {rest}")
            rest = self.rules.rule(f"({between} {member})? {rest}")
        return f"({' | '.join(reversed(begins))})?" if begins else ""

    def _array(self, branch: Branch) -> str:
        says, path = branch.says, branch.path
        first, rest = says.get("prefixItems", []), says.get("items", True)
        least, most = says.get("minItems", 0), says.get("maxItems")
        if not isinstance(first, list) or isinstance(rest, list):
            raise InexpressibleError(path, "prefixItems must be a list of schemas, and items one")
        if not all(isinstance(size, int) and size >= 0 for size in (least, most or 0)):
            raise InexpressibleError(path, "minItems and maxItems must be numbers of items")
        if (most is not None and most < least) or (rest is False and len(first) < least):
            raise InexpressibleError(path, "allows nothing: it needs more items than it may have")
        first = first[:most]
        most_rest = 0 if rest is False else None if most is None else most - len(first)
        items = [self.value(schema, f"{path}.prefixItems[{number}]") for number, schema in enumerate(first)]
        text = ""
        if most_rest != 0:
            text = self._repeated(self.value(rest, f"{path}.items"), max(0, least - len(first)), most_rest, bool(items))
        for number, item in reversed([*enumerate(items)]):
            text = f"{quoted(self.item_separator) if number else ''} {item} {text}"
            text = text if number < least else f"({text})?"
        return f'"[" {text} "]"'

    def _repeated(self, item: str, least: int, most: int | None, goes_on: bool) -> str:
        """So many items; where the list `goes_on`, there are some before them."""
        again = f"({quoted(self.item_separator)} {item})"
        if goes_on:
            return f"{again}{_times(least, most)}"
        some = f"{item} {again}{_times(max(0, least - 1), None if most is None else most - 1)}"
        return some if least else f"({some})?"

    def _joined(self, parts: Sequence[str]) -> str:
        return f" {quoted(self.item_separator)} ".join(parts)

    @abstractmethod
    def text(self, says: Mapping[str, Any], path: str) -> str:
        """Strings of which the schema says this."""

    @abstractmethod
    def key(self, name: str, path: str) -> str:
        """A key, with what stands between it and its value."""

    @abstractmethod
    def other_key(self, names: Sequence[str]) -> str:
        """The same of any key but these, as a terminal's expression."""

    def ordered(self, members: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """Members in the order in which they are written."""
        return list(members.items())


def _times(least: int, most: int | None) -> str:
    if most is None:
        return f"{{{least},}}" if least else "*"
    return f"{{{least},{most}}}"


def _but(names: Sequence[str]) -> str:
    return f" & ~{one_of(names)}" if names else ""


# -- notations


class _Json(_Values):
    """JSON without some texts, which its strings may have escaped."""

    item_separator = ", "

    def text(self, says: Mapping[str, Any], path: str) -> str:
        return self.rules.terminal(json_text(says, self.without, path))

    def key(self, name: str, _: str) -> str:
        return quoted(f"{json_without(name, self.without)}: ")

    def other_key(self, names: Sequence[str]) -> str:
        return f'"\\"" ({PLAIN} & {raw_text({}, self.without, "")}{_but(names)}) "\\": "'


#: A key that readers take without quotes.
_BARE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class _Gemma(_Values):
    """Gemma's: strings as they are between two `quote`, keys without, in the order of the alphabet."""

    item_separator = ","

    def __init__(self, root: Schema, rules: Rules, quote: str, without: Sequence[str]) -> None:
        """`quote`: as it stands in a grammar."""
        super().__init__(root, rules, without)
        self._quote = quote

    def arguments(self) -> str:
        branches = self.kinds.branches(self.root, ROOT)
        if not branches or not {branch.kind for branch in branches} <= {"object", "any"}:
            raise InexpressibleError(ROOT, "must be the schema of an object")
        return f"({' | '.join(self.object(branch) for branch in branches)})"

    def text(self, says: Mapping[str, Any], path: str) -> str:
        body = raw_text(says, self.without, path)
        if self._quote.startswith("<"):  # a token
            return f"{self._quote} {self.rules.terminal(body)} {self._quote}"
        # In one, since the body would take what is between two strings for a part of it.
        return self.rules.terminal(f"{self._quote} ({body}) {self._quote}")

    def key(self, name: str, path: str) -> str:
        if _BARE.fullmatch(name):
            return quoted(f"{name}:")
        return f'{self.text({"enum": [name]}, path)} ":"'

    def other_key(self, names: Sequence[str]) -> str:
        return f'(/{_BARE.pattern}/{_but(names)}) ":"'

    def ordered(self, members: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """As Jinja's `dictsort` has them, by which templates write both the schema and earlier calls."""
        return sorted(members.items(), key=lambda member: member[0].lower())


#: What between the tags of a parameter is read as JSON of these kinds, where they are allowed beside a string.
_LOOKS_LIKE = {
    "null": "null", "boolean": "true|false", **dict.fromkeys(_NUMBERS, _NUMBERS["number"].strip("/")),
    "object": r"\{(?s:.*)", "array": r"\[(?s:.*)",
}  # fmt: skip
_PARAMETER_END = "\n</parameter>\n"


class _Parameters(_Json):
    """The arguments of one call, each between tags: strings as they are, all else in JSON."""

    def all(self) -> str:
        branches = self.kinds.branches(self.root, ROOT)
        if len(branches) != 1 or branches[0].kind not in ("object", "any") or branches[0].values is not None:
            raise InexpressibleError(ROOT, "must be the schema of one object")
        properties, required, rest = members_of(branches[0])
        parts = []
        for name, schema in properties.items():
            path = f"{ROOT}.properties.{name}"
            if schema is False and name not in required:
                continue
            if not name or name != name.strip() or re.search(r"[<>\n]", name):
                raise InexpressibleError(path, "such a name cannot be written there")
            parameter = f"{quoted(f'<parameter={name}>{_NEW_LINE}')} {self._parameter(schema, path)}"
            parts.append(parameter if name in required else f"({parameter})?")
        if rest is not False:
            key = f"(/{_OTHER_NAME}/{_but(list(properties))})"
            tag = self.rules.terminal(f'"<parameter=" {key} {quoted(f">{_NEW_LINE}")}')
            parts.append(f"({tag} {self._parameter(rest, f'{ROOT}.additionalProperties')})*")
        return " ".join(parts)

    def _parameter(self, schema: Any, path: str) -> str:
        """A value and what ends it."""
        branches = self.kinds.branches(schema, path)
        if not branches:
            raise InexpressibleError(path, "allows nothing")
        strings = [branch for branch in branches if branch.kind in ("string", "any")]
        others = [branch for branch in branches if branch.kind not in ("string", "any")]
        if not strings:
            return f"({self.value(schema, path)} {quoted(_PARAMETER_END)})"
        # What is a string and what is JSON is told by how it looks: no string may look like JSON that is allowed.
        looks = "|".join(sorted({_LOOKS_LIKE[branch.kind] for branch in others}))
        unlike = f" & ~/[ \\t\\n\\r]*(?:{looks})[ \\t\\n\\r]*/" if looks else ""
        end, found = quoted(_PARAMETER_END), []
        for branch in strings:
            found.append(f"({raw_text(branch.of('string').says, self.without, branch.path)}{unlike}) {end}")
        for branch in others:
            if branch.kind not in ("object", "array"):
                found.append(f"{self._plain_scalar(branch)} {end}")
        # One terminal, which is never shorter than what it may become: the lexer takes the longest.
        texts = self.rules.terminal(" | ".join(found))
        structures = [f"{self.branch(branch)} {end}" for branch in others if branch.kind in ("object", "array")]
        return f"({' | '.join([texts, *structures])})"

    def _plain_scalar(self, branch: Branch) -> str:
        if branch.values is not None and branch.says.keys() == {"enum"}:
            return one_of(branch.values, json.dumps)
        if branch.says:
            raise InexpressibleError(
                branch.path, f"{' and '.join(branch.says)} of a number that may be a string as well"
            )
        return _WORDS.get(branch.kind) or _NUMBERS[branch.kind]


_NEW_LINE = "\n"
_OTHER_NAME = r"[^\s<>](?:[^<>\n]*[^\s<>])?"
