"""A checkpoint's chat template, run in a sandbox as `transformers` runs it: templates are code from strangers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tandem.core.errors import InvalidRequestError, ModelLoadError

#: What a message's role becomes where the template does not know it; `None`: the message is refused. Templates that
#: write whatever role they are given, or leave out the messages of others, would show the model what it never saw.
_FALLBACKS = {"developer": "system", "tool": None, "function": None}


class ChatTemplate:
    """Turns a list of messages into the text of a prompt."""

    def __init__(self, source: str) -> None:
        """Raises `ModelLoadError` where `source` is not a template."""
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except jinja2.TemplateError as error:
            raise ModelLoadError(f"the chat template cannot be compiled: {error}") from error
        #: The names that it reads of what it is given.
        self.variables = frozenset(jinja2.meta.find_undeclared_variables(tree))
        # A template knows a role by comparing with its name, so the name stands in it as a constant.
        constants = {const.value for const in tree.find_all(jinja2.nodes.Const) if isinstance(const.value, str)}
        self._unknown_roles = _FALLBACKS.keys() - constants
        #: The roles whose messages it does not know and nobody may speak for.
        self.refused_roles = frozenset(role for role in self._unknown_roles if _FALLBACKS[role] is None)

    @classmethod
    def from_dir(cls, model_dir: Path, tokenizer_config: dict[str, Any]) -> ChatTemplate | None:
        """`chat_template.jinja` where there is one, else the one in `tokenizer_config.json`, else `None`."""
        path = model_dir / "chat_template.jinja"
        if path.is_file():
            return cls(path.read_text())
        source = tokenizer_config.get("chat_template")
        if isinstance(source, list):  # several by name: the one for plain chat
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        return cls(source) if isinstance(source, str) else None

    def render(self, messages: Sequence[dict[str, Any]], *, special_tokens: dict[str, str]) -> str:
        """The prompt's text. A `developer` whom the template does not know speaks as `system`.

        Raises:
            InvalidRequestError: the template refuses the messages, or does not know a `tool` or `function`.
        """
        spoken = [self._spoken(number, message) for number, message in enumerate(messages)]
        try:
            # `None` and not undefined, as in `transformers`: templates ask `tools is not none`.
            return self._template.render(
                messages=spoken, tools=None, documents=None, add_generation_prompt=True, **special_tokens
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise InvalidRequestError(
                f"the model's chat template refuses these messages: {error}", field="messages"
            ) from error

    def _spoken(self, number: int, message: dict[str, Any]) -> dict[str, Any]:
        """The message with a role that the template knows."""
        role = message["role"]
        if role not in self._unknown_roles:
            return message
        if role in self.refused_roles:
            raise InvalidRequestError(
                f"messages[{number}].role: the model's chat template knows no messages of the role {role!r}; "
                "put their text into a `user` message",
                field=f"messages[{number}].role",
            )
        return {**message, "role": _FALLBACKS[role]}


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; in a prompt it is its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja's own filter, no HTML escapes: a prompt is not a page."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
