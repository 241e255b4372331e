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


class ChatTemplate:
    """Turns a list of messages into the text of a prompt."""

    def __init__(self, source: str) -> None:
        """Raises `ModelLoadError` where `source` is not a template."""
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            #: The names that it reads of what it is given.
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
        except jinja2.TemplateError as error:
            raise ModelLoadError(f"the chat template cannot be compiled: {error}") from error

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

    def render(
        self, messages: Sequence[dict[str, Any]], *, special_tokens: dict[str, str], add_generation_prompt: bool
    ) -> str:
        """The prompt's text. Raises `InvalidRequestError` where the template refuses the messages."""
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **special_tokens
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise InvalidRequestError(
                f"the model's chat template refuses these messages: {error}", field="messages"
            ) from error


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
