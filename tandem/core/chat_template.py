"""A checkpoint's chat template, run in a sandbox as `transformers` runs it: templates are code from strangers."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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

#: What these hold is not the client's to set by way of `ChatOptions.variables`.
RESERVED_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})

#: Under these names templates read what an assistant's message has thought before it spoke.
_REASONING_NAMES = ("reasoning", "reasoning_content", "thinking")

#: Stands behind the last message's content, with a space, while the template runs; the prompt ends there.
_END_MARK = "\x02tandem-continues-here\x03"


@dataclass(frozen=True)
class ChatOptions:
    """How a template is to write a conversation.

    Attributes:
        add_generation_prompt: the prompt ends where the assistant begins to answer.
        continue_final_message: it ends with the last message's content, which the answer continues.
        documents: what a template for retrieval reads; `None`: there are none.
        variables: others that the template reads, by name.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    documents: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


_USUAL = ChatOptions()


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error


def _template_of_processor(path: Path) -> Any:
    try:
        said = json.loads(_read(path)) if path.is_file() else {}
    except ValueError as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    return said.get("chat_template") if isinstance(said, dict) else None


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
        self.source = source
        # Mistral's refuse ids of calls that have not nine letters and digits.
        self._wants_short_ids = bool(re.search(r"length\W*[!=]=\s*9\b", source))
        #: The names that it reads of what it is given.
        self.variables = frozenset(jinja2.meta.find_undeclared_variables(tree))
        # A template knows a role by comparing with its name, so the name stands in it as a constant.
        constants = {const.value for const in tree.find_all(jinja2.nodes.Const) if isinstance(const.value, str)}
        self._unknown_roles = _FALLBACKS.keys() - constants
        #: The roles whose messages it does not know and nobody may speak for.
        self.refused_roles = frozenset(role for role in self._unknown_roles if _FALLBACKS[role] is None)

    @classmethod
    def from_dir(cls, model_dir: Path, tokenizer_config: dict[str, Any], name: str = "default") -> ChatTemplate | None:
        """`chat_template.jinja` where there is one, else the one in `tokenizer_config.json`, else that of
        `chat_template.json`, where checkpoints that also read images have it, else `None`.

        Others than the `default` lie in `additional_chat_templates`. Older checkpoints have several by name in
        `tokenizer_config.json`, which say nothing where there is a file; one that stands alone is the `default`.

        Raises:
            ModelLoadError: a file cannot be read.
        """
        path = model_dir / "chat_template.jinja"
        named = path if name == "default" else model_dir / "additional_chat_templates" / f"{name}.jinja"
        if named.is_file():
            return cls(_read(named))
        if path.is_file():
            return None
        source = tokenizer_config.get("chat_template")
        if isinstance(source, list):
            source = {entry["name"]: entry["template"] for entry in source}.get(name)
        elif name != "default":
            return None
        elif source is None:
            source = _template_of_processor(model_dir / "chat_template.json")
        return cls(source) if isinstance(source, str) else None

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        options: ChatOptions = _USUAL,
        *,
        special_tokens: dict[str, str],
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> str:
        """The prompt's text. A `developer` whom the template does not know speaks as `system`.

        Args:
            messages: the arguments of their tool calls are objects.
            tools: only where the template `knows_tools`.

        Raises:
            InvalidRequestError: the template refuses the messages, does not know calls of tools, a `tool` or a
                `function`, or leaves out the message that is to be continued.
        """
        spoken = [self._spoken(number, message) for number, message in enumerate(messages)]
        if options.continue_final_message:
            spoken[-1] = {**spoken[-1], "content": f"{spoken[-1]['content']}{_END_MARK} "}
        if self._wants_parts:
            spoken = [_in_parts(message) for message in spoken]
        try:
            # `None` and not undefined, as in `transformers`: templates ask `tools is not none`.
            text = self._template.render(
                {
                    **special_tokens,
                    **options.variables,
                    "messages": spoken,
                    "tools": tools or None,
                    "documents": options.documents,
                    "add_generation_prompt": options.add_generation_prompt,
                }
            )
        except (jinja2.TemplateError, TypeError, ValueError, RecursionError) as error:
            raise InvalidRequestError(
                f"the model's chat template refuses these messages: {error}", field="messages"
            ) from error
        return _up_to_mark(text) if options.continue_final_message else text

    def _spoken(self, number: int, message: dict[str, Any]) -> dict[str, Any]:
        """The message with a role that the template knows, and calls as it writes them."""
        role = message["role"]
        thought = next((message[name] for name in _REASONING_NAMES if message.get(name)), None)
        if thought is not None:
            message = {**message, **dict.fromkeys(_REASONING_NAMES, thought)}
        if message.get("tool_calls"):
            message = self._calling(number, message)
        if self._wants_short_ids and isinstance(message.get("tool_call_id"), str):
            message = {**message, "tool_call_id": _short_id(message["tool_call_id"])}
        if role not in self._unknown_roles:
            return message
        if role in self.refused_roles:
            raise InvalidRequestError(
                f"messages[{number}].role: the model's chat template knows no messages of the role {role!r}; "
                "put their text into a `user` message",
                field=f"messages[{number}].role",
            )
        return {**message, "role": _FALLBACKS[role]}

    @property
    def knows_tools(self) -> bool:
        return "tools" in self.variables

    def _calling(self, number: int, message: dict[str, Any]) -> dict[str, Any]:
        if "tool_calls" not in self.source:
            raise InvalidRequestError(
                f"messages[{number}].tool_calls: the model's chat template knows no calls of tools; put what was "
                "called into the message's content",
                field=f"messages[{number}].tool_calls",
            )
        calls = message["tool_calls"]
        if self._wants_text_arguments:
            calls = [_with_text_arguments(call) for call in calls]
        if self._wants_short_ids:
            calls = [{**call, "id": _short_id(call["id"])} for call in calls]
        return {**message, "tool_calls": calls}

    @functools.cached_property
    def _wants_parts(self) -> bool:
        """Whether the template reads contents as lists of parts only, and would leave out such as are texts.

        Templates of models that also read images do, LLaVA's for one: nothing of a text is a part to them.
        """
        text = "tandem-is-content"
        of_text, of_parts = (
            self._tried([{"role": "user", "content": content}]) for content in (text, [{"type": "text", "text": text}])
        )
        return text not in of_text and text in of_parts

    @functools.cached_property
    def _wants_text_arguments(self) -> bool:
        """Whether the template writes a call's arguments as they come, so that they must be JSON already.

        Tried with one call: most templates turn an object into JSON by themselves.
        """
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"key0": "value0"}}}
        tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": _ANY_OBJECT}}
        asked = {"role": "user", "content": "x"}
        of_object, of_text = (
            self._tried([asked, {"role": "assistant", "content": "", "tool_calls": [each]}], [tool])
            for each in (call, _with_text_arguments(call))
        )
        is_readable = "key0" in of_object and "'key0'" not in of_object
        return not is_readable and '{"key0": "value0"}' in of_text

    def _tried(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None) -> str:
        """What the template makes of these; empty where it refuses them."""
        given = {"documents": None, "add_generation_prompt": False, "bos_token": "", "eos_token": ""}
        try:
            return self._template.render(messages=messages, tools=tools, **given)
        except (jinja2.TemplateError, TypeError, ValueError):
            return ""


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _short_id(call_id: str) -> str:
    """A call's id in nine letters and digits: the same for the same id."""
    if len(call_id) == 9 and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


_ANY_OBJECT: dict[str, Any] = {"type": "object", "properties": {}}


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": _tojson(function["arguments"])}}


def _up_to_mark(text: str) -> str:
    """The prompt up to the end of the content that is to be continued."""
    before, mark, behind = text.rpartition(_END_MARK)
    if not mark:
        raise InvalidRequestError(
            "continue_final_message: the model's chat template does not write the last message as it is, so nothing "
            "can continue it",
            field="continue_final_message",
        )
    # Where the template trims contents, the space behind the mark is gone, and so shall be what stands before it.
    return before if behind.startswith(" ") else before.rstrip()


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
