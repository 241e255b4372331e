"""Bounds a model to what a request says of calls: a grammar where it has to call, or to follow a schema of a tool."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from router.openai.grammar import AskedGrammar, of_lark
from router.openai.model_card import ModelCard
from router.openai.reasoning import marks_of
from router.openai.refusal import refuse
from router.openai.schema import ParsedRequest
from router.tools.formats import ToolFormat
from router.tools.grammar import CallForm, Wanted, grammar_of
from router.tools.pieces import ToolUse
from router.tools.schema_kinds import InexpressibleError
from tandem.core.config import LimitsConfig
from tandem.core.tokenizer import Tokenizer

#: As it is named where it does not hold.
_STRICT = "tools.strict"


def with_bound_calls(
    parsed: ParsedRequest, card: ModelCard, tokenizer: Tokenizer, limits: LimitsConfig
) -> ParsedRequest:
    """`parsed`, with the grammar and the stop string that its calls need.

    Raises:
        InvalidRequestError: this model's calls cannot be bound, or the output has a form that is no schema.
    """
    use, form = parsed.tool_use, card.tool_format
    if not use.is_offered or form is None:
        return parsed
    if parsed.grammar is None and not _may_be_strict(use, form, tokenizer):
        use = dataclasses.replace(use, strict=frozenset())
        parsed = dataclasses.replace(parsed, tool_use=use, ignored_fields=(*parsed.ignored_fields, _STRICT))
    if _needs_grammar(use, form) or parsed.grammar is not None:
        return _with_grammar(parsed, form, card, limits)
    if not use.may_be_parallel and form.close:
        # It ends behind its first call; that costs no grammar.
        return dataclasses.replace(parsed, stop=(*parsed.stop, form.close))
    return parsed


def _may_be_strict(use: ToolUse, form: ToolFormat, tokenizer: Tokenizer) -> bool:
    """Whether schemas of strict tools may hold; false only where they alone ask for a grammar.

    Where the model may call or not, a grammar would keep it from thinking first: what it thinks has no form.
    """
    if not use.strict or _needs_grammar(dataclasses.replace(use, strict=frozenset()), form):
        return True
    return form.form is not None and marks_of(tokenizer) is None


def _needs_grammar(use: ToolUse, form: ToolFormat) -> bool:
    if use.choice == "required" or use.only is not None or use.strict:
        return True
    return not use.may_be_parallel and not form.close and not (form.form and form.form.is_single)


def _with_grammar(parsed: ParsedRequest, form: ToolFormat, card: ModelCard, limits: LimitsConfig) -> ParsedRequest:
    use, calls = parsed.tool_use, form.form
    is_forced = use.choice == "required"
    if calls is None:
        what = "tool_choice" if is_forced or use.only is not None else "tools"
        refuse(what, f"asks for calls of a certain form, which is not possible with this model's ({form.name})")
    wanted = Wanted(
        [_wanted(tool["function"], use) for tool in use.tools if use.only is None or _name(tool) in use.only],
        is_forced=is_forced or parsed.grammar is not None,
        is_single=not use.may_be_parallel,
        instead=None if is_forced else _instead(parsed),
        spacing={} if parsed.grammar is None else parsed.grammar.spacing,
    )
    try:
        lark = _lark(calls, wanted, card)
    except InexpressibleError as error:
        refuse("tools", f"cannot hold in calls as this model writes them ({form.name}): {error}")
    grammar = of_lark(lark, "tools", limits)
    sampling = dataclasses.replace(parsed.sampling, grammar=grammar.text)
    ignored = parsed.ignored_fields
    if is_forced and parsed.grammar is not None:  # of a text that does not come
        ignored = (*ignored, parsed.grammar.field.split(".")[0])
    asked = AskedGrammar(grammar.text, "tools")
    return dataclasses.replace(parsed, grammar=asked, sampling=sampling, ignored_fields=ignored)


def _lark(form: CallForm, wanted: Wanted, card: ModelCard) -> str:
    def marker(text: str) -> str:
        token_id = card.markers.get(text)
        return json.dumps(text) if token_id is None else f"<[{token_id}]>"

    return grammar_of(form, wanted, marker)


def _name(tool: dict[str, Any]) -> str:
    return str(tool["function"]["name"])


def _wanted(function: dict[str, Any], use: ToolUse) -> tuple[str, dict[str, Any] | None]:
    """A tool's name, and the schema of its arguments where they have to follow it."""
    has_to = use.choice == "required" or function["name"] in use.strict
    return function["name"], function["parameters"] if has_to else None


def _instead(parsed: ParsedRequest) -> Any:
    """The schema of JSON that the model may answer with in place of calls."""
    if parsed.grammar is None:
        return None
    if not isinstance(parsed.grammar.schema, dict):
        field = parsed.grammar.field.split(".")[0]
        refuse(field, "cannot hold beside `tools`, unless it is a schema; leave one of them out")
    return parsed.grammar.schema
