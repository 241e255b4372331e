"""How models write their calls: a table, and which entry is a checkpoint's.

A checkpoint's chat template writes the calls of earlier turns as the model is to write its next ones, so the template
says which format it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from router.tools import harmony
from router.tools.argument_rules import gemma_arguments, xml_arguments
from router.tools.blocks import Block, ClosedBlock, JsonBlock, NamedBlock, gemma_call, xml_call
from router.tools.grammar import CallForm, Messages
from router.tools.pieces import PlainReader, Reader, ToolUse
from router.tools.reader import MarkedReader
from router.tools.schema_kinds import ParameterKinds


@dataclass(frozen=True)
class ToolFormat:
    """How a kind of model writes calls."""

    name: str
    #: What begins and ends its parts. Those that are special tokens are shown as text, so that they can be read.
    markers: tuple[str, ...]
    reader: Callable[[ToolUse, str], Reader]  # of a request's tools, and of the end of its prompt
    #: Whether every message is written in it, with calls or without.
    is_always_written: bool = False
    wants_prompt: bool = False  # its reader does, as the prompt may have begun the message
    #: How a grammar makes the model write calls; `None`: nobody knows, as of a template of the checkpoint's own.
    form: CallForm | None = None
    #: What stands behind each call; empty: nothing.
    close: str = ""


def reader_for(form: ToolFormat | None, use: ToolUse, prompt: str = "") -> Reader:
    """Reads what a model answers to a request with these tools.

    `prompt`: its end, with special tokens; a template may have begun the message there.
    """
    if form is None or not (use.is_offered or form.is_always_written):
        return PlainReader()
    return form.reader(use, prompt)


def is_read(form: ToolFormat | None, use: ToolUse) -> bool:
    """Whether the text of an answer is anything else than its content."""
    return form is not None and (use.is_offered or form.is_always_written)


def _json(_: ToolUse, __: str) -> Reader:
    def block() -> Block:
        return JsonBlock("arguments", close="</tool_call>")

    return MarkedReader(["<tool_call>"], block)


def _xml(use: ToolUse, _: str) -> Reader:
    kinds = ParameterKinds({tool["function"]["name"]: tool["function"].get("parameters") for tool in use.tools})

    def block() -> Block:
        return ClosedBlock("</tool_call>", partial(xml_call, kinds=kinds))

    return MarkedReader(["<tool_call>"], block)


def _llama(use: ToolUse, _: str) -> Reader:
    def block() -> Block:
        return JsonBlock("parameters", separator=";", names=use.names)

    return MarkedReader(["<|python_tag|>"], block, at_start="{")


def _mistral_list(_: ToolUse, __: str) -> Reader:
    return MarkedReader(["[TOOL_CALLS]"], partial(JsonBlock, "arguments"))


_MISTRAL_HEADER = re.compile(r"(?P<name>[^\s\[\]]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\])?")


def _mistral_named(_: ToolUse, __: str) -> Reader:
    return MarkedReader(["[TOOL_CALLS]"], partial(NamedBlock, _MISTRAL_HEADER))


def _gemma(opening: str, close: str, quote: str, _: ToolUse, __: str) -> Reader:
    def block() -> Block:
        return ClosedBlock(close, partial(gemma_call, quote=quote))

    return MarkedReader([opening], block)


def _gemma_format(name: str, opening: str, close: str, quote: str) -> ToolFormat:
    return ToolFormat(
        name,
        (opening, close, quote),
        partial(_gemma, opening, close, quote),
        form=CallForm(
            opening,
            before=("call:",),
            after=(f"\0{close}",),
            arguments=gemma_arguments(quote, close),
            is_json=False,
            name=r"[\w.-]+",
        ),
        close=close,
    )


HARMONY = ToolFormat(
    "harmony",
    harmony.MARKERS,
    lambda *_: harmony.HarmonyReader(),
    is_always_written=True,
    form=CallForm(
        before=("\0<|channel|>", "commentary to=functions."),
        between=(" ", "\0<|constrain|>", "json", "\0<|message|>"),
        # As the template writes earlier calls.
        also=(((" to=functions.",), ("\0<|channel|>", "commentary json", "\0<|message|>")),),
        is_json=False,
        is_single=True,
        messages=Messages(
            thought=("\0<|channel|>", "analysis", "\0<|message|>"),
            said=("\0<|channel|>", "commentary", "\0<|message|>"),
            last=("\0<|channel|>", "final", "\0<|message|>"),
            next=("\0<|end|>", "\0<|start|>", "assistant"),
            markers=harmony.MARKERS,
        ),
    ),
)
HERMES = ToolFormat(
    "hermes",
    ("<tool_call>", "</tool_call>"),
    _json,
    form=CallForm(
        "<tool_call>",
        before=('\n{"name": ',),
        between=(', "arguments": ',),
        after=("}\n", "\0</tool_call>"),
    ),
    close="</tool_call>",
)
QWEN_CODER = ToolFormat(
    "qwen-coder",
    ("<tool_call>", "</tool_call>"),
    _xml,
    form=CallForm(
        "<tool_call>",
        before=("\n<function=",),
        between=(">\n",),
        after=("</function>\n", "\0</tool_call>"),
        arguments=xml_arguments(("</parameter>", "</tool_call>")),
        is_json=False,
        name=r"[^\s<>]+",
    ),
    close="</tool_call>",
)
LLAMA = ToolFormat(
    "llama",
    ("<|python_tag|>",),
    _llama,
    form=CallForm(before=('{"name": ',), between=(', "parameters": ',), after=("}",), separator="; "),
)
MISTRAL = ToolFormat(
    "mistral",
    ("[TOOL_CALLS]",),
    _mistral_list,
    form=CallForm(
        "[TOOL_CALLS]",
        head=" [",
        before=('{"name": ',),
        between=(', "arguments": ',),
        after=("}",),
        separator=", ",
        tail="]",
    ),
)
MISTRAL_NAMED = ToolFormat(
    "mistral-named",
    ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    _mistral_named,
    form=CallForm("[TOOL_CALLS]", between=("\0[ARGS]",), is_json=False),
)
GEMMA = _gemma_format("gemma", "<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = _gemma_format("function-gemma", "<start_function_call>", "<end_function_call>", "<escape>")

FORMATS = (HARMONY, HERMES, QWEN_CODER, LLAMA, MISTRAL, MISTRAL_NAMED, GEMMA, FUNCTION_GEMMA)

#: What stands in a chat template of each format: all of the first, none of the second. The first match holds.
_SIGNS: tuple[tuple[ToolFormat, tuple[str, ...], tuple[str, ...]], ...] = (
    (HARMONY, ("<|channel|>", "<|message|>"), ()),
    (GEMMA, ("<|tool_call>", "<tool_call|>"), ()),
    (FUNCTION_GEMMA, ("<start_function_call>",), ()),
    (QWEN_CODER, ("<tool_call>", "<function="), ()),
    (HERMES, ("<tool_call>",), ("<arg_key>",)),
    (MISTRAL_NAMED, ("[TOOL_CALLS]", "[ARGS]"), ()),
    (MISTRAL, ("[TOOL_CALLS]",), ()),
    (LLAMA, ("<|python_tag|>",), ()),
    (LLAMA, ("ipython", '"parameters"'), ()),
)


def format_of(template: str) -> ToolFormat | None:
    """The format of a checkpoint with this chat template; `None` where it is none that is known."""
    for form, wanted, unwanted in _SIGNS:
        if all(sign in template for sign in wanted) and not any(sign in template for sign in unwanted):
            return form
    return None


def normal_tool(name: str, description: str | None, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """A tool as chat templates want it."""
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    return {"type": "function", "function": {**function, "parameters": parameters or _NO_PARAMETERS}}


_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
