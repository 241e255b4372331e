"""From plain data, as a YAML file has it, to a tree of dataclasses: every key is known, and every value possible.

A field's `metadata` says what is possible: `minimum`, `maximum` and `choices`, with the `help` that an error repeats.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tandem.core.errors import ConfigError

_Section = TypeVar("_Section")


def key(
    default: Any, help: str, *, minimum: float | None = None, maximum: float | None = None, choices: Iterable[str] = ()
) -> Any:
    """A field of a section: its default, what it is for, and what is possible."""
    metadata = {"help": help, "minimum": minimum, "maximum": maximum, "choices": choices}
    if isinstance(default, (list, dict)):
        raise TypeError("use tuples: the tree is frozen")
    return dataclasses.field(default=default, metadata=metadata)


def named(help: str, example: str) -> Any:
    """A field of sections that have names, none by default; `example`: one section, as an error shows it."""
    metadata = {"help": help, "minimum": None, "maximum": None, "choices": (), "example": example}
    return dataclasses.field(default_factory=dict, metadata=metadata)


def read_yaml(path: Path, option: str = "--config") -> dict[str, Any]:
    """The file's keys and values. Raises `ConfigError`, which names the place where it is not YAML, and the `option` by
    which another file is named."""
    import yaml  # most processes get their configuration ready made

    text = ""
    try:
        text = path.read_bytes().decode()
        tree = yaml.safe_load(text)
        tree = {} if tree is None else tree
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; name an existing file with {option}") from error
    except UnicodeDecodeError as error:
        before = error.object[: error.start].decode()
        raise _not_yaml(path, before, "a byte that is not UTF-8") from error
    except yaml.reader.ReaderError as error:
        raise _not_yaml(path, text[: error.position], f"the character {chr(error.character)!r}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        before = text[: mark.index] if mark else text
        what = ", ".join(part for part in (error.context, error.problem) if part)
        raise _not_yaml(path, before, what) from error
    except (ValueError, LookupError, AttributeError, RecursionError) as error:  # of values and depths: it has no place
        raise ConfigError(f"{path} is not YAML: it holds a value that cannot be read: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold keys and values at its top, not {type(tree).__name__}")
    return tree


def _not_yaml(path: Path, before: str, what: str) -> ConfigError:
    """`before`: the text in front of what is wrong."""
    line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
    return ConfigError(f"{path} is not YAML: line {line}, column {column}: {what}")


def build(section: type[_Section], tree: Any) -> _Section:
    """Raises `ConfigError`: unknown key, wrong type or impossible value; names key and remedy."""
    return _build(section, tree, "", section)


def _build(section: type[_Section], tree: Any, path: str, root: type[Any]) -> _Section:
    if not isinstance(tree, dict):
        raise ConfigError(f"{path or 'the file'} must hold keys and values, not {tree!r}", key=path)
    fields = {f.name: f for f in dataclasses.fields(section)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(section)
    for name in tree:
        if name not in fields:
            full = f"{path}.{name}".lstrip(".")
            # YAML has keys that are no texts: numbers, and True for `on` and `yes`.
            no_text = "" if isinstance(name, str) else f" is {type(name).__name__} to YAML, and no text"
            raise ConfigError(f"unknown key {full}{no_text}; {_suggestion(str(name), fields, root)}", key=full)
    values: dict[str, Any] = {}
    for name, value in tree.items():
        full = f"{path}.{name}".lstrip(".")
        hint = hints[name]
        if dataclasses.is_dataclass(hint):
            values[name] = _build(typing.cast(type, hint), value if value is not None else {}, full, root)
        elif typing.get_origin(hint) is Mapping:
            values[name] = build_named(typing.get_args(hint)[1], value, full, fields[name].metadata["example"])
        else:
            values[name] = _checked(value, hint, fields[name].metadata, full)
    return section(**values)


def build_named(section: type[_Section], tree: Any, path: str, example: str) -> dict[str, _Section]:
    """Of each name its section. Raises `ConfigError`; `example`: one section, as it is written."""
    if not isinstance(tree, dict | None):
        raise ConfigError(f"{path} must hold names, each with keys and values, as {example}, not {tree!r}", key=path)
    found = {}
    for name, keys in (tree or {}).items():
        full = f"{path}.{name}"
        if not isinstance(keys, dict | None):
            raise ConfigError(f"{full} must hold keys and values, as {example}, not {keys!r}", key=full)
        found[str(name)] = _build(section, keys or {}, full, section)
    return found


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The known name that it may be a slip of, in words that go before a list of all; empty: none is near."""
    by_lower = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f"did you mean {by_lower[near[0]]}? " if near else ""


def _suggestion(name: str, known_here: Iterable[str], root: type[Any]) -> str:
    """Where else the key is, or what it may be a slip of; and all that is known here."""
    elsewhere = [path for path in _paths(root) if path.rpartition(".")[2] == name]
    known = list(known_here)
    meant = f"did you mean {' or '.join(elsewhere)}? " if elsewhere else did_you_mean(name, known)
    return f"{meant}known here: {', '.join(known)}"


def _paths(section: type[Any], prefix: str = "") -> Iterator[str]:
    """Every key of the tree, dotted."""
    for name, hint in typing.get_type_hints(section).items():
        if dataclasses.is_dataclass(hint):
            yield from _paths(typing.cast(type, hint), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _checked(value: Any, hint: Any, metadata: types.MappingProxyType[Any, Any], path: str) -> Any:
    value = _typed(value, hint, path)
    minimum, maximum, choices = metadata["minimum"], metadata["maximum"], metadata["choices"]
    if minimum is not None and value < minimum:
        raise ConfigError(f"{path} is {value}, must be at least {minimum}. {metadata['help']}", key=path)
    if maximum is not None and value > maximum:
        raise ConfigError(f"{path} is {value}, must be at most {maximum}. {metadata['help']}", key=path)
    if choices and value not in choices:
        raise ConfigError(f"{path} is {value!r}, must be one of {', '.join(choices)}", key=path)
    return value


def _typed(value: Any, hint: Any, path: str) -> Any:
    if typing.get_origin(hint) is tuple:
        of = typing.get_args(hint)[0]
        if not isinstance(value, (list, tuple)) or (of is str and not all(isinstance(v, str) for v in value)):
            words = "lists" if typing.get_origin(of) is tuple else _LIST_WORDS.get(of, "sections")
            raise ConfigError(f"{path} must be a list of {words}, not {value!r}", key=path)
        return tuple(_typed(each, of, f"{path}[{number}]") for number, each in enumerate(value))
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value, path, typing.cast(type, hint))
    if hint is float and isinstance(value, str) and _POWER_OF_TEN.fullmatch(value):
        value = float(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) <= sys.float_info.max else math.inf
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{path} must be a finite number, not {value}", key=path)
    if not isinstance(value, hint) or (hint is not bool and isinstance(value, bool)):
        raise ConfigError(f"{path} must be {_TYPE_WORDS[hint]}, not {value!r}", key=path)
    return value


# A number, of which PyYAML makes a text where its exponent has no sign or it has no point: YAML 1.1 wants 8.0e+9.
_POWER_OF_TEN = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
_TYPE_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
_LIST_WORDS = {float: "numbers", str: "texts"}
